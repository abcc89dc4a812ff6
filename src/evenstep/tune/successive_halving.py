"""The rule of a study: which trials go on from a rung, what runs next, and what a suggestion may see.

Successive halving with real promotions, as a function of the rows of the study. Results count by the number of a trial
and by rung, never by the clock: a study has the same suggestions and promotions however long its trials take.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from evenstep.plan import OptionValue
from evenstep.tune.study_rows import (
    Began,
    CommandStart,
    PrunerDecision,
    Reached,
    StudyRequest,
    StudyRow,
    SuggestedTrial,
    TrialFailed,
)

ROUNDS_BEHIND = 2
"""A suggestion does not see the trials of the last two rounds of all slots: they may still be running."""


@dataclass
class StudyTrial:
    """One trial, as far as the study's rows know it."""

    number: int
    options: dict[str, OptionValue]
    reached: list[Reached] = field(default_factory=list)
    """A row for each rung."""
    failed: TrialFailed | None = None
    began: list[Began] = field(default_factory=list)
    decisions: dict[int, bool] = field(default_factory=dict)
    """Of a pruner, by rung: whether it goes on."""

    @property
    def folder(self) -> str:
        return f"{self.number:04d}"

    @property
    def last(self) -> Reached | None:
        return self.reached[-1] if self.reached else None

    @property
    def steps(self) -> int:
        """Steps of its run so far."""
        return max(self.last.step if self.last else 0, self.failed.step if self.failed else 0)


@dataclass(frozen=True)
class TrialJob:
    """A trial, and the rung that it runs to."""

    trial: int
    rung: int


@dataclass
class Study:
    """What has happened so far, and what follows from it."""

    request: StudyRequest
    trials: dict[int, StudyTrial] = field(default_factory=dict)
    commands: list[list[float]] = field(default_factory=list)
    """Of each command: when it started trials, and when it had results."""

    def add(self, row: StudyRow) -> None:
        if isinstance(row, Began | Reached | TrialFailed) and self.commands:
            self.commands[-1].append(row.at)
        match row:
            case StudyRequest():
                self.request = row
            case CommandStart():
                self.commands.append([])
            case SuggestedTrial():
                self.trials[row.trial] = StudyTrial(row.trial, row.options)
            case Began():
                self.trials[row.trial].began.append(row)
            case Reached():
                self.trials[row.trial].reached.append(row)
            case TrialFailed():
                self.trials[row.trial].failed = row
            case PrunerDecision():
                self.trials[row.trial].decisions[row.rung] = row.goes_on

    @cached_property
    def sign(self) -> int:
        """Of a metric whose smaller values are better."""
        return 1 if self.request.direction == "min" else -1

    def ranking(self, rung: int) -> list[StudyTrial]:
        """The trials that have reached a rung, the best first; of equal ones, the one that was suggested first."""
        there = [trial for trial in self.trials.values() if len(trial.reached) > rung]
        return sorted(there, key=lambda trial: (self.sign * trial.reached[rung].value, trial.number))

    def num_failed(self, rung: int) -> int:
        """Trials that have failed on their way to it."""
        return sum(trial.failed is not None and trial.failed.rung == rung for trial in self.trials.values())

    def size(self, rung: int) -> int:
        """Trials that a rung has in the end, as far as it is known."""
        if rung == 0:
            return self.request.trials
        return min(self.request.quotas[rung], self.size(rung - 1) - self.num_failed(rung - 1))

    def promoted(self, rung: int) -> list[StudyTrial]:
        """The trials that are certain to go on from this rung, the best first.

        A trial goes on as soon as no result that is still missing can take its place: devices need not wait for the
        whole rung, and no trial goes on that would not if they did.
        """
        if rung + 1 >= self.request.num_rungs:
            return []
        ranked = self.ranking(rung)
        if self.request.has_pruner:
            return [trial for trial in ranked if trial.decisions.get(rung)]
        missing = self.size(rung) - len(ranked) - self.num_failed(rung)
        return ranked[: max(0, self.size(rung + 1) - missing)]

    def to_decide(self) -> list[TrialJob]:
        """The rungs from which a pruner can now say whether a trial goes on.

        It sees what a suggestion of the same number sees, to the end: the result does not depend on the clock.
        """
        open_ones = [trial for trial in self.trials.values() if not self._is_final(trial)]
        first = min((trial.number for trial in open_ones), default=0)
        return [
            TrialJob(trial.number, len(trial.reached) - 1)
            for trial in open_ones
            if self._is_undecided(trial) and trial.number - self.behind < first
        ]

    def _is_undecided(self, trial: StudyTrial) -> bool:
        at = len(trial.reached)
        return self.request.has_pruner and 0 < at < self.request.num_rungs and at - 1 not in trial.decisions

    def _is_final(self, trial: StudyTrial) -> bool:
        """Whether a trial takes no more steps."""
        at = len(trial.reached)
        return trial.failed is not None or at == self.request.num_rungs or trial.decisions.get(at - 1) is False

    def jobs(self) -> list[TrialJob]:
        """What can run now, the longest first: promotions, then trials that were suggested."""
        found = [
            TrialJob(trial.number, rung + 1)
            for rung in reversed(range(self.request.num_rungs - 1))
            for trial in self.promoted(rung)
            if len(trial.reached) == rung + 1 and trial.failed is None
        ]
        new = [trial for trial in self.trials.values() if not trial.reached and trial.failed is None]
        return [*found, *(TrialJob(trial.number, 0) for trial in new)]

    def next_number(self) -> int | None:
        """The trial that can be suggested now; None if all were, or if results that it is to see are missing."""
        number = len(self.trials) + 1
        if number > self.request.trials:
            return None
        seen = self.seen_by(number)
        return number if len(seen) == max(0, number - self.behind) else None

    def seen_by(self, number: int) -> list[StudyTrial]:
        """The trials whose first rung a suggestion sees, whatever else is known by then."""
        last = number - self.behind
        seen = [trial for trial in self.trials.values() if trial.number <= last]
        return [trial for trial in seen if trial.reached or trial.failed is not None]

    @property
    def behind(self) -> int:
        """Trials before a suggestion that it does not see."""
        return ROUNDS_BEHIND * self.request.slots

    @property
    def is_over(self) -> bool:
        return len(self.trials) >= self.request.trials and not self.jobs() and not self.to_decide()

    @property
    def best(self) -> StudyTrial | None:
        """The best of those that have come furthest."""
        for rung in reversed(range(self.request.num_rungs)):
            if ranked := self.ranking(rung):
                return ranked[0]
        return None

    @property
    def steps(self) -> int:
        return sum(trial.steps for trial in self.trials.values())

    @property
    def whole_steps(self) -> int | None:
        """Steps that all trials would have taken to their end; None if none has come there."""
        lengths = [trial.reached[-1].step for trial in self.ranking(self.request.num_rungs - 1)]
        return max(lengths) * len(self.trials) if lengths else None
