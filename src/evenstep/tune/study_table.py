"""A study in the terminal: a live table while it runs, and its result."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from evenstep.best_metric import parse_best
from evenstep.record import TRIALS
from evenstep.report.terminal import number, plain, table_of, without_control
from evenstep.tune.space import in_words
from evenstep.tune.study import facts_of
from evenstep.tune.successive_halving import Study, StudyTrial

if TYPE_CHECKING:
    from evenstep.tune.scheduler import RunningTrial

MOST_ROWS = 16
"""Of a table that changes: more would not fit on a screen."""
NAME_WIDTH = 11
"""Of the first column of the result."""
MOST_WORDS = 100
"""Characters of a state; the page has all of them."""
SECONDS_BETWEEN = 0.2
STYLES = {"running": "cyan", "failed": "red", "done": "green"}


def order(study: Study) -> list[StudyTrial]:
    """The best of those that came furthest first; failed ones last."""
    ranks = {
        trial.number: (-rung, at)
        for rung in range(study.request.num_rungs)
        for at, trial in enumerate(study.ranking(rung))
    }
    last = (1, 0)
    return sorted(
        study.trials.values(),
        key=lambda trial: (trial.failed is not None, *ranks.get(trial.number, last), trial.number),
    )


def heads_of(study: Study) -> list[str]:
    """Of the columns with a trial's values: each is the best one up to its rung."""
    request = study.request
    return [f"best by epoch {epochs}" for epochs in request.rungs] or [f"best {parse_best(request.metric)[0]}"]


def best_checkpoint(study: Study, folder: Path) -> Path | None:
    """Of the best trial, at its best evaluation."""
    best = study.best
    return folder / TRIALS / best.folder / "checkpoints" / "best" if best is not None else None


def state_of(study: Study, trial: StudyTrial, running: RunningTrial | None = None) -> str:
    """In a few words."""
    if trial.failed is not None:
        return "failed"
    if running is not None:
        return "running"
    if len(trial.reached) == study.request.num_rungs:
        return "done"
    return "paused" if trial.reached else "waiting"


def study_table(study: Study, running: Sequence[RunningTrial] = (), most: int | None = None) -> Table:
    """A line per trial: its options, and the metric at each rung."""
    by_trial = {one.job.trial: one for one in running}
    table = table_of("trial", *map(plain, study.request.search), *map(plain, heads_of(study)), "step")
    table.add_column("state", no_wrap=True)
    ordered = order(study)
    room = len(ordered) if most is None else most - len(by_trial)
    shown = [trial for at, trial in enumerate(ordered) if at < room or trial.number in by_trial]
    for trial in shown:
        one = by_trial.get(trial.number)
        state = state_of(study, trial, one)
        values = [number(row.value) for row in trial.reached] + [""] * (study.request.num_rungs - len(trial.reached))
        step = one.step if one is not None and one.step else trial.steps
        words = f"failed: {without_control(trial.failed.why)}" if trial.failed else state
        is_best = trial is study.best
        table.add_row(
            f"{trial.number}{' *' * is_best}",
            *(_short(trial.options.get(name)) for name in study.request.search),
            *values,
            f"{step:,}" if step else "",
            Text(words if len(words) <= MOST_WORDS else f"{words[: MOST_WORDS - 1]}…", style=STYLES.get(state, "dim")),
            style="bold" if is_best else None,
        )
    if len(shown) < len(ordered):
        table.add_row(f"... {len(ordered) - len(shown)} more")
    return table


def _short(value: Any) -> str:
    return plain(f"{value:.4g}" if isinstance(value, float) else str(value))


def progress_line(study: Study) -> str:
    """`12 of 24 trials suggested, 9 at epoch 1, 2 at epoch 3`"""
    request = study.request
    parts = [f"{len(study.trials)} of {request.trials} trials suggested"]
    if request.rungs:
        parts += [f"{len(study.ranking(at))} at epoch {epochs}" for at, epochs in enumerate(request.rungs)]
    else:
        parts.append(f"{len(study.ranking(0))} done")
    failed = facts_of(study).failed
    return ", ".join([*parts, *([f"{failed} failed"] if failed else [])])


class StudyProgress:
    """What happens, on stderr: a live table on a terminal, one line after another elsewhere."""

    def __init__(self, study: Study, quiet: bool = False) -> None:
        self._study = study
        self._console = Console(stderr=True, highlight=False, emoji=False, quiet=quiet)
        self._shown_at = 0.0
        self._live: Live | None = None
        if self._console.is_terminal and not quiet:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)

    def __enter__(self) -> StudyProgress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, line: str, running: Sequence[RunningTrial]) -> None:
        if line:
            self._console.print(without_control(line), markup=False, soft_wrap=True)
        if self._live is not None and time.monotonic() - self._shown_at > SECONDS_BETWEEN:
            self._shown_at = time.monotonic()
            table = study_table(self._study, running, MOST_ROWS)
            self._live.update(Group(Text(progress_line(self._study), style="bold"), table), refresh=True)


def result_lines(study: Study, folder: Path) -> list[str]:
    facts, best = facts_of(study), study.best
    lines = [""]
    if best is not None and best.last is not None:
        metric = parse_best(study.request.metric)[0]
        at = f" at step {best.last.best_step}" if best.last.best_step is not None else ""
        lines.append(f"best       trial {best.number}: {metric} {best.last.value:.4f}{at}  {in_words(best.options)}")
        lines.append(f"run        {folder / TRIALS / best.folder}")
        checkpoint = best_checkpoint(study, folder)
        lines.append(f"checkpoint {checkpoint}")
        lines.append(f"use it     evenstep checkpoint export {shlex.quote(str(checkpoint))} exported --to safetensors")
    steps = f"{facts.steps:,} steps"
    if facts.saved is not None and study.request.rungs:
        steps += f", {facts.saved:.0%} fewer than {facts.num_trials} whole trials"
    lines.append(f"took       {steps}, {facts.seconds:.1f} s, devices busy {facts.busy:.0%}")
    if not study.is_over:
        lines.append(f"not over   {progress_line(study)}")
    return lines


def to_json(study: Study, folder: Path) -> dict[str, Any]:
    """As --json prints it."""
    best, checkpoint = study.best, best_checkpoint(study, folder)
    return {
        "study": str(folder),
        "is_over": study.is_over,
        "metric": study.request.metric,
        "best": best.number if best is not None else None,
        "checkpoint": str(checkpoint) if checkpoint is not None else None,
        "trials": [
            {
                "trial": trial.number,
                "state": state_of(study, trial),
                "options": trial.options,
                "values": [row.value for row in trial.reached],
                "steps": trial.steps,
                "failed": trial.failed.why if trial.failed else None,
                "run": str(folder / TRIALS / trial.folder),
            }
            for trial in study.trials.values()
        ],
        **asdict(facts_of(study)),
        "saved": facts_of(study).saved,
    }
