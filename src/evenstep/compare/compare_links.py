"""`compare --links`: what another `--link` does to the loss, and how long it takes to reach the same one.

Every method trains with the same seeds, each seed once with each method: the same weights, samples and order. The
target is what the first method reached with its worst seed. Methods take turns, so that a busy machine affects all.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from evenstep.errors import PlanError
from evenstep.launcher.launch import run_in_processes, variant
from evenstep.launcher.prepare import free_name, label_of, prepare
from evenstep.link_method import LINKS, parse_link
from evenstep.plan import RUNS
from evenstep.record import Record
from evenstep.report.comparison import LINKS_FILE, marking_stop
from evenstep.strategy_facts import DEFAULT

SMOOTHED = 0.05
"""Part of a run's steps over which its loss is averaged: the losses of single batches jump."""
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""Of 95 % intervals, for 2 to 10 seeds."""


@dataclass(frozen=True, kw_only=True)
class LinkRequest:
    """What to compare."""

    source: str
    links: str
    devices: str = "2"
    seeds: int = 3
    target: float | None = None
    """The loss to reach; None: what the first method reaches."""
    choices: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class LinkRow:
    """One method; a number for each seed."""

    link: str
    final_loss: list[float]
    steps_to_target: list[int | None]
    """None where it did not get there."""
    seconds_to_target: list[float | None]
    valid_loss: list[float | None] = field(default_factory=list)
    """Of the last evaluation, whose weights all ranks share: those of local steps have drifted apart. None: no data."""
    ratio: tuple[float, float, float] | None = None
    """The first method's seconds over this one's: mean of pairs, and its 95 % interval."""


@dataclass(frozen=True, kw_only=True)
class LinkComparison:
    """All methods; the first is what the others are compared with."""

    task: str
    devices: list[str]
    target: float
    rows: list[LinkRow]


def compare_links(request: LinkRequest, log: Callable[[str], None]) -> tuple[LinkComparison, Path]:
    """Train with every method and seed, and write the comparison beside the Records; returns it and its folder."""
    links = named_links(request.links)
    if not 2 <= request.seeds <= len(STUDENT) + 1:
        raise PlanError(f"--seeds is {request.seeds}; an interval needs 2 to {len(STUDENT) + 1} of them")
    name = request.choices.get("name") or free_name(
        label_of(request.source, request.choices.get("options", {})), "links", request.choices.get("out") or RUNS
    )
    chosen = {**request.choices, "devices": request.devices, "strategy": DEFAULT, "name": name}
    base = prepare(request.source, chosen)
    steps = base.num_steps
    if steps is None:
        raise PlanError("the data is a stream of unknown length; give --steps")
    for link in links:
        replace(base.plan, link=link)
    records: dict[str, list[Record]] = {link: [] for link in links}
    with marking_stop(base.folder):
        for number in range(request.seeds):
            for link in links if number % 2 == 0 else reversed(links):
                log(f"seed {number + 1} of {request.seeds}: {link}")
                folder = base.folder / f"{link.replace(':', '-')}-seed-{number}"
                seed = base.plan.seed + number
                for _ in run_in_processes(variant(base, folder, steps=steps, link=link, seed=seed)):
                    pass
                records[link].append(Record.read(folder))
    comparison = judged_links(request.source, list(base.plan.devices), records, request.target)
    (base.folder / LINKS_FILE).write_text(json.dumps(asdict(comparison), indent=2) + "\n")
    return comparison, base.folder


def named_links(text: str) -> list[str]:
    """Those of a list such as `none,bf16,local:50`."""
    links = list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    for link in links:
        parse_link(link)
    if len(links) < 2:
        raise PlanError(f"--links is {text!r}; name two methods or more, the first to compare with: {LINKS}")
    return links


def judged_links(
    task: str, devices: list[str], records: Mapping[str, Sequence[Record]], target: float | None
) -> LinkComparison:
    """The rows, from the Records of each method: one for each seed, in the same order."""
    curves = {link: [_smoothed(record) for record in of_link] for link, of_link in records.items()}
    first = next(iter(curves))
    goal = target if target is not None else max(losses[-1] for losses in curves[first])
    rows = []
    for link, of_link in curves.items():
        reached = [next((n for n, loss in enumerate(losses) if loss <= goal), None) for losses in of_link]
        rows.append(
            LinkRow(
                link=link,
                final_loss=[losses[-1] for losses in of_link],
                steps_to_target=[None if number is None else number + 1 for number in reached],
                seconds_to_target=[
                    None if number is None else sum(step.seconds for step in record.steps[: number + 1])
                    for number, record in zip(reached, records[link], strict=True)
                ],
                valid_loss=[_valid_loss(record) for record in records[link]],
            )
        )
    return LinkComparison(
        task=task, devices=devices, target=goal, rows=[replace(row, ratio=_ratio(rows[0], row)) for row in rows]
    )


def _smoothed(record: Record) -> list[float]:
    """Each loss, averaged with those before it."""
    num = max(1, round(SMOOTHED * len(record.losses)))
    losses = record.losses
    return [fmean(losses[max(0, end - num) : end]) for end in range(1, len(losses) + 1)]


def _valid_loss(record: Record) -> float | None:
    """The loss of the first validation set."""
    values = record.evaluations[-1].values if record.evaluations else {}
    return next((value for name, value in values.items() if name.rpartition("/")[2] == "loss"), None)


def _ratio(first: LinkRow, row: LinkRow) -> tuple[float, float, float] | None:
    """None where a seed did not reach the target with both."""
    pairs = list(zip(first.seconds_to_target, row.seconds_to_target, strict=True))
    logs = [math.log(one / other) for one, other in pairs if one and other]
    if len(logs) < len(pairs):
        return None
    middle, half = fmean(logs), STUDENT[len(logs) - 2] * stdev(logs) / math.sqrt(len(logs))
    return math.exp(middle), math.exp(middle - half), math.exp(middle + half)


def link_lines(comparison: LinkComparison) -> list[tuple[str, ...]]:
    """Rows of a table: method, steps and seconds to the target, gain, final losses against those of the first."""
    return [_cells(row, comparison.rows[0]) for row in comparison.rows]


def _cells(row: LinkRow, first: LinkRow) -> tuple[str, ...]:
    reached = [number for number in row.steps_to_target if number is not None]
    seconds = [one for one in row.seconds_to_target if one is not None]
    missed = len(row.steps_to_target) - len(reached)
    not_there = f", {missed} of {len(row.steps_to_target)} seeds never" if missed else ""
    return (
        row.link,
        f"{median(reached):.0f}{not_there}" if reached else "never",
        f"{median(seconds):.3g}" if seconds else "-",
        "{:.2f}x ({:.2f} to {:.2f})".format(*row.ratio) if row.ratio is not None and row is not first else "-",
        _against(row.final_loss, first.final_loss),
        _against(row.valid_loss, first.valid_loss),
    )


def _against(own: Sequence[float | None], first: Sequence[float | None]) -> str:
    """The median, and how far the seeds are on average from the first method with the same ones."""
    known = [one for one in own if one is not None]
    if not known:
        return "-"
    apart = [one / other - 1 for one, other in zip(own, first, strict=True) if one is not None and other]
    far = f" ({fmean(apart):+.2%})" if apart and own is not first else ""
    return f"{median(known):.4g}{far}"
