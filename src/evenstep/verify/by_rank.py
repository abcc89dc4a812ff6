"""Causes that lie in the rank: every rank did the same by itself, and they are laid side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from evenstep.verify.verdict import Cause

NEAR = 1e-7
ROUGHLY = 1e-3
Found = dict[str, Any]


def by_rank(single: Found, ranks: Sequence[Found], label: str, is_rough: bool) -> Cause | None:
    """What the same samples and weights give on each rank, and on one device."""
    if not ranks or not single:
        return None
    return (
        _other_settings(single, ranks, label)
        or _other_data(single, ranks)
        or _other_loss(single, ranks, label, ROUGHLY if is_rough else NEAR)
        or _other_gradients(single, ranks, label, ROUGHLY if is_rough else NEAR)
    )


def _other_settings(single: Found, ranks: Sequence[Found], label: str) -> Cause | None:
    for number, group in enumerate(single.get("settings") or []):
        for name, value in group.items():
            found = [(rank.get("settings") or single["settings"])[number].get(name) for rank in ranks]
            if any(other != value for other in found):
                called = "learning rate" if name == "lr" else name
                return Cause(
                    name="settings",
                    sentence=f"the optimizer's {called} depends on the rank or on how many there are: {value} on one "
                    f"device, {_listed(found)} under {label}",
                    evidence=(f"the optimizer was made on one device and on each of {len(ranks)} ranks",),
                    advice="The batch is global here: let the learning rate be the same on any number of devices.",
                )
    return None


def _other_data(single: Found, ranks: Sequence[Found]) -> Cause | None:
    digests = [(rank.get("batch") or {}).get("data") for rank in ranks]
    own = (single.get("batch") or {}).get("data")
    if not own or all(one == own for one in digests):
        return None
    who = next(rank for rank, one in enumerate(digests) if one != own)
    return Cause(
        name="other-data",
        sentence=f"the data depends on the rank: rank {who} reads other samples under the same ids than one device",
        evidence=("the ids of the first batch were read on one device and on every rank",),
        advice="Make or split the data from one seed, the same in every process; sort listed files.",
    )


def _other_loss(single: Found, ranks: Sequence[Found], label: str, near: float) -> Cause | None:
    own = (single.get("batch") or {}).get("loss")
    found = [rank["batch"]["loss"] for rank in ranks if rank.get("batch")]
    if own is None or len(found) < len(ranks) or all(_near(one, own, near) for one in found):
        return None
    factors = [one / own if own else math.nan for one in found]
    return Cause(
        name="rank",
        sentence="model or loss depend on the rank, or on how many there are: for the same samples and weights the "
        f"loss is {_listed([f'{factor:.4g}' for factor in factors])} times that of one device",
        evidence=(f"{own:.6g} on one device, {_listed([f'{one:.6g}' for one in found])} on the ranks of {label}",),
        advice="evenstep weighs the ranks itself: take RANK, WORLD_SIZE and torch.distributed out of model and loss.",
    )


def _other_gradients(single: Found, ranks: Sequence[Found], label: str, near: float) -> Cause | None:
    own = (single.get("batch") or {}).get("gradients") or {}
    largest = max(own.values(), default=0.0)
    for name, norm in own.items():
        found = [((rank.get("batch") or {}).get("gradients") or {}).get(name, 0.0) for rank in ranks]
        if norm > 1e-6 * largest and not all(_near(one, norm, near) for one in found):
            return Cause(
                name="gradients-by-rank",
                sentence=f"the gradient of {name} depends on the rank, or on how many there are, though the loss does "
                f"not: {_listed([f'{one / norm:.4g}' for one in found])} times that of one device for the same "
                "samples; a hook or a backward of your own communicates",
                evidence=(f"norms on the ranks of {label}, with nothing sent by evenstep",),
                advice="Take the hook out: evenstep sums the gradients up itself.",
            )
    return None


def _near(one: float, other: float, near: float) -> bool:
    return abs(one - other) <= near * max(abs(one), abs(other), 1e-300)


def _listed(values: Sequence[Any]) -> str:
    texts = [str(value) for value in values]
    return texts[0] if len(set(texts)) == 1 else " and ".join(texts[:4])
