"""Why a way differs: each cause is a test, tried in turn; what no test confirms is not claimed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from evenstep.verify.by_rank import by_rank
from evenstep.verify.differences import COARSE, FINE, Differ, Difference, Limit, first_beyond
from evenstep.verify.evidence import Evidence, Failure
from evenstep.verify.of_task import buffers, captured, draws, hooks, loss, metrics, reading
from evenstep.verify.runs import Runs, one_device
from evenstep.verify.verdict import Cause, Way
from evenstep.verify.words import in_percent


@dataclass(frozen=True)
class Case:
    """A way that differs from one device, and how."""

    runs: Runs
    way: Way
    precision: str
    reference: Evidence
    run: Evidence | None
    first: Difference | None
    limit: Limit
    beyond: frozenset[str] = frozenset()
    """The parts that differ."""
    is_rough: bool = False
    """Whether it is computed in fewer digits than float64 has."""

    @property
    def single(self) -> Way:
        return one_device(self.way)

    def found(self) -> dict[str, Any]:
        """What the task showed on one device, taken apart."""
        (found,) = self.runs.examined(self.single, self.precision, self.is_rough) or [{}]
        return found

    def on_ranks(self) -> list[dict[str, Any]]:
        """The same from every rank; empty for a way of one process."""
        is_spread = self.way.strategy in ("ddp", "fsdp")
        return self.runs.examined(self.way, self.precision, self.is_rough) if is_spread else []

    def apart(self, one: Any, other: Any) -> float:
        """How far two runs are apart in what they compute, or infinity if one of them failed."""
        if isinstance(one, Failure) or isinstance(other, Failure):
            return float("inf")
        found = Differ(COARSE if self.is_rough else FINE).all(one, other)
        most = min(max((each.size for each in found), default=0.0), self.limit("gradients", ""))
        return max((each.size for each in found if first_beyond([each], self.limit)), default=most)

    def agrees(self, apart: float) -> bool:
        """Whether that is rounding."""
        return apart <= self.limit("gradients", "")


def find_cause(case: Case, failure: Failure | None) -> Cause:
    """The first cause that its test confirms."""
    if failure is not None:
        return _failed(case, failure)
    for test in _tests(case):
        cause = test(case)
        if cause is not None:
            return cause
    problems = (case.found().get("problems") or {}).items()
    return Cause(
        name="unknown",
        sentence="the cause was not found: it is none of those that are looked for",
        evidence=(
            "single, run twice, gave the same",
            *(f"could not be tested: {name} ({why})" for name, why in problems),
        ),
        advice="Run it again with --keep, and compare the first tensor that differs in the runs that it leaves.",
    )


def _tests(case: Case) -> list[Callable[[Case], Cause | None]]:
    by_found: list[Callable[[Case], Cause | None]] = [
        _not_repeated,
        lambda case: captured(case.found()),
        _batch_norm,
        lambda case: by_rank(case.found(), case.on_ranks(), case.way.label, case.is_rough),
        lambda case: draws(case.found(), case.is_rough),
        lambda case: reading(case.found()),
        lambda case: loss(case.found()),
        lambda case: buffers(case.found(), is_cut=case.way.accumulate > 1),
        lambda case: hooks(case.found()),
        lambda case: metrics(case.found()),
        _cut_alone,
    ]
    if case.beyond <= {"checkpoint"}:
        return [_forgotten, *by_found]
    if case.beyond <= {"evaluation"}:
        return [lambda case: metrics(case.found()), *by_found]
    return by_found


def _not_repeated(case: Case) -> Cause | None:
    """The same run twice on one device."""
    again = case.runs.watched(case.single, case.precision, again="again")
    apart = case.apart(case.reference, again)
    if case.agrees(apart):
        return None
    found = case.found()
    twice = found.get("again") or {}
    warned = tuple(f"torch says: {line}" for line in twice.get("warned", []))
    starts = _start_apart(case.reference, again)
    if starts:
        return Cause(
            name="start",
            sentence=f"the model is not the same when it is made twice: {starts} differs before the first step",
            evidence=(f"single, run twice, differs by {in_percent(apart)}",),
            advice="Draw its weights from torch's, NumPy's or Python's own generators, which are seeded before.",
        )
    return Cause(
        name="not-repeatable",
        sentence="the task does not repeat itself, on one device either: the same run twice gives something else",
        evidence=(f"single, run twice, differs by {in_percent(apart)}", *warned),
        advice="Look for a generator without a seed, the time, or the process id in model, loss and data; "
        "or train with --deterministic if an operation is to blame.",
    )


def _start_apart(one: Evidence, other: Any) -> str | None:
    if isinstance(other, Failure):
        return None
    found = Differ(FINE).all(one, other)
    return next((each.name for each in found if each.step == 0 and each.size > 0), None)


def _batch_norm(case: Case) -> Cause | None:
    """The same two runs with statistics that are no longer each device's own."""
    layers = case.found().get("norms") or []
    if not layers or case.run is None:
        return None
    before = case.apart(case.reference, case.run)
    is_shared = case.way.strategy in ("ddp", "fsdp") and case.way.accumulate == 1
    if is_shared and not case.runs.sync_batchnorm:
        after = case.apart(case.reference, case.runs.watched(case.way, case.precision, sync_batchnorm=True))
        tried, advice = "with --sync-batchnorm", "Train with --sync-batchnorm."
    else:
        calm = [case.runs.watched(way, case.precision, norms="eval") for way in (case.single, case.way)]
        after = case.apart(*calm)
        tried = "with BatchNorm in eval mode everywhere"
        advice = (
            "Train with ddp or fsdp and --sync-batchnorm, or use GroupNorm."
            if case.way.accumulate == 1
            else "Train with no accumulation, or use GroupNorm: micro-batches are normalized one by one."
        )
    if not case.agrees(after):
        return None
    names = f"{layers[0]} and {len(layers) - 1} more" if len(layers) > 1 else layers[0]
    return Cause(
        name="batchnorm",
        sentence=f"BatchNorm ({names}) normalizes by the statistics of each part of the batch, not of the whole batch",
        evidence=(f"it differs by {in_percent(before)}, and {tried} by {after:.0e}",),
        advice=advice,
    )


def _forgotten(case: Case) -> Cause | None:
    """One device that goes on from its own checkpoint."""
    saved = case.runs.watched(case.single, case.precision, again="saved", is_saved=True)
    half = max(1, case.runs.steps // 2)
    if isinstance(saved, Failure):
        return None
    resume = str(saved.checkpoint(half))
    apart = case.apart(case.reference, case.runs.watched(case.single, case.precision, again="resumed", resume=resume))
    saved.forget_checkpoints()
    if case.agrees(apart):
        return None
    return Cause(
        name="forgotten",
        sentence="the training is the same, but a run that goes on from a checkpoint is not: the task keeps something "
        "(a counter, a list, a generator) that is neither a parameter nor a buffer, and no checkpoint holds it",
        evidence=(f"one device that goes on from its own checkpoint differs by {in_percent(apart)} too",),
        advice="Keep it in a buffer: self.register_buffer('calls', torch.zeros(())).",
    )


def _cut_alone(case: Case) -> Cause | None:
    """One device that cuts the batch into as many parts: is it the cutting, or what is sent?"""
    num = len(case.way.devices) * case.way.accumulate
    if num == 1 or case.run is None:
        return None
    cut = case.runs.watched(Way("single", case.way.devices[:1], num), case.precision)
    from_cut, from_whole = case.apart(cut, case.run), case.apart(case.reference, cut)
    if not case.agrees(from_cut) or case.agrees(from_whole):
        return None
    return Cause(
        name="cut",
        sentence=f"the cutting of the batch, not what is sent: single with {num} micro-batches gives what "
        f"{case.way.label} gives",
        evidence=(
            f"single with {num} micro-batches differs from single by {in_percent(from_whole)}",
            f"and from {case.way.label} by {from_cut:.0e}",
        ),
        advice="Something in model or loss looks at the whole of the batch that it gets.",
    )


def _failed(case: Case, failure: Failure) -> Cause:
    found = case.found()
    cause = captured(found) or by_rank(found, case.on_ranks(), case.way.label, case.is_rough)
    without = (found.get("batch") or {}).get("without") or []
    tested = (f"on one device no gradient reaches {', '.join(without[:5])}",) if without else ()
    if cause is not None:
        return Cause(
            name=cause.name,
            sentence=cause.sentence,
            evidence=(*cause.evidence, *tested, f"{case.way.label} ended with: {failure.first_lines}"),
            advice=cause.advice,
        )
    lines = failure.first_lines.splitlines() or ["it ended without a word"]
    is_missing = bool(without) and "no gradient reaches" in failure.message
    return Cause(
        name="no-gradient" if is_missing else _kind_of(failure),
        sentence=lines[0],
        evidence=tested,
        advice=" ".join(lines[1:]),
    )


def _kind_of(failure: Failure) -> str:
    kinds = {
        "read the same data": "same-data",
        "has other data": "other-data",
        "read another stream": "other-data",
        "samples and rank": "other-data",
        "in another order": "other-data",
        "no gradient reaches": "no-gradient",
    }
    return next((name for words, name in kinds.items() if words in failure.message), "failed")
