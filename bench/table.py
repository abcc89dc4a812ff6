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
WIDEST = 120
"""Characters of a table's row."""
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


def summary(found: dict[str, Found], gpu: table_gpu.Found | None) -> list[str]:
    """One line for each race: its hardest rival; intervals and limits stand in the race's own table."""
    rows = []
    for key in PARTS:
        if key not in found:
            rows.append([key, "not measured yet", "", "", ""])
            continue
        for race in found[key].result.races:
            rival = hardest(race)
            if rival is not None and rival.ratio is not None:
                against = rival.against if rival.kind == "ours" else rival.name
                rows.append([key, race.title, against, harness.number(rival.ratio), rival.verdict])
    heads = ["", "work", "hardest competitor", "ours is x as fast", "goal: outcome"]
    return markdown(heads, [*rows, *table_gpu.summary_rows(gpu)])


@dataclass(frozen=True)
class Shown:
    """A row of the README: one race of one benchmark, ours beside one competitor."""

    what: str
    id: str
    race: str
    """How the race's title begins; on a GPU, its part and its work."""
    rival: str
    against: str
    """The rival in the README's words."""
    ours: str = ""
    """A racer of ours other than the first; its own ratio is shown."""


README_ROWS = (
    Shown("DDP step, 784-256-10, 2 CPU ranks", "C4", "SimpleNet", "DDP, best", "tuned DDP over gloo"),
    Shown(
        "input, 28 x 28, batch 128", "C2", "Fashion-MNIST, tuple", "DataLoader, per sample", "`DataLoader` by sample"
    ),
    Shown("command to first step, 4 ranks", "C6", "command to the end of the first step, 4", "", "torchrun", "train"),
    Shown("`kill -9` of a rank to its next step", "C6", "SIGKILL", "", "torchrun", "train"),
    Shown("GPT 6 x 384, bf16, one H200", "G1", "GPT 6", "raw eager, fused", "eager loop, fused Adam"),
    Shown("GPT-2 124M, bf16, one H200", "G3", "GPT-2 124M", "accelerate, compiled", "accelerate, both compiled"),
)


def speed(found: dict[str, Found], gpu: table_gpu.Found | None, shown_rows: Sequence[Shown] = README_ROWS) -> list[str]:
    """The README's rows; those without a result are left out."""
    rows, files = [], {}
    for shown in shown_rows:
        source = _race_of(shown, found, gpu)
        if source is not None:
            race, files[shown.id] = source
            rows.append([shown.what, *_cells(shown, race), f"[{shown.id}]"])
    heads = ["what", "evenstep", "compared with", "times as fast (95 %)", "source"]
    return [*markdown(heads, rows), "", *(f"[{key}]: bench/results/{file}" for key, file in files.items())]


def _race_of(shown: Shown, found: dict[str, Found], gpu: table_gpu.Found | None) -> tuple[Race, str] | None:
    if shown.id in found:
        race = next((one for one in found[shown.id].result.races if one.title.startswith(shown.race)), None)
        return (race, found[shown.id].file) if race else None
    works = gpu.works() if gpu else ()
    raced = (one for part, work, one in works if part == shown.id and work.startswith(shown.race))
    return next(((table_gpu.race_of(one), gpu.file) for one in raced if gpu), None)


def _cells(shown: Shown, race: Race) -> list[str]:
    ours = next(row for row in race.rows if row.kind == "ours" and row.name.endswith(shown.ours))
    ratio = ours if shown.ours else next(row for row in race.rows if row.name == shown.rival)
    return [f"{harness.number(ours.value)} {race.unit.removesuffix(' a step')}", shown.against, ratio.ratio_text]


def page(found: dict[str, Found], gpu: table_gpu.Found | None) -> list[str]:
    """Everything that was found, benchmark by benchmark."""
    lines = ["### All goals", "", *summary(found, gpu), ""]
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
    """The goals on one GPU, and every race."""
    lines = [f"### {table_gpu.TITLE}", ""]
    if gpu is None:
        return [*lines, f"Not measured yet: no `{table_gpu.PATTERN}` of `bench/gpu.py` is in `bench/results`.", ""]
    lines += _listed(gpu.errors)
    speeds = gpu.content["results"].get("G3", {}).get("speeds", {}).get("racers", {})
    for part, work, one in gpu.works():
        race = table_gpu.race_of(one, f"{part}: {work}")
        table = table_gpu.table_of(race, one, speeds if part == "G3" else {})
        lines += [f"**{race.title}** ({table_gpu.PARTS[part]})", "", *markdown(*table), ""]
        lines += _listed(table_gpu.notes_of(race, one))
    return [*lines, table_gpu.source_of(gpu), ""]


def _plain(table: Plain) -> list[str]:
    lines = [line for part in narrow(table) for line in [*markdown(part.heads, part.rows), ""]]
    return [*lines, *_listed(table.notes)][: None if table.notes else -1]


def narrow(table: Plain, keys: int = 2) -> list[Plain]:
    """A table with rows longer than a line as several, each with the first columns and some of the rest."""
    if max(map(len, markdown(table.heads, table.rows))) <= WIDEST:
        return [table]
    columns = [[head, *cells] for head, *cells in zip(table.heads, *table.rows, strict=True)]
    groups: list[list[list[str]]] = [[]]
    for column in columns[keys:]:
        lines = markdown(*_turned([*columns[:keys], *groups[-1], column]))
        if max(map(len, lines)) > WIDEST and groups[-1]:
            groups.append([])
        groups[-1].append(column)
    return [Plain("", *_turned([*columns[:keys], *group])) for group in groups]


def _turned(columns: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    heads, *rows = (list(line) for line in zip(*columns, strict=True))
    return heads, rows


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
    stale = []
    for path, name, lines in ((PAGE, "results", page(found, gpu)), (README, "speed", speed(found, gpu))):
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
