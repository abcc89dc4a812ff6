"""`verify --exact`: with virtual replicas, does a configuration have the very bits of one device?

Runs are compared by digests of every tensor of every step. Where they differ, the first step that does is run again
with every operation listed: on one device twice, which tells a task that does not repeat itself, and by the
configuration.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from evenstep.checkpoint.state_dict import Tensors
from evenstep.errors import TrainingError
from evenstep.launcher.prepare import Prepared
from evenstep.strategy_facts import REFERENCE
from evenstep.verify.differences import THINGS, Difference, fails
from evenstep.verify.operation_bits import FirstOperation, Traced, Traces, first_other, read_traces
from evenstep.verify.recorder import Evidence, Failure
from evenstep.verify.run_configurations import Log, Runs
from evenstep.verify.tolerance import parts_of
from evenstep.verify.verdict_table import Configuration, DifferenceCause, Verdict

KINDS = {
    "start": "weights",
    "gradient": "gradients",
    "weight": "weights",
    "buffer": "weights",
    "optimizer": "optimizer",
}
"""In the order in which a step makes them: the part of the verdict that a kind of tensor belongs to."""


GATHER = "evenstep.gather"


@dataclass(frozen=True)
class ExactDepth:
    """How much is compared."""

    virtual_replicas: int
    steps: int = 4
    log: Log = lambda line: None


def judged_exactly(
    base: Prepared, configs: Sequence[Configuration], folder: Path, depth: ExactDepth
) -> Iterator[tuple[Configuration, Verdict]]:
    """Whether each configuration has the bits of one device, as they are known."""
    runs = Runs(base, folder, depth.steps, log=depth.log)
    try:
        for config in configs:
            if config.strategy != REFERENCE:
                yield config, ExactCheck(runs, config, depth.virtual_replicas).verdict()
                runs.forget_checkpoints(config)
    finally:
        runs.forget_checkpoints()


class ExactCheck:
    """Compares one configuration with one device, bit for bit."""

    def __init__(self, runs: Runs, config: Configuration, virtual_replicas: int) -> None:
        self._runs, self._config, self._replicas = runs, config, virtual_replicas
        self._single = Configuration(REFERENCE, config.devices[:1], config.accumulate)
        self._notes: list[str] = []
        self._found: list[Difference] = []

    def verdict(self) -> Verdict:
        reference = self._runs.bits(self._single, self._replicas)
        if isinstance(reference, Failure) and GATHER in reference.message:
            return replace(
                Verdict.because(_failure(reference), "single fails with virtual replicas", self._notes),
                operation=GATHER,
            )
        if isinstance(reference, Failure):
            raise TrainingError(f"single itself fails, so there is nothing to compare with:\n{reference.first_lines}")
        run = self._runs.bits(self._config, self._replicas)
        if isinstance(run, Failure):
            return Verdict.because(_failure(run), fails(self._config.label, run), self._notes)
        self._found = differences(reference, run)
        if all(one.size == 0 for one in self._found):
            self._found += self._resumed(reference, self._config, reference)
            self._found += self._resumed(reference, self._single, run)
        self._note_kernels(reference, run)
        first = next((one for one in self._found if one.size), None)
        if first is None:
            return Verdict(
                is_same=True,
                sentence=f"{self._config.label} is bit-identical to single",
                notes=tuple(self._notes),
                parts=parts_of(self._found, lambda one: 0.0),
            )
        return self._differs(first, reference, run)

    def _resumed(self, reference: Evidence, config: Configuration, saved: Evidence) -> list[Difference]:
        """A run that continues another one's checkpoint, against one device that was not interrupted."""
        half = self._runs.half
        if half == self._runs.steps:
            return []
        resumed = self._runs.bits(config, self._replicas, resume=str(saved.checkpoint(half)))
        if isinstance(resumed, Failure):
            self._notes.append(f"{config.label} cannot resume from a checkpoint: {resumed.first_lines}")
            return [Difference("checkpoint", half, "checkpoint", math.inf)]
        found = differences(reference, resumed)
        return [Difference("checkpoint", one.step, one.name, one.size) for one in found if one.part != "evaluation"]

    def _note_kernels(self, *runs: Evidence) -> None:
        kernels = dict.fromkeys(kernel for run in runs for kernel in read_traces(run.folder).kernels)
        if kernels:
            self._notes.append(f"torch has no deterministic kernel here for {', '.join(kernels)}")

    def _differs(self, first: Difference, reference: Evidence, run: Evidence) -> Verdict:
        shown = _tensor_of(first, self._found)
        when = f"at step {shown.step}" if shown.step else "before the first step"
        thing = THINGS[shown.part].format(name=shown.name)
        cause, operation = self._cause(first, reference, run)
        sentence = f"{self._config.label} is not bit-identical to single: {when}, {thing} differs"
        verdict = Verdict.because(cause, sentence, self._notes)
        return replace(
            verdict,
            first_step=shown.step,
            first_tensor=shown.name,
            operation=operation,
            parts=parts_of(self._found, lambda one: 0.0),
        )

    def _cause(self, first: Difference, reference: Evidence, run: Evidence) -> tuple[DifferenceCause, str | None]:
        threads = [read_traces(one.folder).threads for one in (reference, run)]
        if len({*threads[0], *threads[1]}) > 1:
            return _threads(threads), None
        is_evaluation = first.part == "evaluation"
        if first.part in ("samples", "checkpoint") or not (first.step or is_evaluation):
            return DifferenceCause(
                name="not-found", sentence=f"no operation of a step: {first.part} alone differs"
            ), None
        traced = [
            self._runs.bits(config, self._replicas, traced=Traced(first.step, is_evaluation), again=again)
            for config, again in ((self._single, ""), (self._single, "again"), (self._config, ""))
        ]
        failed = [one.first_lines for one in traced if isinstance(one, Failure)]
        if failed:
            sentence = "the step could not be run again with every operation listed"
            return DifferenceCause(name="not-found", sentence=sentence, evidence=(failed[0],)), None
        once, again, here = (read_traces(one.folder) for one in traced)
        repeated = first_other(once, again)
        if repeated is not None:
            return _not_repeatable(repeated, once, self._where(repeated, is_evaluation)), _named(repeated)
        found = first_other(once, here)
        if found is not None:
            return _operation(found, self._where(found, is_evaluation)), _named(found)
        return self._outside(_tensor_of(first, self._found)), None

    def _where(self, found: FirstOperation, is_evaluation: bool) -> str:
        if is_evaluation:
            return "the evaluation"
        virtual, micro = divmod(found.number, self._config.accumulate)
        return f"virtual replica {virtual}" + (f" (micro-batch {micro})" if self._config.accumulate > 1 else "")

    def _outside(self, shown: Difference) -> DifferenceCause:
        """Every operation of forward and backward gave the same bits."""
        reasons = {
            "gradients": "the sum over virtual replicas",
            "optimizer": "the optimizer step",
            "evaluation": "the sum of the evaluation",
            "weights": "the optimizer step, or what combines the buffers of virtual replicas",
        }
        sentence = (
            f"every operation of forward and backward is bit-identical; {reasons.get(shown.part, shown.part)} is not"
        )
        return DifferenceCause(name="outside", sentence=sentence)


def differences(one: Evidence, other: Evidence) -> list[Difference]:
    """All that was compared, in the order of time: 0 where the bits are the same, infinite where not."""
    found: list[Difference] = []
    begin = max(one.begin, other.begin)
    for step in sorted(step for step in {*one.losses, *other.losses} if step > begin):
        found.append(
            _judged("samples", step, "samples", sorted(one.ids.get(step, ())), sorted(other.ids.get(step, ())))
        )
        found.append(_judged("loss", step, "loss", one.losses.get(step), other.losses.get(step)))
        first, second = (run.tensors(step) if step in run.steps else {} for run in (one, other))
        found += _of_step(step, first, second, is_resumed=one.begin != other.begin)
    evaluations = [
        {each.step: each.values for each in run.record.evaluations if each.step > begin} for run in (one, other)
    ]
    for step in sorted({*evaluations[0], *evaluations[1]}):
        ours, theirs = (values.get(step, {}) for values in evaluations)
        for name in dict.fromkeys([*ours, *theirs]):
            found.append(_judged("evaluation", step, name, ours.get(name), theirs.get(name)))
    return found


def _of_step(step: int, one: Tensors, other: Tensors, is_resumed: bool) -> Iterator[Difference]:
    keys = list(dict.fromkeys([*one, *other]))
    for kind, part in KINDS.items():
        # A resumed run starts from other weights.
        for key in keys if kind != "start" or not is_resumed else ():
            if key.startswith(f"{kind}/"):
                digests = [run[key].tolist() if key in run else None for run in (one, other)]
                yield _judged(part, 0 if kind == "start" else step, key.partition("/")[2], *digests)


def _judged(part: str, step: int, name: str, one: object, other: object) -> Difference:
    # As text: NaN is NaN, and -0.0 is not 0.0.
    return Difference(part, step, name, 0.0 if repr(one) == repr(other) else math.inf)


def _tensor_of(first: Difference, found: Sequence[Difference]) -> Difference:
    """The first tensor that differs in that step: it says more than a loss does."""
    of_step = (one for one in found if one.step == first.step and one.size and one.part not in ("loss", "samples"))
    return first if first.part == "samples" else next(of_step, first)


def _named(found: FirstOperation) -> str:
    return str(found.operation) if found.operation is not None else "reading the samples"


def _operation(found: FirstOperation, where: str) -> DifferenceCause:
    operation = found.operation
    if operation is None:
        return DifferenceCause(
            name="reading",
            sentence=f"the samples of {where} are not those of single",
            advice="Let a sample depend on its id alone.",
        )
    if operation.draws:
        return DifferenceCause(
            name="draws",
            sentence=f"in {where}, {operation} draws other numbers than on single",
            evidence=("single is bit-reproducible",),
            advice="Draw from torch's global generators, which --virtual-replicas seeds for each micro-batch.",
        )
    return DifferenceCause(
        name="operation",
        sentence=f"in {where}, {operation} is the first operation whose result differs",
        evidence=("single is bit-reproducible",),
        advice="Look for what differs between devices there: a state that is kept between calls, the rank, a kernel "
        "chosen by measuring.",
    )


def _not_repeatable(found: FirstOperation, traces: Traces, where: str) -> DifferenceCause:
    kernels = f"; torch has no deterministic kernel for {', '.join(traces.kernels)}" if traces.kernels else ""
    what = (
        "draws different numbers"
        if found.operation is not None and found.operation.draws
        else "computes a different result"
    )
    return DifferenceCause(
        name="not-repeatable",
        sentence=f"single is not bit-reproducible: in {where}, {_named(found)} {what} in a second run{kernels}",
        advice="Replace the operation by one with a deterministic kernel, and seed what draws.",
    )


def _threads(threads: Sequence[Sequence[int]]) -> DifferenceCause:
    return DifferenceCause(
        name="threads",
        sentence=f"the processes of single compute with {threads[0]} threads, those of the configuration with "
        f"{threads[1]}, and kernels split their sums by threads",
        advice="Set OMP_NUM_THREADS to one number.",
    )


def _failure(failure: Failure) -> DifferenceCause:
    if GATHER in failure.message:
        return DifferenceCause(
            name="batch-dependent",
            sentence="the loss is one of the whole batch: evenstep.gather needs all samples at once, and virtual "
            "replicas are computed one after the other",
            advice="Leave --virtual-replicas out for this loss.",
        )
    return DifferenceCause(name="failed", sentence=failure.first_lines)
