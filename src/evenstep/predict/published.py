"""How wrong the model is: published scaling tables are predicted from one device or one machine, and compared.

The constants of the model are chosen once for all tables. Errors are those of held-out publishers: the tables of each
are predicted with constants and an interval that were chosen without any of them. No table and no row has constants of
its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import combinations, product
from pathlib import Path
from statistics import fmean, median, quantiles

from evenstep.predict.communication_cost import (
    CORES,
    GPUS_OF_A_MACHINE,
    SHARE_OF_NOMINAL,
    Cluster,
    gbit,
    handling_seconds,
    network_of,
    nvlink,
)
from evenstep.predict.step_model import DEVIATION, JITTER, Workload, step_parts, stragglers_seconds
from evenstep.strategy_facts import DEFAULT, STRATEGIES, StrategyFacts
from evenstep.typed_values import Positive, Schema

FILE = Path(__file__).with_name("published.json")
RISES = 0.1
"""More devices are never so much faster each: the row with fewer of them is suspect."""
USUAL_STEP = 0.4
"""Seconds, about the median of all tables: for those that do not say how long a step is."""
INPUT_BOUND = 0.9
"""A machine below this part of its prediction is taken to be limited by what it reads."""
FLOOR = 0.02
"""An interval is as wide as the part of a step that is lost and this, times INTERVAL."""
INTERVAL = (-1.18, 0.66)
"""In these units, 90 % of the logarithms of measured over predicted: `evenstep predict --check` prints them."""
ALIKE = (0.1, 0.02)
"""Lengths of steps, and predicted parts of linear scaling, that are nearer than this are the same to the model."""
COVERED, LEVELS = 0.9, (0.9, 0.91, 0.92, 0.93, 0.94, 0.95, 0.96, 0.97, 0.98, 0.99)
"""Edges at the lowest level are taken that hold this part of the rows of a family that they were not chosen by."""
DISCRIMINATES = 0.05
"""Publishers in whose tables linear scaling is wrong by more than this, in the median."""
LEAST_SKILL = 0.5
"""There."""
SEVERAL_FAMILIES = ("nvidia", "llm-foundry")
"""Publishers of whose tables there are several families."""


@dataclass(frozen=True, kw_only=True)
class Constants:
    """All that is chosen by looking at the tables."""

    jitter: float = JITTER
    deviation: float = DEVIATION
    share: float = SHARE_OF_NOMINAL
    """Of the nominal bandwidth of a network."""


CHOICES = [
    Constants(jitter=jitter, deviation=deviation, share=share)
    for jitter, deviation, share in product((0.06, 0.07, 0.08, 0.09, 0.1), (0.0, 0.02, 0.03, 0.04), (0.94, 0.8))
]
ANY_CHOICE = [
    Constants(jitter=jitter, deviation=deviation)
    for jitter, deviation in product((0.0, 0.02, 0.04, 0.06, 0.08, 0.1, 0.12, 0.15, 0.2), (0.0, 0.02, 0.03, 0.04))
]
"""Constants that a family might have if it chose its own: what this model could reach at best."""


@dataclass(frozen=True, kw_only=True)
class Published:
    """One configuration of a published table, at several numbers of devices."""

    family: str
    model: str
    gpu: str
    precision: str
    parameters: Positive | None
    batch: Positive | None
    accumulate: Positive
    per_machine: Positive
    gbit_per_machine: float | None
    shards: bool
    inputs: list[Positive]
    source: str
    points: list[tuple[Positive, float]]
    doubts: list[tuple[Positive, str]] = field(default_factory=list)
    """Rows in which the source contradicts itself, and how."""

    @property
    def samples(self) -> int:
        """Of one device in a step; 1 where the length of a step is not known."""
        return (self.batch or 1) * self.accumulate

    @property
    def label(self) -> str:
        return f"{self.model}, {self.gpu}, {self.precision}"

    def is_refused(self, devices: int) -> bool:
        """Whether `predict` refuses to answer: several machines, and nothing is known of them or of a step."""
        return devices > self.per_machine and self.gbit_per_machine is None and self.batch is None

    @property
    def suspects(self) -> dict[int, str]:
        """Rows that contradict a later one, where with more devices each was much faster; or their own source."""
        found = dict(self.doubts)
        for at, (devices, rate) in enumerate(self.points):
            for more, larger in self.points[at + 1 :]:
                if larger / more > rate / devices * (1 + RISES):
                    found[devices] = f"{rate / devices:,.0f} a device, but {larger / more:,.0f} on {more}"
        return found


@dataclass(frozen=True)
class File:
    about: str
    parameters: str
    tables: list[Published]


@cache
def published_tables() -> list[Published]:
    schema: Schema[File] = Schema(File, "file of published tables")
    return schema.read(FILE).tables


@dataclass(frozen=True, kw_only=True)
class Checked:
    """One row that was predicted, and what was measured."""

    family: str
    name: str
    devices: int
    measured: float
    predicted: float
    linear: float
    """If n devices were n times as fast as the first input."""
    loss: float
    """Predicted, against linear scaling from the input that was used; a logarithm."""
    source: str = ""
    is_input_bound: bool = False
    hardware: str = ""
    """GPU and precision."""
    step_seconds: float | None = None
    """On the first input; None where its source does not say."""
    low: float = 0.0
    high: float = math.inf

    @property
    def publisher(self) -> str:
        return next((name for name in SEVERAL_FAMILIES if self.family.startswith(f"{name}-")), self.family)

    @property
    def error(self) -> float:
        return abs(self.predicted / self.measured - 1)

    @property
    def linear_error(self) -> float:
        return abs(self.linear / self.measured - 1)

    @property
    def surprise(self) -> float:
        """How far the measured rate is from the predicted one, in the units of INTERVAL."""
        return math.log(self.measured / self.predicted) / _unit(self.loss)

    @property
    def kept(self) -> float:
        """Of linear scaling."""
        return self.measured / self.linear

    def within(self, interval: tuple[float, float]) -> Checked:
        low, high = interval_of(self.predicted, self.loss, interval)
        return replace(self, low=low, high=high)


def interval_of(rate: float, loss: float, interval: tuple[float, float] = INTERVAL) -> tuple[float, float]:
    """The rates between which 9 of 10 measured ones lay, for a prediction that loses `loss`."""
    low, high = (rate * math.exp(edge * _unit(loss)) for edge in interval)
    return low, high


def _unit(loss: float) -> float:
    """Of an interval: the part of a step that is lost, and a little for what is computed."""
    return FLOOR + 1 - math.exp(-loss)


def replay(table: Published, constants: Constants) -> Iterator[Checked]:
    """Predict every row of a table from its inputs."""
    points = {devices: rate for devices, rate in table.points if devices not in table.suspects}
    inputs = [devices for devices in table.inputs if devices in points] or list(points)[:1]
    if len(points) < 2:
        return
    ceiling = _ceiling(table, constants, points, inputs)
    computing = {start: _computing_seconds(table, constants, start, points[start]) for start in inputs}
    for devices, rate in points.items():
        if devices in inputs or table.is_refused(devices):
            continue
        start = max(one for one in inputs if one <= devices)
        predicted = devices * table.samples / _step_seconds(table, constants, computing[start], devices)
        limit = ceiling * -(-devices // table.per_machine) if ceiling else math.inf
        used = points[start] * devices / start
        yield Checked(
            family=table.family,
            name=table.label,
            devices=devices,
            measured=rate,
            predicted=min(predicted, limit),
            linear=points[inputs[0]] * devices / inputs[0],
            loss=max(0.0, math.log(used / predicted)),
            source=table.source,
            is_input_bound=ceiling is not None,
            hardware=f"{table.gpu}, {table.precision}",
            step_seconds=table.samples * inputs[0] / points[inputs[0]] if table.batch else None,
        )


def _ceiling(table: Published, constants: Constants, points: dict[int, float], inputs: Sequence[int]) -> float | None:
    """What a machine reads, if one machine is much slower than one device lets expect."""
    if len(inputs) < 2:
        return None
    one, machine = inputs[:2]
    computing = _computing_seconds(table, constants, one, points[one])
    expected = machine * table.samples / _step_seconds(table, constants, computing, machine)
    return points[machine] if points[machine] < INPUT_BOUND * expected else None


def _computing_seconds(table: Published, constants: Constants, devices: int, rate: float) -> float:
    """Of forward and backward, so that a step on these devices has the published rate."""
    target = devices * table.samples / rate
    computing = target
    for _ in range(8):
        # Nearly proportional: a few corrections are exact to a millionth.
        times = target / _step_seconds(table, constants, computing, devices)
        computing *= times
        if abs(times - 1) < 1e-9:
            break
    return computing


def _step_seconds(table: Published, constants: Constants, computing: float, devices: int) -> float:
    gradient_bytes = float((2 if table.shards else 4) * (table.parameters or 0))
    work = Workload(
        fixed_seconds=computing,
        sample_seconds=0.0,
        gradient_bytes=gradient_bytes,
        accumulate=table.accumulate,
        jitter=constants.jitter,
        host_cores=CORES[table.gpu] * GPUS_OF_A_MACHINE / table.per_machine,
        deviation=constants.deviation,
        handling_seconds=handling_seconds(table.gpu, gradient_bytes),
    )
    if table.batch is None:
        # Stragglers as in a usual step; communication is not known.
        return computing * (1 + stragglers_seconds(work, USUAL_STEP, devices) / USUAL_STEP)
    return step_parts(work, _strategy(table.shards), _cluster(table, constants), devices, devices).seconds


@cache
def _strategy(shards: bool) -> StrategyFacts:
    return next(row for row in STRATEGIES.values() if row.shards) if shards else STRATEGIES[DEFAULT]


def _cluster(table: Published, constants: Constants) -> Cluster:
    of_gpus = network_of(table.gpu, table.per_machine)
    between = gbit(table.gbit_per_machine, of_gpus.latency) if table.gbit_per_machine else of_gpus
    times = constants.share / SHARE_OF_NOMINAL
    return Cluster(
        per_machine=table.per_machine,
        inside=nvlink(table.gpu, table.per_machine),
        between=replace(between, bandwidth=between.bandwidth * times),
    )


@dataclass(frozen=True, kw_only=True)
class TableErrors:
    """Of some tables, predicted with constants that were chosen without them."""

    name: str
    points: int
    median: float
    p90: float
    worst: float
    linear: float
    """The median error of linear scaling."""
    skill: float
    """1 - mean error / mean error of linear scaling: above 0 is better than that."""
    covered: float
    """The part of its rows inside their 90 % interval."""

    @property
    def discriminates(self) -> bool:
        return self.linear > DISCRIMINATES


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    publishers: list[TableErrors]
    families: list[TableErrors]
    """Of those that published several kinds of tables: the errors of each kind."""
    total: TableErrors
    rows: list[Checked]
    suspects: list[str]
    refused: list[str]
    """Rows that lack what `predict` asks for."""
    weak: list[str]
    """Kinds of tables that are predicted less well than all of their publisher, and why."""
    constants: Constants
    interval: tuple[float, float]
    unmet: list[str] = field(default_factory=list)
    """Targets that are not met, in words."""


def check_published(own: Sequence[Checked] = ()) -> CheckResult:
    """Predict all tables, each publisher held out; and rows of own Records, which no constant was chosen by."""
    tables = published_tables()
    replays = {choice: [row for table in tables for row in replay(table, choice)] for choice in CHOICES}
    best = min(CHOICES, key=lambda choice: _mean_error(replays[choice]))
    rows = [*_held_out(replays), *own]
    publishers = list(_errors_by(rows, lambda row: row.publisher))
    families = list(_errors_by((row for row in rows if row.family != row.publisher), lambda row: row.family))
    total = _errors("all published", [row for row in rows if row.source])
    return CheckResult(
        publishers=publishers,
        families=families,
        total=total,
        rows=rows,
        suspects=[
            f"{table.family}: {table.label}, {devices} devices: {why}"
            for table in tables
            for devices, why in table.suspects.items()
        ],
        refused=[
            f"{table.family}: {table.label}, {devices} devices: its source has neither a network nor a batch"
            for table in tables
            for devices, _ in table.points
            if table.is_refused(devices)
        ],
        weak=[_weakness(one, rows) for one in families if one.discriminates and one.skill < LEAST_SKILL],
        constants=best,
        interval=_interval(replays[best]),
        unmet=list(_unmet(total, publishers)),
    )


def _held_out(replays: dict[Constants, list[Checked]]) -> Iterator[Checked]:
    """Every published row, predicted with constants and an interval that no table of its publisher chose."""
    for name in dict.fromkeys(row.publisher for row in replays[CHOICES[0]]):
        others = {choice: [row for row in rows if row.publisher != name] for choice, rows in replays.items()}
        best = min(CHOICES, key=lambda choice: _mean_error(others[choice]))
        interval = _interval(others[best])
        yield from (row.within(interval) for row in replays[best] if row.publisher == name)


def _mean_error(rows: Iterable[Checked]) -> float:
    """Of all families alike, however many rows each has."""
    errors: dict[str, list[float]] = {}
    for row in rows:
        errors.setdefault(row.family, []).append(abs(math.log(row.predicted / row.measured)))
    return fmean(fmean(of_family) for of_family in errors.values())


def _interval(rows: Iterable[Checked]) -> tuple[float, float]:
    """Edges that hold 9 of 10 surprises of a family that they were not chosen by, as the next table will be."""
    surprises: dict[str, list[float]] = {}
    for row in rows:
        surprises.setdefault(row.family, []).append(row.surprise)
    for level in LEVELS:
        inside = 0
        for name, of_family in surprises.items():
            low, high = _edges([one for other, of in surprises.items() if other != name for one in of], level)
            inside += sum(low <= one <= high for one in of_family)
        if inside >= COVERED * sum(map(len, surprises.values())):
            break
    return _edges([one for of in surprises.values() for one in of], level)


def _edges(surprises: Sequence[float], level: float) -> tuple[float, float]:
    """Between which this part of them lies, with as many below as above."""
    cuts = quantiles(surprises, n=200, method="inclusive")
    outside = round(100 * (1 - level))
    return cuts[outside - 1], cuts[-outside]


def _errors_by(rows: Iterable[Checked], group: Callable[[Checked], str]) -> Iterator[TableErrors]:
    groups: dict[str, list[Checked]] = {}
    for row in rows:
        groups.setdefault(group(row), []).append(row)
    return (_errors(name, of_group) for name, of_group in groups.items())


def _errors(name: str, rows: Sequence[Checked]) -> TableErrors:
    errors = sorted(row.error for row in rows)
    linear = [row.linear_error for row in rows]
    return TableErrors(
        name=name,
        points=len(rows),
        median=median(errors),
        p90=errors[math.ceil(0.9 * len(errors)) - 1],
        worst=errors[-1],
        linear=median(linear),
        skill=1 - fmean(errors) / (fmean(linear) or 1e-12),
        covered=fmean(row.low <= row.measured <= row.high for row in rows),
    )


def _weakness(one: TableErrors, rows: Sequence[Checked]) -> str:
    own = f"constants chosen by its own rows, which none here are, would give {_best_skill(one.name):.2f}"
    differing = _differing([row for row in rows if row.family == one.name])
    return "; ".join([f"{one.name}: skill {one.skill:.2f}", own, *differing])


def _unmet(total: TableErrors, publishers: Sequence[TableErrors]) -> Iterator[str]:
    """The targets: a median of 6 %, skill on all tables, and 0.5 of it where linear scaling is wrong."""
    if total.median > 0.06:
        yield f"median error {total.median:.1%}, target 6 %"
    for one in publishers:
        if one.skill <= 0:
            yield f"{one.name}: skill {one.skill:.2f}, target above 0"
        elif one.discriminates and one.skill < LEAST_SKILL:
            yield f"{one.name}: skill {one.skill:.2f}, target {LEAST_SKILL} where linear is wrong by {one.linear:.0%}"
    if total.covered < 0.85:
        yield f"{total.covered:.0%} of the rows are inside their 90 % interval, target 85 %"


def _best_skill(family: str) -> float:
    """Of this model, if its constants were chosen by the rows of the family that it is then scored by."""
    tables = [table for table in published_tables() if table.family == family]
    replays = ([row for table in tables for row in replay(table, choice)] for choice in ANY_CHOICE)
    return max(_errors(family, rows).skill for rows in replays)


def _differing(rows: Sequence[Checked]) -> Iterator[str]:
    """What no model with these inputs can do: rows that are alike in all of them, and differ."""
    alike = [(one, other) for one, other in combinations(rows, 2) if _are_alike(one, other)]
    if alike:
        low, high = max(
            (sorted(pair, key=lambda row: row.kept) for pair in alike), key=lambda pair: pair[1].kept / pair[0].kept
        )
        yield (
            f"rows alike in every input differ: on {low.devices} x {low.hardware} with steps of "
            f"{1e3 * (high.step_seconds or 0):.0f} and {1e3 * (low.step_seconds or 0):.0f} ms, "
            f"{high.name.partition(',')[0]} keeps {high.kept:.0%} and {low.name.partition(',')[0]} {low.kept:.0%} "
            "of linear scaling"
        )


def _are_alike(one: Checked, other: Checked) -> bool:
    """By hardware, length of a step, and what the model says of both."""
    if not one.step_seconds or not other.step_seconds or (one.hardware, one.devices) != (other.hardware, other.devices):
        return False
    pairs = ((one.step_seconds, other.step_seconds), (one.predicted / one.linear, other.predicted / other.linear))
    return all(abs(math.log(a / b)) < near for (a, b), near in zip(pairs, ALIKE, strict=True))
