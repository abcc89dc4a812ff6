"""Predictions for n devices from a calibrated task, each with an interval and its limit; and the knee."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean, median
from typing import get_args

from evenstep.errors import BadInput
from evenstep.pipeline_order import bubble_share
from evenstep.plan import Plan, ScheduleName
from evenstep.predict.calibration import Calibration, Observation, calibrate
from evenstep.predict.job import WholeJob
from evenstep.predict.links import (
    CORES,
    GPUS_OF_A_MACHINE,
    MEMORY,
    NVLINK,
    NVLINK_OF_ITS_GPU,
    Cluster,
    Link,
    handling_seconds,
    nvlink,
)
from evenstep.predict.published import interval_of
from evenstep.predict.step_model import (
    DEVIATION,
    StepParts,
    Workload,
    buckets_of,
    computing_of,
    limit_of,
    step_parts,
)
from evenstep.record import Lane, Measurement, Record, RecordWriter, Timeline
from evenstep.report.comparison import Range
from evenstep.report.prediction import KNEE, Expectation, Forecast, Knee, Prediction
from evenstep.strategy_facts import DEFAULT, REFERENCE, STRATEGIES, UNKNOWN, StrategyFacts

MICRO_BATCHES_A_STAGE = 4
MOST_TOO_MANY = -0.8
"""Of a modelled step, where a measured one was shorter."""
FARTHEST = 2**16
SHARED_MEMORY = Link(latency=2e-5, bandwidth=5e9, name="shared memory, assumed")
ERRORS = (
    "Such forecasts of published tables were wrong by 3.1 % in the median, 9 % in 1 of 10 and 39 % at worst "
    "(n times as fast: 7.8 %); see evenstep predict --check."
)


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """Of a GPU's data sheet."""

    half_tflops: float
    full_tflops: float
    gigabytes_a_second: float


GPUS = {
    "v100": Speeds(half_tflops=125, full_tflops=15.7, gigabytes_a_second=MEMORY["v100"] / 1e9),
    "a100": Speeds(half_tflops=312, full_tflops=19.5, gigabytes_a_second=MEMORY["a100"] / 1e9),
    "h100": Speeds(half_tflops=989, full_tflops=67, gigabytes_a_second=MEMORY["h100"] / 1e9),
    "h200": Speeds(half_tflops=989, full_tflops=67, gigabytes_a_second=MEMORY["h200"] / 1e9),
}
"""torch/_inductor/analysis/device_info.py (a100, h100), stas00/ml-engineering (h200), RajBhope's gpu_catalog (v100)."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is to be predicted."""

    devices: Sequence[int]
    machines: Sequence[int] = ()
    """For each number of devices, or one for all; by default as many as there have to be."""
    strategies: Sequence[str] = ()
    links: Sequence[Link] = ()
    gpu: str | None = None
    batch: int | None = None
    per_device: int | None = None
    """Samples of each device, instead of a batch that they share."""
    reads: float | None = None
    """Samples a second that a machine can read."""
    price: float | None = None
    hours_between_failures: float | None = None
    """Of one device."""


@dataclass
class Forecaster:
    """The model with one task's numbers in it."""

    calibration: Calibration
    question: Question
    task: str = ""

    def __post_init__(self) -> None:
        measured = self.calibration.work
        self.work = replace(measured, samples_a_second=self.question.reads or measured.samples_a_second)
        self.width = 0.0
        """Added to the interval: half of what two scalings to another GPU differ by."""
        if self.question.gpu:
            self._change_gpu(self.question.gpu)
        if self.calibration.kind == "cuda":
            self.work = self._on_gpus(self.question.gpu or self._own_gpu or "a100")

    def _on_gpus(self, gpu: str) -> Workload:
        """What published tables say of GPUs and their hosts, and one machine cannot measure."""
        handling = handling_seconds(gpu, self.work.gradient_bytes)
        return replace(self.work, host_cores=CORES[gpu], deviation=DEVIATION, handling_seconds=handling)

    def forecast(self, command: str = "") -> Forecast:
        left_out: dict[str, str] = {}
        rows = self._measured()
        for strategy in self._strategies():
            for at, devices in enumerate(self.question.devices):
                why = self._refusal(strategy, devices)
                if why:
                    left_out[f"{strategy.name} x {devices}"] = why
                else:
                    rows.append(self.predict(strategy, devices, self._cluster(devices, at)))
        return Forecast(
            task=self.task,
            rows=rows,
            curves={one.name: self._curve(one) for one in self._strategies() if one.model_axis is None},
            knees=[self._knee(one) for one in self._strategies() if one.model_axis is None],
            links=f"{self._batch_in_words()}; {self._links()}",
            errors=ERRORS,
            notes=[note for note in self.calibration.notes if note],
            left_out=left_out,
            command=command,
        )

    def predict(self, strategy: StrategyFacts, devices: int, cluster: Cluster) -> Prediction:
        """One row; what a measured step on fewer devices took beyond the model is part of it."""
        parts = self._parts(strategy, devices, cluster)
        batch = self._batch(devices)
        rate = batch / parts.seconds
        low, high = interval_of(rate, self._lost(strategy, devices, parts) + self.width)
        low, high = (rate * math.exp(sign * self._with_noise(edge / rate)) for sign, edge in ((-1, low), (1, high)))
        # n devices are not more than n times as fast.
        high = max(rate, min(high, devices * self._rate_of_one * math.exp(self._noise)))
        ideal = computing_of(self._single) * batch / devices / self._batch(1)
        return self._with_job(
            Prediction(
                strategy=strategy.name,
                devices=devices,
                machines=cluster.machines(devices),
                batch=batch,
                samples_per_second=Range(middle=rate, low=low, high=high),
                step_seconds=Range(middle=batch / rate, low=batch / high, high=batch / low),
                efficiency=rate / devices / self._rate_of_one,
                parts=_named(parts),
                limit=limit_of(parts, ideal) if devices > 1 else "",
                hidden_seconds=parts.hidden,
                buckets=len(parts.buckets),
                algorithm=self._algorithm(strategy, devices, cluster) if parts.buckets else "",
            )
        )

    def _algorithm(self, strategy: StrategyFacts, devices: int, cluster: Cluster) -> str:
        """How the largest bucket is sent."""
        here, machines = cluster.in_a_machine(devices), cluster.machines(devices)
        if strategy.shards:
            return "gather and scatter"
        if not strategy.processes_per_device:
            return "copies from one process"
        if self.work.shares_memory and machines == 1:
            return "shared memory"
        largest = max(buckets_of(self.work.gradient_bytes))
        inside = [f"{cluster.inside.algorithm(here, largest)} inside"] if here > 1 else []
        between = [f"{cluster.between.algorithm(machines, largest)} between"] if machines > 1 else []
        return ", ".join(inside + between)

    def forecast_one(self, strategy: StrategyFacts, devices: int) -> Prediction:
        """The row of one strategy on one of the question's numbers of devices."""
        return self.predict(strategy, devices, self._cluster(devices, list(self.question.devices).index(devices)))

    def expectation(self, strategy: StrategyFacts, devices: int) -> Expectation:
        """What N devices give, beside one."""
        row = self.forecast_one(strategy, devices)
        alone = [one.rate for one in self.calibration.observed if one.devices == 1 and one.samples == self._batch(1)]
        single = median(alone or [self._rate_of_one])
        rate, knee = row.samples_per_second, self._knee(strategy)
        times = Range(middle=rate.middle / single, low=rate.low / single, high=rate.high / single)
        limit = knee.limit if knee.devices else row.limit
        return Expectation(devices=devices, times=times, limit=limit, limit_from=knee.devices)

    def timeline_of(self, strategy: StrategyFacts, devices: int, at: int) -> Timeline:
        """The predicted step of rank 0, as a measured one is drawn."""
        parts = self._parts(strategy, devices, self._cluster(devices, at))
        moments, spans = 0.0, []
        for name, seconds in (
            ("input", parts.input + parts.waiting),
            ("forward", parts.forward),
            ("backward", parts.backward + parts.contention),
            ("communication", _sending(parts)),
            ("optimizer", parts.optimizer),
        ):
            spans.append((name, moments, moments + seconds))
            moments += seconds
        sent = [(f"bucket {number}", begin, end) for number, (begin, end) in enumerate(parts.buckets)]
        return Timeline(
            step=0, lanes=[Lane(rank=0, name="host", spans=spans), Lane(rank=0, name="network", spans=sent)]
        )

    def _parts(self, strategy: StrategyFacts, devices: int, cluster: Cluster) -> StepParts:
        parts = step_parts(self.work, strategy, cluster, devices, self._batch(devices))
        found = [self._beyond(one, parts) for one in self._nearest(strategy, devices)]
        return replace(parts, unexplained=max(fmean(found), MOST_TOO_MANY * parts.seconds) if found else 0.0)

    def _beyond(self, one: Observation, parts: StepParts) -> float:
        """Seconds of a measured step that the model does not have, for a step of these parts.

        Processes that compute at once slow each other down by their memory, so on CPUs they grow and shrink with what
        is computed; what they are too many does so everywhere. What a GPU waits for its host stays.
        """
        modelled = self._modelled(one)
        beyond = one.seconds - modelled.seconds
        stays = beyond > 0 and one.kind != "cpu"
        return beyond if stays else beyond * computing_of(parts) / computing_of(modelled)

    def _batch(self, devices: int) -> float:
        if self.question.per_device:
            return self.question.per_device * devices
        return self.question.batch or round(self.calibration.largest.samples)

    @cached_property
    def _single(self) -> StepParts:
        return self._parts(STRATEGIES[REFERENCE], 1, self._cluster(1, 0))

    @cached_property
    def _rate_of_one(self) -> float:
        return self._batch(1) / self._single.seconds

    @cached_property
    def _noise(self) -> float:
        """Of what was measured: twice the standard deviation of the logarithms of equal Records' rates."""
        groups: dict[tuple[str, int, float], list[float]] = {}
        for one in self.calibration.observed:
            groups.setdefault((one.strategy.name, one.devices, one.samples), []).append(math.log(one.rate))
        squares = sum((rate - fmean(rates)) ** 2 for rates in groups.values() for rate in rates)
        freedom = sum(len(rates) - 1 for rates in groups.values())
        return 2 * math.sqrt(squares / freedom) if freedom else 0.0

    def _with_noise(self, edge: float) -> float:
        return math.hypot(math.log(edge), self._noise)

    def _lost(self, strategy: StrategyFacts, devices: int, parts: StepParts) -> float:
        """By more than computing, since the most devices that were measured: what an error can be made about."""
        known = self._known(strategy, devices)
        before = max((_overhead(self._modelled(one)) for one in known), default=0.0)
        beyond = abs(math.log(parts.seconds / (parts.seconds - parts.unexplained)))
        is_measured = any(one.devices == devices for one in known)
        return max(0.0, _overhead(parts) - before) + (0.0 if is_measured else beyond)

    def _known(self, strategy: StrategyFacts, devices: int) -> list[Observation]:
        """The Records of this strategy with the most devices, up to these."""
        if self.question.gpu:
            return []
        # On one device, every strategy is what the reference is.
        wanted = STRATEGIES[REFERENCE] if devices == 1 else strategy
        own = [
            one
            for one in self.calibration.observed
            if one.strategy == wanted and one.devices <= devices and self._is_alike(one)
        ]
        most = max((one.devices for one in own), default=0)
        return [one for one in own if one.devices == most]

    def _is_alike(self, one: Observation) -> bool:
        return not one.shares_a_gpu and (one.kind != "cpu" or one.threads == self.work.threads)

    def _nearest(self, strategy: StrategyFacts, devices: int) -> list[Observation]:
        """Of these Records, those with the nearest number of samples a device."""
        known, share = self._known(strategy, devices), self._batch(devices) / devices
        nearest = min((abs(math.log(one.share / share)) for one in known), default=0.0)
        return [one for one in known if abs(math.log(one.share / share)) <= nearest + 1e-9]

    def _modelled(self, one: Observation) -> StepParts:
        cluster = Cluster(per_machine=one.devices, inside=self._inside, between=self._inside)
        # What was measured was not limited by `--reads`.
        work = replace(self.work, samples_a_second=None)
        return step_parts(work, one.strategy, cluster, one.devices, one.samples)

    @cached_property
    def _inside(self) -> Link:
        given = [link for link in self.question.links if link.name.startswith(("nvlink", "pcie"))]
        measured = self.calibration.link
        if given and given[-1].name != NVLINK_OF_ITS_GPU:
            return given[-1]
        if given or (self.calibration.kind == "cuda" and (self.question.gpu or measured is None)):
            return nvlink(self.question.gpu or self._own_gpu or "a100")
        return measured or SHARED_MEMORY

    @cached_property
    def _between(self) -> Link | None:
        given = [link for link in self.question.links if not link.name.startswith(("nvlink", "pcie"))]
        return given[-1] if given else None

    def _per_machine(self) -> int:
        if self.calibration.kind == "cuda":
            return GPUS_OF_A_MACHINE
        return max(1, (self.work.cores or 1) // self.work.threads)

    def _cluster(self, devices: int, at: int | None = None) -> Cluster:
        machines = self.question.machines
        if machines and at is not None:
            per_machine = -(-devices // machines[at if len(machines) > 1 else 0])
        else:
            per_machine = self._per_machine()
        return Cluster(per_machine=per_machine, inside=self._inside, between=self._between or self._inside)

    def _links(self) -> str:
        between = self._between.name if self._between else "none given"
        return f"inside a machine: {self._inside.name}; between machines: {between}"

    def _batch_in_words(self) -> str:
        if self.question.per_device:
            return f"{self.question.per_device:,} samples a device"
        return f"batch {self._batch(1):,.0f}, over all devices"

    def _strategies(self) -> list[StrategyFacts]:
        names = self.question.strategies or [DEFAULT]
        return [STRATEGIES[name] for name in names]

    def _refusal(self, strategy: StrategyFacts, devices: int) -> str:
        cluster = self._cluster(devices, list(self.question.devices).index(devices))
        machines = cluster.machines(devices)
        if strategy.model_axis is not None:
            return why_not_predicted(strategy, devices)
        if strategy.is_reference and devices > 1:
            return "it runs on one device"
        if machines > 1 and not strategy.several_machines:
            return f"it runs on one machine, and these are {machines}"
        if machines > 1 and self._between is None:
            return f"these are {machines:,} machines; say what connects them: --link 25gbit"
        if self._batch(devices) < devices:
            return f"a batch of {self._batch(devices):,.0f} does not go over {devices:,} devices; give --per-device"
        return ""

    def _measured(self) -> list[Prediction]:
        """Each configuration that was measured, once."""
        groups: dict[tuple[str, int, float], list[Observation]] = {}
        for one in self.calibration.observed:
            groups.setdefault((one.strategy.name, one.devices, one.samples), []).append(one)
        order = sorted(groups.values(), key=lambda seen: (seen[0].devices, seen[0].strategy.name, seen[0].samples))
        return [_row(seen, self._single_rate(seen[0].samples)) for seen in order]

    def _single_rate(self, samples: float) -> float:
        """Of one device, with this batch if that was measured."""
        alone = [one for one in self.calibration.observed if one.devices == 1]
        single = [one for one in alone if one.strategy.is_reference] or alone
        same = [one.rate for one in single if one.samples == samples]
        return median(same or [one.rate for one in single] or [self._rate_of_one])

    def _curve(self, strategy: StrategyFacts) -> list[Prediction]:
        most = max(self.question.devices)
        counts = sorted({*self.question.devices, *(2**power for power in range(most.bit_length()) if 2**power <= most)})
        return [
            self.predict(strategy, devices, self._cluster(devices, None))
            for devices in counts
            if self._batch(devices) >= devices
            and (strategy.several_machines or self._cluster(devices).machines(devices) == 1)
        ]

    def _knee(self, strategy: StrategyFacts) -> Knee:
        """The first number of devices whose efficiency is below KNEE, up to where a batch can be cut."""
        most = min(FARTHEST, max(self.question.devices) if self.question.per_device else int(self._batch(1)))
        if not strategy.several_machines:
            most = min(most, self._per_machine())
        low, high = 1, most
        if self._efficiency(strategy, most) >= KNEE:
            return Knee(strategy=strategy.name, devices=None, looked_at=most)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._efficiency(strategy, middle) >= KNEE else (low, middle)
        parts = self._parts(strategy, high, self._cluster(high))
        limit = limit_of(parts, computing_of(self._single) * self._batch(high) / high / self._batch(1))
        return Knee(strategy=strategy.name, devices=high, looked_at=most, limit=limit, efficiency=KNEE)

    def _efficiency(self, strategy: StrategyFacts, devices: int) -> float:
        return self.predict(strategy, devices, self._cluster(devices)).efficiency

    @cached_property
    def _job(self) -> WholeJob | None:
        return WholeJob.of(self.calibration.largest.record)

    def _with_job(self, row: Prediction) -> Prediction:
        """An epoch of the job, and what it costs."""
        if self._job is None:
            return row
        failures = self.question.hours_between_failures
        parts = self._job.epoch_parts(row.samples_per_second.middle, row.batch, row.devices, failures)
        seconds = sum(parts.values())
        device_hours = seconds * row.devices / 3600
        cost = device_hours * self.question.price if self.question.price is not None else None
        return replace(
            row,
            epoch_seconds=seconds,
            epoch_parts=parts,
            device_hours=device_hours,
            cost=cost,
            epochs=self._job.epochs,
        )

    @cached_property
    def _own_gpu(self) -> str | None:
        cards = self.calibration.observed[0].record.machine.get("cards") or [""]
        return next((name for name in NVLINK if name in str(cards[0]).lower()), None)

    def _change_gpu(self, gpu: str) -> None:
        """Between what arithmetic and what memory would give: nobody measured which of them limits this task."""
        if self.calibration.kind != "cuda":
            raise BadInput("--gpu needs Records of a GPU: a step on the CPU says nothing about one")
        own = self._own_gpu
        if own == gpu:
            return
        if own not in GPUS or gpu not in GPUS:
            raise BadInput(f"--gpu {gpu}: from {own or 'this GPU'} to it is not known; there are {', '.join(GPUS)}")
        here, there = GPUS[own], GPUS[gpu]
        half = self.calibration.observed[0].record.plan.precision in ("bf16", "fp16")
        arithmetic = (here.half_tflops / there.half_tflops) if half else (here.full_tflops / there.full_tflops)
        memory = here.gigabytes_a_second / there.gigabytes_a_second
        self.width = abs(math.log(arithmetic / memory)) / 2
        scale = math.sqrt(arithmetic * memory)
        self.work = replace(
            self.work,
            fixed_seconds=self.work.fixed_seconds * scale,
            sample_seconds=self.work.sample_seconds * scale,
            optimizer_seconds=self.work.optimizer_seconds * memory,
        )
        self.calibration.notes.append(
            f"{own} to {gpu}: by data sheets, {scale:.2f} x the seconds; expect 10 to 30 % error"
        )

    def write_records(self, folder: Path, forecast: Forecast) -> list[Path]:
        """A Record for each predicted row, as a measured one has it: its parts and its timeline."""
        found = []
        for row in forecast.rows:
            if row.is_measured:
                continue
            name = f"{row.strategy}-{row.devices}-predicted"
            (folder / name).mkdir(parents=True, exist_ok=True)
            self._write_record(folder / name, row)
            found.append(folder / name)
        return found

    def _write_record(self, folder: Path, row: Prediction) -> None:
        measured = self.calibration.largest.record
        device = self.calibration.kind if self.calibration.kind == "cpu" else "cuda:0"
        plan: Plan = replace(
            measured.plan,
            strategy=row.strategy,
            devices=(device,) * row.devices,
            batch=round(row.batch),
            name=folder.name,
        )
        (folder / "record.jsonl").unlink(missing_ok=True)
        writer = RecordWriter(folder, plan, {**measured.machine, "predicted": True})
        at = list(self.question.devices).index(row.devices)
        writer.append(self.timeline_of(STRATEGIES[row.strategy], row.devices, at))
        parts = row.parts
        shown = {
            "input": parts["input"] + parts["waiting"],
            "forward": parts["forward"],
            "backward": parts["backward"] + parts["contention"],
            "communication": parts["communication"]
            + parts["handling"]
            + parts["stragglers"]
            + max(0.0, parts["unexplained"]),
            "bubble": 0.0,
            "optimizer": parts["optimizer"],
        }
        seconds = row.step_seconds.middle
        writer.append(
            Measurement(
                first_step_at=0.0,
                samples=round(row.batch),
                seconds=seconds,
                step_seconds=[seconds],
                timed_seconds=sum(shown.values()),
                parts=shown,
                without_input_seconds=seconds - shown["input"],
                without_communication_seconds=seconds - shown["communication"],
                sent_bytes=round(self.work.gradient_bytes),
                peak_bytes={},
            )
        )
        writer.close()


def why_not_predicted(strategy: StrategyFacts, devices: int) -> str:
    """Why nothing is predicted where ranks divide a model; of a pipeline, its bubble is known."""
    if not strategy.schedules:
        return (
            "its ranks wait for two sums of activations for each pair of split layers, in forward and in backward, and "
            "no Record has their number and sizes; measure it with evenstep compare"
        )
    num = MICRO_BATCHES_A_STAGE * devices
    bubbles = [f"{name} {bubble_share(name, devices, num):.0%}" for name in get_args(ScheduleName)]
    return (
        "what its stages take and send depends on where the model is cut; measure it with evenstep compare. The bubble "
        f"alone, of {num:,} micro-batches in stages that take as long: {', '.join(bubbles)} of a step"
    )


def expectation(records: Sequence[Record]) -> list[str]:
    """What twice as many devices of the same machine would give, in one sentence; none where they could not run."""
    facts = {id(record): STRATEGIES.get(record.plan.strategy, UNKNOWN) for record in records}
    records = [one for one in records if facts[id(one)].model_axis is None]
    able = [one for one in records if facts[id(one)].processes_per_device and len(one.plan.devices) > 1]
    if not able or any(one.plan.machines for one in records):
        return []
    most = max(able, key=lambda record: len(record.plan.devices))
    devices, strategy = 2 * len(most.plan.devices), facts[id(most)]
    try:
        calibration = calibrate(records)
    except BadInput:
        return []
    cores = calibration.work.cores
    if cores is not None and devices * calibration.work.threads > cores:
        return []
    forecaster = Forecaster(calibration, Question(devices=[devices], machines=[1], strategies=[strategy.name]))
    found = forecaster.expectation(strategy, devices).sentence
    return [f"{strategy.name}: {found}. More: evenstep predict."]


def _sending(parts: StepParts) -> float:
    """Until all ranks have the averaged gradients, after backward."""
    return parts.communication + parts.handling + parts.stragglers + max(0.0, parts.unexplained)


def _overhead(parts: StepParts) -> float:
    """The logarithm of a step over its computing."""
    return math.log(max(1.0, (parts.seconds - parts.unexplained) / computing_of(parts)))


def _named(parts: StepParts) -> dict[str, float]:
    return {name: value for name, value in asdict(parts).items() if name not in ("hidden", "buckets")}


def _row(seen: Sequence[Observation], single_rate: float) -> Prediction:
    """What was measured, as a row beside the predicted ones."""
    one, rates = seen[0], [each.rate for each in seen]
    parts = {"input": one.input, "forward": one.compute * (1 - one.backward), "backward": one.compute * one.backward}
    return Prediction(
        strategy=one.strategy.name,
        devices=one.devices,
        machines=1,
        batch=one.samples,
        samples_per_second=Range.of(rates),
        step_seconds=Range.of([each.seconds for each in seen]),
        efficiency=median(rates) / one.devices / single_rate,
        parts={**parts, "communication": one.communication, "optimizer": one.optimizer},
        is_measured=True,
    )
