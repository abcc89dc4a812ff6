"""From Records to what the model needs: compute by batch, bytes, arrival of gradients, links, jitter."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, linear_regression, median, quantiles
from typing import TypedDict

from evenstep.errors import BadInput, shorten
from evenstep.pipeline_schedule import bubble_share, chunks_of
from evenstep.predict.communication_cost import Link
from evenstep.predict.model_division import Arrangement, ModelDivision, TensorShare
from evenstep.predict.step_model import BACKWARD, CPU_JITTER, JITTER, Workload, buckets_of
from evenstep.record import FILE, PARTS, Lane, Measurement, Record, Timeline
from evenstep.strategy_facts import REFERENCE, STRATEGIES, UNKNOWN, StrategyFacts

WARM_UP = 3
"""First steps of a training that are not counted."""
NORMAL_QUARTILES = 1.349
"""Between the quartiles of a normal distribution, in standard deviations."""
LEAST_JITTER = 0.002
IN_TABLES = 0.03
"""Seconds: about the shortest steps of published tables."""
WAITS = 0.05
"""A step that waits for input for more than this part of it is limited by what is read."""
SHORTEST = 1e-7
"""Seconds; a damaged Record may say 0."""
WEIGHTS = Path("checkpoints", "latest", "weights.safetensors")


NOT_LOOKED_AT = (
    "no run here shows how {name} divides the model; measure the task instead: "
    "evenstep predict TASK --strategies {name}"
)


SHARDS_NOT_PREDICTED = "what the gathers and scatters of a sharded, split model cost is not predicted"


def no_stages_known() -> str:
    """Of a pipeline."""
    return NOT_LOOKED_AT.format(name=next(row.name for row in STRATEGIES.values() if row.schedules))


@dataclass(frozen=True, kw_only=True)
class Observation:
    """A usual step of one Record."""

    strategy: StrategyFacts
    devices: int
    kind: str
    samples: float
    """Of all devices."""
    seconds: float
    compute: float
    """Forward and backward."""
    backward: float
    """Its part of them."""
    optimizer: float
    input: float
    communication: float
    bubble: float = 0.0
    sent_bytes: int
    deviation: float
    """Standard deviation of its steps."""
    threads: int
    is_timed: bool
    """Whether its parts were measured."""
    record: Record = field(repr=False)

    @property
    def share(self) -> float:
        return self.samples / self.devices

    @property
    def arranged(self) -> Arrangement:
        """How its ranks divided a model."""
        plan = self.record.plan
        return Arrangement.of(self.strategy, self.devices, plan.mesh, plan.accumulate, plan.pipeline_schedule)

    @property
    def shares_a_gpu(self) -> bool:
        """Whether a GPU was given twice: what was measured then says nothing about two of them."""
        return self.kind != "cpu" and len(set(self.record.plan.devices)) < self.devices

    @property
    def rate(self) -> float:
        return self.samples / self.seconds


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """A task as the model takes it, and where each number is from."""

    work: Workload
    observed: list[Observation]
    link: Link | None
    """Inside this machine, as measured."""
    notes: list[str]
    divided: list[Observation] = field(default_factory=list)
    """Records of models that ranks divided."""
    division: ModelDivision | None = None
    """How the model can be divided, if anything says that."""
    is_derived: bool = False
    """Whether no Record is of a whole model on one device: `observed` follows from what ranks computed of it."""

    @property
    def kind(self) -> str:
        return self.observed[0].kind

    @property
    def largest(self) -> Observation:
        """The Record with the largest batch on the fewest devices."""
        return max(self.observed, key=lambda one: (one.samples, -one.devices))


def read_records(folder: str | Path) -> list[Record]:
    """The Records of a run, or of all blocks of a comparison."""
    where = Path(folder)
    if (where / FILE).is_file() or not where.is_dir():
        return [Record.read(where)]
    found = [Record.read(path.parent) for path in sorted(where.glob(f"*/{FILE}"))]
    if not found:
        raise BadInput(f"{shorten(str(folder))} holds no run; give the folder of a run or of a comparison")
    return found


def observe(record: Record) -> Observation:
    """The usual step of a Record."""
    if record.plan.machines not in (None, "1"):
        raise BadInput(f"{shorten(str(record.path))} is a run on several machines; give a run on one machine")
    if record.measurement is not None:
        return _measured(record, record.measurement)
    steps = list(record.steps)[WARM_UP:] or list(record.steps)
    if not steps:
        raise BadInput(f"{shorten(str(record.path))} has no steps; train for 10 or more first")
    seconds, reading = median(step.seconds for step in steps), median(step.input_seconds for step in steps)
    return Observation(
        **_facts(record),
        samples=max(1, *(step.samples for step in steps)),
        seconds=max(seconds, SHORTEST),
        compute=max(seconds - reading, 0.0),
        backward=BACKWARD,
        optimizer=0.0,
        input=reading,
        communication=0.0,
        sent_bytes=0,
        deviation=_deviation([step.seconds for step in steps]),
        is_timed=False,
    )


def _measured(record: Record, measured: Measurement) -> Observation:
    parts = dict.fromkeys(PARTS, 0.0) | measured.parts
    compute = parts["forward"] + parts["backward"]
    usual = median if _kind(record) == "cpu" else fmean
    seconds = max(SHORTEST, usual(measured.step_seconds or [measured.timed_seconds]))
    # The parts are timed in other steps than those that count, and with a clock that costs something.
    scale = seconds / (measured.timed_seconds or seconds)
    return Observation(
        **_facts(record),
        # A usual step is one of a whole batch.
        samples=record.plan.batch,
        seconds=seconds,
        compute=compute * scale,
        backward=parts["backward"] / compute if compute else BACKWARD,
        optimizer=parts["optimizer"] * scale,
        input=parts["input"] * scale,
        communication=parts["communication"] * scale,
        bubble=parts["bubble"] * scale,
        sent_bytes=measured.sent_bytes,
        deviation=_deviation(measured.step_seconds),
        is_timed=True,
    )


class _Facts(TypedDict):
    strategy: StrategyFacts
    devices: int
    kind: str
    threads: int
    record: Record


def _facts(record: Record) -> _Facts:
    return {
        "strategy": STRATEGIES.get(record.plan.strategy, UNKNOWN),
        "devices": max(1, len(record.plan.devices)),
        "kind": _kind(record),
        "threads": int(record.machine.get("threads") or 1),
        "record": record,
    }


def _kind(record: Record) -> str:
    return next(iter(record.plan.devices), "cpu").partition(":")[0]


def _deviation(seconds: Sequence[float]) -> float:
    """A standard deviation that one long step does not change."""
    if len(seconds) < 4:
        return 0.0
    low, _, high = quantiles(seconds, n=4)
    return (high - low) / NORMAL_QUARTILES


def divides(record: Record) -> bool:
    """Whether its ranks computed parts of one model."""
    return STRATEGIES.get(record.plan.strategy, UNKNOWN).model_axis is not None


def calibrate(
    records: Sequence[Record], parameters: int | None = None, division: ModelDivision | None = None
) -> Calibration:
    """What the Records of one task say about it; `division` is what was seen of its model, if it was looked at."""
    whole = [record for record in records if not divides(record)]
    known = [observe(record) for record in records if divides(record)]
    divided = [one for one in known if one.arranged.shards == 1]
    observed = [observe(record) for record in whole] or [one for one in map(_as_whole, divided) if one is not None]
    if not observed:
        raise BadInput(
            "in all of these runs, ranks divide the model: they say nothing about one device; measure one too: "
            f"--strategy {REFERENCE}"
        )
    if len({one.kind for one in (*observed, *divided)}) > 1:
        raise BadInput("some of these runs are on CPUs and some on GPUs; give those on one kind of device")
    notes: list[str] = []
    for mesh in dict.fromkeys(one.record.plan.mesh for one in known if one not in divided):
        notes.append(f"runs with --mesh {mesh} are not used: {SHARDS_NOT_PREDICTED}")
    if not whole:
        notes.append("no run is on one device: its compute time is the sum over the stages of a pipeline")
    looked = 4 * round(division.parameters) if division is not None else 0
    work = _workload(observed, 4 * parameters if parameters else _gradient_bytes(observed) or looked, notes)
    return Calibration(
        work=work,
        observed=observed,
        link=_link(observed),
        notes=notes,
        divided=divided,
        division=division or _division(divided, work),
        is_derived=not whole,
    )


def _workload(observed: Sequence[Observation], gradient_bytes: int, notes: list[str]) -> Workload:
    """What one device computes and a rank sends; what is not known of it is added to the notes."""
    chosen = _computing(_comparable(observed))
    fixed, slope, exponent = _line(chosen, notes)
    first = min(chosen, key=lambda one: one.devices)
    arrivals = _arrivals(observed, gradient_bytes)
    if gradient_bytes:
        notes.append(_arrivals_in_words(arrivals, gradient_bytes))
    else:
        notes.append("the size of the gradients is not known: communication is left out; give --parameters 25.6M")
    return Workload(
        fixed_seconds=fixed,
        sample_seconds=slope,
        exponent=exponent,
        optimizer_seconds=median(one.optimizer for one in chosen),
        backward=median(one.backward for one in chosen),
        input_seconds=median(one.input / one.share for one in chosen),
        gradient_bytes=float(gradient_bytes),
        arrivals=arrivals,
        accumulate=first.record.plan.accumulate,
        jitter=_jitter(first, notes),
        contention=_contention(observed),
        samples_a_second=_reads(chosen, notes),
        cores=int(first.record.machine.get("cores") or 1) if first.kind == "cpu" else None,
        threads=first.threads,
        shares_memory=first.kind == "cpu",
    )


def _as_whole(one: Observation) -> Observation | None:
    """What one device would compute, from the stages of a pipeline; None where ranks repeat a part of the model."""
    if not one.strategy.schedules:
        return None
    arranged = one.arranged
    bubble = bubble_share(arranged.schedule, arranged.ranks, arranged.accumulate)
    # Without its parts, a step is taken to be that of equal stages which send at no cost.
    computing = one.compute if one.is_timed else one.compute * (1 - bubble)
    compute, optimizer = computing * arranged.ranks, one.optimizer * arranged.ranks
    return replace(
        one,
        strategy=STRATEGIES[REFERENCE],
        devices=1,
        samples=one.samples / arranged.replicas,
        seconds=compute + optimizer + one.input,
        compute=compute,
        optimizer=optimizer,
        communication=0.0,
        bubble=0.0,
        sent_bytes=0,
    )


def _division(divided: Sequence[Observation], work: Workload) -> ModelDivision | None:
    """What Records of divided models say about their division: of stages, nothing but what is sent."""
    found = [one for one in divided if one.arranged.replicas == 1] or list(divided)
    if not found:
        return None
    sent = [_boundary_bytes(one) for one in found if one.strategy.schedules and one.sent_bytes]
    shares = [_tensor_share(one, work) for one in found if not one.strategy.schedules and one.is_timed]
    has_stages = any(one.strategy.schedules for one in found)
    return ModelDivision(
        boundary_bytes=median(sent) if sent else None,
        why_no_blocks="" if has_stages else no_stages_known(),
        tensors=[one for one in shares if one.sums],
        why_no_tensors={},
    )


def _boundary_bytes(one: Observation) -> float:
    """For each sample: the first rank sends every output of its chunks, and interleaved one gradient too."""
    arranged = one.arranged
    messages = 3 if arranged.schedule == "interleaved" else 1
    return one.sent_bytes / (one.samples / arranged.replicas) / messages


def _tensor_share(one: Observation, work: Workload) -> TensorShare:
    """By what its ranks computed, beside what one device would; sums are those of its timeline."""
    arranged = one.arranged
    samples = one.samples / arranged.replicas
    whole = arranged.accumulate * work.compute_seconds(samples / arranged.accumulate)
    share = min(1.0, one.compute / max(whole, SHORTEST))
    lanes = [lane for timeline in one.record.timelines for lane in _lanes(timeline, "network")]
    counts = [sum(name == "activations" for name, *_ in lane.spans) for lane in lanes]
    num = round(median(counts) / arranged.accumulate) if counts else 0
    return TensorShare(
        ranks=arranged.ranks,
        forward=share,
        backward=share,
        parameters=share,
        sums=[one.sent_bytes / samples / num] * num if num else [],
    )


def activations_link(divided: Sequence[Observation], division: ModelDivision | None, name: str) -> Link | None:
    """What carries activations inside this machine, by the seconds that ranks waited for each message."""
    found = [one for one in divided if one.strategy.name == name and one.is_timed and not one.shares_a_gpu]
    costs = [cost for one in found if division is not None and (cost := _message(one, division)) is not None]
    if not costs:
        return None
    seconds, hops, num_bytes = (median(column) for column in zip(*costs, strict=True))
    bandwidth = LOOPBACK.bandwidth
    if num_bytes / bandwidth >= seconds:
        return Link(latency=0.0, bandwidth=num_bytes / max(seconds, SHORTEST), name="measured here")
    return Link(latency=(seconds - num_bytes / bandwidth) / hops, bandwidth=bandwidth, name="measured here")


LOOPBACK = Link(latency=1.5e-4, bandwidth=1.5e9, name="gloo on one machine, assumed")
"""Ranks on CPUs send activations through gloo's sockets, not through the shared memory of gradients."""


def _message(one: Observation, division: ModelDivision) -> tuple[float, float, float] | None:
    """Seconds that a rank waited for one message, the latencies in it, and its bytes."""
    arranged = one.arranged
    micro_batch = one.samples / arranged.replicas / arranged.accumulate
    if arranged.replicas > 1:
        return None
    if one.strategy.schedules:
        stages = division.stages(arranged.ranks * chunks_of(arranged.schedule))[:-1]
        num = 2 * arranged.accumulate * len(stages) / arranged.ranks
        return one.communication / num, 1.0, fmean(stage.output_bytes for stage in stages) * micro_batch
    tensor = division.tensor(arranged.ranks)
    if tensor is None or not tensor.sums:
        return None
    num, hops = arranged.accumulate * len(tensor.sums), 2.0 * (arranged.ranks - 1)
    return one.communication / num, hops, hops / arranged.ranks * fmean(tensor.sums) * micro_batch


def _comparable(observed: Sequence[Observation]) -> list[Observation]:
    """Those with the same threads, of the most batch sizes: a process with two threads is another device."""
    groups: dict[int, list[Observation]] = {}
    for one in observed:
        groups.setdefault(one.threads if one.kind == "cpu" else 0, []).append(one)

    def worth(group: list[Observation]) -> tuple[int, int]:
        return len({one.share for one in group}), max(one.devices for one in group)

    return max(groups.values(), key=worth)


def _computing(chosen: list[Observation]) -> list[Observation]:
    """Those whose forward and backward are what one device computes: no shards, and a device for each rank."""
    single = [one for one in chosen if one.strategy.is_reference]
    if len({one.share for one in single}) > 1:
        return single
    ranks = [one for one in chosen if one.strategy.processes_per_device and not one.strategy.shards]
    return [*single, *(one for one in ranks if not one.shares_a_gpu)] or chosen


def _line(chosen: Sequence[Observation], notes: list[str]) -> tuple[float, float, float]:
    """The fixed part of forward and backward, the part for each sample, and its exponent.

    A line through all batch sizes; where larger batches cost more for each sample, a power of their size.
    """
    by_share: dict[float, list[float]] = {}
    for one in chosen:
        by_share.setdefault(one.share, []).append(one.compute)
    points = [(share, median(seconds)) for share, seconds in by_share.items()]
    if len(points) == 1:
        share, seconds = points[0]
        notes.append(f"measured with {share:g} samples per device only: fixed and per-sample time cannot be separated")
        return 0.0, seconds / share, 1.0
    fixed, slope = linear_regression(*zip(*points, strict=True))[::-1]
    if slope <= 0:
        return fmean(seconds for _, seconds in points), 0.0, 1.0
    if fixed >= 0:
        return fixed, slope, 1.0
    exponent, logarithm = linear_regression(
        *([math.log(max(value, SHORTEST)) for value in of] for of in zip(*points, strict=True))
    )
    return 0.0, math.exp(logarithm), exponent


def _jitter(one: Observation, notes: list[str]) -> float:
    """Of a rank's steps, over the root of their length."""
    if one.kind == "cpu":
        return max(LEAST_JITTER, one.deviation / math.sqrt(one.seconds)) if one.deviation else CPU_JITTER
    if one.seconds < IN_TABLES:
        notes.append(f"steps of {one.seconds * 1e3:.1f} ms are shorter than those of any table: stragglers are a guess")
    notes.append(
        "straggler times are those of published tables: the host runs ahead of its GPU, so its step times say little"
    )
    return JITTER


def _gradient_bytes(observed: Sequence[Observation]) -> int:
    """What a rank sends in a step, or the size of the weights in a checkpoint."""
    sent = [one.sent_bytes for one in observed if one.strategy.processes_per_device and not one.strategy.shards]
    if any(sent):
        return max(sent)
    sizes = [_weights_bytes(one.record) for one in observed]
    return max(sizes, default=0)


def _weights_bytes(record: Record) -> int:
    """From the header of the latest checkpoint, if there is one."""
    path = record.path.parent / WEIGHTS if record.path is not None else None
    if path is None or not path.is_file():
        return 0
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(length, 2**27)))
        return max((one["data_offsets"][1] for name, one in header.items() if name != "__metadata__"), default=0)
    except (OSError, ValueError, KeyError, TypeError, IndexError, struct.error):
        return 0


def _lanes(timeline: Timeline, name: str) -> list[Lane]:
    return [lane for lane in timeline.lanes if lane.name == name]


def _arrivals(observed: Sequence[Observation], gradient_bytes: int) -> tuple[float, ...]:
    """When each bucket began to be sent, as a part of backward; only where there are as many as we count."""
    expected = len(buckets_of(gradient_bytes))
    found: list[list[float]] = []
    for timeline in (one for seen in observed for one in seen.record.timelines):
        for network in _lanes(timeline, "network"):
            host = next((lane for lane in _lanes(timeline, "host") if lane.rank == network.rank), None)
            backward = next((span for span in host.spans if span[0] == "backward"), None) if host else None
            if backward and len(network.spans) == expected and network.spans[0][0].startswith("bucket"):
                length = (backward[2] - backward[1]) or 1.0
                found.append([min(1.0, max(0.0, (begin - backward[1]) / length)) for _, begin, _ in network.spans])
    return tuple(median(column) for column in zip(*found, strict=True)) if found else ()


def _arrivals_in_words(arrivals: Sequence[float], gradient_bytes: int) -> str:
    sizes = buckets_of(gradient_bytes)
    total = f"{gradient_bytes / 1e6:,.3g} MB of gradients in {len(sizes):,} bucket{'s' * (len(sizes) > 1)}"
    if not arrivals:
        return f"{total}; when each is ready was not measured: evenly over backward"
    shown = [f"{part:.0%}" for part in arrivals]
    when = ", ".join(shown if len(shown) < 6 else [*shown[:2], "...", *shown[-2:]])
    return f"{total}; ready at {when} of backward, as measured"


def _reads(chosen: Sequence[Observation], notes: list[str]) -> float | None:
    """Samples a second that the cores of a host can read, where steps on a GPU waited for them."""
    found = []
    for one in chosen:
        workers = one.record.plan.workers or 0
        if one.kind == "cpu" or one.input < WAITS * one.seconds or not (cores := one.record.machine.get("cores")):
            continue
        # Workers that a step waits for are busy all the time.
        core_seconds = workers * one.seconds if workers else one.input
        found.append(int(cores) * one.share / core_seconds)
    if not found:
        return None
    notes.append(f"steps waited for input: the cores of such a host read at most {median(found):,.0f} samples a second")
    return median(found)


def _link(observed: Sequence[Observation]) -> Link | None:
    """Inside this machine: the bytes of a ring, over the seconds that sending them took."""
    found = []
    for one in observed:
        sends_all = one.strategy.processes_per_device and not one.strategy.shards
        if one.devices < 2 or not one.sent_bytes or not sends_all or one.shares_a_gpu:
            continue
        seconds = _sending_seconds(one)
        if seconds > 0:
            found.append(2 * (one.devices - 1) / one.devices * one.sent_bytes / seconds)
    return Link(latency=0.0, bandwidth=max(found), name="measured here") if found else None


def _contention(observed: Sequence[Observation]) -> float:
    """What a step without communication gains beyond what it does not wait for, over the seconds that were hidden."""
    found = []
    for one in observed:
        bare = one.record.measurement.without_communication_seconds if one.record.measurement else None
        hidden = _sending_seconds(one) - one.communication
        if bare is not None and one.strategy.processes_per_device and hidden > 0:
            found.append((one.seconds - one.communication - bare) / hidden)
    return min(1.0, max(0.0, median(found))) if found else 0.0


def _sending_seconds(one: Observation) -> float:
    """The shortest time on the network of a step; else what was not hidden."""
    lanes = [lane for timeline in one.record.timelines for lane in _lanes(timeline, "network") if lane.spans]
    times = [sum(end - begin for _, begin, end in lane.spans) for lane in lanes]
    return min(times, default=one.communication)
