"""The check: train on one device, then with every configuration, in float64 and in the task's own precision."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from evenstep.errors import TrainingError
from evenstep.launcher.prepare import Prepared
from evenstep.link_method import parse_link
from evenstep.strategy_facts import REFERENCE
from evenstep.verify.causes import BATCH_DEPENDENT, Case, find_cause, lies_in_task, only_in
from evenstep.verify.differences import (
    COARSE,
    FINE,
    STEP,
    Differ,
    Difference,
    Limit,
    by_rounding,
    differs,
    fails,
    first_beyond,
    has_steps,
    is_loss,
    jumps,
    most,
    same,
    saved_as_trained,
    still,
    tensor_of,
)
from evenstep.verify.recorder import MOST_TRIED, Evidence, Failure
from evenstep.verify.run_configurations import Budget, Log, OutOfTime, Runs, one_device
from evenstep.verify.tolerance import FALLBACK_TOLERANCE, LinkLimit, PerturbedLimit, RoundingLimit, exact, parts_of
from evenstep.verify.verdict_table import Configuration, DifferenceCause, Verdict

SKIPPED = (
    "no optimizer step was taken in both runs: fp16's GradScaler skips steps until it has found its scale; use more "
    "steps (--steps 20)"
)


@dataclass(frozen=True)
class Depth:
    """How much is compared."""

    steps: int = 4
    own_precision: bool = True
    """Whether the task's own precision is compared beside float64."""
    sync_batchnorm: bool = False
    from_single: bool = False
    """Whether each configuration also resumes from a checkpoint of one device; the reverse is always tested."""
    log: Log = lambda line: None


def check(
    base: Prepared, configs: Sequence[Configuration], folder: Path, depth: Depth | None = None
) -> dict[Configuration, Verdict]:
    """Whether each configuration matches one device; the runs are written to `folder` and left there."""
    return settled(dict(judged(base, configs, folder, depth or Depth())))


def judged(
    base: Prepared, configs: Sequence[Configuration], folder: Path, depth: Depth
) -> Iterator[tuple[Configuration, Verdict]]:
    """The verdicts as they are reached, so that an error in a later one does not lose them."""
    runs = Runs(base, folder, depth.steps, depth.sync_batchnorm, depth.log)
    search = replace(runs, budget=Budget())
    try:
        for config in configs:
            verdict = ConfigurationCheck(runs, search, config, depth).verdict()
            # They may be large, and another configuration follows.
            runs.forget_checkpoints(config)
            yield config, verdict
    finally:
        runs.forget_checkpoints()


class ConfigurationCheck:
    """Compares one configuration with one device."""

    def __init__(self, runs: Runs, search: Runs, config: Configuration, depth: Depth) -> None:
        self._runs = runs
        self._search = search
        """The same runs, within the time limit of the search for causes."""
        self._config = config
        self._depth = depth
        self._own = runs.base.plan.precision
        self._method = parse_link(config.link)
        self._first = "fp64"
        """The precision in which the arithmetic is judged."""
        self._notes: list[str] = []
        self._found: list[Difference] = []
        self._is_rough = False

    def verdict(self) -> Verdict:
        """Compare in float64 first, then in the precision of the task."""
        self._first = precision = "fp64" if self._has_float64() else self._own
        reference = self._reference(precision)
        self._is_rough = precision != "fp64" or reference.facts["narrow"] is not None
        self._note_about(reference)
        run = self._runs.watched(self._config, precision, is_saved=True)
        if reference.steps and len(reference.without_gradient) == len(reference.facts["parameters"]):
            run = Failure("no gradient reaches any parameter of the model: nothing is learned, not even on one device")
        if isinstance(run, Failure):
            return self._failed(run, reference, precision)
        limit = self._limit(precision)
        differ = Differ(COARSE if self._is_rough else FINE)
        self._found = self._without_skips(differ.all(reference, run), reference, run)
        if not has_steps(self._found):
            skipped = DifferenceCause(name="not-judged", sentence=SKIPPED)
            return Verdict.because(skipped, f"{self._config.label} was not compared ({precision})", self._notes)
        if not self._is_explained(reference, run, limit):
            limit = self._eased(limit, self._found, reference)
        if first_beyond(self._found, limit) is None:
            self._found += self._round_trip(differ, reference, run, precision)
            limit = self._eased(limit, self._found, reference)
        first = first_beyond(self._found, limit)
        if first is not None:
            case = self._case(reference, run, precision, limit, self._found)
            return self._differs(first, self._found, case, find_cause(case, None))
        if differ.silent:
            names = ", ".join(differ.silent[:3]) + (" ..." if len(differ.silent) > 3 else "")
            self._notes.append(f"the gradient of {names} is rounding noise and was not compared")
        if not self._method.is_exact:
            self._notes.append(f"--link {self._config.link} is not exact: losses were compared within its tolerance")
        elif self._depth.own_precision and precision == "fp64" != self._own:
            return self._in_practice(limit)
        return self._same(limit)

    def _has_float64(self) -> bool:
        """Whether the task can be computed in float64 at all."""
        if self._own == "fp64":
            return True
        found = self._runs.watched(one_device(self._config), "fp64", is_saved=True)
        if not isinstance(found, Failure):
            return True
        why = found.first_lines.splitlines()
        self._notes.append(
            f"the task does not run in float64 ({why[-1] if why else 'it failed'}), so only {self._own} was "
            f"compared, with tolerance {FALLBACK_TOLERANCE[self._own]:g}"
        )
        return False

    def _reference(self, precision: str) -> Evidence:
        found = self._runs.watched(one_device(self._config), precision, is_saved=precision == self._first)
        if isinstance(found, Failure):
            raise TrainingError(f"single itself fails, so there is no reference to compare with:\n{found.first_lines}")
        assert isinstance(found, Evidence)
        return found

    def _note_about(self, reference: Evidence) -> None:
        if reference.facts["dropout"]:
            self._notes.append("dropout was disabled in all of these runs: by design, each device draws its own")
        if reference.facts["narrow"]:
            self._notes.append(
                f"the task computes in lower precision even when run in float64 ({reference.facts['narrow']}), so it "
                "was compared within the rounding of that precision"
            )
        values = dict.fromkeys(name for one in reference.record.evaluations for name in one.values)
        metrics = [name for name in values if not is_loss(name)]
        if metrics and self._is_rough:
            self._notes.append(
                f"evaluation metrics were not compared ({', '.join(metrics)}): rounding can flip single samples"
            )
        without = reference.without_gradient
        if without and reference.steps:
            more = f" and {len(without) - 3} more" if len(without) > 3 else ""
            self._notes.append(f"no gradient reaches {', '.join(without[:3])}{more}, not even on one device")

    def _round_trip(self, differ: Differ, reference: Evidence, run: Evidence, precision: str) -> list[Difference]:
        """A checkpoint of this configuration is complete, and one device resumes from it as from its own."""
        half = self._runs.half
        if not run.checkpoint(half).is_dir():
            return [Difference("checkpoint", half, "checkpoint", math.inf)]
        found = saved_as_trained(run, half)
        if half == self._depth.steps:
            self._notes.append("resuming from a checkpoint was not tested: it takes at least two steps")
            return found
        found += self._resumed(differ, reference, one_device(self._config), run, precision)
        if self._depth.from_single:
            found += self._resumed(differ, reference, self._config, reference, precision)
        return found

    def _resumed(
        self, differ: Differ, reference: Evidence, config: Configuration, saved: Evidence, precision: str
    ) -> list[Difference]:
        """Compare a configuration resumed from a checkpoint with one device that was not interrupted."""
        half = self._runs.half
        whose = REFERENCE if saved is reference else self._config.label
        again, resume = f"resumed from a checkpoint of {whose}", str(saved.checkpoint(half))
        resumed = self._runs.watched(config, precision, again=again, resume=resume)
        if isinstance(resumed, Failure):
            self._notes.append(f"{config.label} cannot resume from a checkpoint of {whose}: {resumed.first_lines}")
            return [Difference("checkpoint", half, "checkpoint", math.inf)]
        return [
            Difference("checkpoint", one.step, one.name, one.size)
            for one in self._without_skips(differ.all(reference, resumed), reference, resumed)
            if one.part not in ("samples", "evaluation")
        ]

    def _limit(self, precision: str) -> Limit:
        if not self._method.is_exact:
            return LinkLimit(self._method)
        if not self._is_rough:
            return exact
        if precision == "fp64" != self._own:
            return RoundingLimit(Differ(COARSE).all(self._reference("fp64"), self._reference(self._own)), self._own)
        return RoundingLimit([], precision)

    def _in_practice(self, arithmetic: Limit) -> Verdict:
        """Compare in the task's own precision, with a tolerance measured from rounding on one device."""
        self._is_rough = True
        reference, run = self._reference(self._own), self._runs.watched(self._config, self._own)
        if isinstance(run, Failure):
            return self._failed(run, reference, self._own)
        noise = Differ(COARSE).all(self._reference("fp64"), reference)
        found = self._without_skips(Differ(COARSE).all(reference, run), reference, run)
        limit: Limit = RoundingLimit(noise, self._own)
        result = f"in {self._own}, max relative difference {most(found):.1e}; {by_rounding(noise)}"
        if not has_steps(found):
            result = f"in {self._own} nothing was compared: {SKIPPED}"
        self._notes.append(result)
        limit = self._eased(limit, found, reference)
        first = first_beyond(found, limit)
        if first is None:
            return self._same(arithmetic)
        shown = tensor_of(first, found, limit)
        tested = [result, f"the tolerance for {shown.name} is {limit(shown):.1e}"]
        if isinstance(limit, PerturbedLimit):
            tested.append(still(limit.moved(shown), limit.num_tried))
        case = self._case(reference, run, self._own, limit, found)
        return self._differs(first, found, case, only_in(case, self._largest(), tuple(tested)))

    def _is_explained(self, reference: Evidence, run: Evidence, limit: Limit) -> bool:
        """Whether the task itself shows the reason, so that rounding need not be measured."""
        if not self._is_rough or first_beyond(self._found, limit) is None:
            return False
        try:
            return lies_in_task(self._case(reference, run, self._first, limit, self._found))
        except OutOfTime:
            return False

    def _eased(self, limit: Limit, found: Sequence[Difference], reference: Evidence) -> Limit:
        """A wider limit, from how far tiny perturbations of the weights move one device."""
        first = first_beyond(found, limit)
        if first is None or not self._is_rough or any(math.isinf(one.size) for one in found):
            return limit
        precision = reference.record.plan.precision
        eased = PerturbedLimit(limit)
        for number in range(1, MOST_TRIED + 1):
            try:
                run = self._search.watched(one_device(self._config), precision, perturbation=number)
            except OutOfTime:
                break
            if isinstance(run, Failure):
                break
            eased.add(Differ(COARSE).all(reference, run))
            if first_beyond(found, eased) is None:
                shown = tensor_of(first, found, limit)
                self._notes.append(jumps(shown, eased.moved(shown), precision))
                break
        return eased

    def _without_skips(self, found: list[Difference], reference: Evidence, run: Evidence) -> list[Difference]:
        """Ignore steps that only one run skipped: in fp16 a whole batch overflows sooner than its parts."""
        skipped = [
            one
            for one in found
            if one.name == STEP
            and run.record.plan.precision == "fp16"
            and one.step in reference.losses
            and one.step in run.losses
        ]
        for one in skipped:
            self._notes.append(
                f"fp16's GradScaler skipped step {one.step} in one run only, since a whole batch overflows sooner than "
                "its parts; the steps before it were compared"
            )
        return [one for one in found if one not in skipped]

    def _largest(self) -> float:
        return max((one.size for one in self._found), default=0.0)

    def _same(self, limit: Limit) -> Verdict:
        return Verdict(
            is_same=True,
            sentence=same(self._config.label, self._largest()),
            notes=tuple(self._notes),
            parts=parts_of(self._found, limit),
        )

    def _failed(self, failure: Failure, reference: Evidence, precision: str) -> Verdict:
        cause = find_cause(self._case(reference, None, precision, self._limit(precision), ()), failure)
        return Verdict.because(cause, fails(self._config.label, failure), self._notes)

    def _case(
        self, reference: Evidence, run: Evidence | None, precision: str, limit: Limit, found: Sequence[Difference]
    ) -> Case:
        beyond = {one for one in found if one.size > limit(one)}
        return Case(self._search, self._config, precision, reference, run, limit, frozenset(beyond), self._is_rough)

    def _differs(self, first: Difference, found: Sequence[Difference], case: Case, cause: DifferenceCause) -> Verdict:
        shown = tensor_of(first, found, case.limit)
        return replace(
            Verdict.because(cause, differs(self._config.label, shown, case.precision), self._notes),
            first_step=shown.step,
            first_tensor=shown.name,
            difference=shown.size,
            parts=parts_of(found, case.limit),
        )


def settled(verdicts: Mapping[Configuration, Verdict]) -> dict[Configuration, Verdict]:
    """Final verdicts: a loss that needs the whole batch gets the advice to use a strategy that passed, if one did.

    A loss that gathers from all ranks agrees under ddp and fsdp, and cannot under dp or in micro-batches.
    """
    passed = [config.label for config, verdict in verdicts.items() if verdict.is_same and len(config.devices) > 1]
    if not passed:
        return dict(verdicts)
    advice = f"Use {' or '.join(passed)}: there the loss sees the whole batch and matches single."
    return {
        config: replace(verdict, advice=advice) if verdict.cause == BATCH_DEPENDENT else verdict
        for config, verdict in verdicts.items()
    }
