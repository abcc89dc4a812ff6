"""Why a configuration differs from single: each cause has a test, and only a confirmed cause is named.

Some tests run the training again with one change; others compare what each rank computed from the same samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from evenstep.strategy_facts import REFERENCE, STRATEGIES, with_processes
from evenstep.verify.differences import (
    COARSE,
    FINE,
    Differ,
    Difference,
    Limit,
    first_beyond,
    in_percent,
    saved_as_trained,
)
from evenstep.verify.recorder import Evidence, Failure
from evenstep.verify.run_configurations import OutOfTime, Runs, has_ranks, one_device
from evenstep.verify.tolerance import NOT_COMPARED
from evenstep.verify.verdict_table import Configuration, DifferenceCause

NEAR = 1e-7
ROUGHLY = 1e-3
Found = dict[str, Any]
Groups = list[dict[str, Any]]
"""An optimizer's settings."""


def by_rank(single: Found, ranks: Sequence[Found], label: str, is_rough: bool) -> DifferenceCause | None:
    """What the same samples and weights give on each rank, and on one device."""
    near = ROUGHLY if is_rough else NEAR
    own, of_ranks = single.get("batch"), [rank["batch"] for rank in ranks if rank.get("batch")]
    cause = _other_settings(single.get("settings"), [rank.get("settings") for rank in ranks], label)
    # A rank whose test failed has nothing to compare: `problems_of` reports it.
    if cause is not None or not own or not ranks or len(of_ranks) < len(ranks):
        return cause
    return (
        _other_data(own, of_ranks)
        or _other_loss(own["loss"], [one["loss"] for one in of_ranks], label, near)
        or _other_gradients(own["gradients"], [one["gradients"] for one in of_ranks], label, near)
    )


def problems_of(single: Found, ranks: Sequence[Found]) -> tuple[str, ...]:
    """What could not be tested, and why."""
    problems = []
    for where, found in (("", single), *((f" on rank {rank}", found) for rank, found in enumerate(ranks))):
        if found.get("failure"):
            problems.append(f"the task could not be analysed: {found['failure']}")
        problems += [
            f"could not be tested{where}: {name} ({why})" for name, why in (found.get("problems") or {}).items()
        ]
    return tuple(dict.fromkeys(problems))


def _other_settings(own: Groups | None, ranks: Sequence[Groups | None], label: str) -> DifferenceCause | None:
    found = [groups for groups in ranks if groups is not None]
    if own is None or len(found) < len(ranks):
        return None
    if any(len(groups) != len(own) for groups in found):
        return _settings("number of groups", len(own), [len(groups) for groups in found], label)
    for number, group in enumerate(own):
        for name in dict.fromkeys([*group, *(name for groups in found for name in groups[number])]):
            values = [groups[number].get(name) for groups in found]
            if any(value != group.get(name) for value in values):
                return _settings("learning rate" if name == "lr" else name, group.get(name), values, label)
    return None


def _settings(called: str, own: Any, found: Sequence[Any], label: str) -> DifferenceCause:
    return DifferenceCause(
        name="settings",
        sentence=f"the optimizer's {called} depends on the rank or the world size: {own} on single, "
        f"{_listed(found)} on the ranks",
        evidence=(f"the optimizer was created on single and on each of the {len(found)} ranks of {label}",),
        advice="The batch is global: use the same learning rate on any number of devices.",
    )


def _other_data(own: Found, ranks: Sequence[Found]) -> DifferenceCause | None:
    who = next((rank for rank, one in enumerate(ranks) if one["data"] != own["data"]), None)
    if who is None:
        return None
    return DifferenceCause(
        name="other-data",
        sentence=f"the data depends on the rank: for the same ids, rank {who} reads other samples than single",
        evidence=("the ids of the first batch were read on single and on every rank",),
        advice="Make or split the data from one seed, the same in every process; sort listed files.",
    )


def _other_loss(own: float, found: Sequence[float], label: str, near: float) -> DifferenceCause | None:
    if all(_near(one, own, near) for one in found):
        return None
    factors = [one / own if own else math.nan for one in found]
    return DifferenceCause(
        name="rank",
        sentence="the model or loss depends on the rank or the world size: for the same samples and weights the "
        f"loss is {_listed([f'{factor:.4g}' for factor in factors])} times that of single",
        evidence=(f"{own:.6g} on single, {_listed([f'{one:.6g}' for one in found])} on the ranks of {label}",),
        advice="evenstep weights the ranks itself: remove RANK, WORLD_SIZE and torch.distributed from model and loss.",
    )


def _other_gradients(
    own: Mapping[str, float], ranks: Sequence[Mapping[str, float]], label: str, near: float
) -> DifferenceCause | None:
    largest = max(own.values(), default=0.0)
    for name, norm in own.items():
        found = [rank.get(name, 0.0) for rank in ranks]
        if norm > 1e-6 * largest and not all(_near(one, norm, near) for one in found):
            return DifferenceCause(
                name="gradients-by-rank",
                sentence=f"the gradient of {name} depends on the rank or the world size, although the loss does "
                f"not: {_listed([f'{one / norm:.4g}' for one in found])} times that of single for the same "
                "samples; a hook or a custom backward communicates",
                evidence=(f"gradient norms on the ranks of {label}, with no communication by evenstep",),
                advice="Remove the hook: evenstep sums the gradients itself.",
            )
    return None


def _near(one: float, other: float, near: float) -> bool:
    both = math.isnan(one) and math.isnan(other)
    return both or abs(one - other) <= near * max(abs(one), abs(other), 1e-300)


def _listed(values: Sequence[Any]) -> str:
    texts = [str(value) for value in values]
    return texts[0] if len(set(texts)) == 1 else " and ".join(texts[:4])


REPEAT = (
    "Look for an unseeded generator, the time, or the process id in model, loss and data; "
    "or train with --deterministic if an operation is the cause."
)

LATE = "the time for the search ran out"


@dataclass(frozen=True)
class RunDifference:
    largest: float
    agrees: bool
    """Whether all of it is rounding."""
    failure: Failure | None = None
    """Of one of them, which could not be compared then."""

    def in_words(self) -> str:
        if self.failure is not None:
            return f"fails: {self.failure.first_lines}"
        return f"differs by {in_percent(self.largest)}" if math.isfinite(self.largest) else "differs"


@dataclass(frozen=True)
class Case:
    """A configuration that differs from one device, and how."""

    runs: Runs
    config: Configuration
    precision: str
    reference: Evidence
    run: Evidence | None
    limit: Limit
    beyond: frozenset[Difference] = frozenset()
    """All that is more than rounding."""
    is_rough: bool = False
    """Whether it is computed in fewer digits than float64 has."""

    @property
    def single(self) -> Configuration:
        return one_device(self.config)

    @property
    def can_gather(self) -> bool:
        """Whether each rank can gather the whole batch, which neither micro-batches nor threads can."""
        return has_ranks(self.config) and self.config.accumulate == 1

    @property
    def parts(self) -> set[str]:
        return {one.part for one in self.beyond}

    @property
    def names(self) -> set[str]:
        return {one.name for one in self.beyond}

    def found(self) -> dict[str, Any]:
        """The findings of the experiments on one device."""
        (found,) = self.runs.examined(self.single, self.precision, self.is_rough)
        return found

    def on_ranks(self) -> list[dict[str, Any]]:
        """The same from every rank; empty for a configuration with one process."""
        return self.runs.examined(self.config, self.precision, self.is_rough) if has_ranks(self.config) else []

    def compare(self, one: Evidence | Failure, other: Evidence | Failure) -> RunDifference:
        if isinstance(one, Failure) or isinstance(other, Failure):
            return RunDifference(math.inf, False, one if isinstance(one, Failure) else other)  # type: ignore[arg-type]
        found = Differ(COARSE if self.is_rough else FINE).all(one, other)
        judged = [each.size for each in found if self.limit(each) < NOT_COMPARED or math.isinf(each.size)]
        return RunDifference(max(judged, default=0.0), first_beyond(found, self.limit) is None)


def find_cause(case: Case, failure: Failure | None) -> DifferenceCause:
    """The first cause that its test confirms; none where no test does, or where they take too long."""
    try:
        return _confirmed(case) if failure is None else _failed(case, failure)
    except OutOfTime:
        return _unknown(LATE, ()) if failure is None else _from_message(failure, ())


def _confirmed(case: Case) -> DifferenceCause:
    """Every test is tried, even when time is up: runs that exist already cost none."""
    is_late = False
    for test in _tests(case):
        try:
            cause = test(case)
        except OutOfTime:
            is_late = True
            continue
        if cause is not None:
            return cause
    if is_late:
        raise OutOfTime
    repeated = f"single, run twice, gave identical results, and so did {case.config.label}"
    return _unknown("none of the tested causes applies", (repeated, *problems_of(case.found(), case.on_ranks())))


def _unknown(why: str, evidence: tuple[str, ...]) -> DifferenceCause:
    return DifferenceCause(
        name="unknown",
        sentence=f"the cause was not found: {why}",
        evidence=evidence,
        advice="Run verify again with --keep, and compare the first tensor that differs in the runs that it keeps.",
    )


def only_in(case: Case, arithmetic: float, tested: tuple[str, ...]) -> DifferenceCause:
    """Why a configuration differs in the task's own precision although float64 agrees."""
    try:
        cause = _not_repeated(case) or _config_not_repeated(case)
    except OutOfTime:
        return _unknown(LATE, tested)
    if cause is not None:
        return cause
    own = case.precision
    return DifferenceCause(
        name="precision",
        sentence=f"a difference in precision, as far as was tested: in float64 {case.config.label} and single agree to "
        f"{arithmetic:.0e}, in {own} they do not, although each is reproducible there, and perturbing the "
        "weights of single does not move it as far. One of them computes something in lower precision",
        evidence=(*tested, f"single and {case.config.label} were each run twice in {own}, with identical results"),
        advice="Look for a cast (.half(), .bfloat16(), autocast) that depends on the number of processes.",
    )


def _tests(case: Case) -> list[Callable[[Case], DifferenceCause | None]]:
    by_found: list[Callable[[Case], DifferenceCause | None]] = [
        _not_repeated,
        lambda case: captured(case.found()),
        _batch_norm,
        lambda case: draws(case.found(), case.is_rough),
        lambda case: reading(case.found()),
        # Before the loss: what depends on such a buffer depends on the other samples of its batch.
        lambda case: _buffers(case) if (case.found().get("buffers") or {}).get("read") else None,
        _gathered,
        lambda case: loss(case.found()),
        # Before the ranks are compared: what changes from run to run would look as if it depended on them.
        _config_not_repeated,
        lambda case: by_rank(case.found(), case.on_ranks(), case.config.label, case.is_rough),
        _buffers,
        lambda case: hooks(case.found()),
        lambda case: metrics(case.found()),
        _cut_alone,
    ]
    if case.parts <= {"checkpoint"}:
        return [_forgotten, *by_found]
    if case.parts <= {"evaluation"}:
        return [lambda case: metrics(case.found()), *by_found]
    return by_found


def lies_in_task(case: Case) -> bool:
    """Whether experiments on one device already show why no split of the batch can agree."""
    found = case.found()
    causes = (captured(found), draws(found, case.is_rough), reading(found), loss(found))
    return any(cause is not None for cause in causes)


def _gathered(case: Case) -> DifferenceCause | None:
    """Only gradients differ in the first step, under a strategy whose ranks can gather."""
    first = case.reference.begin + 1
    at_first = {one.part for one in case.beyond if one.step <= first}
    if not case.can_gather or "gradients" not in at_first or "loss" in at_first:
        return None
    return gathered(case.found(), case.limit(Difference("loss", first, "loss", 0.0)))


def _buffers(case: Case) -> DifferenceCause | None:
    return buffers(case.found(), case.config.accumulate > 1, case.names)


def _not_repeated(case: Case) -> DifferenceCause | None:
    """The same run twice on one device."""
    again = case.runs.watched(case.single, case.precision, again="again")
    result = case.compare(case.reference, again)
    if result.agrees:
        return None
    tested = f"single, run twice, {result.in_words()}"
    starts = _first_start_difference(case.reference, again)
    if starts:
        return DifferenceCause(
            name="start",
            sentence=f"building the model twice gives different weights: {starts} differs before the first step",
            evidence=(tested,),
            advice="Initialize it from torch's, NumPy's or Python's global generators, which are seeded beforehand.",
        )
    return DifferenceCause(
        name="not-repeatable",
        sentence="the task is not reproducible, not even on one device: the same run twice "
        f"{'gives different results' if result.failure is None else 'ends differently'}",
        evidence=(tested, *(f"torch warns: {line}" for line in case.found().get("warned") or [])),
        advice=REPEAT,
    )


def _config_not_repeated(case: Case) -> DifferenceCause | None:
    """The same run twice under this configuration."""
    if case.run is None:
        return None
    result = case.compare(case.run, case.runs.watched(case.config, case.precision, again="again"))
    if result.agrees:
        return None
    return DifferenceCause(
        name="not-repeatable",
        sentence=f"{case.config.label} is not reproducible: the same run twice "
        f"{'gives different results' if result.failure is None else 'ends differently'}, while single is reproducible",
        evidence=(
            f"{case.config.label}, run twice, {result.in_words()}",
            "single, run twice, gave identical results",
        ),
        advice=REPEAT,
    )


def _first_start_difference(one: Evidence, other: Any) -> str | None:
    if isinstance(other, Failure):
        return None
    found = Differ(FINE).all(one, other)
    return next((each.name for each in found if each.step == 0 and each.size > 0), None)


def _batch_norm(case: Case) -> DifferenceCause | None:
    """The same two runs with BatchNorm statistics that do not depend on the device."""
    layers = case.found().get("norms") or []
    if not layers or case.run is None:
        return None
    before = case.compare(case.reference, case.run)
    if case.can_gather and not case.runs.sync_batchnorm:
        after = case.compare(case.reference, case.runs.watched(case.config, case.precision, sync_batchnorm=True))
        tried, advice = "with --sync-batchnorm", "Train with --sync-batchnorm."
    else:
        calm = [case.runs.watched(config, case.precision, norms="eval") for config in (case.single, case.config)]
        after = case.compare(*calm)
        tried = "with BatchNorm in eval mode everywhere"
        advice = (
            f"Train with {with_processes()} and --sync-batchnorm{_or_virtual(case)}, or use GroupNorm."
            if case.config.accumulate == 1
            else "Train with no accumulation, or use GroupNorm: each micro-batch is normalized separately."
        )
    if not after.agrees:
        return None
    names = f"{layers[0]} and {len(layers) - 1} more" if len(layers) > 1 else layers[0]
    return DifferenceCause(
        name="batchnorm",
        sentence=f"BatchNorm ({names}) normalizes by the statistics of each part of the batch, not of the whole batch",
        evidence=(f"it {before.in_words()}; {tried}, by {after.largest:.0e}",),
        advice=advice,
    )


def _or_virtual(case: Case) -> str:
    num = len(case.config.devices)
    return (
        f", or with --virtual-replicas {num} on any number of devices"
        * STRATEGIES[case.config.strategy].virtual_replicas
    )


def _forgotten(case: Case) -> DifferenceCause | None:
    """What a checkpoint of one device holds, and whether one device can resume from it."""
    half = case.runs.half
    saved = case.runs.watched(case.single, case.precision, is_saved=True)
    if not isinstance(saved, Evidence) or not saved.checkpoint(half).is_dir():
        return None
    lost = [one.name for one in saved_as_trained(saved, half) if one.size > 0]
    if lost:
        return DifferenceCause(
            name="not-saved",
            sentence=f"a checkpoint does not hold what was trained, not even on one device: {', '.join(lost[:3])}",
            evidence=("the checkpoint was compared with the weights, buffers and optimizer state of its step",),
            advice="Look for a custom state_dict, or a state_dict hook, that drops or changes something.",
        )
    resume = str(saved.checkpoint(half))
    again = "resumed from its own checkpoint"
    result = case.compare(case.reference, case.runs.watched(case.single, case.precision, again=again, resume=resume))
    if result.agrees:
        return None
    return DifferenceCause(
        name="forgotten",
        sentence="training matches, but a run resumed from a checkpoint does not, not even on one device, although "
        "the checkpoint holds every parameter, buffer and optimizer state: the task keeps other state (a counter, a "
        "list, a generator) that is neither a parameter nor a buffer",
        evidence=(
            f"single, resumed from its own checkpoint, {result.in_words()}",
            "the checkpoint was compared with what was trained, and is complete",
        ),
        advice="Keep it in a buffer: self.register_buffer('calls', torch.zeros(())).",
    )


def _cut_alone(case: Case) -> DifferenceCause | None:
    """One device with as many micro-batches: does splitting cause it, or communication?"""
    num = len(case.config.devices) * case.config.accumulate
    if num == 1 or case.run is None:
        return None
    cut = case.runs.watched(Configuration(REFERENCE, case.config.devices[:1], num), case.precision)
    from_cut, from_whole = case.compare(cut, case.run), case.compare(case.reference, cut)
    if not from_cut.agrees or from_whole.agrees or from_whole.failure is not None:
        return None
    return DifferenceCause(
        name="cut",
        sentence=f"splitting the batch, not communication: single with {num} micro-batches gives the same as "
        f"{case.config.label}",
        evidence=(
            f"compared with single, single with {num} micro-batches {from_whole.in_words()}",
            f"compared with {case.config.label}, it differs by {from_cut.largest:.0e}",
        ),
        advice="Something in the model or loss depends on the whole batch that it is given.",
    )


def _failed(case: Case, failure: Failure) -> DifferenceCause:
    found = case.found()
    # Only draws that skip parameters can make a configuration fail that runs on one device.
    skipping = draws(found, case.is_rough) if (found.get("draws") or {}).get("skips") else None
    cause = captured(found) or skipping or by_rank(found, case.on_ranks(), case.config.label, case.is_rough)
    without = (found.get("batch") or {}).get("without") or []
    tested = (f"on single no gradient reaches {', '.join(without[:5])}",) if without else ()
    if cause is not None:
        error = f"{case.config.label} failed with: {' '.join(failure.first_lines.split())}"
        return replace(cause, evidence=(*cause.evidence, *tested, error))
    return _from_message(failure, (*tested, *problems_of(found, case.on_ranks())))


def _from_message(failure: Failure, evidence: tuple[str, ...]) -> DifferenceCause:
    lines = failure.first_lines.splitlines() or ["it ended without an error message"]
    return DifferenceCause(
        name=_kind_of(failure), sentence=lines[0].rstrip(".;"), evidence=evidence, advice=" ".join(lines[1:])
    )


def _kind_of(failure: Failure) -> str:
    kinds = {
        "read the same data": "same-data",
        "has different data": "other-data",
        "read a different stream": "other-data",
        "samples and rank": "other-data",
        "in a different order": "other-data",
        "no gradient reaches": "no-gradient",
    }
    return next((name for words, name in kinds.items() if words in failure.message), "failed")


def captured(found: Found) -> DifferenceCause | None:
    """A loss that was given a copy of the model, and gave the original its gradients."""
    names = found.get("captured")
    if names:
        effect = "its forward bypasses the replica that each device trains"
        tested = f"called with a copy of the model, the loss gave gradients to the original: {', '.join(names[:3])}"
    elif names == [] and (found.get("batch") or {}).get("gradients") == {}:
        effect = "no parameter of the trained model gets a gradient"
        tested = "called with the model, the loss has a gradient, which reaches none of its parameters"
    else:
        return None
    return DifferenceCause(
        name="captured-model",
        sentence=f"the loss does not use the model that it is given, but another one: {effect}",
        evidence=(tested,),
        advice="Use the argument: loss=lambda model, batch: ... model(batch[0]) ...",
    )


def draws(found: Found, is_rough: bool) -> DifferenceCause | None:
    """A result that changes with the seed of the host and of the devices alone."""
    seen = found.get("draws") or {}
    least = ROUGHLY if is_rough else NEAR
    if not seen.get("generators") or seen["apart"] <= least or seen["by_itself"] > least:
        return None
    where = f", at {seen['places'][0]}" if seen["places"] else ""
    skips = ", so each device skips different parameters" if seen["skips"] else ""
    return DifferenceCause(
        name="draws",
        sentence="the model or loss draws random numbers, and each device draws different ones "
        f"({' and '.join(seen['generators'])} generator{where}){skips}",
        evidence=(f"on single, another seed for these draws alone changes the result by {in_percent(seen['apart'])}",),
        advice="Run every layer in every step: disable the skipping (layerdrop=0), or multiply skipped outputs by 0."
        if seen["skips"]
        else "Draw per sample, in augment or augment_batch, whose draws depend on the sample, not on the device; "
        "or accept that the number of devices changes what is drawn.",
    )


def reading(found: Found) -> DifferenceCause | None:
    """Samples that differ when the batch that they are in is cut up, or when they are read again."""
    read = found.get("reading") or {}
    if not read or (read["repeats"] and read["is_cut_alike"] is not False):
        return None
    by = f" ({', '.join(read['code'])} draws from a global generator)" if read.get("code") else ""
    if read["is_cut_alike"] is False and not read.get("code") and read["repeats"]:
        by = " (collate, __getitems__ or augment_batch draws random numbers, or uses the other samples of the batch)"
    what = "when its batch is split" if read["repeats"] else "when it is read a second time"
    return DifferenceCause(
        name="reading",
        sentence=f"a sample is not the same {what}{by}",
        evidence=("the same ids were read twice, as one batch and in three parts, and compared",),
        advice="Let a sample depend on its id alone: draw from the generator that augment gets, or from "
        "draws.uniform(k) in augment_batch; take a partner (mixup) from the data set, in augment.",
    )


def loss(found: Found) -> DifferenceCause | None:
    """A loss of the whole batch that is not the mean of the losses of its parts."""
    cut = found.get("cut") or {}
    kind = cut.get("kind", "sound")
    if cut.get("gathers"):
        # Of a part alone, it is the loss of that part.
        return None
    if kind == "sound" and cut.get("unlike") and cut["has_slope"]:
        return _mixed(
            f"one batch in parts of {_sizes(cut)}: the gradient of {cut['unlike'][0]} is not the mean of those of the "
            "parts, though it is the derivative of the loss, unchanged by any hook"
        )
    if kind == "sound":
        return None
    losses = f"loss {cut['whole']:.6g} as a whole, {cut['by_parts']:.6g} from its parts"
    evidence = f"one batch in parts of {_sizes(cut)}: {losses}"
    if kind == "mixed":
        return _mixed(evidence)
    name, sentence, advice = {
        "sum": (
            "sum",
            "the loss is a sum over the batch, not a mean: half of the batch gives half of the loss",
            "Return the mean over the samples, or the pair (sum, count).",
        ),
        "weighted": (
            "mean-of-means",
            "the loss is a mean over something other than samples (tokens, boxes), so that the mean of its parts is a "
            f"mean of means: one part of the batch weighs {cut.get('factor', 1):.3g} times as much as its samples do",
            "Return the pair (sum, count): the sum over tokens or boxes, and how many there were. With .loss of "
            "Hugging Face, in two lines: count = (labels[:, 1:] != -100).sum(); return output.loss * count, count "
            "(without [:, 1:] where the model does not shift the labels: masked language models, T5).",
        ),
        "pair": (
            "pair",
            "the sum that the loss returns is not the sum of what the parts of the batch give",
            "Return a sum over samples, with nothing in it that depends on how many there are.",
        ),
    }[kind]
    return DifferenceCause(name=name, sentence=sentence, evidence=(evidence,), advice=advice)


BATCH_DEPENDENT = "batch-dependent"


def _mixed(evidence: str) -> DifferenceCause:
    return DifferenceCause(
        name=BATCH_DEPENDENT,
        sentence="the loss of a sample depends on the other samples of its batch (in-batch negatives, a normalization, "
        "a rank or a router's load over the batch), and each device sees only its own part",
        evidence=(evidence,),
        advice="Gather what is compared from all devices, z = evenstep.gather(z), and return the loss of all of it, in "
        "one micro-batch; or a loss of each sample alone.",
    )


def gathered(found: Found, loss_limit: float) -> DifferenceCause | None:
    """A loss that depends on the whole batch, and is that of the whole batch on every rank; its gradients are not.

    It is known to be the same to `loss_limit`, relative to its size; the parts of a batch must give clearly another.
    """
    cause, cut = loss(found), found.get("cut") or {}
    if cause is None or cause.name != BATCH_DEPENDENT:
        return None
    if abs(cut["by_parts"] - cut["whole"]) <= 10 * loss_limit * abs(cut["whole"]):
        return None
    return DifferenceCause(
        name="gather",
        sentence="the loss gathers from all ranks and is that of the whole batch, but its gradients are not: no "
        "gradient flows back through the gather",
        evidence=(*cause.evidence, "the loss of the first step is that of single, and its gradients are not"),
        advice="Gather with evenstep.gather, which sends gradients back; torch.distributed.all_gather does not.",
    )


def hooks(found: Found) -> DifferenceCause | None:
    """Gradients that do not add up although the loss does, and that are not its slope."""
    cut = found.get("cut") or {}
    if cut.get("kind") != "sound" or not cut.get("unlike") or cut["has_slope"] is not False:
        return None
    name = cut["unlike"][0]
    return DifferenceCause(
        name="gradient-hook",
        sentence=f"the gradient of {name} is changed (by a hook or a custom backward) "
        "in a way that does not add up: clipped, normalized or rounded for each part of the batch",
        evidence=(
            "the loss of a batch is the mean of its parts, its gradients are not",
            f"moving {name} changes the loss by another amount than its gradient predicts",
        ),
        advice="Change gradients after they are summed: --clip for their norm, or in the optimizer.",
    )


def buffers(found: Found, is_cut: bool, differing: Container[str]) -> DifferenceCause | None:
    """Buffers that forward changes, and that differ or change the loss."""
    seen = found.get("buffers") or {}
    changed = seen.get("changed" if is_cut else "by_data") or []
    names = [name for name in changed if seen["read"] or name in differing]
    if not names:
        return None
    name = next((name for name in names if name in differing), names[0])
    read = "the loss reads it" if seen["read"] else "it is part of checkpoints and evaluations"
    if name in seen["summed"]:
        return _adding_buffer(name, read, is_count=name in seen["counts"])
    return _sampling_buffer(name, read, names) if name in seen["by_data"] else _calling_buffer(name, read)


def _adding_buffer(name: str, read: str, is_count: bool) -> DifferenceCause:
    return DifferenceCause(
        name="buffer",
        sentence=f"forward {'counts samples' if is_count else 'adds up what it sees'} in the buffer {name}, and "
        f"{read}: every device counts its own part of the batch, and only the first one's is kept",
        evidence=("what forward on a batch adds to it is the sum of what forward on its parts adds",),
        advice="Add up over all ranks what is added to it (torch.distributed.all_reduce), or count steps instead.",
    )


def _sampling_buffer(name: str, read: str, names: Sequence[str]) -> DifferenceCause:
    return DifferenceCause(
        name="buffer",
        sentence=f"forward changes the buffer {name} by the samples that it sees, and {read}: every device keeps "
        "its own, and only the first one's is kept",
        evidence=(f"after forward on other samples it holds other values: {', '.join(names[:3])}",),
        advice="Gather what goes into it from all ranks (torch.distributed.all_gather), or keep it out of the model; "
        "observers of quantization can be frozen once they have seen enough (disable_observer).",
    )


def _calling_buffer(name: str, read: str) -> DifferenceCause:
    return DifferenceCause(
        name="buffer",
        sentence=f"every call of forward changes the buffer {name}, and {read}: each micro-batch is a call",
        evidence=("after forward on some samples, on others and on all of them it holds the same",),
        advice="Train with no accumulation, or change it once for each step, outside of forward.",
    )


def metrics(found: Found) -> DifferenceCause | None:
    """Values of an evaluation that are not means over samples."""
    names = [name for name, kind in (found.get("metrics") or {}).items() if kind != "sound"]
    if not names:
        return None
    return DifferenceCause(
        name="metric",
        sentence=f"the metric {names[0]} changes with the number of devices: it is not a mean over samples, and that "
        "of a batch does not follow from its parts",
        evidence=("it was computed for one batch as a whole and in three parts",),
        advice="Return one value per sample, or a pair (sum, count). What needs all predictions (F1, AUC, a maximum) "
        "is a score: Task(predict=..., scores={...}).",
    )


def _sizes(cut: Found) -> str:
    return " + ".join(map(str, cut.get("sizes", [])))
