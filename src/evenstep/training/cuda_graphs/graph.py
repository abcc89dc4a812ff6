"""A step captured as a CUDA graph and replayed: hundreds of kernels for one launch.

With one replica and a fused optimizer, the graph is the whole step, and the host runs ahead of it: `LossRing` holds
the losses of the last steps, and `Pending` is a step whose loss has not been read. Otherwise a graph holds forward and
backward of each replica, and the update is eager.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from evenstep.data.dataset import Rows
from evenstep.data.loader import Batch, MicroBatch
from evenstep.data.nested import leaves, map_tensors
from evenstep.errors import NonFiniteLoss
from evenstep.monitor.nonfinite import NonFiniteMean, explain
from evenstep.private_apis import (
    clear_cublas_workspaces,
    foreach_mul_,
    has_step_hooks,
    hooks_after_steps,
    hooks_before_steps,
    release_pool,
)
from evenstep.strategies.base import NOTHING, forget, forget_gradients, on
from evenstep.training.clipping import clip_gradients
from evenstep.training.deferred_loss import SLOTS, FiniteGuard
from evenstep.training.fused_optimizer import Sliced, is_fused
from evenstep.training.gradient_accumulation import ReplicaBackward
from evenstep.training.host_copy import HostCopy
from evenstep.training.loss_amount import as_pair
from evenstep.training.loss_context import LossContext
from evenstep.training.loss_weighting import LateLoss, LossTotal, MeanLoss, PartialLoss, not_finite
from evenstep.training.step import Recipe


class LossRing:
    """The losses of the last steps, written by the graph itself, beside the update.

    A ring of slots on the GPU, copied to the host whole; GPU and host both count the slot of the next step. It is made
    before the capture, in memory that does not belong to the graph.
    """

    def __init__(self, stream: torch.cuda.Stream, most_values: int) -> None:
        device = stream.device
        num_bytes = SLOTS * most_values * 8
        self._host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)
        # Not memory of the graph, which other tensors of the step may use before.
        self._ring = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._slot = torch.zeros(1, dtype=torch.int64, device=device)
        # torch frees pinned memory only after the streams that wrote to it: this makes the replaying one known.
        self._host.copy_(self._ring, non_blocking=True)
        self._stream = stream
        self._num = 0

    def record(self, values: torch.Tensor) -> None:
        """Write these values; the capture waits for it in `join`."""
        shape, num = (SLOTS, *values.shape), SLOTS * values.numel()
        self._host = self._host.view(values.dtype)[:num].view(shape)
        self._ring = self._ring.view(values.dtype)[:num].view(shape)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._ring.index_copy_(0, self._slot, values[None])
            self._host.copy_(self._ring, non_blocking=True)
            self._slot.add_(1).remainder_(SLOTS)

    def join(self) -> None:
        """A step ends when its values are on the host."""
        torch.cuda.current_stream().wait_stream(self._stream)

    def next(self) -> int:
        """The slot of the values of the step that was just launched."""
        self._num += 1
        return (self._num - 1) % SLOTS

    def read(self, slot: int) -> Any:
        """The values as floats; the GPU must have finished that step."""
        return self._host[slot].tolist()


Shapes = tuple[Any, ...]
MODE = "thread_local"
"""Other threads of this process, such as the prefetching one, keep running during a capture."""


def shapes_of(batch: Batch) -> Shapes | None:
    """What two batches must share to use one graph; None if a batch is not a tree of tensors."""
    shapes: list[Any] = [batch.num_samples]
    for per_replica in batch.micro_batches:
        for micro_batch in per_replica:
            shapes.append(micro_batch.num_samples)
            if micro_batch.rows is not None:
                shapes.append((id(micro_batch.rows.columns), len(micro_batch.rows.ids)))
            elif not _add_shapes(micro_batch.inputs, shapes):
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
    """What else is fixed in a graph: the optimizer's options except its learning rates."""

    groups: tuple[tuple[tuple[str, Any], ...], ...]

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> Choices:
        """The current ones."""
        excluded = ("params", "lr", "initial_lr", "param_names")
        return cls(
            tuple(
                tuple((key, value) for key, value in group.items() if key not in excluded)
                for group in optimizer.param_groups
            )
        )


@dataclass(frozen=True)
class SharedByGraphs:
    """What the graphs of all shapes have in common; only one of them runs at a time."""

    guard: FiniteGuard
    side: torch.cuda.Stream
    """On which part of a step is captured in parallel; torch has few streams, and reuses them."""
    pools: list[Any]
    """The memory of the graphs of each replica."""


class Captured:
    """The graphs for one batch shape, with their static inputs and outputs."""

    def __init__(self, recipe: Recipe, batch: Batch, shared: SharedByGraphs) -> None:
        world = recipe.team.world
        self._recipe, self._shared = recipe, shared
        self._context = LossContext(world, batch)
        self._num_samples = batch.num_samples
        self.shapes = shapes_of(batch)
        self.choices = Choices.of(recipe.optimizer)
        self.is_whole = can_be_whole(recipe)
        self.seen: dict[str, Any] = {}
        """The Python state that the step read."""
        self.draws = True
        """Whether the step draws random numbers, and so needs a seed."""
        self._slots = [
            [
                Copied(micro_batch) if micro_batch.rows is None else Gathered(micro_batch, micro_batch.rows)
                for micro_batch in per_replica
            ]
            for per_replica in batch.micro_batches
        ]
        # And a zero: as many numbers as an eager step of another rank sends.
        self._request_code = torch.zeros(2, dtype=torch.float64, device=world.device)
        self._norm: torch.Tensor | None = None
        self._norms = torch.zeros(SLOTS, pin_memory=True)
        groups = recipe.optimizer.param_groups
        self._rates = [torch.full((), float(group["lr"]), device=world.device) for group in groups]
        self._last_rates = [float(group["lr"]) for group in groups]
        self._last_request_code = 0.0
        self._totals = [CapturedLoss(world, batch.num_samples, self._request_code) for _ in world.devices]
        # A pair for each micro-batch, or the sum over ranks.
        self._losses = LossRing(shared.side, 2 * len(batch.micro_batches) + 2)
        forget(recipe.model.weights)
        if len(world.devices) > 1:
            # Eager steps ran in the replicas' threads; this thread has not initialized its libraries yet.
            for replica in range(len(world.devices)):
                with on(world.devices[replica]):
                    self._compute(replica, CapturedLoss(world, batch.num_samples, self._request_code))
            for bound in recipe.model.loss_modules:
                forget(bound.parameters())
        # cuBLAS's workspaces must belong to the graphs: if eager steps share and clear them, replays break.
        clear_cublas_workspaces()
        self._graphs = [self._capture(replica) for replica in range(len(world.devices))]
        self._weights = [list(bound.parameters()) for bound in recipe.model.loss_modules]
        self._gradients = [[weight.grad for weight in weights] for weights in self._weights]
        for weights in self._weights:
            forget(weights)

    def fill(self, batch: Batch, request_code: float) -> None:
        """Copy a batch into the static inputs."""
        for slots, per_replica in zip(self._slots, batch.micro_batches, strict=True):
            for slot, micro_batch in zip(slots, per_replica, strict=True):
                slot.fill(micro_batch)
        if request_code != self._last_request_code:
            self._request_code[0].fill_(request_code)
            self._last_request_code = request_code

    def replay(self) -> None:
        """Everything that the graphs hold, in order."""
        for graph, device in zip(self._graphs, self._recipe.team.world.devices, strict=True):
            with on(device):
                graph.replay()

    def replay_whole(self) -> int:
        """Replay the whole step; returns the slot of its loss, valid once the GPU has finished it."""
        rates = [group["lr"] for group in self._recipe.optimizer.param_groups]
        if rates != self._last_rates:
            for rate, tensor in zip(rates, self._rates, strict=True):
                tensor.fill_(rate)
            self._last_rates = rates
        self._graphs[0].replay()
        slot = self._losses.next()
        if self._norm is not None:
            self._norms[slot].copy_(self._norm, non_blocking=True)
        return slot

    def read(self, slot: int) -> Any:
        """The values of a loss as floats; the GPU must have finished that step."""
        return self._losses.read(slot)

    def read_norm(self, slot: int) -> float | None:
        """The norm of a step's gradients before they were clipped; the GPU must have finished that step."""
        return float(self._norms[slot]) if self._norm is not None else None

    def replay_backward(self, batch: Batch, totals: LossTotal) -> None:
        """Forward and backward of every replica; leaves gradients on the parameters and losses in `totals`."""
        self.replay()
        for weights, gradients in zip(self._weights, self._gradients, strict=True):
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.grad = gradient
        # Read two replays later, which write this memory again.
        is_cloned = isinstance(totals, LateLoss) and self._totals[0].sums is not None
        for replica, captured in enumerate(self._totals):
            for per_replica, part in zip(batch.micro_batches, captured.parts, strict=True):
                amount = part.amount.clone() if is_cloned else part.amount
                totals.parts.append(PartialLoss(per_replica[replica].without_inputs(), amount, totals.copy(amount)))
        totals.is_late = any(one.is_late for one in self._totals)
        if self._totals[0].sums is not None:
            totals.sent = HostCopy(self._totals[0].sums)

    def pairs(self, values: Any) -> list[list[float]]:
        """[sum, count] of each part of a whole step, from what `read` gave."""
        return self._totals[0].pairs(values)

    def _capture(self, replica: int) -> torch.cuda.CUDAGraph:
        world = self._recipe.team.world
        graph = torch.cuda.CUDAGraph()
        device = world.devices[replica]
        # The training's stream, if it can be captured: DDP's autograd nodes belong to it.
        current = torch.cuda.current_stream(device)
        stream = torch.cuda.Stream(device) if current == torch.cuda.default_stream(device) else current
        pool = self._shared.pools[replica]
        try:
            with on(device), _no_collection(), torch.cuda.graph(graph, pool, stream, MODE):
                self._compute(replica, self._totals[replica])
                if len(world.devices) == 1:
                    self._totals[replica].arrive()
                if self.is_whole:
                    self._update(self._totals[replica])
        except BaseException:
            # Otherwise torch's allocator waits for the end of the capture and frees nothing that other streams used.
            release_pool(device, pool)
            raise
        return graph

    def _compute(self, replica: int, totals: CapturedLoss) -> None:
        recipe, team = self._recipe, self._recipe.team
        backward = ReplicaBackward(team.world, team.precision, recipe.loss, (recipe.model,), totals, self._context)
        for number, slots in enumerate(self._slots, 1):
            is_last = number == len(self._slots)
            # Several replicas synchronize outside of their graphs.
            with recipe.model.sync_gradients(is_last) if len(team.world.devices) == 1 else NOTHING:
                backward(is_last, replica, slots[replica].micro_batch())

    def _update(self, totals: CapturedLoss) -> None:
        """The rest of the step, without the host: the weights do not change if the loss is not finite."""
        recipe = self._recipe
        if totals.is_late:
            gradients = [weight.grad for weight in recipe.model.weights if weight.grad is not None]
            foreach_mul_(gradients, totals.late_factor_on_gpu(self._num_samples))
        self._shared.guard.check(totals.values)
        self._losses.record(totals.values)
        try:
            self._update_weights()
        finally:
            # A capture with an unjoined stream would fail without naming the cause.
            self._losses.join()

    def _update_weights(self) -> None:
        recipe = self._recipe
        if recipe.clip is not None:
            # Kept: its memory belongs to the graph, and every replay writes it.
            self._norm = clip_gradients(recipe.optimizer, recipe.clip)
        stopping = self._shared.guard.stopping(recipe.optimizer)
        with stopping, _capturable(recipe.optimizer, self._rates), Sliced():  # type: ignore[no-untyped-call]
            recipe.optimizer.step()
        forget_gradients(recipe.optimizer)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Python collects no garbage inside: CUDA forbids to free the graph of an earlier run during a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Copied:
    """Static inputs: a micro-batch's tensors are copied here before each replay."""

    def __init__(self, micro_batch: MicroBatch) -> None:
        self._inputs = MicroBatch(
            map_tensors(micro_batch.inputs, torch.clone), micro_batch.ids, micro_batch.num_samples
        )
        self._tensors = list(leaves(self._inputs.inputs))

    def micro_batch(self) -> MicroBatch:
        """The captured inputs."""
        return self._inputs

    def fill(self, micro_batch: MicroBatch) -> None:
        """Copy another micro-batch into them."""
        for target, source in zip(self._tensors, leaves(micro_batch.inputs), strict=True):
            target.copy_(source, non_blocking=True)


class Gathered:
    """Samples that are resident on the GPU: only their indices are copied; gathering them is captured."""

    def __init__(self, micro_batch: MicroBatch, rows: Rows) -> None:
        self._first = micro_batch
        self._rows = rows
        self._index = torch.from_numpy(rows.ids).to(rows.device)

    def micro_batch(self) -> MicroBatch:
        """The captured inputs."""
        return MicroBatch(self._rows.at(self._index), self._first.ids, self._first.num_samples)

    def fill(self, micro_batch: MicroBatch) -> None:
        """Copy other indices."""
        assert micro_batch.rows is not None
        self._index.copy_(torch.from_numpy(micro_batch.rows.ids), non_blocking=True)


class CapturedLoss(LossTotal):
    """The loss of a step under capture; all of it stays on the GPU."""

    def __init__(self, world: Any, num_samples: int, request_code: torch.Tensor) -> None:
        super().__init__(world, num_samples)
        self.sums: torch.Tensor | None = None
        self._request_code_on_gpu = request_code
        self._work: Any = None
        self.values: torch.Tensor = request_code
        """The values of the loss that the host needs."""

    def copy(self, kept: torch.Tensor) -> HostCopy | None:
        return None

    def send(self) -> None:
        if self._world.size > 1:
            self.sums = torch.cat([self.own_pair(), self._request_code_on_gpu])
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
        return [as_pair(value, part.micro_batch.num_samples) for value, part in zip(every, self.parts, strict=True)]

    def late_factor_on_gpu(self, num_samples: int) -> torch.Tensor:
        """What gradients are still to be multiplied by: the samples over the counts, or 1 if nothing was counted."""
        count = self.sums[1] if self.sums is not None else self.own_pair()[1]
        return torch.where(count > 0, num_samples / count, 1.0)


def can_be_whole(recipe: Recipe) -> bool:
    """Whether the update can be captured: one replica, a fused kernel, no hooks of this optimizer or of all."""
    optimizer: Any = recipe.optimizer
    precision = recipe.team.precision
    is_hooked = bool(has_step_hooks(optimizer) or hooks_before_steps or hooks_after_steps)
    # Learning rates on the GPU are float32, which is not enough for float64.
    is_plain = precision.scaler is None and precision.name != "fp64" and not is_hooked
    rates = [group["lr"] for group in optimizer.param_groups]
    return (
        is_plain
        and len(recipe.team.world.devices) == 1
        and is_fused(optimizer)
        and not any(isinstance(rate, torch.Tensor) for rate in rates)
    )


@contextmanager
def _capturable(optimizer: Any, rates: list[torch.Tensor]) -> Iterator[None]:
    """Learning rates on the GPU."""
    before = [{key: group[key] for key in ("lr", "capturable") if key in group} for group in optimizer.param_groups]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
        if "capturable" in group:
            group["capturable"] = True
    try:
        yield
    finally:
        for group, values in zip(optimizer.param_groups, before, strict=True):
            group.update(values)


class Pending:
    """A step running on the GPU; its loss is being copied to the host."""

    event: torch.cuda.Event

    def __init__(self, recipe: Recipe, captured: Captured, batch: Batch, slot: int, request_code: float) -> None:
        self._slot = slot
        self._values: Any = None
        self._norm: float | None = None
        self._loss: MeanLoss | None = None
        self._step = batch.loader.num_finished
        self._recipe = recipe
        self._captured = captured
        self._epoch = batch.span.epoch
        # The inputs are free for other steps.
        self._micro_batches = [one.without_inputs() for per_replica in batch.micro_batches for one in per_replica]
        self._request_code = request_code

    def arrive(self) -> Any:
        """Wait until the step has finished; its event and slot can be reused afterwards."""
        if self._values is None:
            self.event.synchronize()
            self._values, self._norm = self._captured.read(self._slot), self._captured.read_norm(self._slot)
        return self._values

    def read(self) -> MeanLoss:
        """Its loss; NonFiniteLoss if that is not finite, with the weights of the step before."""
        if self._loss is None:
            self._loss = self._read()
        team = self._recipe.team
        team.requests.agree(self.arrive()[2] if team.world.size > 1 else self._request_code)
        return self._loss

    def _read(self) -> MeanLoss:
        values = self.arrive()
        pairs = self._captured.pairs(values)
        total, count = (math.fsum(column) for column in zip(*pairs, strict=True))
        team = self._recipe.team
        mean = total / count if count else 0.0
        if not math.isfinite(mean) and not team.world.communication.is_off:
            spoilt = not_finite(team.world.rank, self._micro_batches, pairs) if team.world.size == 1 else []
            loss = NonFiniteMean(mean, self._step, self._epoch, team.precision.name, spoilt)
            raise NonFiniteLoss(explain(team.world, self._recipe.model, loss))
        known = MeanLoss(mean, count)
        known.grad_norm = self._norm
        return known
