"""Failures that others have met before, answered: what it means and what to do, in one to three lines.

What is known about an error, written on the error itself: where it happened, and what helps.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import psutil

from evenstep.errors import EvenstepError, RankLost, shorten
from evenstep.strategy_facts import with_processes
from evenstep.task import NO_GROUP

Match = re.Match[str]
MAX_CHARACTERS = 20_000
"""Of a message: torch's are shorter, and one with a printed tensor in it can have megabytes."""


@dataclass(frozen=True)
class Situation:
    """What is known about the run that failed, as far as it helps to answer."""

    share: int | None = None
    """Samples of a step on one device."""
    accumulate: int = 1
    fits: int | None = None
    """What `largest_that_fits` found."""
    was_tried: bool = False
    """Whether it was searched for."""
    has_batchnorm: bool = False
    command: str = ""
    """`evenstep fit ...` for this run."""


@dataclass(frozen=True)
class _Case:
    """A known failure: how it is recognised, and the advice for it."""

    pattern: str
    answer: Callable[[Match, Sequence[str], Situation], str]
    is_victim: bool = False


def answer(error: BaseException, names: Sequence[str] = (), situation: Situation | None = None) -> str | None:
    """Advice for a failure that is known, or None; `names` are those of the trainable parameters, in order."""
    found = _find(error)
    return found[0].answer(found[1], names, situation or Situation()) if found else None


def is_victim(error: BaseException) -> bool:
    """Whether this rank failed only because another rank failed first, which has the cause."""
    found = _find(error)
    return isinstance(error, RankLost) or (found is not None and found[0].is_victim)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the machine had no memory left."""
    found = _find(error)
    return found is not None and found[0].answer in (_device_memory, _host_memory)


def message_of(error: BaseException) -> str:
    """What an exception says: the beginning and the end, if it is very long, and something if it cannot say it."""
    try:
        return shorten(str(error), MAX_CHARACTERS)
    except Exception as failed:
        return f"(its message cannot be shown: {type(failed).__name__})"


def _find(error: BaseException) -> tuple[_Case, Match] | None:
    text = f"{type(error).__name__}: {message_of(error)}"
    for case in CASES:
        found = re.search(case.pattern, text, re.DOTALL)
        if found and not (case.is_victim and not _may_be_torch(error, text)):
            return case, found
    return None


def _may_be_torch(error: BaseException, text: str) -> bool:
    """A dataset that reads from the network can lose a connection too, and is then the cause and no victim."""
    is_other = isinstance(error, OSError | EvenstepError) or "in DataLoader worker process" in text
    return isinstance(error, RuntimeError) and not is_other


def _unused(found: Match, names: Sequence[str], _: Situation) -> str:
    indices = [int(index) for index in found["indices"].split()] if found["indices"] else []
    unused = [names[index] if index < len(names) else f"parameter {index}" for index in indices]
    shown = f"{', '.join(unused[:5])}{f' and {len(unused) - 5} more' if len(unused) > 5 else ''}"
    return (
        f"no gradient reached {shown or 'some parameters'} in the step before, and ddp waits for one from every "
        "parameter.\nUse them in the loss at every step, or switch them off before the start: "
        "parameter.requires_grad_(False)"
    )


def _twice(found: Match, names: Sequence[str], _: Situation) -> str:
    index = int(found["index"]) if found["index"] else None
    known = names[index] if index is not None and index < len(names) else found["name"]
    return (
        f"the gradient of {known or 'a parameter'} was ready twice in one step.\n"
        "Activation checkpointing: use checkpoint(..., use_reentrant=False). Otherwise the parameter is shared between "
        "modules, or\nused by several forward calls of one step: call the model once for each micro-batch"
    )


def _slice(_: Match, __: Sequence[str], ___: Situation) -> str:
    return (
        "a parameter was used outside its layer's forward, where fsdp holds only this rank's shard of it.\n"
        "Use it inside that layer, use ddp, or, in a custom loop, pass a step to team.wrap(model, sample=...)"
    )


def _same_gpu(found: Match, _: Sequence[str], __: Situation) -> str:
    first, second = sorted((int(found["one"]), int(found["other"])))
    return (
        f"ranks {first} and {second} are on the same GPU, which NCCL refuses.\n"
        "Give each its own (--devices cuda:0,cuda:1), or let them share it through gloo (--devices cuda:0,cuda:0)"
    )


def _port(found: Match, _: Sequence[str], __: Situation) -> str:
    port = found["port"]
    look = f"(who: ss -ltnp 'sport = :{port}')" if port else "(who: ss -ltnp)"
    return (
        f"{f'port {port}' if port else 'the port'} is in use by another program, or by a run that has not ended "
        f"{look}.\nEnd that one, or set MASTER_PORT to another port, the same on every machine"
    )


def _shared_memory(_: Match, __: Sequence[str], ___: Situation) -> str:
    room = ""
    with suppress(OSError):
        usage = shutil.disk_usage("/dev/shm")
        room = f": it has {_size(usage.total)}, {_size(usage.free)} of them free now"
    return (
        f"/dev/shm, through which loader workers hand over their batches, is full{room}.\n"
        "In a container: docker run --shm-size=8g (or --ipc=host); on a machine: mount -o remount,size=8G /dev/shm;\n"
        "without changing it: fewer --workers, or --workers 0"
    )


def _device_memory(found: Match, _: Sequence[str], situation: Situation) -> str:
    where = f"GPU {found['gpu']}" if found["gpu"] else "the device"
    asked = f": {found['asked']} more were needed" if found["asked"] else ""
    room = f", {found['free']} of {found['total']} are free" if found["free"] else ""
    return f"out of memory on {where}{asked}{room}.\n{_fewer_samples(situation)}"


def _fewer_samples(situation: Situation) -> str:
    # Most runs do not run out of memory, and do without this file.
    from evenstep.monitor.out_of_memory import fewer_samples

    return fewer_samples(situation) + _fit_command(situation)


def _fit_command(situation: Situation) -> str:
    if not situation.command:
        return ""
    return f"\n{situation.command} shows what fits, and train --micro auto chooses it before the start"


def _host_memory(found: Match, _: Sequence[str], situation: Situation) -> str:
    asked = _size(int(found["bytes"])) if found["bytes"] else found["words"]
    free = _size(psutil.virtual_memory().available)
    return (
        f"out of memory on this machine{f': {asked} were requested' if asked else ''}; {free} are free now.\n"
        "Fewer --workers, a larger --accumulate (fewer samples at once), or data that is read as it is needed"
        f"{_fit_command(situation)}"
    )


def _one_sample(_: Match, __: Sequence[str], ___: Situation) -> str:
    return (
        "BatchNorm cannot be trained on one sample, and that is what this device has in this step.\n"
        f"Use another --batch, drop_last=True in the Task, or --sync-batchnorm with {with_processes()}"
    )


def _freed_weights(_: Match, __: Sequence[str], ___: Situation) -> str:
    return (
        "a gradient was taken through weights that fully_shard had freed: a loss that takes gradients itself (a "
        "penalty on them,\nMAML) goes back through the weights twice. Use --strategy ddp"
    )


def _no_graph(_: Match, __: Sequence[str], ___: Situation) -> str:
    return (
        "the loss depends on no parameter that requires a gradient. A model that team.wrap returned computes gradients "
        "only\ninside team.backward(loss, model, batch), where loss is a function of model and batch: def loss(model, "
        "batch): ..."
    )


def _lost(_: Match, __: Sequence[str], ___: Situation) -> str:
    return "the connection to another rank was lost: that one ended first, and its report has the cause"


def _too_late(found: Match, _: Sequence[str], __: Situation) -> str:
    milliseconds = next((group for group in found.groups() if group), None)
    after = f" for {int(milliseconds) / 1000:g} s" if milliseconds else ""
    return (
        f"this rank waited{after} in a collective that another rank did not call: that rank is stuck, has ended, or "
        "took\nanother path (a collective under `if rank == 0`, or a loop of a different length)"
    )


def _nobody_there(found: Match, _: Sequence[str], __: Situation) -> str:
    return (
        f"nothing answers at {found['host']}:{found['port']}: rank 0 has not started or has ended, this is not "
        "its address\n(MASTER_ADDR, MASTER_PORT), or a firewall blocks it"
    )


def _missing_ranks(found: Match, _: Sequence[str], __: Situation) -> str:
    came = f"{found['came']} of {found['all']} ranks joined" if found["came"] else "not all ranks joined"
    return f"{came} in time: the others failed earlier (see their reports), or were never started"


def _no_group(_: Match, __: Sequence[str], ___: Situation) -> str:
    return (
        "there is no process group yet: call team = evenstep.join() (or init_process_group) before this line.\n"
        "A DistributedSampler can be left out: team.loader(dataset, batch=...) gives each rank its share"
    )


def _size(num_bytes: int) -> str:
    gigabytes = num_bytes / 2**30
    return f"{gigabytes:.1f} GiB" if gigabytes >= 1 else f"{num_bytes / 2**20:.0f} MiB"


# What may lie between two parts of a pattern is bounded, or a search would take the square of the message's length.
CASES = (
    _Case(
        r"Expected to have finished reduction in the prior iteration"
        r"(?:.*indices which did not receive grad for rank \d+:(?P<indices>[ \d]+))?",
        _unused,
    ),
    _Case(
        r"Expected to mark a variable ready only once"
        r"(?:.*Parameter at index (?P<index>\d+)(?: with name (?P<name>\S+))? has been marked as ready twice)?",
        _twice,
    ),
    _Case(r"got mixed torch\.Tensor and DTensor|tensor subclasses, got DTensor", _slice),
    _Case(r"Duplicate GPU detected : rank (?P<one>\d+) and rank (?P<other>\d+)", _same_gpu),
    _Case(
        r"(?:failed to listen on any|(?i:address already in use)|EADDRINUSE)(?:.*?\bport[:=] ?(?P<port>\d+))?", _port
    ),
    _Case(
        r"unable to (?:open|allocate) shared memory|shared memory.{0,500}No space left on device|"
        r"DataLoader worker.{0,500}Bus error|insufficient shared memory",
        _shared_memory,
    ),
    _Case(
        r"(?:^OutOfMemoryError: )?CUDA out of memory(?:\. Tried to allocate (?P<asked>[\d.]+ \w+))?(?:\. GPU "
        r"(?P<gpu>\d+) has a total capacity of (?P<total>[\d.]+ \w+) of which (?P<free>[\d.]+ \w+) is free)?|"
        r"^OutOfMemoryError",
        _device_memory,
    ),
    _Case(
        r"DefaultCPUAllocator: can't allocate memory(?:: you tried to allocate (?P<bytes>\d+) bytes)?|std::bad_alloc|"
        r"(?<!OutOf)MemoryError(?:: Unable to allocate (?P<words>[\d.]+ \w+))?",
        _host_memory,
    ),
    _Case(r"Expected more than 1 value per channel when training", _one_sample),
    _Case(r"setStorage: .{0,500}out of bounds for storage of size 0", _freed_weights),
    _Case(r"does not require grad and does not have a grad_fn", _no_graph),
    _Case(NO_GROUP, _no_group),
    _Case(r"gloo/.{0,500}Timed out waiting (\d+)ms|Timeout\(ms\)=(\d+)\) ran for|caught collective", _too_late, True),
    _Case(
        r"gloo/.{0,500}(?:Connection (?:closed|reset) by peer|Connection refused|Broken pipe)|connectFullMesh failed|"
        r"ncclRemoteError|remote process exited|NCCL communicator was aborted|"
        r"Connection was likely closed|Socket unexpectedly closed|^Dist\w+Error:.*(?i:broken pipe|connection reset)",
        _lost,
        True,
    ),
    _Case(r"client socket has timed out.{0,500}connect to \((?P<host>[^,]+), (?P<port>\d+)\)", _nobody_there, True),
    _Case(
        r"waiting for clients\. (?P<came>\d+)/(?P<all>\d+) clients joined|"
        r"^(?:RuntimeError|Dist\w+Error): (?:[Ww]ait timeout|Timeout waiting for key)",
        _missing_ranks,
        True,
    ),
)


_STEP, _ANSWER = "at step ", "What helps: "


def note(error: BaseException, step: int, names: Sequence[str], situation: Situation | None = None) -> None:
    """Write where an error happened, and what is known to help, on the error itself: its traceback shows both."""
    error.add_note(f"{_STEP}{step}")
    text = answer(error, names, situation)
    if text:
        error.add_note(f"{_ANSWER}{text}")


def noted_step(error: BaseException) -> int:
    """The step that `note` wrote; 0 if none."""
    return next((int(one.removeprefix(_STEP)) for one in _notes(error) if one.startswith(_STEP)), 0)


def noted_advice(error: BaseException) -> str | None:
    """The answer that `note` wrote."""
    return next((one.removeprefix(_ANSWER) for one in _notes(error) if one.startswith(_ANSWER)), None)


def _notes(error: BaseException) -> list[str]:
    return list(getattr(error, "__notes__", []))
