"""The page of a study, and the reports of its trials."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from evenstep.best_metric import parse_best
from evenstep.record import FILE as RECORD_FILE
from evenstep.record import TRIALS, Record
from evenstep.report.html.page import FILE, Page, PageLink, need_bokeh, render, write_page_of_runs, write_text
from evenstep.report.html.tables import Sheet
from evenstep.report.terminal import number
from evenstep.task_options import value_in_words
from evenstep.tune.optuna_sampler import has_optuna, importances
from evenstep.tune.study import facts_of
from evenstep.tune.study_table import NAME_WIDTH, heads_of, order, result_lines, state_of
from evenstep.tune.successive_halving import Study, StudyTrial

if TYPE_CHECKING:
    from evenstep.report.html.charts import Chart

MOST_REPORTS = 30
"""Trials whose report is written with the page, the best first: each has more than a megabyte."""
WORDS = {
    "best by epoch N": "the best evaluation up to there, which may be an earlier one; its checkpoint is kept",
    "trial": "a run with options that the sampler suggested; all have the same seed, sample order and initial weights",
    "rung": "an epoch at which trials are compared; the best go on, the others stay paused at their checkpoint",
    "importance": "the part of the difference between trials at their first rung that an option explains (PED-ANOVA)",
    "steps saved": "compared with the same trials, each trained to its end",
    "busy": "the part of the time in which devices had a trial, its start included",
}


def write_study_page(study: Study, folder: Path) -> Path:
    """Write page.html of a study, and that of each trial which has none of its latest rows."""
    need_bokeh()
    linked = {trial.number for trial in order(study)[:MOST_REPORTS] if _write_report(folder, trial)}
    target = folder / FILE
    write_text(target, render(_page(study, folder, linked)))
    return target


def _write_report(folder: Path, trial: StudyTrial) -> bool:
    run = folder / TRIALS / trial.folder
    record, page = run / RECORD_FILE, run / FILE
    if not os.path.isfile(record) or not os.path.getsize(record):
        return False
    if not os.path.isfile(page) or os.path.getmtime(page) < os.path.getmtime(record):
        above = PageLink(text=f"All trials of {folder.resolve().name}", to=f"../../{FILE}")
        write_page_of_runs([Record.read(run)], page, [above])
    return True


def _page(study: Study, folder: Path, linked: set[int]) -> Page:
    request, facts = study.request, facts_of(study)
    parts = [f"{facts.num_trials} trials", f"{request.sampler}, seed {request.seed}", f"{request.slots} at a time"]
    if request.rungs:
        parts.append(f"rungs at epochs {', '.join(map(str, request.rungs))}")
    if request.has_pruner:
        parts.append(f"{request.pruner} pruner")
    return Page(
        title=f"{Path(request.task).name}: {parse_best(request.metric)[0]}",
        about=" · ".join(parts),
        commands=[request.command] if request.command else [],
        charts=_charts(study),
        runs=_trials_sheet(study, linked),
        links=_links(study, linked),
        sheets=[_facts_sheet(study)],
        notes=[*(_note(line) for line in result_lines(study, folder) if line), *_missing()],
        words=WORDS,
    )


def _links(study: Study, linked: set[int]) -> list[PageLink]:
    best = study.best
    if best is None or best.number not in linked:
        return []
    return [PageLink(text=f"Report of trial {best.number}, the best", to=f"{TRIALS}/{best.folder}/{FILE}")]


def _missing() -> list[str]:
    """What the page could have."""
    return [] if has_optuna() else ["The importance of options needs Optuna: pip install 'evenstep[tune]'."]


def _note(line: str) -> str:
    """A line of the terminal's summary as a sentence: `best: trial 6, loss 0.1633, lr=0.08622`."""
    name, text = line[:NAME_WIDTH], line[NAME_WIDTH:]
    return f"{name.rstrip()}: {text.strip().replace('  ', ', ')}"


def _charts(study: Study) -> list[Chart]:
    from evenstep.tune.study_charts import charts_of

    return charts_of(study, importances(study))


def _trials_sheet(study: Study, linked: set[int]) -> Sheet:
    trials = order(study)
    return Sheet(
        title="Trials",
        columns=["", *study.request.search, *heads_of(study), "steps", "state"],
        rows=[_cells(study, trial) for trial in trials],
        links=[f"{TRIALS}/{trial.folder}/{FILE}" if trial.number in linked else "" for trial in trials],
    )


def _cells(study: Study, trial: StudyTrial) -> list[str]:
    values = [number(row.value) for row in trial.reached] + [""] * (study.request.num_rungs - len(trial.reached))
    state = f"failed: {trial.failed.why}" if trial.failed is not None else state_of(study, trial)
    options = [trial.options.get(name) for name in study.request.search]
    shown = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in options]
    return [f"trial {trial.number}", *shown, *values, f"{trial.steps:,}", state]


def _words(value: object) -> str:
    """As on a command line; options as `kind=relu, depth=3`."""
    if isinstance(value, dict):
        return ", ".join(f"{name}={value_in_words(one)}" for name, one in value.items())
    return value_in_words(value)


def _facts_sheet(study: Study) -> Sheet:
    request = study.request
    rows = [[name, text] for name, text in request.search.items()]
    rows += [["metric", request.metric], ["sampler", request.sampler], ["pruner", request.pruner]]
    rows += [["seed", str(request.seed)]]
    rows += [[name, _words(value)] for name, value in request.choices.items()]
    return Sheet(title="Study", columns=[], rows=rows)
