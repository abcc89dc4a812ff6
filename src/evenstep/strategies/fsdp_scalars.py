"""Parameters without dimensions under fsdp: a temperature, the scale of a residual branch.

`fully_shard` cuts rows, and refuses what has none. So it gets a parameter of one row in place of such a one, which is
then made zero-dimensional again: a DTensor that every rank holds whole, beside those of which each holds rows. It is
gathered and reduced with the rest of its unit, in the same messages, weighted as the rest is; optimizers, clipping and
checkpoints see one more DTensor. Every rank computes with the first rank's value, which is also the one that is saved.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from evenstep.private_apis import fsdp_groups, replicate_scalar


def shard(unit: nn.Module, **options: Any) -> None:
    """`fully_shard` of a unit that may have zero-dimensional parameters."""
    from torch.distributed.fsdp import fully_shard

    places = _places_of_scalars(unit)
    # One for each parameter: those that are tied stay tied.
    rows = {id(scalar): nn.Parameter(scalar.detach().reshape(1), scalar.requires_grad) for _, _, scalar in places}
    for module, name, scalar in places:
        setattr(module, name, rows[id(scalar)])
    fully_shard(unit, **options)
    if not places:
        return
    values = {id(getattr(module, name)): scalar.detach() for module, name, scalar in places}
    for _, _, group in fsdp_groups(unit):
        for one in group.fsdp_params:
            if id(one.sharded_param) in values:
                replicate_scalar(one, values[id(one.sharded_param)])


def _places_of_scalars(unit: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """Those that no unit inside has taken."""
    from torch.distributed.tensor import DTensor

    return [
        (module, name, weight)
        for module in unit.modules()
        for name, weight in module.named_parameters(recurse=False, remove_duplicate=False)
        if not weight.ndim and not isinstance(weight, DTensor)
    ]


def rows_of_ranks(gradient: torch.Tensor, num: int) -> list[torch.Tensor]:
    """What each rank gets of a whole gradient, flat; the last ranks may have fewer rows or none."""
    if not gradient.ndim:
        return [gradient.reshape(1)] * num
    rows = -(-len(gradient) // num)
    return [gradient[rank * rows : (rank + 1) * rows].reshape(-1) for rank in range(num)]
