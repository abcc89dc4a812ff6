"""Predictions for n devices from a calibrated task, each with an interval and its limit; and the knee."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean, median
from typing import Any

from evenstep.errors import BadInput, PlanError
from evenstep.mesh import has_axes
from evenstep.pipeline_schedule import chunks_of
from evenstep.plan import Plan, ScheduleName
from evenstep.predict.calibration import (
    LOOPBACK,
    NOT_LOOKED_AT,
    Calibration,
    Observation,
    activations_link,
    calibrate,
)
from evenstep.predict.communication_cost import (
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
from evenstep.predict.job import WholeJob
from evenstep.predict.model_division import Arrangement, DividedStep, ModelDivision
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
FEW_POINTS, WITHOUT_RECORDS = 0.6, 1.2
"""Half of the width of an interval, as a logarithm, for models that ranks divide, with own Records of it and without.

No table was found for them: these are the worst errors of the first seven runs in docs/predict.md, on busy cores."""
MOST_TOO_MANY = -0.8
"""Of a modelled step, where a measured one was shorter."""
FARTHEST = 2**16
SHARED_MEMORY = Link(latency=2e-5, bandwidth=5e9, name="shared memory, assumed")
ERRORS = (
    "Such forecasts of published tables were wrong by 3.1 % in the median, 9 % in 1 of 10 and 32 % at worst "
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
    mesh: str | None = None
    """How the ranks of a divided model are arranged, for strategies with these axes."""
    accumulate: int | None = None
    """Micro-batches of a step of a divided model; by default 4 for each stage of a pipeline, else 1."""
    schedule: ScheduleName = "1f1b"


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
                    row = self.predict(strategy, devices, self._cluster(devices, at))
                    # Of what one device was measured to do, as that of the measured rows.
                    rate = row.samples_per_second.middle
                    rows.append(replace(row, efficiency=rate / devices / self._measured_rate_of_one))
        divided = [row for row in rows if not row.is_measured and STRATEGIES[row.strategy].model_axis is not None]
        return Forecast(
            task=self.task,
            rows=rows,
            curves={one.name: self._curve(one) for one in self._strategies()},
            knees=[self._knee(one) for one in self._strategies() if one.model_axis is None],
            links=f"{self._batch_in_words()}; {self._links()}",
            errors=self._errors_in_words(divided, is_all=len(divided) == sum(not row.is_measured for row in rows)),
            notes=[*(note for note in self.calibration.notes if note), *map(self._division_in_words, divided)],
            left_out=left_out,
            command=command,
        )

    def predict(self, strategy: StrategyFacts, devices: int, cluster: Cluster) -> Prediction:
        """One row; what a measured step on fewer devices took beyond the model is part of it."""
        parts = self._parts(strategy, devices, cluster)
        batch = self._batch(devices)
        rate = batch / parts.seconds
        if strategy.model_axis is None:
            low, high = interval_of(rate, self._lost(strategy, devices, parts) + self.width)
        else:
            known = FEW_POINTS + self._own_error(strategy) if self._own(strategy) else WITHOUT_RECORDS
            half = known + self.width
            low, high = rate * math.exp(-half), rate * math.exp(half)
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

    def _own_error(self, strategy: StrategyFacts) -> float:
        """By how much the model missed the Records of this strategy, at worst: a logarithm."""
        return max((abs(math.log(one.seconds / self._modelled(one).seconds)) for one in self._own(strategy)), default=0)

    def _own(self, strategy: StrategyFacts) -> list[Observation]:
        if self.calibration.division is None or self.question.gpu:
            return []
        own = [one for one in self.calibration.divided if one.strategy == strategy and self._is_alike(one)]
        return [one for one in own if not self._why_not_divided(strategy, one.arranged, one.samples)]

    def _errors_in_words(self, divided: Sequence[Prediction], *, is_all: bool) -> str:
        found = [] if is_all and divided else [ERRORS]
        for name in dict.fromkeys(row.strategy for row in divided):
            own = self._own(STRATEGIES[name])
            missed = f", missed by up to {math.expm1(self._own_error(STRATEGIES[name])):.0%}" if own else ""
            found.append(
                f"No published table covers {name}: its interval comes from {len(own)} run{'s' * (len(own) != 1)} "
                f"of it here{missed}, and from 14 runs on one busy machine (docs/predict.md). Take it as a guess."
            )
        return " ".join(found)

    def _division_in_words(self, row: Prediction) -> str:
        strategy = STRATEGIES[row.strategy]
        arranged, division = self._arranged(strategy, row.devices), self.calibration.division
        assert division is not None
        if not strategy.schedules:
            found = division.tensor(arranged.ranks)
            assert found is not None
            sums = f"{len(found.sums):,} sum{'s' * (len(found.sums) != 1)}"
            own = f"a rank's part takes {found.forward:.0%} of the time of forward and {found.backward:.0%} of backward"
            if min(found.forward, found.backward) >= NO_GAIN:
                own = "a rank's part took as long as the whole model here, whose layers are too small to gain"
            return f"{row.label}: {arranged.in_words}; {own}; it waits for {sums} of activations a micro-batch"
        stages = division.stages(arranged.ranks * chunks_of(arranged.schedule))
        shares = [f"{(1 - self.work.backward) * one.forward + self.work.backward * one.backward:.0%}" for one in stages]
        shown = ", ".join(shares if len(shares) <= MOST_STAGES else [*shares[: MOST_STAGES - 1], "..."])
        of_stages = "equal stages, since no block was timed" if division.is_equal else f"stages of {shown}"
        return f"{row.label}: {arranged.in_words}, {arranged.schedule}; {of_stages}"

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
        single = self._measured_rate_of_one
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
            ("bubble", parts.bubble),
            ("optimizer", parts.optimizer),
        ):
            spans.append((name, moments, moments + seconds))
            moments += seconds
        sent = [(f"bucket {number}", begin, end) for number, (begin, end) in enumerate(parts.buckets)]
        return Timeline(
            step=0, lanes=[Lane(rank=0, name="host", spans=spans), Lane(rank=0, name="network", spans=sent)]
        )

    def _parts(self, strategy: StrategyFacts, devices: int, cluster: Cluster) -> StepParts:
        if strategy.model_axis is None:
            parts = step_parts(self.work, strategy, cluster, devices, self._batch(devices))
        else:
            arranged = self._arranged(strategy, devices)
            parts = self._divided(self.work, strategy, cluster, arranged, self._batch(devices)).parts(strategy)
        found = [self._beyond(one, parts) for one in self._nearest(strategy, devices)]
        return replace(parts, unexplained=max(fmean(found), MOST_TOO_MANY * parts.seconds) if found else 0.0)

    def _arranged(self, strategy: StrategyFacts, devices: int) -> Arrangement:
        """As `train` would arrange these devices; a pipeline needs micro-batches."""
        mesh = self.question.mesh
        has = mesh is not None and has_axes(mesh, strategy)
        found = Arrangement.of(strategy, devices, mesh if has else None, 1, self.question.schedule)
        usual = MICRO_BATCHES_A_STAGE * found.ranks if strategy.schedules else 1
        samples = max(1, int(self._batch(devices) // found.replicas))
        return replace(found, accumulate=self.question.accumulate or min(usual, samples))

    def _divided(
        self, work: Workload, strategy: StrategyFacts, cluster: Cluster, arranged: Arrangement, samples: float
    ) -> DividedStep:
        division = self.calibration.division
        assert division is not None
        link = self._activations(strategy.name)
        return DividedStep(work=work, division=division, arranged=arranged, cluster=cluster, link=link, samples=samples)

    def _activations(self, name: str) -> Link:
        """What carries activations inside a machine: as given, as measured, or as the devices have it."""
        given = any(link.name.startswith(("nvlink", "pcie")) for link in self.question.links)
        measured = activations_link(self.calibration.divided, self.calibration.division, name)
        if not given and measured is not None and not self.question.gpu:
            return measured
        return self._inside if given or self.calibration.kind == "cuda" else LOOPBACK

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
    def _measured_rate_of_one(self) -> float:
        """That of the batch in question; of another GPU or batch, what is predicted."""
        alone = [one.rate for one in self.calibration.observed if one.devices == 1 and one.samples == self._batch(1)]
        return median(alone) if alone and not self.question.gpu else self._rate_of_one

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
            for one in (*self.calibration.observed, *self._own(strategy))
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
        if one.strategy.model_axis is not None:
            return self._divided(work, one.strategy, cluster, one.arranged, one.samples).parts(one.strategy)
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
        if strategy.is_reference and devices > 1:
            return "it runs on one device"
        if machines > 1 and not strategy.several_machines:
            return f"it runs on one machine, and these are {machines}"
        if machines > 1 and self._between is None:
            return f"these are {machines:,} machines; say what connects them: --link 25gbit"
        if strategy.model_axis is not None:
            try:
                return self._why_not_divided(
                    strategy, self._arranged(strategy, devices), self._batch(devices), machines
                )
            except PlanError as error:
                return str(error)
        if self._batch(devices) < devices:
            return f"a batch of {self._batch(devices):,.0f} is too small for {devices:,} devices; give --per-device"
        return ""

    def _why_not_divided(
        self, strategy: StrategyFacts, arranged: Arrangement, samples: float, machines: int = 1
    ) -> str:
        """Why a model cannot be divided like this, or nothing is known of that."""
        division, name = self.calibration.division, strategy.name
        if arranged.ranks == 1:
            return f"it divides a model over 2 ranks or more; give more devices, or --mesh {strategy.model_axis}=2"
        if division is None:
            return NOT_LOOKED_AT.format(name=name)
        per_replica = samples / arranged.replicas
        if per_replica < arranged.accumulate:
            return f"{per_replica:g} samples are not {arranged.accumulate:,} micro-batches; give a larger --batch"
        if strategy.schedules:
            return _why_no_stages(name, division, arranged, machines)
        ranks = str(arranged.ranks)
        if ranks in division.why_no_tensors:
            return division.why_no_tensors[ranks]
        return "" if division.tensor(arranged.ranks) is not None else NOT_LOOKED_AT.format(name=name)

    def _measured(self) -> list[Prediction]:
        """Each configuration that was measured, once."""
        groups: dict[tuple[object, ...], list[Observation]] = {}
        whole = [] if self.calibration.is_derived else self.calibration.observed
        for one in (*whole, *self.calibration.divided):
            divided = one.arranged if one.strategy.model_axis is not None else None
            groups.setdefault((one.strategy.name, one.devices, one.samples, divided), []).append(one)
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
        if strategy.model_axis is not None:
            able = [devices for devices in sorted(self.question.devices) if not self._refusal(strategy, devices)]
            return [self.forecast_one(strategy, devices) for devices in able]
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
        is_measured = any((one.strategy, one.devices) == (strategy, high) for one in self.calibration.observed)
        return Knee(
            strategy=strategy.name,
            devices=high,
            looked_at=most,
            limit=limit,
            efficiency=KNEE,
            is_measured=is_measured,
        )

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
        return _gpu_of(self.calibration.observed[0].record.machine.get("cards") or [])

    def _change_gpu(self, gpu: str) -> None:
        """Between what arithmetic and what memory would give: nobody measured which of them limits this task."""
        own = gpu_to_scale(gpu, self.calibration.kind, self.calibration.observed[0].record.machine.get("cards") or [])
        if own == gpu:
            return
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
            **self._plan_of_division(row),
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
            "bubble": parts["bubble"],
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
                sent_bytes=round(self._sent_bytes(row)),
                peak_bytes={},
            )
        )
        writer.close()

    def _plan_of_division(self, row: Prediction) -> dict[str, Any]:
        """What its plan has besides strategy and devices."""
        strategy = STRATEGIES[row.strategy]
        if strategy.model_axis is None:
            # The Record may be of another strategy, one with axes.
            return {"mesh": None, "pipeline_schedule": "1f1b"}
        arranged = self._arranged(strategy, row.devices)
        mesh = f"data={arranged.replicas},{strategy.model_axis}={arranged.ranks}"
        return {"mesh": mesh, "accumulate": arranged.accumulate, "pipeline_schedule": arranged.schedule}

    def _sent_bytes(self, row: Prediction) -> float:
        """By the first rank in a step: gradients, or activations where ranks divide a model."""
        strategy, division = STRATEGIES[row.strategy], self.calibration.division
        if strategy.model_axis is None or division is None:
            return self.work.gradient_bytes
        arranged = self._arranged(strategy, row.devices)
        if strategy.schedules:
            sent = division.stages(arranged.ranks * chunks_of(arranged.schedule))[0].output_bytes
        else:
            found = division.tensor(arranged.ranks)
            sent = sum(found.sums) if found is not None else 0.0
        return sent * row.batch / arranged.replicas


NO_GAIN = 0.995
"""Of the time of a whole model: printed as 100 %."""
MOST_STAGES = 8
"""That are named."""


def _why_no_stages(name: str, division: ModelDivision, arranged: Arrangement, machines: int) -> str:
    needed = arranged.ranks * chunks_of(arranged.schedule)
    if division.why_no_blocks:
        return division.why_no_blocks
    if division.is_equal and division.boundary_bytes is None and machines > 1:
        return (
            "the run does not show what is sent between machines, since it does not time its parts; measure the task "
            f"instead: evenstep predict TASK --strategies {name}"
        )
    if division.blocks and len(division.blocks) < needed:
        fewer = f"--mesh {STRATEGIES[name].model_axis}={len(division.blocks) // chunks_of(arranged.schedule)}"
        return f"it needs {needed:,} blocks, and the model has {len(division.blocks)}; use fewer stages: {fewer}"
    return ""


def _gpu_of(gpus: Sequence[object]) -> str | None:
    """The name of the first GPU of a machine, as links and data sheets have it."""
    return next((name for name in NVLINK if name in str(gpus[0]).lower()), None) if gpus else None


def gpu_to_scale(gpu: str, kind: str, gpus: Sequence[object]) -> str:
    """The GPU of a machine whose steps can be scaled to those of another, or of the same; refused if they cannot."""
    if kind != "cuda":
        raise BadInput("--gpu needs runs on a GPU: a step on the CPU says nothing about one")
    own = _gpu_of(gpus)
    if own is None or (own != gpu and not {own, gpu} <= {*GPUS}):
        raise BadInput(f"--gpu {gpu}: from {own or 'this GPU'} to it is not known; there are {', '.join(GPUS)}")
    return own


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
        parts={**parts, "communication": one.communication, "bubble": one.bubble, "optimizer": one.optimizer},
        is_measured=True,
    )
