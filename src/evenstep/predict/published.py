"""How wrong the model is: published scaling tables are predicted from one device or one machine, and compared.

The three constants of the model are chosen once for all tables. Errors are those of held-out families: each family is
predicted with constants and an interval that were chosen without it. No table and no row has constants of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from pathlib import Path
from statistics import fmean, median, quantiles

from evenstep.predict.links import SHARE_OF_NOMINAL, Cluster, gbit, network_of, nvlink
from evenstep.predict.step_model import JITTER, Workload, slowest_of, step_parts
from evenstep.schema import Positive, Schema
from evenstep.strategy_facts import DEFAULT, STRATEGIES, StrategyFacts

FILE = Path(__file__).with_name("published.json")
RISES = 0.15
"""More devices are never so much faster each: the row with fewer of them is suspect."""
INPUT_BOUND = 0.9
"""A machine below this part of its prediction is taken to be limited by what it reads."""
FLOOR = 0.02
"""An interval is as wide as the predicted loss and this, times INTERVAL."""
INTERVAL = (-1.87, 0.73)
"""In these units, 90 % of the logarithms of measured over predicted: `evenstep predict --check` prints them."""
DISCRIMINATES = 0.05
"""Families in which linear scaling is wrong by more than this, in the median."""


@dataclass(frozen=True, kw_only=True)
class Constants:
    """All that is chosen by looking at the tables."""

    jitter: float = JITTER
    relative_jitter: float = 0.08
    """Where the length of a step is not known: a part of it."""
    share: float = SHARE_OF_NOMINAL
    """Of the nominal bandwidth of a link."""


CHOICES = [
    Constants(jitter=jitter, relative_jitter=relative, share=share)
    for jitter, relative, share in product((0.015, 0.02, 0.025, 0.03), (0.04, 0.06, 0.08, 0.1), (1.0, 0.85, 0.7))
]


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

    @property
    def samples(self) -> int:
        """Of one device in a step; 1 where the length of a step is not known."""
        return (self.batch or 1) * self.accumulate

    @property
    def suspects(self) -> dict[int, str]:
        """Rows that contradict a later one: with more devices, each was much faster."""
        found = {}
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
    low: float = 0.0
    high: float = math.inf

    @property
    def error(self) -> float:
        return abs(self.predicted / self.measured - 1)

    @property
    def linear_error(self) -> float:
        return abs(self.linear / self.measured - 1)

    @property
    def surprise(self) -> float:
        """How far the measured rate is from the predicted one, in the units of INTERVAL."""
        return math.log(self.measured / self.predicted) / (FLOOR + self.loss)

    def within(self, interval: tuple[float, float]) -> Checked:
        low, high = interval_of(self.predicted, self.loss, interval)
        return replace(self, low=low, high=high)


def interval_of(rate: float, loss: float, interval: tuple[float, float] = INTERVAL) -> tuple[float, float]:
    """The rates between which 9 of 10 measured ones lay, for a prediction that loses `loss`."""
    low, high = (rate * math.exp(edge * (FLOOR + loss)) for edge in interval)
    return low, high


def replay(table: Published, constants: Constants) -> Iterator[Checked]:
    """Predict every row of a table from its inputs."""
    points = {devices: rate for devices, rate in table.points if devices not in table.suspects}
    inputs = [devices for devices in table.inputs if devices in points] or list(points)[:1]
    if len(points) < 2:
        return
    ceiling = _ceiling(table, constants, points, inputs)
    for devices, rate in points.items():
        if devices in inputs:
            continue
        start = max(one for one in inputs if one <= devices)
        predicted = _from_one(table, constants, (start, points[start]), devices)
        limit = ceiling * -(-devices // table.per_machine) if ceiling else math.inf
        used = points[start] * devices / start
        yield Checked(
            family=table.family,
            name=f"{table.model}, {table.gpu}, {table.precision}",
            devices=devices,
            measured=rate,
            predicted=min(predicted, limit),
            linear=points[inputs[0]] * devices / inputs[0],
            loss=max(0.0, math.log(used / predicted)),
            source=table.source,
            is_input_bound=ceiling is not None,
        )


def _ceiling(table: Published, constants: Constants, points: dict[int, float], inputs: Sequence[int]) -> float | None:
    """What a machine reads, if one machine is much slower than one device lets expect."""
    if len(inputs) < 2:
        return None
    one, machine = inputs[:2]
    expected = _from_one(table, constants, (one, points[one]), machine)
    return points[machine] if points[machine] < INPUT_BOUND * expected else None


def _from_one(table: Published, constants: Constants, known: tuple[int, float], devices: int) -> float:
    """The rate on `devices`, from that on fewer."""
    start, rate = known
    target = start * table.samples / rate
    computing = target
    for _ in range(8):
        # Nearly proportional: a few corrections are exact to a millionth.
        computing *= target / _step_seconds(table, constants, computing, start)
    return devices * table.samples / _step_seconds(table, constants, computing, devices)


def _step_seconds(table: Published, constants: Constants, computing: float, devices: int) -> float:
    if table.batch is None:
        # No length of a step: stragglers are a part of it, and communication is not known.
        return computing * (1 + constants.relative_jitter / math.sqrt(table.accumulate) * slowest_of(devices))
    bytes_each = 2 if table.shards else 4
    work = Workload(
        fixed_seconds=computing,
        sample_seconds=0.0,
        gradient_bytes=float(bytes_each * (table.parameters or 0)),
        accumulate=table.accumulate,
        jitter=constants.jitter,
    )
    return step_parts(work, _strategy(table.shards), _cluster(table, constants), devices, devices).seconds


@cache
def _strategy(shards: bool) -> StrategyFacts:
    return next(row for row in STRATEGIES.values() if row.shards) if shards else STRATEGIES[DEFAULT]


def _cluster(table: Published, constants: Constants) -> Cluster:
    of_gpus = network_of(table.gpu, table.per_machine)
    between = gbit(table.gbit_per_machine, of_gpus.latency) if table.gbit_per_machine else of_gpus
    inside, times = nvlink(table.gpu), constants.share / SHARE_OF_NOMINAL
    return Cluster(
        per_machine=table.per_machine,
        inside=replace(inside, bandwidth=inside.bandwidth * times),
        between=replace(between, bandwidth=between.bandwidth * times),
    )


@dataclass(frozen=True, kw_only=True)
class Family:
    """The errors of one family of tables, predicted with constants that were chosen without it."""

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
    families: list[Family]
    total: Family
    rows: list[Checked]
    suspects: list[str]
    constants: Constants
    interval: tuple[float, float]
    unmet: list[str] = field(default_factory=list)
    """Targets that are not met, in words."""


def check_published(own: Sequence[Checked] = ()) -> CheckResult:
    """Predict all tables, each family held out; and rows of own Records, which no constant was chosen by."""
    tables = published_tables()
    replays = {choice: [row for table in tables for row in replay(table, choice)] for choice in CHOICES}
    rows: list[Checked] = []
    for name in dict.fromkeys(table.family for table in tables):
        best = min(CHOICES, key=lambda choice: _mean_error(row for row in replays[choice] if row.family != name))
        interval = _interval(row for row in replays[best] if row.family != name)
        rows += [row.within(interval) for row in replays[best] if row.family == name]
    best = min(CHOICES, key=lambda choice: _mean_error(replays[choice]))
    interval = _interval(replays[best])
    rows += [row.within(interval) for row in own]
    published = [row for row in rows if row.source]
    names = dict.fromkeys(row.family for row in rows)
    families = [_family(name, [row for row in rows if row.family == name]) for name in names]
    total = _family("all published", published)
    return CheckResult(
        families=families,
        total=total,
        rows=rows,
        suspects=[
            f"{table.family}: {table.model}, {table.gpu}, {table.precision}, {devices} devices: {why}"
            for table in tables
            for devices, why in table.suspects.items()
        ],
        constants=best,
        interval=interval,
        unmet=list(_unmet(total, families)),
    )


def _mean_error(rows: Iterable[Checked]) -> float:
    """Of all families alike, however many rows each has."""
    errors: dict[str, list[float]] = {}
    for row in rows:
        errors.setdefault(row.family, []).append(abs(math.log(row.predicted / row.measured)))
    return fmean(fmean(of_family) for of_family in errors.values())


def _interval(rows: Iterable[Checked]) -> tuple[float, float]:
    surprises = [row.surprise for row in rows]
    edges = quantiles(surprises, n=20, method="inclusive")
    return edges[0], edges[-1]


def _family(name: str, rows: Sequence[Checked]) -> Family:
    errors = sorted(row.error for row in rows)
    linear = [row.linear_error for row in rows]
    return Family(
        name=name,
        points=len(rows),
        median=median(errors),
        p90=errors[math.ceil(0.9 * len(errors)) - 1],
        worst=errors[-1],
        linear=median(linear),
        skill=1 - fmean(errors) / (fmean(linear) or 1e-12),
        covered=fmean(row.low <= row.measured <= row.high for row in rows),
    )


def _unmet(total: Family, families: Sequence[Family]) -> Iterator[str]:
    """The targets: a median of 6 %, skill in every family, and 0.5 of it where linear scaling is wrong."""
    if total.median > 0.06:
        yield f"median error {total.median:.1%}, target 6 %"
    for one in families:
        if one.skill <= 0:
            yield f"{one.name}: skill {one.skill:.2f}, target above 0"
        elif one.discriminates and one.skill < 0.5:
            yield f"{one.name}: skill {one.skill:.2f}, target 0.5 where linear scaling is wrong by {one.linear:.0%}"
    if total.covered < 0.85:
        yield f"{total.covered:.0%} of the rows are inside their 90 % interval, target 85 %"
