"""Steps to the same best metric: `evenstep tune`, plain successive halving, and Optuna's own pruner. Counts, not times.

python bench/tune.py [--seeds 5] [--trials 24] [--tasks digits,cnn] [--own] [OUT.json]

For each task and seed, `evenstep tune` runs a study with rungs at epochs 1, 3 and 9 on two CPU devices. Then Optuna's
SuccessiveHalvingPruner (the same first rung and the same factor) gets the same suggestions in the same order, one trial
after another: both have the same luck in what is drawn. Neither knows how good is good enough, so both studies run
all their trials. If Optuna's best is then not as good as ours, it goes on with suggestions of its own TPE sampler until
it is, or until it has used five times as many steps. `first_steps` are those until a study first had that metric.

With --own, Optuna also races with its own suggestions from the first one on, and stops as soon as it has found the
metric, which ours cannot know: the race that is the best for Optuna.

A whole trial is trained once, and Optuna's pruner is shown its values epoch by epoch: the steps that it did not let the
trial take are not counted. Ideal is what successive halving needs for the same trials when it waits for whole rungs and
repeats nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import harness
import optuna

import evenstep
from evenstep.tune.optuna_sampler import distribution
from evenstep.tune.study import read_study
from evenstep.tune.successive_halving import Study

TASKS = Path(__file__).with_name("tune_tasks.py")
RUNGS = (1, 3, 9)
MOST = 5


def our_study(task: str, seed: int, trials: int, folder: Path) -> tuple[Study, dict[str, Any]]:
    rungs = ",".join(map(str, RUNGS))
    words = ["--trials", str(trials), "--devices", "cpu,cpu", "--rungs", rungs, "--seed", str(seed), "--json"]
    command = [sys.executable, "-m", "evenstep", "tune", f"{TASKS}:{task}", *words, "--name", f"{task}-{seed}"]
    done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    return read_study(folder / "runs" / f"{task}-{seed}"), json.loads(done.stdout)


def curve(task: str, seed: int, options: dict[str, Any], folder: Path) -> tuple[list[float], int]:
    """The loss after each epoch of a whole trial, and its steps per epoch."""
    spec = f"{TASKS}:{task}"
    name = f"{len(os.listdir(folder))}"
    try:
        record = evenstep.train(
            spec, options=options, epochs=RUNGS[-1], seed=seed, threads=1, out=str(folder), name=name, progress=False
        )
    except evenstep.EvenstepError:  # it diverged
        record = evenstep.Record.read(folder / name)
    values = [one.values["loss"] for one in record.evaluations]
    steps = record.evaluations[0].step if values else len(record.steps)
    return values + [math.inf] * (RUNGS[-1] - len(values)), steps


def by_optuna(study: Study, suggestions: Sequence[dict[str, Any]], target: float, folder: Path) -> dict[str, Any]:
    """Optuna's pruner on these suggestions, then on its own until it has found a metric as good as `target`."""
    request, found = study.request, OptunaSteps(target)
    driven = optuna.create_study(
        sampler=optuna.samplers.TPESampler(seed=request.seed, multivariate=True),
        pruner=optuna.pruners.SuccessiveHalvingPruner(min_resource=RUNGS[0], reduction_factor=RUNGS[1]),
    )
    for options in suggestions:
        driven.enqueue_trial(options)
    space = {one.name: distribution(one) for one in request.space}
    num = 0
    while num < len(suggestions) or (found.best > target and found.steps < MOST * study.steps):
        trial, num = driven.ask(space), num + 1
        losses, per_epoch = curve(request.task.rpartition(":")[2], request.seed, trial.params, folder)
        drive(driven, trial, losses, per_epoch, found)
        if num == request.trials:
            found.same_trials = {"steps": found.steps, "best": found.best}
    return {**asdict(found), "trials": num, "found": found.best <= target}


@dataclass
class OptunaSteps:
    """What a study that Optuna drives has used, and found."""

    target: float
    steps: int = 0
    best: float = math.inf
    first_steps: int | None = None
    """When it first had the target."""
    same_trials: dict[str, float] | None = None
    """After as many trials as our study."""

    def add(self, steps: int, value: float) -> None:
        self.steps += steps
        self.best = min(self.best, value)
        if self.first_steps is None and self.best <= self.target:
            self.first_steps = self.steps


def drive(driven: Any, trial: Any, losses: Sequence[float], per_epoch: int, found: OptunaSteps) -> None:
    """Show a trial to the pruner, epoch by epoch, until it stops it."""
    best = math.inf
    for epoch, value in enumerate(losses, 1):
        best = min(best, value if math.isfinite(value) else 1e9)
        found.add(per_epoch, best)
        trial.report(best, epoch)
        if epoch < RUNGS[-1] and trial.should_prune():
            driven.tell(trial, state=optuna.trial.TrialState.PRUNED)
            return
    driven.tell(trial, best)


def first_steps(study: Study, target: float) -> int:
    """Steps of all trials, those that were running with all of their rung, when our study first had its metric."""
    trials = study.trials.values()
    at = min(row.at for trial in trials for row in trial.reached if row.value <= target)
    begun = {(trial.number, row.rung) for trial in trials for row in trial.began if row.at <= at}
    return sum(max(row.step for row in trial.reached if (trial.number, row.rung) in begun) for trial in trials)


def ideal_steps(study: Study) -> int:
    """Of plain successive halving over the same trials."""
    per_epoch = max(row.step // row.epoch for trial in study.trials.values() for row in trial.reached)
    ends = [0, *RUNGS]
    return sum(per_epoch * num * (ends[at + 1] - ends[at]) for at, num in enumerate(study.request.quotas))


def race(task: str, seed: int, trials: int, with_own: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        study, found = our_study(task, seed, trials, folder)
        best = study.best
        assert best is not None
        assert best.last is not None
        target = best.last.value
        (folder / "optuna").mkdir()
        same = [trial.options for trial in study.trials.values()]
        theirs = by_optuna(study, same, target, folder / "optuna")
        own = by_optuna(study, [], target, folder / "optuna") if with_own else None
    ours = {"steps": study.steps, "first_steps": first_steps(study, target), "best": target}
    row = {"task": task, "seed": seed, "ours": {**ours, "busy": found["busy"], "seconds": found["seconds"]}}
    return {**row, "ideal_steps": ideal_steps(study), "optuna": theirs, **({"optuna_own": own} if own else {})}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--trials", type=int, default=24)
    parser.add_argument("--tasks", default="digits,cnn")
    parser.add_argument("--own", action="store_true", help="race against Optuna's own suggestions, too")
    given = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    rows = []
    for task in given.tasks.split(","):
        for seed in range(given.seeds):
            rows.append(race(task, seed, given.trials, given.own))
            print(json.dumps(rows[-1]), flush=True)
    if given.out is not None:
        results = {"trials": given.trials, "optuna": optuna.__version__, "summary": summarised(rows), "rows": rows}
        harness.write(str(given.out), f"python bench/tune.py {given.out}", results)
    print(json.dumps(summarised(rows), indent=1))


def summarised(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """For each task: how many times the steps Optuna needed, with a 95 % interval over the seeds."""
    return {
        task: _summarised([row for row in rows if row["task"] == task])
        for task in dict.fromkeys(row["task"] for row in rows)
    }


def _summarised(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    ours = [row["ours"] for row in rows]
    theirs = [row["optuna"] for row in rows]
    own = [row["optuna_own"] for row in rows if "optuna_own" in row]
    steps = [one["steps"] for one in ours]
    firsts = [one["first_steps"] or one["steps"] for one in theirs]
    return {
        **harness.compared(steps, [one["steps"] for one in theirs]).figures("steps"),
        "fewer_steps": sum(a["steps"] < b["steps"] for a, b in zip(ours, theirs, strict=True)),
        "first_ratio": asdict(harness.compared([one["first_steps"] for one in ours], firsts)),
        "optuna_better": sum(b["same_trials"]["best"] < a["best"] for a, b in zip(ours, theirs, strict=True)),
        "optuna_found": sum(one["found"] for one in theirs),
        "own_ratio": asdict(harness.compared(steps, [one["steps"] for one in own])) if own else None,
        "over_ideal": max(one["steps"] / row["ideal_steps"] for one, row in zip(ours, rows, strict=True)),
        "busy": statistics.median(one["busy"] for one in ours),
        "least_busy": min(one["busy"] for one in ours),
    }


if __name__ == "__main__":
    main()
