"""One process per device; each holds a slice of every parameter, gradient and optimizer state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import nn

from evenstep.errors import TaskError
from evenstep.worker.comm.ledger import open_ledger
from evenstep.worker.fused import has_sparse_gradients
from evenstep.worker.gradients import separate
from evenstep.worker.seats import NOTHING
from evenstep.worker.spread import Bound, Spread
from evenstep.worker.strategies.ddp import send_buffers, send_from_rank_0
from evenstep.worker.strategies.fsdp_agreed import Agreement
from evenstep.worker.strategies.fsdp_units import units_apart
from evenstep.worker.strategies.single import Sample, Single
from evenstep.worker.tap import Tap
from evenstep.worker.world import World


class FSDP(Single):
    """torch's `fully_shard`: every child of a ModuleList or Sequential is gathered on its own, then the rest."""

    processes_per_device: ClassVar[bool] = True

    def __init__(self) -> None:
        self._tap: Tap | None = None
        self._agreement: Agreement | None = None
        self._syncs: WeakKeyDictionary[Spread, bool] = WeakKeyDictionary()
        """Whether the engine was last told to add gradients up, which is what it does by itself."""

    def spread(self, model: nn.Module, world: World, sample: Sample | None = None) -> Spread:
        if world.size == 1:
            # One process has nobody to share with, and gathering its own slices would triple a small step.
            return super().spread(model, world)
        # Imported here: these bring sympy along, two seconds that the other strategies need not wait for.
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        _refuse_sparse(model)
        _refuse_complex(model)
        model.to(world.device)
        with torch.no_grad():
            send_from_rank_0([tensor.data for tensor in (*model.parameters(), *model.buffers())])
        mesh = init_device_mesh(world.device.type, (world.size,))
        for unit in units_apart(model, world, sample):
            fully_shard(unit, mesh=mesh)
        bound = Bound(model)
        fully_shard(bound, mesh=mesh)
        self._watch(bound, world)
        return Spread(model, [bound])

    def _watch(self, bound: Bound, world: World) -> None:
        """Compare what ranks are about to send, and have a tap told of it."""
        from evenstep.worker.strategies.fsdp_told import ToldAllGather, ToldReduceScatter

        if self._agreement is None:
            self._agreement = Agreement(open_ledger(world.gather, world.rank), world.rank, world.tap)
        agreement = self._agreement
        names = {id(weight): name for name, weight in bound.model.named_parameters()}
        for name, unit, group in _groups(bound):
            own = [names[id(one.sharded_param)] for one in group.fsdp_params]
            unit.set_custom_all_gather(ToldAllGather(world.tap, agreement.gathers(name.removeprefix("model."), own)))
            unit.set_custom_reduce_scatter(ToldReduceScatter(world.tap))
            agreement.watch_backward(group)
        agreement.watch_forward(bound)

    def refresh(self, spread: Spread, is_training: bool) -> None:
        # At every step too: DDP does so, and the strategies are to agree.
        if self._is_sharded(spread):
            send_buffers(spread, self._tap)

    def syncing(self, spread: Spread, is_last: bool) -> AbstractContextManager[None]:
        root: Any = spread.seats[0]
        if not self._is_sharded(spread):
            return NOTHING
        if self._syncs.get(spread, True) != is_last:
            # It walks through all modules.
            root.set_requires_gradient_sync(is_last)
            self._syncs[spread] = is_last
        return NOTHING if is_last else _separating(root)

    def _is_sharded(self, spread: Spread) -> bool:
        return hasattr(spread.seats[0], "set_requires_gradient_sync")

    def tell(self, spread: Spread, tap: Tap) -> None:
        self._tap = tap


def _refuse_sparse(model: nn.Module) -> None:
    layers = [name for name, layer in model.named_modules() if has_sparse_gradients(layer)]
    if layers:
        raise TaskError(
            f"{layers[-1] or 'the model'} makes sparse gradients (sparse=True), and fsdp shards dense ones;\n"
            "leave sparse out, or use ddp"
        )


def _refuse_complex(model: nn.Module) -> None:
    """torch's optimizers leave complex parameters as they are where they are sharded, without a word."""
    for name, weight in model.named_parameters():
        if weight.requires_grad and weight.is_complex():
            raise TaskError(
                f"the parameter {name} is {str(weight.dtype).removeprefix('torch.')}, and fsdp trains real ones only;\n"
                "keep it as a real parameter and use torch.view_as_complex in forward, or use ddp"
            )


@contextmanager
def _separating(root: nn.Module) -> Iterator[None]:
    """Around a backward whose gradients stay whole and are added to later, on parameters that torch alone sees."""
    yield
    groups = [group for _, _, group in _groups(root)]
    separate(
        [one._unsharded_param for group in groups for one in group.fsdp_params if hasattr(one, "_unsharded_param")]
    )


def _groups(root: nn.Module) -> list[tuple[str, Any, Any]]:
    """The units that have parameters of their own: their names, modules, and what the engine keeps of each."""
    from torch.distributed.fsdp import FSDPModule

    units = [(name, module) for name, module in root.named_modules() if isinstance(module, FSDPModule)]
    states: list[Any] = [module._get_fsdp_state() for _, module in units]
    groups = [state._fsdp_param_group for state in states]
    return [(*unit, group) for unit, group in zip(units, groups, strict=True) if group is not None]
