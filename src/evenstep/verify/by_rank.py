"""Causes that lie in the rank: every rank did the same by itself, and they are laid side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from evenstep.verify.verdict import Cause

NEAR = 1e-7
ROUGHLY = 1e-3
Found = dict[str, Any]
Groups = list[dict[str, Any]]
"""An optimizer's settings."""


def by_rank(single: Found, ranks: Sequence[Found], label: str, is_rough: bool) -> Cause | None:
    """What the same samples and weights give on each rank, and on one device."""
    near = ROUGHLY if is_rough else NEAR
    own, of_ranks = single.get("batch"), [rank["batch"] for rank in ranks if rank.get("batch")]
    cause = _other_settings(single.get("settings"), [rank.get("settings") for rank in ranks], label)
    # A rank whose test failed has computed nothing that could be compared: `problems_of` tells of it.
    if cause is not None or not own or not ranks or len(of_ranks) < len(ranks):
        return cause
    return (
        _other_data(own, of_ranks)
        or _other_loss(own["loss"], [one["loss"] for one in of_ranks], label, near)
        or _other_gradients(own["gradients"], [one["gradients"] for one in of_ranks], label, near)
    )


def problems_of(single: Found, ranks: Sequence[Found]) -> tuple[str, ...]:
    """What could not be tested, and why."""
    said = []
    for where, found in (("", single), *((f" on rank {rank}", found) for rank, found in enumerate(ranks))):
        if found.get("failure"):
            said.append(f"the task could not be taken apart: {found['failure']}")
        said += [f"could not be tested{where}: {name} ({why})" for name, why in (found.get("problems") or {}).items()]
    return tuple(dict.fromkeys(said))


def _other_settings(own: Groups | None, ranks: Sequence[Groups | None], label: str) -> Cause | None:
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


def _settings(called: str, own: Any, found: Sequence[Any], label: str) -> Cause:
    return Cause(
        name="settings",
        sentence=f"the optimizer's {called} depends on the rank or on how many there are: {own} on one "
        f"device, {_listed(found)} on the ranks",
        evidence=(f"the optimizer was made on one device and on each of the {len(found)} ranks of {label}",),
        advice="The batch is global here: let the learning rate be the same on any number of devices.",
    )


def _other_data(own: Found, ranks: Sequence[Found]) -> Cause | None:
    who = next((rank for rank, one in enumerate(ranks) if one["data"] != own["data"]), None)
    if who is None:
        return None
    return Cause(
        name="other-data",
        sentence=f"the data depends on the rank: rank {who} reads other samples under the same ids than one device",
        evidence=("the ids of the first batch were read on one device and on every rank",),
        advice="Make or split the data from one seed, the same in every process; sort listed files.",
    )


def _other_loss(own: float, found: Sequence[float], label: str, near: float) -> Cause | None:
    if all(_near(one, own, near) for one in found):
        return None
    factors = [one / own if own else math.nan for one in found]
    return Cause(
        name="rank",
        sentence="model or loss depend on the rank, or on how many there are: for the same samples and weights the "
        f"loss is {_listed([f'{factor:.4g}' for factor in factors])} times that of one device",
        evidence=(f"{own:.6g} on one device, {_listed([f'{one:.6g}' for one in found])} on the ranks of {label}",),
        advice="evenstep weighs the ranks itself: take RANK, WORLD_SIZE and torch.distributed out of model and loss.",
    )


def _other_gradients(
    own: Mapping[str, float], ranks: Sequence[Mapping[str, float]], label: str, near: float
) -> Cause | None:
    largest = max(own.values(), default=0.0)
    for name, norm in own.items():
        found = [rank.get(name, 0.0) for rank in ranks]
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
    both = math.isnan(one) and math.isnan(other)
    return both or abs(one - other) <= near * max(abs(one), abs(other), 1e-300)


def _listed(values: Sequence[Any]) -> str:
    texts = [str(value) for value in values]
    return texts[0] if len(set(texts)) == 1 else " and ".join(texts[:4])
