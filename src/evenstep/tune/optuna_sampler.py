"""Suggestions by Optuna's samplers, as a pure function of the study; and a copy of the study for optuna-dashboard.

A sampler is made for each suggestion, with a seed of its own, and sees the trials that the study's rule lets it see: a
study that was killed suggests what it would have suggested.
"""

from __future__ import annotations

import importlib.util
import json
import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from evenstep.errors import BadInput
from evenstep.plan import OptionValue
from evenstep.sampling.rng import derive_seed
from evenstep.tune.space import Dimension, grid
from evenstep.tune.study_rows import StudyRequest
from evenstep.tune.successive_halving import Study, StudyTrial
from evenstep.typed_values import check_choice

NEEDS_OPTUNA = "evenstep tune needs Optuna, which is not installed; pip install 'evenstep[tune]'"
JOURNAL = "optuna.journal"
SAMPLERS = ("tpe", "gp", "cmaes", "random", "grid")
NEEDS = {"gp": "scipy", "cmaes": "cmaes"}
"""What a sampler needs besides Optuna."""
LEAST_RANGES = 2
"""Of CMA-ES, which has no covariance of one number."""


def has_optuna() -> bool:
    return importlib.util.find_spec("optuna") is not None


def need_optuna(sampler: str) -> None:
    """Say what to install where it is missing, and which samplers there are."""
    if not has_optuna():
        raise BadInput(NEEDS_OPTUNA)
    check_choice("sampler", sampler, SAMPLERS, BadInput)
    package = NEEDS.get(sampler)
    if package is not None and importlib.util.find_spec(package) is None:
        raise BadInput(f"--sampler {sampler} needs {package}, which is not installed; pip install {package}")


def check_space(sampler: str, space: Sequence[Dimension]) -> None:
    """Refuse a space that a sampler cannot search."""
    ranges = sum(one.kind != "choice" for one in space)
    if sampler == "cmaes" and ranges < LEAST_RANGES:
        raise BadInput(
            f"--sampler cmaes needs {LEAST_RANGES} ranges of numbers or more, and {ranges or 'none'} of the options "
            "that are searched is one; write lr=1e-4..1e-1:log, or use --sampler tpe"
        )


def load_optuna() -> Any:
    """Optuna, which logs nothing."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def suggest(study: Study, number: int) -> dict[str, OptionValue]:
    """The options of trial `number`: a function of the study's seed, the number, and what it may see."""
    request, space = study.request, study.request.space
    if request.sampler == "grid":
        return grid(space)[number - 1]
    distributions = {one.name: distribution(one) for one in space}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = _from_generations if request.sampler == "cmaes" else _from_trials
        params = found(study, number, distributions)
    return {one.name: _value(one, params[one.name]) for one in space}


def _from_trials(study: Study, number: int, distributions: Any) -> dict[str, Any]:
    """By a sampler that looks at the trials alone."""
    request, space = study.request, study.request.space
    asked = load_optuna().create_study(direction=direction_of(request), sampler=_sampler(request, number))
    seen = study.seen_by(number)
    asked.add_trials(_frozen(trial, space, distributions) for trial in seen if trial.reached)
    asked.add_trials(
        _running(trial, space, distributions)
        for trial in study.trials.values()
        if trial.number < number and trial.number > number - study.behind
    )
    return dict(asked.ask(distributions).params)


def _from_generations(study: Study, number: int, distributions: Any) -> dict[str, Any]:
    """By CMA-ES, whose generations are a state: all suggestions before this one are made again, in their order."""
    optuna, request = load_optuna(), study.request
    seed = derive_seed(request.seed, "suggestion", 0) % 2**32
    sampler = optuna.samplers.CmaEsSampler(seed=seed, warn_independent_sampling=False)
    asked = optuna.create_study(direction=direction_of(request), sampler=sampler)
    made: list[Any] = []
    for at in range(1, number + 1):
        if at > study.behind:
            trial = study.trials[at - study.behind]
            value = trial.reached[0].value if trial.reached else None
            asked.tell(made[trial.number - 1], value, state=None if trial.reached else optuna.trial.TrialState.FAIL)
        made.append(asked.ask(distributions))
    return dict(made[-1].params)


def direction_of(request: StudyRequest) -> str:
    """In Optuna's words."""
    return "minimize" if request.direction == "min" else "maximize"


def _sampler(request: StudyRequest, number: int) -> Any:
    optuna = load_optuna()
    seed = derive_seed(request.seed, "suggestion", number) % 2**32
    match request.sampler:
        case "tpe":
            # It sees that trials are running, and keeps away from where they are.
            found = optuna.samplers.TPESampler(seed=seed, multivariate=True, constant_liar=True)
        case "gp":
            found = optuna.samplers.GPSampler(seed=seed, deterministic_objective=True)
        case _:
            found = optuna.samplers.RandomSampler(seed=seed)
    return found


def distribution(one: Dimension) -> Any:
    """A dimension in Optuna's words."""
    distributions = load_optuna().distributions
    if one.kind == "choice":
        return distributions.CategoricalDistribution(_labels(one))
    if one.kind == "int":
        return distributions.IntDistribution(int(one.low), int(one.high), log=one.is_log)
    return distributions.FloatDistribution(one.low, one.high, log=one.is_log)


def _labels(one: Dimension) -> list[Any]:
    """Choices as Optuna takes them: a list is named by its text."""
    return [json.dumps(choice) if isinstance(choice, list) else choice for choice in one.choices]


def _value(one: Dimension, given: Any) -> OptionValue:
    found: OptionValue = one.choices[_labels(one).index(given)] if one.kind == "choice" else given
    return found


def _params(trial: StudyTrial, space: Iterable[Dimension]) -> dict[str, Any]:
    return {
        one.name: _labels(one)[one.choices.index(trial.options[one.name])]
        if one.kind == "choice"
        else trial.options[one.name]
        for one in space
    }


def _frozen(trial: StudyTrial, space: Sequence[Dimension], distributions: Any) -> Any:
    """A trial as its first rung showed it, which all trials have: values of different epochs do not compare."""
    create = load_optuna().trial.create_trial
    return create(params=_params(trial, space), distributions=distributions, value=trial.reached[0].value)


def _running(trial: StudyTrial, space: Sequence[Dimension], distributions: Any) -> Any:
    optuna = load_optuna()
    return optuna.trial.create_trial(
        state=optuna.trial.TrialState.RUNNING, params=_params(trial, space), distributions=distributions
    )


def importances(study: Study) -> dict[str, float]:
    """How much each option matters for the first rung, by Optuna; empty without it, or where trials are too few."""
    if not has_optuna():
        return {}
    optuna, space = load_optuna(), study.request.space
    distributions = {one.name: distribution(one) for one in space}
    shown = optuna.create_study(direction=direction_of(study.request))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shown.add_trials(_frozen(trial, space, distributions) for trial in study.ranking(0))
        try:
            return dict(optuna.importance.get_param_importances(shown))
        except (ValueError, RuntimeError):  # fewer than two different trials
            return {}


class Mirror:
    """A journal file of the study that optuna-dashboard opens. It is a copy: nothing is read from it."""

    def __init__(self, folder: Path, study: Study) -> None:
        self._path = folder / JOURNAL
        self._study = study
        self._space = study.request.space
        self._distributions = {one.name: distribution(one) for one in self._space}
        self._ids: dict[int, int] = {}
        self._written: dict[int, int] = {}
        """Rungs of each trial that the journal has."""
        self._closed: set[int] = set()
        """Trials that Optuna counts as finished."""
        self.problem = ""
        """Why it is no longer written."""
        self.write_all()

    def write_all(self) -> None:
        """Write it again, from the study: what a killed command left may be torn, or locked."""
        for left in self._path.parent.glob(f"{JOURNAL}*"):
            with suppress(OSError):
                left.unlink()
        self._ids, self._written, self._closed = {}, {}, set()
        self._guarded(self._open)
        self.update()

    def update(self) -> None:
        """Write what is new in the study."""
        for trial in self._study.trials.values():
            self._guarded(partial(self._write, trial))

    def finish(self) -> None:
        """The trials that were paused for good are Optuna's pruned ones."""
        state = load_optuna().trial.TrialState.PRUNED
        for number in {*self._ids} - self._closed:
            self._guarded(partial(self._close, self._study.trials[number], state))

    def _guarded(self, write: Any) -> None:
        """A copy that cannot be written ends no study."""
        if self.problem:
            return
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                write()
        except Exception as error:
            self.problem = f"{self._path} is no longer written ({type(error).__name__}: {error}); the study goes on"

    def _open(self) -> None:
        optuna = load_optuna()
        backend = optuna.storages.journal.JournalFileBackend(str(self._path))
        self._storage = optuna.storages.JournalStorage(backend)
        self._copy = optuna.create_study(
            study_name=self._path.parent.name, storage=self._storage, direction=direction_of(self._study.request)
        )
        self._copy.set_user_attr("command", self._study.request.command)

    def _write(self, trial: StudyTrial) -> None:
        if trial.number in self._closed:
            return
        if trial.number not in self._ids:
            running = _running(trial, self._space, self._distributions)
            study_id = self._storage.get_study_id_from_name(self._copy.study_name)
            self._ids[trial.number] = self._storage.create_new_trial(study_id, running)
            self._written[trial.number] = 0
            self._storage.set_trial_user_attr(self._ids[trial.number], "trial", trial.number)
        for row in trial.reached[self._written[trial.number] :]:
            self._storage.set_trial_intermediate_value(self._ids[trial.number], row.epoch, row.value)
            self._written[trial.number] += 1
        states = load_optuna().trial.TrialState
        if trial.failed is not None:
            self._storage.set_trial_user_attr(self._ids[trial.number], "cause", trial.failed.why)
            self._close(trial, states.FAIL)
        elif len(trial.reached) == self._study.request.num_rungs:
            self._close(trial, states.COMPLETE)

    def _close(self, trial: StudyTrial, state: Any) -> None:
        values = [trial.last.value] if trial.last is not None and state.name != "FAIL" else None
        self._storage.set_trial_state_values(self._ids[trial.number], state, values)
        self._closed.add(trial.number)
