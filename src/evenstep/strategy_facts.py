"""What the rest of evenstep knows about each strategy without importing torch: one row of facts each.

Plan's checks, the launcher, defaults, help and advice are made from these rows. A new strategy is one file with a
class (see `evenstep.strategies.base`) and one row here; outside of these nothing names a strategy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True, kw_only=True)
class StrategyFacts:
    """One strategy: where its class is, where it runs, and what it can be combined with."""

    name: str
    """As users write it: `--strategy ddp`."""
    location: str
    """Module and class, imported when first used: torch's FSDP takes a second to import."""
    summary: str
    """One line for `evenstep train --help`."""
    processes_per_device: bool = False
    """True: one process for each device. False: one process drives them all."""
    drives_from_first: bool = False
    """True: whole batches go to the first device, and torch's wrapper splits them over the other devices."""
    is_reference: bool = False
    """The strategy that all others are compared with; it runs on one device."""
    is_baseline: bool = False
    """Present only to be compared with: `compare` includes it where it runs, `verify` only if it is named."""
    needs_several_devices: bool = False
    """On one device it does what the reference does, and `compare` skips it there."""
    device_kinds: tuple[str, ...] = ("cpu", "cuda")
    other_kinds_refusal: str = ""
    """The message for devices of other kinds, if it should say more than which strategies run on them."""
    mixes_device_kinds: bool = False
    """Whether one run can use a CPU and a GPU."""
    several_machines: bool = False
    shares_gpu: bool = True
    """Whether one GPU can be given twice."""
    shards: bool = False
    """Whether each device holds a part of the weights instead of all of them."""
    offloads: bool = False
    """Whether shards can be kept in host memory (`--cpu-offload`)."""
    axes: tuple[str, ...] = ()
    """What `--mesh` may name, outermost first."""
    model_axis: str | None = None
    """The axis along which ranks compute one replica together and read the same samples."""
    shard_axis: str | None = None
    """The axis along which ranks hold shards: of one copy of the model, or of what a rank of a replica has of it."""
    refused_axes: Mapping[str, str] = field(default_factory=dict)
    """Axes of other strategies that one may expect here, each with the message that says why not and what to use."""
    schedules: bool = False
    """Whether micro-batches pass through its ranks in an order that `--pipeline-schedule` names."""
    size_flag: str = ""
    """The flag for the size of that axis alone: `--shards 2` is `--mesh tensor=2`."""
    compiles: bool = True
    """Whether torch.compile can make it faster."""
    cuda_graphs: bool = False
    """Whether a step that goes through torch's wrapper can be captured."""
    virtual_replicas: bool = False
    """Whether it sums the gradients of virtual replicas in the order of their tree (`--virtual-replicas`)."""
    links: bool = False
    """Whether gradients can be sent between machines by another method (`--link`)."""
    separates_communication: bool = True
    """Whether communication can be timed separately from forward and backward."""
    refusals: Mapping[str, str] = field(default_factory=dict)
    """Fields of the Plan that cannot be set with it, each with the message that says why and what to use."""
    preloads: tuple[str, ...] = ()
    """Modules that the fork server imports for its workers."""


REFERENCE = "single"
DEFAULT = "ddp"
"""For several devices, processes or machines."""
DEFAULT_IN_ONE_PROCESS = "dp"
"""For several devices, where a process was started by hand and is alone."""

_ROWS = (
    StrategyFacts(
        name=REFERENCE,
        location="evenstep.strategies.single:Single",
        summary="one process, one device: what all other strategies are compared with",
        is_reference=True,
        device_kinds=("cpu", "cuda", "mps"),
        cuda_graphs=True,
        virtual_replicas=True,
    ),
    StrategyFacts(
        name=DEFAULT_IN_ONE_PROCESS,
        location="evenstep.strategies.dp:DP",
        summary="one process, one replica and one thread for each device",
        needs_several_devices=True,
        mixes_device_kinds=True,
        cuda_graphs=True,
        virtual_replicas=True,
        compiles=False,
        refusals={
            "compile": "torch.compile does not trace in several threads, which dp needs; use --strategy ddp",
        },
    ),
    StrategyFacts(
        name=DEFAULT,
        location="evenstep.strategies.ddp:DDP",
        summary="one process for each device; each holds the whole model, and gradients are averaged",
        processes_per_device=True,
        several_machines=True,
        cuda_graphs=True,
        virtual_replicas=True,
        links=True,
    ),
    StrategyFacts(
        name="fsdp",
        location="evenstep.strategies.fsdp:FSDP",
        summary="one process for each device; each holds a shard of parameters, gradients and optimizer state",
        processes_per_device=True,
        several_machines=True,
        # Seen on torch 2.11: ranks on one GPU use gloo, and gathering whole tensors there is a SIGSEGV.
        shares_gpu=False,
        shards=True,
        offloads=True,
        axes=("data", "fsdp"),
        shard_axis="fsdp",
        refused_axes={
            "tensor": "fsdp gathers whole layers; to split them and shard what is left of them, use --strategy tensor",
            "pipeline": "fsdp gathers whole layers; to put them on several ranks, use --strategy pipeline",
        },
        virtual_replicas=True,
        refusals={
            "replay_every": "--replay-every compares whole gradients, and fsdp has shards of them; use --strategy ddp",
            "channels_last": "fully_shard takes no weights with channels last; use --strategy ddp with --channels-last",
        },
        preloads=("torch.distributed.fsdp", "torch.distributed.device_mesh", "torch.distributed.tensor"),
    ),
    StrategyFacts(
        name="tensor",
        location="evenstep.strategies.tensor:Tensor",
        summary="one process for each device; each computes a part of every layer that can be split (--shards)",
        processes_per_device=True,
        several_machines=True,
        needs_several_devices=True,
        axes=("data", "fsdp", "tensor"),
        model_axis="tensor",
        shard_axis="fsdp",
        size_flag="shards",
        compiles=False,
        refusals={
            "compile": "tensor changes layers in place, which --compile would not see; leave it out",
            "replay_every": "--replay-every compares whole gradients, and tensor has parts of them; use --strategy ddp",
            "shares": "--shares is for data parallelism; leave it out, or use --strategy ddp",
            "sync_batchnorm": "--sync-batchnorm would count each sample once for every shard; use --strategy ddp",
            "statistics": "--statistics looks at whole layers, and tensor has shards of them; use --strategy ddp",
        },
    ),
    StrategyFacts(
        name="pipeline",
        location="evenstep.strategies.pipeline:Pipeline",
        summary="one process for each device; each runs some blocks, and micro-batches pass through all (--stages)",
        processes_per_device=True,
        several_machines=True,
        needs_several_devices=True,
        shards=True,
        axes=("data", "pipeline"),
        model_axis="pipeline",
        refused_axes={
            "fsdp": "the stages of a pipeline are not sharded: fully_shard frees a layer after each forward and "
            "backward, and here those of several micro-batches alternate, and a forward ends where the next stage "
            "begins; use data in place of fsdp, or --strategy tensor --mesh fsdp=2,tensor=2"
        },
        schedules=True,
        size_flag="stages",
        compiles=False,
        refusals={
            "compile": "pipeline ends forward where the next stage begins, which --compile cannot; leave it out",
            "replay_every": "--replay-every compares whole gradients, and a stage has its own; use --strategy ddp",
            "shares": "--shares is for data parallelism; leave it out, or use --strategy ddp",
            "sync_batchnorm": "--sync-batchnorm joins ranks that hold the same layers; use --strategy ddp",
            "statistics": "--statistics looks at all layers, and a stage has its own; use --strategy ddp",
        },
    ),
    StrategyFacts(
        name="dp-torch",
        location="evenstep.strategies.torch_dp:TorchDP",
        summary="torch's own nn.DataParallel on CUDA devices, to compare with",
        drives_from_first=True,
        is_baseline=True,
        needs_several_devices=True,
        device_kinds=("cuda",),
        other_kinds_refusal="dp-torch is nn.DataParallel, which runs on CUDA devices only; use --strategy dp",
        compiles=False,
        separates_communication=False,
        refusals={
            "replay_every": "--replay-every compares replicas, which nn.DataParallel does not keep; use --strategy dp",
            "shares": "nn.DataParallel cuts a batch into equal parts; use --strategy dp with --shares",
        },
    ),
)
UNKNOWN = StrategyFacts(
    name="",
    location="",
    summary="of a saved run, whose task has not been imported: nothing is refused",
    processes_per_device=True,
    device_kinds=("cpu", "cuda", "mps"),
    mixes_device_kinds=True,
    several_machines=True,
    virtual_replicas=True,
    links=True,
)
_FACTS = {row.name: row for row in _ROWS}
STRATEGIES: Mapping[str, StrategyFacts] = MappingProxyType(_FACTS)
"""The rows by name, in the order in which help lists them."""


def add_strategy(facts: StrategyFacts) -> None:
    """Make a custom strategy known, at the top of the task's file; the launcher passes the row on to its workers."""
    if _FACTS.setdefault(facts.name, facts) != facts:
        raise ValueError(f"there is a strategy {facts.name!r} already; give yours another name")


def added_strategies() -> tuple[StrategyFacts, ...]:
    """The rows that `add_strategy` added in this process."""
    return tuple(_FACTS.values())[len(_ROWS) :]


def usual_strategies() -> list[StrategyFacts]:
    """The data parallel ones that are no baseline; those that split a model are for models that need it."""
    rows = STRATEGIES.values()
    return [row for row in rows if not row.is_reference and not row.is_baseline and row.model_axis is None]


def one_of(rows: Iterable[StrategyFacts]) -> str:
    """Their names as a choice.

    >>> one_of(usual_strategies())
    'dp, ddp or fsdp'
    """
    *most, last = [row.name for row in rows]
    return f"{', '.join(most)} or {last}" if most else last


def with_processes() -> str:
    """The data parallel strategies with a process for each device, as a choice."""
    return one_of(row for row in STRATEGIES.values() if row.processes_per_device and row.model_axis is None)


def sharding() -> str:
    """The strategies whose devices hold a part of the model each, as a choice."""
    return one_of(row for row in STRATEGIES.values() if row.shards)
