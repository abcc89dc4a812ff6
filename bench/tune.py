"""Steps to the same best metric: `evenstep tune`, plain successive halving, and Optuna's own pruner. Counts, not times.

python bench/tune.py [--seeds 5] [--trials 24] [--tasks digits,cnn] [OUT.json]

For each task and seed, `evenstep tune` runs a study with rungs at epochs 1, 3 and 9 on two CPU devices. Then Optuna
drives the same task: its TPE sampler and its SuccessiveHalvingPruner (the same first rung and the same factor), one
trial after another, each of which sees all before it, until it has found a metric as good as the study's, or has used
five times as many steps. A whole trial is trained once, and Optuna's pruner is shown its values epoch by epoch: the
steps that it did not let the trial take are not counted.

Ideal is what successive halving needs for the same trials when it waits for whole rungs and repeats nothing.
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
from pathlib import Path
from typing import Any

import harness
import optuna

import evenstep
from evenstep.tune.sampler import distribution
from evenstep.tune.study import Study, read_study

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


def by_optuna(study: Study, target: float, most_steps: int, folder: Path) -> dict[str, Any]:
    """Steps until Optuna's pruner has found a metric as good as `target`."""
    request = study.request
    sampler = optuna.samplers.TPESampler(seed=request.seed, multivariate=True)
    pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=RUNGS[0], reduction_factor=RUNGS[1])
    driven = optuna.create_study(sampler=sampler, pruner=pruner)
    space = {one.name: distribution(one) for one in request.space}
    task = request.task.rpartition(":")[2]
    steps, best, in_study = 0, math.inf, None
    while best > target and steps < most_steps:
        trial = driven.ask(space)
        values, per_epoch = curve(task, request.seed, trial.params, folder)
        so_far, is_pruned = math.inf, False
        for epoch, value in enumerate(values, 1):
            steps += per_epoch
            so_far = min(so_far, value if math.isfinite(value) else math.inf)
            trial.report(min(so_far, 1e9), epoch)
            is_pruned = epoch < RUNGS[-1] and trial.should_prune()
            if is_pruned:
                break
        if is_pruned:
            driven.tell(trial, state=optuna.trial.TrialState.PRUNED)
        else:
            driven.tell(trial, min(so_far, 1e9))
        best = min(best, so_far)
        if trial.number + 1 == request.trials:
            in_study = {"steps": steps, "best": best}
    return {
        "steps": steps,
        "best": best,
        "trials": len(driven.trials),
        "found": best <= target,
        "same_trials": in_study,
    }


def ideal_steps(study: Study) -> int:
    """Of plain successive halving over the same trials."""
    per_epoch = max(row.step // row.epoch for trial in study.trials.values() for row in trial.reached)
    ends = [0, *RUNGS]
    return sum(per_epoch * num * (ends[at + 1] - ends[at]) for at, num in enumerate(study.request.quotas))


def race(task: str, seed: int, trials: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        study, found = our_study(task, seed, trials, folder)
        best = study.best
        assert best is not None
        assert best.last is not None
        (folder / "optuna").mkdir()
        theirs = by_optuna(study, best.last.value, MOST * found["steps"], folder / "optuna")
    ours = {"steps": found["steps"], "best": best.last.value, "busy": found["busy"], "seconds": found["seconds"]}
    return {"task": task, "seed": seed, "ours": ours, "ideal_steps": ideal_steps(study), "optuna": theirs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--trials", type=int, default=24)
    parser.add_argument("--tasks", default="digits,cnn")
    given = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    rows = []
    for task in given.tasks.split(","):
        for seed in range(given.seeds):
            rows.append(race(task, seed, given.trials))
            print(json.dumps(rows[-1]), flush=True)
    if given.out is not None:
        results = {"trials": given.trials, "optuna": optuna.__version__, "summary": summarised(rows), "rows": rows}
        harness.write(str(given.out), f"python bench/tune.py {given.out}", results)
    print(json.dumps(summarised(rows), indent=1))


def summarised(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """For each task: how many times the steps Optuna needed, with a 95 % interval over the seeds."""
    summary = {}
    for task in dict.fromkeys(row["task"] for row in rows):
        own = [row for row in rows if row["task"] == task]
        ratio = harness.compared(*([row[who]["steps"] for row in own] for who in ("ours", "optuna")))
        summary[task] = {
            **ratio.figures("steps"),
            "over_ideal": max(row["ours"]["steps"] / row["ideal_steps"] for row in own),
            "busy": statistics.median(row["ours"]["busy"] for row in own),
            "least_busy": min(row["ours"]["busy"] for row in own),
            "optuna_found": sum(row["optuna"]["found"] for row in own),
        }
    return summary


if __name__ == "__main__":
    main()
