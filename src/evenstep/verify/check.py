"""The check: one device, then every way, in float64 and in the task's own precision."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from evenstep.errors import TrainingError
from evenstep.launcher.prepare import Prepared
from evenstep.verify.causes import Case, find_cause
from evenstep.verify.differences import (
    COARSE,
    FINE,
    Differ,
    Difference,
    Limit,
    first_beyond,
    has_checkpoint,
    saved_as_trained,
)
from evenstep.verify.evidence import Evidence, Failure
from evenstep.verify.limits import WITHOUT_YARDSTICK, Yardstick, exact
from evenstep.verify.runs import Runs, Say, one_device
from evenstep.verify.verdict import PARTS, Part, Verdict, Way
from evenstep.verify.words import differs, fails, same


@dataclass(frozen=True)
class Depth:
    """How much is looked at."""

    steps: int = 4
    own_precision: bool = True
    """Whether the task's own precision is compared beside float64."""
    sync_batchnorm: bool = False
    say: Say = lambda line: None


def check(base: Prepared, ways: Sequence[Way], folder: Path, depth: Depth | None = None) -> dict[Way, Verdict]:
    """Whether each way learns what one device learns; the runs go into `folder`, and are left there."""
    depth = depth or Depth()
    runs = Runs(base, folder, depth.steps, depth.sync_batchnorm, depth.say)
    return {way: Judge(runs, way, depth).verdict() for way in ways}


class Judge:
    """One way against one device."""

    def __init__(self, runs: Runs, way: Way, depth: Depth) -> None:
        self._runs = runs
        self._way = way
        self._depth = depth
        self._own = runs.base.plan.precision
        self._notes: list[str] = []
        self._found: list[Difference] = []
        self._is_rough = False

    def verdict(self) -> Verdict:
        """The arithmetic first; then the same in practice."""
        precision = "fp64" if self._has_float64() else self._own
        reference = self._reference(precision)
        self._is_rough = precision != "fp64" or reference.facts["narrow"] is not None
        self._note_about(reference)
        run = self._runs.watched(self._way, precision, is_saved=True)
        if len(reference.without_gradient) == len(reference.facts["parameters"]):
            run = Failure("no gradient reaches any parameter of the model: nothing is learned, on one device either")
        if isinstance(run, Failure):
            return self._failed(run, reference, precision)
        limit = self._limit(precision)
        differ = Differ(COARSE if self._is_rough else FINE)
        self._found = differ.all(reference, run)
        if first_beyond(self._found, limit) is None:
            self._found += self._round_trip(differ, reference, run, precision)
        first = first_beyond(self._found, limit)
        if first is not None:
            return self._differs(first, reference, run, precision, limit)
        if differ.silent:
            names = ", ".join(differ.silent[:3]) + (" ..." if len(differ.silent) > 3 else "")
            self._notes.append(f"nothing is learned by {names}: the gradient is rounding noise, and was not judged")
        if self._depth.own_precision and precision == "fp64" != self._own:
            return self._in_practice(limit)
        return self._same(limit)

    def _has_float64(self) -> bool:
        """Whether the task can be computed in float64 at all."""
        if self._own == "fp64":
            return True
        found = self._runs.watched(one_device(self._way), "fp64")
        if isinstance(found, Failure):
            why = found.first_lines.splitlines()
            self._notes.append(
                f"the task does not run in float64 ({why[-1] if why else 'it failed'}), so {self._own} alone was "
                f"compared, to {WITHOUT_YARDSTICK[self._own]:g}"
            )
        return not isinstance(found, Failure)

    def _reference(self, precision: str) -> Evidence:
        found = self._runs.watched(one_device(self._way), precision)
        if isinstance(found, Failure):
            raise TrainingError(f"single itself does not run, so there is nothing to compare with:\n{found.message}")
        assert isinstance(found, Evidence)
        return found

    def _note_about(self, reference: Evidence) -> None:
        if reference.facts["dropout"]:
            self._notes.append(
                "dropout was switched off in all of these runs: it is drawn anew for every device, on purpose"
            )
        if reference.facts["narrow"]:
            self._notes.append(
                f"asked for float64, the task computes in fewer digits all the same ({reference.facts['narrow']}), so "
                "it was compared as far as rounding allows"
            )
        without = reference.without_gradient
        if without:
            more = f" and {len(without) - 3} more" if len(without) > 3 else ""
            self._notes.append(f"no gradient reaches {', '.join(without[:3])}{more}, on one device either")

    def _round_trip(self, differ: Differ, reference: Evidence, run: Evidence, precision: str) -> list[Difference]:
        """A checkpoint of this way holds what was trained, and one device goes on from it as if from its own."""
        half = max(1, self._depth.steps // 2)
        if not has_checkpoint(run, half) or half == self._depth.steps:
            return []
        found = saved_as_trained(run, half)
        resume = str(run.checkpoint(half))
        again = f"from a checkpoint of {self._way.label}"
        resumed = self._runs.watched(one_device(self._way), precision, again=again, resume=resume)
        run.forget_checkpoints()
        if isinstance(resumed, Failure):
            self._notes.append(f"its checkpoint cannot be gone on from: {resumed.first_lines}")
            return [*found, Difference("checkpoint", half, "checkpoint", math.inf)]
        return found + [
            Difference("checkpoint", one.step, one.name, one.size)
            for one in differ.all(reference, resumed)
            if one.step > half and one.part not in ("samples", "evaluation")
        ]

    def _limit(self, precision: str) -> Limit:
        """What counts as rounding."""
        if not self._is_rough:
            return exact
        if precision == "fp64" != self._own:
            return Yardstick(Differ(COARSE).all(self._reference("fp64"), self._reference(self._own)), self._own)
        return Yardstick([], precision, WITHOUT_YARDSTICK.get(precision, WITHOUT_YARDSTICK["fp32"]))

    def _in_practice(self, arithmetic: Limit) -> Verdict:
        """In the task's own precision: a way may be off as far as rounding itself is, and some more."""
        self._is_rough = True
        reference, run = self._reference(self._own), self._runs.watched(self._way, self._own)
        if isinstance(run, Failure):
            return self._failed(run, reference, self._own)
        noise = Differ(COARSE).all(self._reference("fp64"), reference)
        found = Differ(COARSE).all(reference, run)
        limit = Yardstick(noise, self._own)
        first = first_beyond(found, limit)
        most = max((one.size for one in found if one.part in ("loss", "gradients")), default=0.0)
        by_rounding = max((one.size for one in noise if one.part in ("loss", "gradients")), default=0.0)
        said = f"in {self._own} it is off by {most:.1e} at most; rounding alone makes {by_rounding:.1e} on one device"
        self._notes.append(said)
        if first is None:
            return self._same(arithmetic)
        why = (
            f"a difference of precision: in float64 {self._way.label} and single agree to {self._largest():.0e}, "
            f"in {self._own} they do not. Something is computed in fewer digits in one of them"
        )
        first = _tensor_of(first, found, limit)
        evidence = (said, f"allowed were {limit(first.part, first.name):.1e} for {first.name}")
        advice = "Look for a cast (.half(), .bfloat16(), autocast) that depends on how many processes there are."
        return Verdict(
            is_same=False,
            sentence=differs(self._way.label, first, self._own),
            cause="precision",
            why=why,
            evidence=evidence,
            advice=advice,
            first_step=first.step,
            first_tensor=first.name,
            difference=first.size,
            notes=tuple(self._notes),
            parts=_parts(found, limit),
        )

    def _largest(self) -> float:
        return max((one.size for one in self._found), default=0.0)

    def _same(self, limit: Limit) -> Verdict:
        return Verdict(
            is_same=True,
            sentence=same(self._way.label, self._largest()),
            notes=tuple(self._notes),
            parts=_parts(self._found, limit),
        )

    def _failed(self, failure: Failure, reference: Evidence, precision: str) -> Verdict:
        case = Case(
            self._runs, self._way, precision, reference, None, None, self._limit(precision), is_rough=self._is_rough
        )
        cause = find_cause(case, failure)
        return Verdict(
            is_same=False,
            sentence=fails(self._way.label, failure),
            cause=cause.name,
            why=cause.sentence,
            evidence=cause.evidence,
            advice=cause.advice,
            notes=tuple(self._notes),
        )

    def _differs(self, first: Difference, reference: Evidence, run: Evidence, precision: str, limit: Limit) -> Verdict:
        beyond = {one.part for one in self._found if one.size > limit(one.part, one.name)}
        case = Case(self._runs, self._way, precision, reference, run, first, limit, frozenset(beyond), self._is_rough)
        cause = find_cause(case, None)
        shown = _tensor_of(first, self._found, limit)
        return Verdict(
            is_same=False,
            sentence=differs(self._way.label, shown, precision),
            cause=cause.name,
            why=cause.sentence,
            evidence=cause.evidence,
            advice=cause.advice,
            first_step=shown.step,
            first_tensor=shown.name,
            difference=shown.size,
            notes=tuple(self._notes),
            parts=_parts(self._found, limit),
        )


def _tensor_of(first: Difference, found: Sequence[Difference], limit: Limit) -> Difference:
    """The first tensor that differs in that step: it says more than a loss does."""
    of_step = (one for one in found if one.step == first.step and one.part not in ("loss", "samples"))
    return (
        first
        if first.part == "samples"
        else next((one for one in of_step if one.size > limit(one.part, one.name)), first)
    )


def _parts(found: Sequence[Difference], limit: Limit) -> dict[str, Part]:
    parts = {}
    for name in PARTS:
        of_part = [one for one in found if one.part == name]
        is_same = all(one.size <= limit(name, one.name) for one in of_part)
        parts[name] = Part(max((one.size for one in of_part), default=None), is_same)
    return parts
