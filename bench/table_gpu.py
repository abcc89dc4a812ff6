"""What bench/gpu.py found on one GPU, as lines of a page: a table for each race, the goals, one line of summary.

A goal is judged here, by the interval, as everywhere: met when all of it reaches the goal, "not sure" when the median
alone does; and what is smaller than the control is said to be so. The `is_met` in the file goes by the median.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
from harness import Entry, Race, Row

PATTERN = "*-gpu-h200.json"
TITLE = "One H200"
PARTS = {
    "G1": "steps as users run them",
    "G1 compiled": "the same, with `--compile`",
    "G2": "input, samples delivered on the GPU; `default` and `resident` are ours",
    "G3": "tokens a second",
    "G4": "what a wrapper costs at size 1",
    "G4 dp": "dp over one GPU listed twice",
}
OURS, COMPILED = "ours", "ours, compiled"
INPUT, RESIDENT, LOADER = "default: thread, pinned, own stream", "resident", "DataLoader"
LIMIT, AGAIN = "limit: ", ", again"
SHORT = {
    "G1": "the best eager peer",
    "G1 compiled": "the best compiled peer",
    "G3": "the best tuned peer",
    "G4 dp": "the best of the two",
}
"""The goals that the summary tells, by how their text ends."""


@dataclass(frozen=True)
class Found:
    """The newest file of a GPU."""

    file: str
    content: dict[str, Any]

    def works(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """Every race that ours was in, as part, work and what was found, in the order of `PARTS`."""
        return ((part, work, one) for part, work, one in self._every() if base_of(raced_in(one)) is not None)

    def _every(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        for part in PARTS:
            for work, one in self.content["results"].get(part, {}).items():
                if isinstance(one, dict) and "goals" in one:
                    yield part, work, one

    @property
    def errors(self) -> list[str]:
        results = self.content["results"]
        early = [f"{part} ended early: {results[part]['error']}" for part in PARTS if "error" in results.get(part, {})]
        return early + [
            f"{part}, {work}: ours did not race: {one.get('absent', {}).get(OURS, 'the file does not say why')}"
            for part, work, one in self._every()
            if base_of(raced_in(one)) is None
        ]


@dataclass(frozen=True)
class Goal:
    """What was wanted of a ratio, and what it came to."""

    text: str
    wanted: float
    is_least: bool
    ratio: float
    low: float
    high: float
    spread: float
    """Of the control: how far apart two runs of the same racer were in that race."""

    @property
    def got(self) -> str:
        return Row("", "peer", "", 0.0, self.ratio, self.low, self.high).ratio_text

    @property
    def wish(self) -> str:
        return f"at {'least' if self.is_least else 'most'} {self.wanted:g}"

    @property
    def judged(self) -> str:
        return f"{self.wanted:g}: {self.outcome}"

    @property
    def outcome(self) -> str:
        """`met by 12 %`, `not sure: 3 % beyond`, `missed by 6 %, within the control`: the median beside the goal."""
        margin = self.ratio / self.wanted - 1 if self.is_least else 1 - self.ratio / self.wanted
        share = f"{abs(margin) * 100:{'.0f' if abs(margin) > 0.1 else '.2g'}} %"
        is_sure = self.low >= self.wanted if self.is_least else self.high <= self.wanted
        word = f"missed by {share}" if margin < 0 else f"met by {share}" if is_sure else f"not sure: {share} beyond"
        return word + ", within the control" * (abs(margin) < self.spread)


def newest(folder: Path) -> Found | None:
    files = [Found(path.name, json.loads(path.read_text())) for path in sorted(folder.glob(PATTERN))]
    return max(files, key=lambda one: one.content["when"], default=None)


def goals_of(one: Mapping[str, Any]) -> list[Goal]:
    """Those that could be judged; input keeps its figures one level deeper."""
    spread = race_of(one).control_spread or 0.0
    judged = [goal for goal in one["goals"] if isinstance(goal, dict)]
    return [
        Goal(goal["text"], goal["wanted"], goal["is_least"], *(goal.get("got", goal)[key] for key in _FIGURES), spread)
        for goal in judged
    ]


_FIGURES = ("ratio", "low", "high")


def race_of(one: Mapping[str, Any], title: str = "") -> Race:
    """The same figures as a race of the harness: everybody against ours, a racer that ran twice against itself."""
    raced, is_rate = raced_in(one), "rates" in one
    unit = "samples/s" if is_rate else "ms a step"
    return harness.judge(title, unit, _entries(raced), raced, is_rate, one.get("absent"))


def raced_in(one: Mapping[str, Any]) -> dict[str, list[float]]:
    """The figures of those who raced; others may have been entered for another race of the same work."""
    figures = one["rates"] if "rates" in one else {name: row["figures_ms"] for name, row in one["rows"].items()}
    return {name: list(found) for name, found in figures.items() if found}


def base_of(raced: Mapping[str, Sequence[float]]) -> str | None:
    """Ours, that others are compared with."""
    return next((name for name in (COMPILED, OURS, INPUT) if name in raced), None)


def _entries(raced: Mapping[str, Sequence[float]]) -> dict[str, Entry]:
    base = base_of(raced)
    assert base is not None
    entries = {base: Entry("ours")}
    for name in raced:
        if name.startswith(LIMIT):
            entries[name] = Entry("limit")
        elif name.endswith(AGAIN):
            entries[name] = Entry("control", against=_original(name, raced))
        elif name == RESIDENT:
            rivals = [one for one in raced if one.startswith(LOADER)]
            entries[name] = Entry("ours", against=max(rivals, key=lambda one: statistics.median(raced[one])))
        elif name != base:
            entries[name] = Entry("peer")
    return entries


def _original(name: str, raced: Mapping[str, Sequence[float]]) -> str:
    """`ours` of `ours, again`; input says `default, again` of what is `default: ...`."""
    first = name.removesuffix(AGAIN)
    return first if first in raced else next(one for one in raced if one.startswith(f"{first}:"))


def table_of(race: Race, one: Mapping[str, Any], speeds: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Heads and rows; tokens a second where they were counted, loss and memory where something was trained."""
    base = next(row.name for row in race.rows if row.kind == "ours").partition(":")[0]
    heads = ["racer", race.unit, f"{base}{',' * (',' in base)} is x as fast (95 %)"]
    heads += ["tokens/s", "of the matrix rate"] if speeds else []
    heads += ["loss after", "peak MiB"] if "rows" in one else []
    rows = []
    for row, (name, _, value, ratio, _) in zip(race.rows, harness.cells_of(race), strict=True):
        cells = [name.replace(LIMIT * 2, LIMIT), value, ratio]
        if speeds:
            speed = speeds.get(row.name, {})
            rate, share = speed.get("tokens_per_second"), speed.get("share_of_matrix_rate")
            cells += [f"{rate:,.0f}", _percent(share)] if speed else ["", ""]
        if "rows" in one:
            known = one["rows"][row.name]
            cells += [f"{known['loss_after']:.3g}", f"{known['peak_bytes'] / 2**20:,.0f}"]
        rows.append(cells)
    return heads, rows


def notes_of(race: Race, one: Mapping[str, Any]) -> list[str]:
    """The control, how much losses may differ, what starting costs, how near the limit is, who was absent."""
    notes = harness.notes_of(race)
    if "check" in one:
        check = one["check"]
        notes.append(
            f"Loss on a fixed batch after {check['steps']} steps, {check['start_loss']:.3g} at first; a racer may "
            f"differ by {check['tolerance']:.2g}, a limit by anything. Memory is what a racer adds to those before it."
        )
    for row in race.rows:
        if row.kind == "limit" and row.ratio is not None:
            share = f"{_percent(row.ratio)} ({_percent(row.low)} to {_percent(row.high)})"
            notes.append(f"Share of the limit, {row.name.removeprefix(LIMIT)}: {share}.")
    goals = [f"Goal: {goal.text}: {goal.wish}; {goal.got}: {goal.outcome}." for goal in goals_of(one)]
    return notes + goals + [goal for goal in one["goals"] if isinstance(goal, str)]


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}".replace("%", " %")


def summary_rows(found: Found | None) -> list[list[str]]:
    """The goals against peers, a row each; one row if nothing was measured."""
    if found is None:
        return [[TITLE, "not measured yet", "", "", ""]]
    return [
        [part, work.partition(",")[0], goal.text.partition(" / ")[0], harness.number(goal.ratio), goal.judged]
        for part, work, one in found.works()
        for goal in goals_of(one)
        if goal.text.endswith(SHORT.get(part, "\n"))
    ]


def source_of(found: Found) -> str:
    """Machine, driver, versions, command."""
    content = found.content
    machine = content["machine"]
    driver = content["results"].get("card", {}).get("driver", "not recorded")
    peers = ", ".join(f"{name} {version}" for name, version in content["peers"].items())
    return (
        f"`{content['command']}`, {content['when']}: {', '.join(machine['cards'])}, driver {driver}, CUDA "
        f"{machine['cuda']}, {machine['cores']} CPU cores, {machine['system']}, Python {machine['python']}, torch "
        f"{machine['torch']}, {peers} ([{found.file}](../bench/results/{found.file}))."
    )
