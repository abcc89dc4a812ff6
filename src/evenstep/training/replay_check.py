"""`--replay-every N`: every N steps, all devices compute one micro-batch of the next step, twice, and compare bits.

Messages call it a recomputation check: a replay is one of a CUDA graph.

The devices take turns in whose micro-batch it is. Batches and random numbers are pure functions, so each device can
read the same samples and draw the same numbers; the weights are equal on all of them. Nothing of it stays: gradients
are not accumulated, and buffers and generators are put back.

Where bits differ, all devices compute it many times with deterministic algorithms. A device is faulty if it differs
from the others most times, while those always agree. Where two always differ and nobody else can decide, each computes
again what both agreed on at the first check. Anything else is nondeterministic, and so is a later difference in the
same tensor, or in one computed from it: a sound run must not end.
"""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from evenstep.data.loader import Batch, Loader
from evenstep.data.nested import leaves, map_tensors
from evenstep.distributed.heartbeat import COMPARING
from evenstep.errors import TrainingError
from evenstep.monitor.replica_check import checksums, combined
from evenstep.record import Replay
from evenstep.sampling.rng import derive_seed, replica_seed, restore_rng_states, rng_states, seed_device, seed_host
from evenstep.strategies.base import on
from evenstep.training.loss_context import LossContext
from evenstep.training.step import Recipe

Sums = dict[str, int]
"""A number for the bits of each tensor, by its name, in the order in which a step computes them."""
INPUTS, PARAMETERS, LOSS = "the inputs", "the parameters", "the loss"
NUM_MORE = 24
"""Computations with deterministic algorithms, where bits differ."""
MOST = 2 / 3
"""A faulty device differs in this part of them. With noise at any rate, sound devices look so once in ten million."""
NUM_OLD = 12
"""Computations of what two devices agreed on."""


@dataclass(frozen=True)
class Computation:
    """What is computed: the first micro-batch that a replica gets in a step."""

    batch: Batch
    """With this micro-batch on every device of this process."""
    replica: int
    step: int


class ReplayCheck:
    """Compares the devices of a run with each other, and each with itself."""

    def __init__(self, recipe: Recipe, loader: Loader, every: int) -> None:
        self.every = every
        self.num_checks, self.num_odd, self.seconds = 0, 0, 0.0
        self._recipe, self._loader, self._world = recipe, loader, recipe.team.world
        self._agreed: Agreed | None = None
        self._said: set[str] = set()
        self._noisy: set[str] = set()
        """Tensors that a check found to be nondeterministic."""

    def is_due(self, step: int) -> bool:
        return step % self.every == 0

    def after(self, step: int) -> Iterator[Replay | str]:
        """Check after `step` steps; raise TrainingError, on every rank, if a device is faulty. All ranks call this."""
        if "gather" in self._recipe.team.called_in_loss:
            yield from self._once("--replay-every: a loss that gathers the rows of all devices is not checked")
            return
        started = time.perf_counter()
        replica = (step // self.every - 1) % self._world.num_replicas
        with self._world.spans.during(COMPARING):
            finding = self._check(Computation(self._loader.upcoming(replica), replica, step + 1))
        seconds = time.perf_counter() - started
        self.seconds += seconds
        self.num_checks += 1
        self.num_odd += finding.outcome != "equal"
        yield Replay(step=step, replica=replica, outcome=finding.outcome, seconds=seconds, found=finding.text)
        if finding.outcome == "faulty":
            raise TrainingError(f"recomputation check after step {step}: {finding.text}")
        if finding.text:
            yield from self._once(f"recomputation check after step {step}: {finding.text}")

    def summary(self, seconds: float) -> str:
        """In one line; `seconds` are those of the whole run."""
        found = f"{self.num_odd} not bit-identical" if self.num_odd else "all bit-identical"
        num = f"{self.num_checks} recomputation check{'s' * (self.num_checks != 1)}"
        return f"{num}, {found}; they took {self.seconds:.2f} s ({self.seconds / (seconds or 1):.1%} of the run)"

    def _once(self, line: str) -> Iterator[str]:
        what = line.partition(": ")[2]
        if what not in self._said and self._world.is_main:
            yield line
        self._said.add(what)

    def _check(self, work: Computation) -> ReplayFinding:
        model = self._recipe.model
        with _kept_generators(self._world.devices), _kept_buffers(model.loss_modules):
            model.sync_replicas(is_training=False)
            once, again = self._compute(work), self._compute(work)
            own = [[number_of(one), number_of(other)] for one, other in zip(once, again, strict=True)]
            numbers, kinds = self._gathered(own), self._gathered(self._kinds())
            if _is_equal(numbers, kinds):
                if self._agreed is None:
                    self._agree(work, [first for first, _ in own])
                return ReplayFinding("equal")
            pairs = self._gathered([[one, other] for one, other in zip(once, again, strict=True)])
            names = self._gathered(self._names())
            devices = [DeviceSums(name, kind, *pair) for name, kind, pair in zip(names, kinds, pairs, strict=True)]
            finding = known(devices, self._noisy)
            if finding is None:
                finding = judge(devices, self._gathered(self._deterministic(work)), self._gathered(self._still_holds()))
        if finding.outcome == "nondeterministic":
            self._noisy |= {finding.tensor} - {INPUTS}
        return finding

    def _compute(self, work: Computation) -> list[Sums]:
        """On each device of this process."""
        # Many in a row are no stall.
        self._world.heartbeat.beat(COMPARING)
        return [self._on_device(work, index) for index in range(len(self._world.devices))]

    def _on_device(self, work: Computation, index: int) -> Sums:
        recipe, device = self._recipe, self._world.devices[index]
        bound: Any = recipe.model.loss_modules[index]
        micro_batch = work.batch.micro_batches[0][index]
        # A loss may change its inputs in place.
        data = map_tensors(micro_batch.inputs, torch.clone)
        sums = dict(zip((INPUTS, PARAMETERS), (_number(data), _number(list(bound.parameters()))), strict=True))
        epoch, start = work.batch.span.epoch, work.batch.span.start
        seed = replica_seed(derive_seed(recipe.team.seed, "dropout", epoch, work.replica), start, 0)
        seed_host(seed)
        seed_device(seed, device)
        context = LossContext(self._world, work.batch, at=lambda: (work.step, epoch))
        context.is_alone = True
        trained = {name.removeprefix("model."): one for name, one in bound.named_parameters() if one.requires_grad}
        with on(device), context.on(index, micro_batch.num_samples), _kept_buffers([bound]):
            with recipe.team.precision.autocast(device):
                amount = bound(recipe.loss, data)
            loss = amount[0] if isinstance(amount, tuple | list) else amount
            gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
            computed = {LOSS: loss.detach()}
            # In the order of backward.
            computed |= {
                f"the gradient of {name}": _dense(gradient)
                for name, gradient in reversed(list(zip(trained, gradients, strict=True)))
                if gradient is not None
            }
            computed |= {f"the buffer {name.removeprefix('model.')}": one for name, one in bound.named_buffers()}
            return sums | dict(zip(computed, checksums(list(computed.values())), strict=True))

    def _deterministic(self, work: Computation) -> list[list[int]]:
        """For each device of this process, what it computes with deterministic algorithms, a few times."""
        with _deterministic_algorithms():
            every = [[number_of(one) for one in self._compute(work)] for _ in range(NUM_MORE)]
        return [list(of_device) for of_device in zip(*every, strict=True)]

    def _agree(self, work: Computation, numbers: list[int]) -> None:
        """Keep what the first check computed: later it shows which of two devices has changed."""
        if self._world.num_replicas == 2:
            weights = [
                [one.detach().cpu().clone() for one in _state(bound)] for bound in self._recipe.model.loss_modules
            ]
            self._agreed = Agreed(work, weights, numbers)

    def _still_holds(self) -> list[list[bool]]:
        """For each device of this process, whether it computes what it did at the first check, a few times."""
        if self._agreed is None:
            return [[] for _ in self._world.devices]
        bounds = self._recipe.model.loss_modules
        now = [[one.detach().clone() for one in _state(bound)] for bound in bounds]
        _load(bounds, self._agreed.weights)
        try:
            every = [[number_of(one) for one in self._compute(self._agreed.work)] for _ in range(NUM_OLD)]
        finally:
            _load(bounds, now)
        of_devices = zip(self._agreed.numbers, zip(*every, strict=True), strict=True)
        return [[one == agreed for one in of_device] for agreed, of_device in of_devices]

    def _names(self) -> list[str]:
        world = self._world
        if len(world.devices) > 1:
            return [f"replica {index} ({device})" for index, device in enumerate(world.devices)]
        return [f"rank {world.rank} ({world.device})"]

    def _kinds(self) -> list[str]:
        """Devices of one kind compute the same bits, if the CPU uses as many threads."""
        return [
            torch.cuda.get_device_name(device)
            if device.type == "cuda"
            else f"{device.type} {_processor()} {torch.get_num_threads()}"
            for device in self._world.devices
        ]

    def _gathered(self, own: list[Any]) -> list[Any]:
        """Of all devices of all ranks."""
        return [one for of_rank in self._world.gather(own) for one in of_rank]


@dataclass(frozen=True)
class Agreed:
    """A computation whose result both devices agreed on, with the weights that it needs."""

    work: Computation
    weights: list[list[torch.Tensor]]
    numbers: list[int]


@dataclass(frozen=True)
class DeviceSums:
    """What one device computed, twice."""

    name: str
    kind: str
    once: Sums
    again: Sums

    @property
    def repeats_itself(self) -> bool:
        return self.once == self.again


@dataclass(frozen=True)
class ReplayFinding:
    """What a check found."""

    outcome: Literal["equal", "nondeterministic", "faulty"]
    text: str = ""
    tensor: str = INPUTS
    """The first one that differs."""


def known(devices: Sequence[DeviceSums], noisy: Set[str]) -> ReplayFinding | None:
    """What can be said without computing more; `noisy` are tensors that were nondeterministic in an earlier check."""
    if len({one.once[INPUTS] for one in devices}) > 1:
        return ReplayFinding(
            "nondeterministic",
            "the ranks read different data for the same samples, so that their results cannot be compared; let the "
            "dataset depend on the index alone",
        )
    tensor, _ = _difference(devices)
    if not tensor:
        return ReplayFinding("equal")
    names = list(devices[0].once)
    # What is computed from a noisy tensor is noisy too.
    if tensor in noisy or noisy & set(names[: names.index(tensor)] if tensor in names else names):
        return ReplayFinding(
            "nondeterministic",
            f"{tensor} differs again, or what it is computed from: nondeterministic, as before",
            tensor,
        )
    return None


def judge(
    devices: Sequence[DeviceSums], more: Sequence[Sequence[int]], holds: Sequence[Sequence[bool]]
) -> ReplayFinding:
    """Which device is faulty, if one is.

    `more` are numbers that each device computed with deterministic algorithms; `holds` says whether each still computes
    what it did at the first check.
    """
    tensor, differs = _difference(devices)
    for kind in dict.fromkeys(one.kind for one in devices):
        same = [index for index, one in enumerate(devices) if one.kind == kind]
        faulty, sound = _suspects(same, more, holds)
        if faulty and sound:
            culprit = devices[faulty[0]]
            if not culprit.repeats_itself:
                tensor = _first_difference(culprit.once, culprit.again)
                differs = f"{tensor} differs when {culprit.name} computes it twice"
                text = f"{differs}, also with deterministic algorithms, and not on other devices"
            else:
                names = " and ".join(devices[index].name for index in faulty)
                text = f"{tensor} on {names} repeatedly differs from that on {devices[sound[0]].name}"
            return ReplayFinding("faulty", f"{text}: {_FAULTY}", tensor)
        if faulty:
            names = " or ".join(devices[index].name for index in same)
            text = f"{tensor} differs between devices, each of which is consistent: {names} is faulty"
            return ReplayFinding("faulty", text, tensor)
    return ReplayFinding("nondeterministic", f"{differs}, {_cause(devices, more)}", tensor)


def _suspects(
    same: Sequence[int], more: Sequence[Sequence[int]], holds: Sequence[Sequence[bool]]
) -> tuple[list[int], list[int]]:
    """Of devices of one kind, the faulty ones and the sound ones; no sound ones if any may be faulty, or none is."""
    steady = Counter(more[index][0] for index in same if len(set(more[index])) == 1)
    if not steady:
        return [], []
    ((usual, most),) = steady.most_common(1)
    others = [index for index in same if any(number != usual for number in more[index])]
    if not all(_mostly([number != usual for number in more[index]]) for index in others):
        return [], []
    sound = [index for index in same if index not in others]
    if most > len(same) / 2 or most == steady.total():
        return others, sound
    if steady.total() < len(same):
        return [], []
    # No majority, and all repeat themselves.
    changed = [index for index in same if _mostly([not one for one in holds[index]])]
    kept = [index for index in same if holds[index] and all(holds[index])]
    return (changed, kept) if changed and len(changed) + len(kept) == len(same) else (list(same), [])


def _mostly(flags: Sequence[bool]) -> bool:
    return bool(flags) and sum(flags) >= MOST * len(flags)


def _cause(devices: Sequence[DeviceSums], more: Sequence[Sequence[int]]) -> str:
    """Of a difference for which no device is to blame."""
    if _is_equal(more, [one.kind for one in devices]):
        return "and not with deterministic algorithms: a nondeterministic kernel"
    depends = "a loss that does not depend on its inputs alone"
    if len(devices) == 1:
        return f"also with deterministic algorithms: {depends}, or a faulty device; a second device would show which"
    if all(len(set(numbers)) > 1 for numbers in more):
        return (
            "and every device differs from itself: the loss depends on more than its inputs, the weights and the "
            "generators of torch, NumPy and Python"
        )
    return f"and now and then with deterministic algorithms too: {depends}, or a device that is faulty at times"


def _difference(devices: Sequence[DeviceSums]) -> tuple[str, str]:
    """The first tensor that differs, and a clause that says where; empty if none does."""
    for one in devices:
        if not one.repeats_itself:
            tensor = _first_difference(one.once, one.again)
            return tensor, f"{tensor} differs when {one.name} computes it twice"
    for kind in dict.fromkeys(one.kind for one in devices):
        first, *others = [one for one in devices if one.kind == kind]
        for other in others:
            if other.once != first.once:
                tensor = _first_difference(first.once, other.once)
                return tensor, f"{tensor} differs between {first.name} and {other.name}"
    return "", ""


_FAULTY = "a faulty device; leave it out, and continue from the last checkpoint with --resume"


def _first_difference(one: Sums, other: Sums) -> str:
    return next((name for name in one if one[name] != other.get(name)), next(iter(other)))


def _is_equal(numbers: Sequence[Sequence[int]], kinds: Sequence[str]) -> bool:
    """Whether all devices of a kind have computed the same, twice."""
    found = {(kind, number) for kind, pair in zip(kinds, numbers, strict=True) for number in pair}
    return len(found) == len(set(kinds))


def number_of(sums: Sums) -> int:
    """One number for all of them."""
    return combined(sums.values())


def _number(data: Any) -> int:
    return combined(checksums([_dense(leaf) for leaf in leaves(data) if isinstance(leaf, torch.Tensor)]))


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach() if tensor.layout == torch.strided else tensor.detach().to_dense()


def _state(bound: nn.Module) -> list[torch.Tensor]:
    return [*bound.parameters(), *bound.buffers()]


@torch.no_grad()
def _load(bounds: Sequence[nn.Module], values: Sequence[Sequence[torch.Tensor]]) -> None:
    for bound, of_bound in zip(bounds, values, strict=True):
        for tensor, value in zip(_state(bound), of_bound, strict=True):
            tensor.copy_(value)


def _processor() -> str:
    """The kind of CPU: kernels are chosen by it."""
    return torch.backends.cpu.get_cpu_capability()


@contextmanager
def _kept_buffers(bounds: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, forward may change buffers, or put other tensors in their place."""
    kept = [
        (layer, name, buffer, buffer.detach().clone())
        for bound in bounds
        for layer in bound.modules()
        for name, buffer in layer.named_buffers(recurse=False)
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for layer, name, buffer, values in kept:
                setattr(layer, name, buffer)
                buffer.copy_(values)


@contextmanager
def _kept_generators(devices: Sequence[torch.device]) -> Iterator[None]:
    """Inside, anything may be drawn; on GPUs, wait for what runs there before and afterwards."""
    gpus = [device for device in devices if device.type == "cuda"]
    host, on_gpus = rng_states(), [torch.cuda.get_rng_state(device) for device in gpus]
    for device in gpus:
        torch.cuda.synchronize(device)
    try:
        yield
    finally:
        restore_rng_states(host)
        for device, state in zip(gpus, on_gpus, strict=True):
            torch.cuda.synchronize(device)
            torch.cuda.set_rng_state(state, device)


@contextmanager
def _deterministic_algorithms() -> Iterator[None]:
    is_on, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.use_deterministic_algorithms(is_on, warn_only=warns)
