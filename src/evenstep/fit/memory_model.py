"""Bytes of a step by kind, as lines in the number of samples; what a strategy makes of them; which micro-batch fits.

A step passes many moments, one after each operation. At each of them, memory is a line in the micro-batch, and the
peak is the highest of these lines: at small micro-batches often the optimizer's, at large ones the end of forward.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

from evenstep.errors import BadInput, shorten
from evenstep.pipeline_schedule import most_held
from evenstep.strategy_facts import StrategyFacts

KINDS = ("weights", "buffers", "gradients", "optimizer", "activations", "inputs", "communication", "framework")
"""`activations` are all tensors that a step makes and drops; `framework` is torch itself, with its libraries."""
COUNTED = KINDS[:6]
"""Those that tensors of a step are counted as."""
STEP, ACCUMULATED, UPDATE, EVALUATION = PHASES = ("step", "accumulated", "update", "evaluation")
"""`accumulated`: a micro-batch after others, whose gradients are there already."""
BUILDING = "building"
MARGIN = 0.05
"""Of the limit, left free: allocators keep memory that no tensor uses."""
CORRECTING, PARTS = 0.5, (1, 2, 4)
"""Steps that correct a forecast may take this part of the free memory, as shapes alone were up to half too low; their
micro-batches are the largest that does, and a half and a quarter of it."""
RING_BYTES = 2**21
"""Of each rank, for averaging gradients through shared memory."""

SMALLEST_LIMIT = 2**20

Sizes = dict[str, float]


@dataclass(frozen=True)
class Moment:
    """Bytes by kind: a fixed part, and a part for each sample of the micro-batch."""

    fixed: Sizes
    per_sample: Sizes

    def at(self, micro_batch: int) -> Sizes:
        return {kind: self.fixed[kind] + self.per_sample[kind] * micro_batch for kind in self.fixed}


@dataclass(frozen=True)
class Division:
    """How ranks divide a model: under which strategy, how many, in which order they compute."""

    strategy: str
    num: int
    schedule: str


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """What one device holds in a step of the whole model; from shape-only passes."""

    held: Sizes
    """Weights, buffers, all gradients and the optimizer's state, as they lie between two steps."""
    phases: dict[str, list[Moment]]
    """The moments of each phase that may be its highest."""
    input_bytes: float
    """Of one sample."""
    excess: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    """By phase: (samples, bytes) that real steps took beyond the moments, or below them; the fewest samples first."""
    beyond: list[tuple[int, float]] = field(default_factory=list)
    """(samples, bytes) that real steps of one strategy took beyond its forecast for such a micro-batch, or below it."""
    ran_out: int | None = None
    """Samples of the micro-batch with which a rank ran out of memory in these steps; None if none did."""
    rank_bytes: float | None = None
    """What a process of that strategy could use, on the rank that had least; None if it was not measured."""
    unit_bytes: list[float]
    """Parameters of each part that a sharded model gathers at a time; the last is the rest of the model."""
    framework_bytes: float
    """Of a process before it makes the model; on a GPU, what no tensor of the task explains."""
    available_bytes: float = 0.0
    """What a process could use on this device, if it were alone there."""
    gaps: float = 0.0
    """Of the peak: what the allocator of a GPU needs beyond it, found by real steps in less and less memory."""
    has_batchnorm: bool = False
    ranks: list[StepMemory] = field(default_factory=list)
    """Of a model that ranks divide: what each holds of it."""
    waiting: tuple[float, float] = (0.0, 0.0)
    """Bytes of a micro-batch between its forward and its backward: a fixed part, and one for each sample."""
    received_bytes: float = 0.0
    """From other ranks, of one sample."""
    is_real: bool = False
    """Whether steps were computed, since shapes alone do not say what this task does."""
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Placement:
    """A strategy on a number of devices, and the samples of a step on each."""

    facts: StrategyFacts
    devices: int
    kind: str
    """cpu or cuda."""
    share: int
    """Samples of a step on one device."""
    is_resident: bool = False
    input_copies: int = 1
    num_shards: int | None = None
    """Devices that hold one copy of a sharded model together, or one rank's part of it; None: all, or none."""
    is_offloaded: bool = False
    """Whether shards are in the memory of the host (`--cpu-offload`)."""
    division: Division | None = None
    """Of the model, where ranks divide it."""

    @property
    def is_alone(self) -> bool:
        return self.devices == 1

    @property
    def in_one_process(self) -> bool:
        """Whether one process holds what all devices hold, in the same memory."""
        return not self.is_alone and not self.facts.processes_per_device and self.kind == "cpu"


@dataclass(frozen=True)
class Peak:
    """The highest moment of a step on one device."""

    kinds: Sizes
    phase: str

    @property
    def total(self) -> float:
        return sum(self.kinds.values())


def peak(memory: StepMemory, place: Placement, micro_batch: int) -> Peak:
    """The peak of a training step, evaluations left out."""
    found = _highest(memory, place, micro_batch, (_phase(place, micro_batch), UPDATE))
    more = excess_at(memory.beyond, micro_batch)
    return replace(found, kinds={**found.kinds, "activations": found.kinds["activations"] + more})


def evaluation_peak(memory: StepMemory, place: Placement, micro_batch: int) -> Peak | None:
    """The peak of an evaluation; None for a task that has none."""
    return _highest(memory, place, micro_batch, (EVALUATION,)) if memory.phases.get(EVALUATION) else None


def _phase(place: Placement, micro_batch: int) -> str:
    return STEP if micro_batch >= place.share else ACCUMULATED


def _highest(memory: StepMemory, place: Placement, micro_batch: int, phases: tuple[str, ...]) -> Peak:
    if place.division is not None:
        return _highest_of_ranks(memory, place, micro_batch, phases)
    found = []
    for phase in phases:
        excess = excess_at(memory.excess.get(phase, []), micro_batch)
        for moment in memory.phases[phase]:
            kinds = moment.at(micro_batch)
            kinds["activations"] += excess
            found.append(Peak(_placed(memory, place, kinds, phase), phase))
    return max(found, key=lambda one: one.total)


def _highest_of_ranks(memory: StepMemory, place: Placement, micro_batch: int, phases: tuple[str, ...]) -> Peak:
    """Of the rank that holds most, when micro-batches wait for their backward; or while all build the whole model."""
    assert place.division is not None
    schedule, num = place.division.schedule, place.division.num
    # Each rank makes the whole model, and watches what a copy of it computes.
    built = {kind: 2 * memory.held[kind] for kind in ("weights", "buffers")}
    found = [Peak({**dict.fromkeys(KINDS, 0.0), **built, "framework": memory.framework_bytes}, BUILDING)]
    alone = replace(place, division=None, devices=place.num_shards or 1)
    for rank, own in enumerate(memory.ranks):
        held = most_held(schedule, num, rank, -(-place.share // micro_batch))
        waiting = (held - 1) * (own.waiting[0] + own.waiting[1] * micro_batch)
        for phase in phases:
            kinds = _highest(own, alone, micro_batch, (phase,)).kinds
            if phase in (STEP, ACCUMULATED):
                kinds["activations"] += waiting
                kinds["communication"] += own.received_bytes * place.share
            found.append(Peak(kinds, phase))
    return max(found, key=lambda one: one.total)


def excess_at(points: list[tuple[int, float]], num: int) -> float:
    """Bytes for this many samples: on lines between the points, and beyond the last between constant and proportional.

    Gaps do not grow in a line, and libraries choose other algorithms for other sizes: the line through the last two
    points could go anywhere.

    >>> excess_at([(4, 10.0), (16, 40.0)], 8), excess_at([(4, 10.0), (16, 40.0)], 32)
    (20.0, 80.0)
    >>> excess_at([(4, 90.0), (16, -60.0)], 32), excess_at([(4, 90.0), (16, 60.0)], 32)
    (-120.0, 60.0)
    """
    if not points:
        return 0.0
    if num <= points[0][0]:
        return points[0][1]
    for (first, low), (last, high) in pairwise(points):
        if num <= last:
            return low + (high - low) * (num - first) / (last - first)
    last, high = points[-1]
    slope = (high - points[-2][1]) / (last - points[-2][0]) if len(points) > 1 else 0.0
    proportional = high / last
    return high + min(max(slope, min(0.0, proportional)), max(0.0, proportional)) * (num - last)


def _placed(memory: StepMemory, place: Placement, kinds: Sizes, phase: str) -> Sizes:
    """What a moment of the whole model on one device becomes under a strategy."""
    inputs = 0.0 if place.is_resident else memory.input_bytes * place.share * place.input_copies
    found = {**kinds, "inputs": inputs, "communication": 0.0, "framework": memory.framework_bytes}
    if place.is_alone and not place.is_offloaded:
        return found
    if place.facts.shards or (place.num_shards or 1) > 1:
        return found | _sharded(memory, place, kinds, phase)
    if place.facts.processes_per_device:
        return found | _averaged(memory, place)
    return found | _replicated(memory, place, found)


def _averaged(memory: StepMemory, place: Placement) -> Sizes:
    """A whole model in each process. On GPUs, gradients lie in buckets, which stay; on a CPU, in shared memory."""
    if place.kind == "cpu":
        return {"communication": float(place.devices * RING_BYTES)}
    return {"gradients": memory.held["gradients"]}


def _replicated(memory: StepMemory, place: Placement, found: Sizes) -> Sizes:
    """A replica on each device, driven by one process; each updates its part of the parameters."""
    num = place.devices
    if place.in_one_process:
        return {kind: found[kind] * num for kind in ("weights", "buffers", "gradients", "activations", "inputs")}
    received = memory.held["gradients"] / num
    return {"optimizer": found["optimizer"] / num, "communication": received}


def _sharded(memory: StepMemory, place: Placement, kinds: Sizes, phase: str) -> Sizes:
    """A shard of everything that is held, and the parts that are gathered at the moment."""
    num, (*units, rest) = place.num_shards or place.devices, memory.unit_bytes
    largest, second, *_ = *sorted(units, reverse=True), 0.0, 0.0
    trained = memory.held["gradients"] / (memory.held["weights"] or 1.0)
    # Of micro-batches before the last, gradients stay whole.
    gradients = memory.held["gradients"] if phase == ACCUMULATED else kinds["gradients"] / num
    # A part, what it was gathered into, and the next one.
    gathered = rest + 2 * largest + second if phase != UPDATE else 0.0
    # Its gradients, what they are scattered from, and on a CPU the copy that gloo sends.
    copies = 3 if place.kind == "cpu" else 2
    scattered = copies * max(largest, rest) * trained if phase in (STEP, ACCUMULATED) else 0.0
    if place.is_offloaded:
        # Gradients of micro-batches before the last stay whole, on the device.
        gradients = gradients if phase == ACCUMULATED else 0.0
        return {"weights": 0.0, "gradients": gradients, "optimizer": 0.0, "communication": gathered + scattered}
    return {
        "weights": kinds["weights"] / num,
        "gradients": gradients,
        "optimizer": kinds["optimizer"] / num,
        "communication": gathered + scattered,
    }


@dataclass(frozen=True)
class Cut:
    """A step cut into `accumulate` micro-batches, the largest of which has `size` samples."""

    accumulate: int
    size: int


def cuts(share: int, least: int = 1) -> Iterator[Cut]:
    """All sizes of micro-batches of a share, the largest first; none is smaller than `least`."""
    last = 0
    for accumulate in range(1, share + 1):
        size = -(-share // accumulate)
        if share // accumulate < least:
            return
        if size != last:
            yield Cut(accumulate, size)
        last = size


def largest_fitting(memory: StepMemory, place: Placement, limit: float) -> Cut | None:
    """The fewest micro-batches with which a step, and an evaluation, fits in `limit` bytes."""
    for cut in cuts(place.share, 2 if memory.has_batchnorm else 1):
        if needs(memory, place, cut.size) <= limit:
            return cut
    return None


def needs(memory: StepMemory, place: Placement, micro_batch: int) -> float:
    """Bytes that steps and evaluations need, with gaps as far as the margin does not cover them."""
    evaluation = evaluation_peak(memory, place, micro_batch)
    most = max(peak(memory, place, micro_batch).total, evaluation.total if evaluation is not None else 0.0)
    return most * (1 + max(0.0, memory.gaps - MARGIN))


def in_process(memory: StepMemory, held: float, available: float) -> StepMemory:
    """The same in processes that hold and can use this many bytes before they make the model."""
    ranks = [replace(one, framework_bytes=held) for one in memory.ranks]
    return replace(memory, framework_bytes=held, rank_bytes=available, ranks=ranks)


def cuts_to_correct_by(memory: StepMemory, place: Placement, limit: float) -> list[Cut]:
    """The largest micro-batch that is forecast to take half of what is free, a half and a quarter of it."""
    most = memory.framework_bytes + CORRECTING * (limit - memory.framework_bytes)
    small = [
        cut for cut in cuts(place.share, 2 if memory.has_batchnorm else 1) if needs(memory, place, cut.size) <= most
    ]
    parts = [next((cut for cut in small if cut.size <= small[0].size // part), None) for part in PARTS if small]
    # The smallest first: if one runs out of memory, larger ones need not be tried.
    return sorted({cut for cut in parts if cut is not None}, key=lambda cut: cut.size)


def usable(limit: float) -> float:
    """What of a limit is given to a step."""
    return limit * (1 - MARGIN)


def fewest_devices(memory: StepMemory, place: Placement, limit: float, most: int = 1024) -> int | None:
    """The smallest power of two of devices on which a step fits, each with the same share of the global batch."""
    batch, num = place.share * place.devices, place.devices
    while num <= min(most, batch):
        there = Placement(**{**vars(place), "devices": num, "share": -(-batch // num)})
        if largest_fitting(memory, there, limit) is not None:
            return num
        num *= 2
    return None


def parse_bytes(text: str) -> int:
    """A size such as 24GB (24e9), 16GiB or 800MB.

    >>> parse_bytes("24GB"), parse_bytes("1.5 GiB")
    (24000000000, 1610612736)
    """
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)\s*([KMGT]?)(i?)B?", text.strip(), re.IGNORECASE)
    power = "KMGT".find(found[2].upper()) + 1 if found and found[2] else 0
    num = int(float(found[1]) * (1024 if found[3] else 1000) ** power) if found else 0
    if num < SMALLEST_LIMIT:
        raise BadInput(
            f"--memory is {shorten(repr(text))}; write the memory of one device, such as 24GB, 16GiB or 800MB"
        )
    return num


def in_words(kinds: Mapping[str, float]) -> str:
    """The two largest kinds.

    >>> in_words({"weights": 10, "activations": 85, "inputs": 5})
    'activations 85 %, weights 10 %'
    """
    total = sum(kinds.values()) or 1.0
    first = sorted(kinds, key=lambda kind: -kinds[kind])[:2]
    return ", ".join(f"{kind} {kinds[kind] / total:.0%}".replace("%", " %") for kind in first)
