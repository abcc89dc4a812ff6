"""Optuna's pruners at the rungs of a study. A trial that is pruned is paused at its checkpoint, like any other."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from evenstep.errors import BadInput
from evenstep.tune.optuna_sampler import direction_of, load_optuna
from evenstep.tune.study_rows import StudyRequest
from evenstep.tune.successive_halving import Study, StudyTrial
from evenstep.typed_values import check_choice

PRUNERS = ("halving", "median", "hyperband")


def check_pruner(name: str, rungs: Sequence[int]) -> None:
    """Refuse a pruner that there is not, or that has no rungs to look at trials."""
    check_choice("prune", name, PRUNERS, BadInput)
    if name != "halving" and len(rungs) < 2:
        raise BadInput(f"--prune {name} compares trials at rungs; give --rungs 1,3,9")
    factors = {after / before for before, after in pairwise(rungs)}
    if name == "hyperband" and (len(factors) > 1 or not max(factors).is_integer()):
        given = ",".join(map(str, rungs))
        raise BadInput(f"--prune hyperband needs rungs with one factor between them, and they are {given}; try 1,3,9")


def goes_on(study: Study, number: int) -> bool:
    """Whether a trial goes on from the last rung that it has reached.

    The pruner is shown the trials that the study's rule lets it see, from the first to the last, and then this one.
    """
    optuna, request = load_optuna(), study.request
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Hyperband chooses the bracket of a trial by its number and by this name.
        shown = optuna.create_study(
            study_name=f"study-{request.seed}",
            direction=direction_of(request),
            sampler=optuna.samplers.RandomSampler(),
            pruner=_pruner(request),
        )
        asked = [shown.ask() for _ in range(number)]
        for trial in (study.trials[before] for before in range(1, number - study.behind + 1)):
            _show(trial, asked[trial.number - 1])
            shown.tell(asked[trial.number - 1], **_end(trial, request))
        return not _show(study.trials[number], asked[number - 1])


def _pruner(request: StudyRequest) -> Any:
    pruners, rungs = load_optuna().pruners, request.rungs
    if request.pruner == "median":
        return pruners.MedianPruner()
    return pruners.HyperbandPruner(min_resource=rungs[0], max_resource=rungs[-1], reduction_factor=rungs[1] // rungs[0])


def _show(trial: StudyTrial, asked: Any) -> bool:
    """Report each rung, as a training would; returns what the pruner says after the last one."""
    is_pruned = False
    for row in trial.reached:
        asked.report(row.value, row.epoch)
        # It keeps what it was shown at each rung, so it is asked each time.
        is_pruned = asked.should_prune()
    return is_pruned


def _end(trial: StudyTrial, request: StudyRequest) -> dict[str, Any]:
    states = load_optuna().trial.TrialState
    if trial.failed is not None:
        return {"state": states.FAIL}
    if len(trial.reached) < request.num_rungs:
        return {"state": states.PRUNED}
    return {"values": trial.reached[-1].value}
