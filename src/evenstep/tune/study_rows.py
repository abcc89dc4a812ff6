"""What a study writes down: what was requested, each suggestion, and each rung that a trial reached."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from evenstep.best_metric import Direction, parse_best
from evenstep.plan import OptionValue
from evenstep.tune.space import Dimension
from evenstep.typed_values import Natural, Positive


@dataclass(frozen=True, kw_only=True)
class StudyRequest:
    """What a study does; a command that continues it asks for the same."""

    task: str
    space: list[Dimension]
    trials: Positive
    rungs: list[Positive]
    """Epochs at which trials are compared, the last one their whole length; empty: every trial runs to its end."""
    metric: str
    """`accuracy:max`."""
    sampler: str
    seed: Natural
    slots: Positive
    """Trials at a time for which the study was made; it may run on fewer or more devices later."""
    per_trial: Positive
    """Devices of a trial."""
    choices: dict[str, Any] = field(default_factory=dict)
    """Fields of the Plan that all trials have in common."""
    command: str = ""
    pruner: str = "halving"
    """`halving` is the study's own rule; others are Optuna's."""

    @property
    def search(self) -> dict[str, str]:
        """The space as it was written."""
        return {one.name: one.text for one in self.space}

    @property
    def num_rungs(self) -> int:
        return max(1, len(self.rungs))

    @property
    def direction(self) -> Direction:
        return parse_best(self.metric)[1]

    @property
    def has_pruner(self) -> bool:
        """Whether one of Optuna's pruners takes the place of the study's own rule."""
        return self.pruner != "halving"

    @property
    def quotas(self) -> list[int]:
        """Trials of each rung: as many go on as give every rung about the same number of epochs.

        >>> StudyRequest(task="a", space=[], trials=24, rungs=[1, 3, 9], metric="loss:min", sampler="tpe", seed=0,
        ...     slots=2, per_trial=1).quotas
        [24, 8, 2]
        """
        sizes = [self.trials]
        for before, after in zip(self.rungs, self.rungs[1:], strict=False):
            sizes.append(max(1, sizes[-1] * before // after))
        return sizes


@dataclass(frozen=True, kw_only=True)
class CommandStart:
    """A command began the study, or goes on with it."""

    devices: list[str]
    at: float
    """In seconds since 1970."""


@dataclass(frozen=True, kw_only=True)
class SuggestedTrial:
    """The options of a trial."""

    trial: Positive
    options: dict[str, OptionValue]


@dataclass(frozen=True, kw_only=True)
class Began:
    """A trial was started, or went on, towards a rung."""

    trial: Positive
    rung: Natural
    devices: list[str]
    at: float


@dataclass(frozen=True, kw_only=True)
class Reached:
    """A trial has reached a rung."""

    trial: Positive
    rung: Natural
    value: float
    """The best of the metric up to here."""
    step: Natural
    epoch: Natural
    values: dict[str, float] = field(default_factory=dict)
    """The evaluation that had it."""
    best_step: Natural | None = None
    """Of that evaluation; rows of earlier versions lack it."""
    is_over: bool = False
    """Whether the run has ended: at its last epoch, or early."""
    at: float = 0.0


@dataclass(frozen=True, kw_only=True)
class TrialFailed:
    """A trial has failed on its way to a rung."""

    trial: Positive
    rung: Natural
    why: str
    step: Natural = 0
    at: float = 0.0


@dataclass(frozen=True, kw_only=True)
class PrunerDecision:
    """Whether a trial goes on from a rung, by one of Optuna's pruners; one that does not stays paused."""

    trial: Positive
    rung: Natural
    goes_on: bool


StudyRow = StudyRequest | CommandStart | SuggestedTrial | Began | Reached | TrialFailed | PrunerDecision
