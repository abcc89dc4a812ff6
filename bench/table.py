"""Results as pages: docs/performance.md and the README's table, between their markers, from the files alone.

python bench/table.py [--results bench/results] [--check]      --check: only say whether the pages are up to date

Of each benchmark the newest result is taken. One that has none is said to have none.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import table_gpu
from harness import Plain, Race, Result, Row
from suite import PARTS

ROOT = Path(__file__).parents[1]
PAGE, README = ROOT / "docs" / "performance.md", ROOT / "README.md"
BEGIN, END = "<!-- begin: {} (made by bench/table.py; do not edit) -->", "<!-- end: {} -->"


@dataclass(frozen=True)
class Found:
    """The newest result of a benchmark, and where it came from."""

    result: Result
    command: str
    when: str
    machine: dict[str, Any]
    peers: dict[str, str]
    file: str


def newest(folder: Path) -> dict[str, Found]:
    """By the benchmark's name; files of another shape are not ours to read."""
    found: dict[str, Found] = {}
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text())
        results = content.get("results")
        if not (isinstance(results, dict) and {"id", "races", "tables", "headline"} <= results.keys()):
            continue
        one = Found(
            harness.read_result(results),
            content["command"],
            content["when"],
            content["machine"],
            content["peers"],
            path.name,
        )
        if one.result.id not in found or found[one.result.id].when <= one.when:
            found[one.result.id] = one
    return found


def hardest(race: Race) -> Row | None:
    """The racer against whom the goal is furthest away."""
    aimed = [row for row in race.rows if row.goal is not None and row.ratio is not None]
    return min(aimed, key=lambda row: (row.low or 0) / (row.goal or 1), default=None)


def summary(found: dict[str, Found], gpu: table_gpu.Found | None, link: str) -> list[str]:
    """One line for each race: our figure, the hardest rival, the limit; and one for the card."""
    rows = []
    for key, part in PARTS.items():
        if key not in found:
            rows.append([key, "not measured yet", "", "", "", f"`python bench/{part.file}`"])
            continue
        one = found[key]
        command = f"`{one.command}` ([result]({link}/{one.file}))"
        rows += [[key, race.title, *_standing(race), command] for race in one.result.races]
        if not one.result.races:
            figures = "; ".join(f"{name} {value:.2f}" for name, value in one.result.headline.items())
            rows.append([key, one.result.title, figures, f"goal: {one.result.goal}", "", command])
    rows.append(table_gpu.summary_row(gpu, link))
    heads = ["", "work", "ours", "hardest goal: ours is x as fast (95 %) as", "limit", "command"]
    return markdown(heads, rows)


def _standing(race: Race) -> list[str]:
    ours = next((row for row in race.rows if row.kind == "ours"), None)
    rival = hardest(race)
    limits = [row for row in race.rows if row.kind == "limit"]
    limit = limits[-1] if limits else None
    return [
        f"{harness.number(ours.value)} {race.unit}" if ours else "",
        f"{rival.name}: {rival.ratio_text}{_of(rival)}; {rival.verdict}" if rival else "",
        f"{limit.name}: {harness.number(limit.value)} {race.unit}" if limit else "",
    ]


def _of(row: Row) -> str:
    """Another way of ours is no rival: whom it was raced against."""
    return f" x {row.against}" if row.kind == "ours" else ""


def page(found: dict[str, Found], gpu: table_gpu.Found | None) -> list[str]:
    """Everything that was found, benchmark by benchmark."""
    lines = ["### All goals", "", *summary(found, gpu, "../bench/results"), ""]
    for key, part in PARTS.items():
        if key not in found:
            lines += [
                f"### {key}",
                "",
                f"Not measured yet: no result of `bench/{part.file}` is in `bench/results`.",
                "",
            ]
            continue
        one = found[key]
        lines += [f"### {key}: {one.result.title}", "", f"Goal: {one.result.goal}.", ""]
        for race in one.result.races:
            lines += [f"**{race.title}**", "", *markdown(harness.heads_of(race), harness.cells_of(race)), ""]
            lines += _listed(harness.notes_of(race))
        for table in one.result.tables:
            lines += [f"**{table.title}**", "", *_plain(table), ""]
        lines += [_source(one), ""]
    return [*lines, *gpu_page(gpu)]


def gpu_page(gpu: table_gpu.Found | None) -> list[str]:
    """The goals on one card, and every race."""
    lines = [f"### {table_gpu.TITLE}", ""]
    if gpu is None:
        return [*lines, f"Not measured yet: no `{table_gpu.PATTERN}` of `bench/gpu.py` is in `bench/results`.", ""]
    lines += [*markdown(table_gpu.GOAL_HEADS, table_gpu.goal_rows(gpu)), "", *_listed(gpu.errors)]
    speeds = gpu.content["results"].get("G3", {}).get("speeds", {}).get("racers", {})
    for part, work, one in gpu.works():
        race = table_gpu.race_of(one, f"{part}: {work}")
        table = table_gpu.table_of(race, one, speeds if part == "G3" else {})
        lines += [f"**{race.title}** ({table_gpu.PARTS[part]})", "", *markdown(*table), ""]
        lines += _listed(table_gpu.notes_of(race, one))
    return [*lines, table_gpu.source_of(gpu), ""]


def _plain(table: Plain) -> list[str]:
    return [*markdown(table.heads, table.rows), "", *_listed(table.notes)][: None if table.notes else -1]


def _listed(notes: Sequence[str]) -> list[str]:
    return [*(f"- {note}" for note in notes), ""] if notes else []


def _source(one: Found) -> str:
    machine = one.machine
    gpus = ", ".join(machine["cards"]) or f"{machine['cores']} CPU cores"
    peers = ", ".join(f"{name} {version}" for name, version in one.peers.items())
    without = "" if machine.get("has_c_part", True) else ", evenstep without its C part"
    return (
        f"`{one.command}`, {one.when}: {gpus}, {machine['system']}, Python {machine['python']}, torch "
        f"{machine['torch']}, {peers}{without} ([{one.file}](../bench/results/{one.file}))."
    )


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table; what would end a cell is escaped."""
    lines = [heads, ["---"] * len(heads), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]


def put(text: str, name: str, lines: Sequence[str]) -> str:
    """The text with what stands between the markers of that name replaced."""
    begin, end = BEGIN.format(name), END.format(name)
    if text.count(begin) != 1 or text.count(end) != 1:
        raise SystemExit(f"the page has no place for {name}; it needs the lines\n{begin}\n{end}")
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n\n" + "\n".join(lines).strip() + f"\n\n{end}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results")
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    found, gpu = newest(given.results), table_gpu.newest(given.results)
    short = summary(found, gpu, "bench/results")
    stale = []
    for path, name, lines in ((PAGE, "results", page(found, gpu)), (README, "speed", short)):
        before = path.read_text()
        after = put(before, name, lines)
        if after != before:
            stale.append(path.name)
            if not given.check:
                path.write_text(after)
    if given.check and stale:
        sys.exit(f"not up to date: {', '.join(stale)}; python bench/table.py")


if __name__ == "__main__":
    main()
