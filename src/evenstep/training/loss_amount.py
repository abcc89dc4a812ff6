"""A loss as users return it: a mean, or (sum, count), becomes a sum and a count; everything else is refused."""

from __future__ import annotations

from typing import Any

import torch

from evenstep.errors import TaskError


def as_pair(values: Any, num_samples: int) -> list[float]:
    """[sum, count] of values on the host: that pair, or a mean over `num_samples`."""
    if isinstance(values, list):
        return values
    return [values * num_samples if num_samples else 0.0, num_samples]


def as_sum(amount: Any, num_samples: int, what: str) -> torch.Tensor:
    """[sum, count] of a mean over samples, of one value per sample, or of a pair (sum, count).

    An empty micro-batch (`num_samples` 0) gives [0, 0].
    """
    # new_full, not new_tensor: copying a number to a GPU makes the host wait for the GPU.
    if isinstance(amount, tuple | list):
        check_pair(amount, what)
        total, count = torch.as_tensor(amount[0]).detach().reshape(()), amount[1]
        if num_samples == 0:
            return total.new_zeros(2, dtype=_wide(total))
        total = total.to(_wide(total))
        if isinstance(count, torch.Tensor):
            return torch.stack([total, count.detach().to(total.device, total.dtype).reshape(())])
        return torch.stack([total, total.new_full((), float(count))])
    values = torch.as_tensor(amount).detach()
    if num_samples == 0:
        # The mean of an empty tensor is NaN, and NaN times 0 is not 0.
        return values.new_zeros(2, dtype=_wide(values))
    values = values.to(_wide(values))
    if values.ndim == 0:
        return torch.stack([values * num_samples, values.new_full((), num_samples)])
    return torch.stack([values.sum(), values.new_full((), values.numel())])


def at_least_one(count: Any) -> Any:
    """A count to divide by; of a batch that counts nothing, the sum is zero already."""
    if isinstance(count, torch.Tensor):
        return torch.where(count == 0, torch.ones_like(count), count).reshape(())
    return count or 1


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.float32 if tensor.device.type == "mps" else torch.float64


def check_pair(amount: Any, what: str) -> None:
    if len(amount) != 2:
        raise TaskError(f"{what} returned {len(amount)} values; return a mean, or a pair (sum, count)")
    count = amount[1]
    if isinstance(count, torch.Tensor) and count.numel() != 1:
        raise TaskError(f"the count of {what} has shape {tuple(count.shape)}; it is one number, such as its sum()")
    if not isinstance(count, torch.Tensor | int | float):
        raise TaskError(f"the count of {what} is a {type(count).__name__}; it is one number, such as len(batch)")


def checked(loss: Any) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor):
        raise TaskError(
            f"the loss is a {type(loss).__name__}; return a tensor: the mean over the batch, or (sum, count)"
        )
    if loss.numel() != 1:
        raise TaskError(
            f"the loss has shape {tuple(loss.shape)}; it must be one number: its mean, or a pair (its sum, its count)"
        )
    if not loss.requires_grad:
        raise TaskError("the loss has no gradient; it must depend on the model's parameters (no detach, no .item())")
    return loss if loss.ndim == 0 else loss.reshape(())
