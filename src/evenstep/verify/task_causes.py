"""Causes that lie in the task, from the findings of the experiments on one device."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

from evenstep.verify.differences import in_percent
from evenstep.verify.verdict_table import DifferenceCause

APPRECIABLE = 1e-7
ROUGHLY = 1e-3
Found = dict[str, Any]


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
    least = ROUGHLY if is_rough else APPRECIABLE
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
