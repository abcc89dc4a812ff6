"""A step that was recorded as a CUDA graph and is replayed: hundreds of kernels for the price of one call.

Where nothing but the card takes part in the update (a fused optimizer, one seat), the graph is the whole step, and the
host does not wait for it. Elsewhere it holds forward and backward of each seat, and the update is taken as always.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from evenstep.worker.fused import is_fused
from evenstep.worker.gradients import forget, forget_gradients
from evenstep.worker.loader import Batch, Piece
from evenstep.worker.seats import on
from evenstep.worker.sliced import Sliced
from evenstep.worker.source import Rows, to_device
from evenstep.worker.told import Told
from evenstep.worker.totals import HostCopy, Part, Totals, as_pair

if TYPE_CHECKING:
    from evenstep.worker.stepping import Recipe

Shapes = tuple[Any, ...]
MODE = "thread_local"
"""Other threads of this process, such as the one that reads ahead, go on while a graph is recorded."""


def shapes_of(batch: Batch) -> Shapes | None:
    """What two batches must have in common to go through one graph; None if a batch is no plain tree of tensors."""
    shapes: list[Any] = [batch.num_samples]
    for pieces in batch.micro_batches:
        for piece in pieces:
            shapes.append(piece.num_samples)
            if piece.rows is not None:
                shapes.append((id(piece.rows.columns), len(piece.rows.ids)))
            elif not _add_shapes(piece.inputs, shapes):
                return None
    return tuple(shapes)


def _add_shapes(data: Any, shapes: list[Any]) -> bool:
    if isinstance(data, torch.Tensor):
        shapes.append((data.shape, data.dtype, data.device))
        return data.layout is torch.strided and not data.requires_grad
    if type(data) is dict:
        shapes.append(tuple(data))
        data = list(data.values())
    elif type(data) not in (tuple, list):
        return False
    shapes.append(len(data))
    return all(_add_shapes(value, shapes) for value in data)


@dataclass(frozen=True)
class Choices:
    """What else is fixed in a graph: the optimizer's settings but for its learning rates."""

    groups: tuple[tuple[tuple[str, Any], ...], ...]

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> Choices:
        """As they are now."""
        apart = ("params", "lr", "initial_lr", "param_names")
        return cls(
            tuple(
                tuple((key, value) for key, value in group.items() if key not in apart)
                for group in optimizer.param_groups
            )
        )


class Captured:
    """The graphs of one shape of batch, with the tensors that they read and write."""

    def __init__(self, recipe: Recipe, batch: Batch, side: torch.cuda.Stream) -> None:
        """`side` is a stream on which part of a step is recorded beside the rest."""
        world = recipe.team.world
        self._recipe = recipe
        self._num_samples = batch.num_samples
        self.shapes = shapes_of(batch)
        self.choices = Choices.of(recipe.optimizer)
        self.is_whole = can_be_whole(recipe)
        self.draws = True
        """Whether the step draws random numbers; those that do not need no seed."""
        self._slots = [
            [Copied(piece) if piece.rows is None else Gathered(piece, piece.rows) for piece in pieces]
            for pieces in batch.micro_batches
        ]
        self._wish = torch.zeros(1, dtype=torch.float64, device=world.device)
        self._bad = torch.zeros((), device=world.device)
        self._one = torch.ones((), device=world.device)
        groups = recipe.optimizer.param_groups
        self._rates = [torch.full((), float(group["lr"]), device=world.device) for group in groups]
        self._last_rates = [float(group["lr"]) for group in groups]
        self._last_wish = 0.0
        self._totals = [Recorded(world, batch.num_samples, self._wish) for _ in world.devices]
        # A pair for each micro-batch, or what all ranks add up.
        self._told = Told(side, 2 * len(batch.micro_batches) + 1)
        forget(recipe.model.weights)
        if len(world.devices) > 1:
            # Eager steps ran in the seats' threads; this one has not set up its libraries yet.
            for place in range(len(world.devices)):
                with on(world.devices[place]):
                    self._compute(place, Recorded(world, batch.num_samples, self._wish))
            for bound in recipe.model.bounds:
                forget(bound.parameters())
        # Shared with plain steps, cuBLAS's workspaces must belong to the graphs: whoever clears them would break these.
        torch._C._cuda_clearCublasWorkspaces()
        self._graphs = [self._record(place) for place in range(len(world.devices))]
        self._weights = [list(bound.parameters()) for bound in recipe.model.bounds]
        self._gradients = [[weight.grad for weight in weights] for weights in self._weights]
        for weights in self._weights:
            forget(weights)

    def fill(self, batch: Batch, wish: float) -> None:
        """Put a batch where the graphs read it."""
        for slots, pieces in zip(self._slots, batch.micro_batches, strict=True):
            for slot, piece in zip(slots, pieces, strict=True):
                slot.fill(piece)
        if wish != self._last_wish:
            self._wish.fill_(wish)
            self._last_wish = wish

    def replay(self) -> None:
        """Everything that the graphs hold, in order."""
        for graph, device in zip(self._graphs, self._recipe.team.world.devices, strict=True):
            with on(device):
                graph.replay()

    def replay_whole(self) -> int:
        """The whole step; where the values of its loss will be, when the card has come to its end."""
        rates = [group["lr"] for group in self._recipe.optimizer.param_groups]
        if rates != self._last_rates:
            for rate, tensor in zip(rates, self._rates, strict=True):
                tensor.fill_(rate)
            self._last_rates = rates
        self._graphs[0].replay()
        return self._told.next()

    def read(self, place: int) -> Any:
        """The values of a loss, as numbers; the card must have come to the end of that step."""
        return self._told.read(place)

    def replay_backward(self, batch: Batch, totals: Totals) -> None:
        """Forward and backward of every seat; the gradients are left on the parameters, and the losses in `totals`."""
        self.replay()
        for weights, gradients in zip(self._weights, self._gradients, strict=True):
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.grad = gradient
        for place, recorded in enumerate(self._totals):
            for pieces, part in zip(batch.micro_batches, recorded.parts, strict=True):
                totals.parts.append(Part(pieces[place], part.amount, totals.copy(part.amount)))
        totals.is_late = any(one.is_late for one in self._totals)
        if self._totals[0].sums is not None:
            totals.sent = HostCopy(self._totals[0].sums)

    def pairs(self, values: Any) -> list[list[float]]:
        """[sum, count] of each part of a whole step, from what `read` gave."""
        return self._totals[0].pairs(values)

    def _record(self, place: int) -> torch.cuda.CUDAGraph:
        world = self._recipe.team.world
        graph = torch.cuda.CUDAGraph()
        device = world.devices[place]
        # The stream that all of the training uses, if it is one that can be recorded: DDP's nodes belong to it.
        current = torch.cuda.current_stream(device)
        stream = torch.cuda.Stream(device) if current == torch.cuda.default_stream(device) else current
        pool = torch.cuda.graph_pool_handle()
        try:
            with on(device), torch.cuda.graph(graph, pool, stream, MODE):
                self._compute(place, self._totals[place])
                if len(world.devices) == 1:
                    self._totals[place].arrive()
                if self.is_whole:
                    self._update(self._totals[place])
        except BaseException:
            _leave(device, pool)
            raise
        return graph

    def _compute(self, place: int, totals: Recorded) -> None:
        recipe = self._recipe
        for number, slots in enumerate(self._slots, 1):
            is_last = number == len(self._slots)
            with recipe.team.syncing_alone(recipe.model, is_last):
                recipe.team.seat_backward(recipe.loss, (recipe.model,), place, slots[place].piece(), totals, is_last)

    def _update(self, totals: Recorded) -> None:
        """The rest of the step, in words that the card alone understands: weights stay where the loss is not finite."""
        recipe = self._recipe
        if totals.is_late:
            gradients = [weight.grad for weight in recipe.model.weights if weight.grad is not None]
            torch._foreach_mul_(gradients, totals.late_factor_on_card(self._num_samples))
        torch._amp_foreach_non_finite_check_and_unscale_([totals.values], self._bad, self._one)
        self._told.record(totals.values)
        try:
            self._update_weights()
        finally:
            # A recording with loose ends would fail with no word of what went wrong.
            self._told.join()

    def _update_weights(self) -> None:
        recipe = self._recipe
        if recipe.clip is not None:
            weights = [weight for group in recipe.optimizer.param_groups for weight in group["params"]]
            torch.nn.utils.clip_grad_norm_(weights, recipe.clip)
        with _as_recorded(recipe.optimizer, self._rates, self._bad), Sliced():  # type: ignore[no-untyped-call]
            recipe.optimizer.step()
        forget_gradients(recipe.optimizer)


def _leave(device: torch.device, pool: Any) -> None:
    """A recording that CUDA broke off leaves torch's allocator waiting for its end: what other streams used would never
    be free again. Where torch has ended it, it refuses to do so twice, and then the pool is the graph's to release."""
    with suppress(RuntimeError, AttributeError):
        torch._C._cuda_endAllocateToPool(device.index, pool)
        torch._C._cuda_releasePool(device.index, pool)


class Copied:
    """Where a piece's tensors are copied to before each replay."""

    def __init__(self, piece: Piece) -> None:
        self._piece = Piece(to_device(piece.inputs, torch.clone), piece.ids, piece.num_samples)
        self._tensors = list(_leaves(self._piece.inputs))

    def piece(self) -> Piece:
        """What is recorded."""
        return self._piece

    def fill(self, piece: Piece) -> None:
        """Put another piece in its place."""
        for target, source in zip(self._tensors, _leaves(piece.inputs), strict=True):
            target.copy_(source, non_blocking=True)


class Gathered:
    """Samples that are on the card already: which of them is all that is copied, and gathering is recorded."""

    def __init__(self, piece: Piece, rows: Rows) -> None:
        self._first = piece
        self._rows = rows
        self._index = torch.from_numpy(rows.ids).to(rows.device)

    def piece(self) -> Piece:
        """What is recorded."""
        return Piece(self._rows.at(self._index), self._first.ids, self._first.num_samples)

    def fill(self, piece: Piece) -> None:
        """Take other samples."""
        assert piece.rows is not None
        self._index.copy_(torch.from_numpy(piece.rows.ids), non_blocking=True)


class Recorded(Totals):
    """The loss of a step that is being recorded: all of it stays on the card."""

    def __init__(self, world: Any, num_samples: int, wish: torch.Tensor) -> None:
        super().__init__(world, num_samples)
        self.sums: torch.Tensor | None = None
        self._wish_on_card = wish
        self._work: Any = None
        self.values: torch.Tensor = wish
        """What the host needs to know of the loss."""

    def copy(self, kept: torch.Tensor) -> HostCopy | None:
        return None

    def send(self) -> None:
        if self._world.size > 1:
            self.sums = torch.cat([self.own_pair(), self._wish_on_card])
            self._work = self._world.total(self.sums)

    def arrive(self) -> None:
        """All that was sent is there, and nothing more will be taken."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        amounts = [part.amount for part in self.parts]
        if self.sums is not None:
            self.values = self.sums
        else:
            self.values = amounts[0] if len(amounts) == 1 else torch.stack(amounts)

    def pairs(self, values: Any) -> list[list[float]]:
        """[sum, count] of every part, or of all ranks together, from `values` on the host."""
        if self.sums is not None:
            return [values[:2]]
        every = [values] if len(self.parts) == 1 else values
        return [as_pair(value, part.piece.num_samples) for value, part in zip(every, self.parts, strict=True)]

    def late_factor_on_card(self, num_samples: int) -> torch.Tensor:
        """What gradients are still to be multiplied by: the samples over the counts, or 1 if nothing was counted."""
        count = self.sums[1] if self.sums is not None else self.own_pair()[1]
        return torch.where(count > 0, num_samples / count, 1.0)


def can_be_whole(recipe: Recipe) -> bool:
    """Whether the update can be part of the graph: one seat, a fused kernel, nobody else to be told."""
    optimizer: Any = recipe.optimizer
    hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    precision = recipe.team.precision
    # The card holds learning rates in float32, which is not enough for float64.
    is_plain = precision.scaler is None and precision.name != "fp64" and not hooks
    rates = [group["lr"] for group in optimizer.param_groups]
    return (
        is_plain
        and len(recipe.team.world.devices) == 1
        and is_fused(optimizer)
        and not any(isinstance(rate, torch.Tensor) for rate in rates)
    )


@contextmanager
def _as_recorded(optimizer: Any, rates: list[torch.Tensor], bad: torch.Tensor) -> Iterator[None]:
    """Learning rates on the card, and a number there that keeps the weights as they are."""
    before = [{key: group[key] for key in ("lr", "capturable") if key in group} for group in optimizer.param_groups]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
        if "capturable" in group:
            group["capturable"] = True
    optimizer.found_inf = bad
    try:
        yield
    finally:
        del optimizer.found_inf
        for group, values in zip(optimizer.param_groups, before, strict=True):
            group.update(values)


def _leaves(data: Any) -> Iterator[torch.Tensor]:
    if isinstance(data, torch.Tensor):
        yield data
    else:
        for value in data.values() if isinstance(data, dict) else data:
            yield from _leaves(value)
