"""Do two ways of taking a step end in the same place? Every tensor that a step changes, copied, put back, compared."""

from __future__ import annotations

import math

import torch

from evenstep.worker.stepping import Recipe

MOST_APART = 0.02
"""Share of the numbers of a kind that may be elsewhere: Adam takes full steps where a gradient is but rounding, too."""
LAST_DIGITS = 4
"""In units of the last place: how far a number may be off in any case."""

Kinds = dict[str, list[torch.Tensor]]


def changed_by(recipe: Recipe) -> Kinds:
    """What a step changes, by kind: weights, buffers, and whatever the optimizer and fp16's scaler keep."""
    kinds: Kinds = {"the weights": [weight.detach() for weight in recipe.model.weights]}
    for buffer in recipe.model.module.buffers():
        kinds.setdefault("the buffers" if buffer.is_floating_point() else "the counts", []).append(buffer)
    for state in recipe.optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                kinds.setdefault(f"the optimizer's {name}", []).append(value)
    scaler = recipe.team.precision.scaler
    if scaler is not None:
        kept = [one for one in (scaler._scale, scaler._growth_tracker) if one is not None]
        kinds.setdefault("the scale", []).extend(kept)
    return kinds


def num_bytes(kinds: Kinds) -> int:
    """Of all of them."""
    return sum(tensor.nbytes for tensors in kinds.values() for tensor in tensors)


def copied(kinds: Kinds) -> Kinds:
    """On the host: the card's memory is the training's."""
    return {kind: [tensor.detach().to("cpu", copy=True) for tensor in tensors] for kind, tensors in kinds.items()}


@torch.no_grad()
def put(targets: Kinds, sources: Kinds) -> None:
    """Make the targets what the sources are."""
    for kind, tensors in targets.items():
        for target, source in zip(tensors, sources[kind], strict=True):
            target.copy_(source)


def are_equal(one: Kinds, other: Kinds) -> bool:
    """Bit for bit."""
    return all(
        torch.equal(first, second.to(first.device))
        for kind, tensors in one.items()
        for first, second in zip(tensors, other[kind], strict=True)
    )


def first_apart(before: Kinds, after: Kinds, now: Kinds, tolerance: float) -> str | None:
    """The first kind that went from `before` elsewhere than `after`: by more than so much of its usual way."""
    for kind, tensors in now.items():
        way, num = 0.0, 0
        for begun, ended in zip(before[kind], after[kind], strict=True):
            way += float((ended.double() - begun.double()).square().sum())
            num += ended.numel()
        limit = tolerance * math.sqrt(way / max(1, num))
        off = sum(_num_beyond(limit, *pair) for pair in zip(after[kind], tensors, strict=True))
        if off > MOST_APART * num:
            return kind
    return None


def _num_beyond(limit: float, ended: torch.Tensor, now: torch.Tensor) -> int:
    digits = LAST_DIGITS * torch.finfo(ended.dtype).eps if ended.is_floating_point() else 0.0
    distance = (ended.double() - now.cpu().double()).abs()
    # Not "above the limit": what is no number is above nothing.
    return int((~(distance <= limit + digits * ended.double().abs())).sum())
