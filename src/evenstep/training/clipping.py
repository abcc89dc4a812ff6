"""Clipping gradients by their total norm, of shards and of slices too."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from evenstep.checkpoint.shards import is_sharded
from evenstep.distributed.parameter_slices import slice_of
from evenstep.distributed.world import World


def clip_gradients(
    optimizer: Optimizer, clip: float, *, is_exact: bool = False, ranks: World | None = None
) -> torch.Tensor:
    """`clip_grad_norm_` of all its parameters; returns their norm, of sharded ones too.

    Where it `is_exact`, the norm has the same bits wherever the gradients are. `ranks` hold parts of one replica each.
    """
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    # A norm of all gradients is rounded differently in another order.
    weights = getattr(optimizer, "in_order_of_model", weights)
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    if ranks is not None:
        norm = _norm_of_slices(weights, ranks)
    else:
        norm = _exact_norm(gradients) if is_exact else torch.nn.utils.get_total_norm(gradients)
    norm = norm.full_tensor() if is_sharded(norm) else norm
    torch.nn.utils.clip_grads_with_norm_(weights, clip, norm)
    return norm


def _norm_of_slices(weights: Sequence[torch.Tensor], ranks: World) -> torch.Tensor:
    """Of a replica whose parameters are split over ranks: slices are of all ranks, whole ones are counted once."""
    counted = [
        weight.grad
        for weight in weights
        if weight.grad is not None and (slice_of(weight) is not None or ranks.rank == 0)
    ]
    own = torch.nn.utils.get_total_norm(counted)
    # Of shards: over the ranks that hold them, first.
    own = own.full_tensor() if is_sharded(own) else own
    square = own.double().to(ranks.device).square()
    work = ranks.total(square)
    if work is not None:
        work.wait()
    return square.sqrt().to(own.dtype)


def _exact_norm(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tensor by tensor, each of them whole: slices of it have sums that are rounded differently."""
    if not gradients:
        return torch.tensor(0.0)
    norms = [torch.linalg.vector_norm(one.full_tensor() if is_sharded(one) else one) for one in gradients]
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
    return total
