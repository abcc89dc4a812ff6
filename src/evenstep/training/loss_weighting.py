"""A loss is a sum and a count, each summed over micro-batches, replicas and processes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from evenstep.data.loader import MicroBatch
from evenstep.data.nested import leaves
from evenstep.distributed.world import World
from evenstep.monitor.nonfinite import BAD_DATA
from evenstep.private_apis import foreach_mul_
from evenstep.task import Amount
from evenstep.training.host_copy import DeviceTime, HostCopy
from evenstep.training.logged_values import StepLogs
from evenstep.training.loss_amount import as_pair, as_sum, at_least_one, check_pair, checked

if TYPE_CHECKING:
    from evenstep.distributed.shm.allreduce import PendingSum
    from evenstep.sampling.rng import Ids


@dataclass(slots=True)
class PartialLoss:
    """The loss of one micro-batch: a mean, or [sum, count], on its device."""

    micro_batch: MicroBatch
    amount: torch.Tensor
    host: HostCopy | None

    def pair(self) -> torch.Tensor:
        """[sum, count], on the device."""
        return self.amount if self.amount.ndim else as_sum(self.amount, self.micro_batch.num_samples, "loss")

    def read(self) -> list[float]:
        """[sum, count], on the host."""
        assert self.host is not None
        return as_pair(self.host.read(), self.micro_batch.num_samples)


class MeanLoss(float):
    """The mean loss of a global batch; `count` is what it is a mean over: samples, or whatever the loss counts."""

    __slots__ = ("compute_seconds", "count", "grad_norm", "logged")

    count: float
    logged: dict[str, float]
    """Means of what the loss gave to `evenstep.log`."""
    grad_norm: float | None
    """Before clipping; None where nothing is clipped, and before the update."""
    compute_seconds: float
    """How long this process computed before it waited for others; 0 in a replayed CUDA graph, which does not know."""

    def __new__(
        cls, value: float, count: float, compute_seconds: float = 0.0, logged: dict[str, float] | None = None
    ) -> MeanLoss:
        self = super().__new__(cls, value)
        self.count, self.compute_seconds, self.logged = count, compute_seconds, logged or {}
        self.grad_norm = None
        return self

    def __getnewargs__(self) -> tuple[float, float, float, dict[str, float]]:  # type: ignore[override]
        return float(self), self.count, self.compute_seconds, self.logged

    def item(self) -> float:
        """The number, as of a tensor."""
        return float(self)


class LossTotal:
    """The loss of one global batch.

    The sums are sent to the other processes after forward and read after backward, so that communication overlaps
    backward and the host does not wait for work that is still to be computed.
    """

    def __init__(self, world: World, num_samples: int, request_code: float = 0.0, logs: StepLogs | None = None) -> None:
        self.logs = logs or StepLogs(world, [])
        self.request_code = request_code
        """This process's request to stop or to save (see preemption.py); once read, the sum over all processes."""
        self._started = DeviceTime(world)
        self._arrived: DeviceTime | None = None
        self.late_factor: float | None = None
        """The factor still to be applied to the gradients, if the count was not known before backward."""
        self.count = 0.0
        self._world = world
        self._scale = world.data_size
        """What strategies divide summed gradients by."""
        self._can_be_whole = world.num_replicas == 1 and world.ranks_per_replica == 1
        """Whether a micro-batch with all samples is known to be the only one."""
        self._num_samples = num_samples
        self.parts: list[PartialLoss] = []
        self.is_late = False
        self.sent: HostCopy | PendingSum | None = None

    def take(self, amount: Amount, micro_batch: MicroBatch) -> tuple[torch.Tensor, float]:
        """Add a micro-batch's loss; returns the tensor to start backward from, and its weight in the global mean.

        DDP and FSDP divide gradients by the number of processes; the weight undoes that.
        """
        is_pair = isinstance(amount, tuple | list)
        if is_pair:
            check_pair(amount, "loss")
        loss: torch.Tensor = checked(amount[0] if is_pair else amount)
        kept = as_sum(amount, micro_batch.num_samples, "loss") if is_pair else loss.detach()
        self.parts.append(PartialLoss(micro_batch, kept, self.copy(kept)))
        weight = micro_batch.num_samples
        if is_pair and weight == self._num_samples and self._can_be_whole:
            # The whole batch: no other count is to come.
            return loss / at_least_one(amount[1]), 1.0
        if is_pair:
            # The other ranks' counts are not known yet: divide by the samples now, and correct it after backward.
            self.is_late = True
            weight = min(1, micro_batch.num_samples)
        return loss, self._scale * weight / self._num_samples

    def copy(self, kept: torch.Tensor) -> HostCopy | None:
        """A copy on the host, for a single process; several processes sum first."""
        return HostCopy(kept) if self._world.size == 1 else None

    def send(self) -> None:
        """Start the sum over processes; called once, by the only replica of each process, before its last backward."""
        if self._world.size > 1:
            self._arrived = DeviceTime(self._world)
            self.sent = self._post()

    def _post(self) -> HostCopy | PendingSum:
        """Start the sum of [sum, count, request code, whether names are new, sums and counts of names]."""
        has_new = float(self.logs.has_new)
        if self._world.device.type != "cpu":
            padded = torch.nn.functional.pad(self.own_pair(), (0, 1), value=self.request_code)
            padded = torch.nn.functional.pad(padded, (0, 1), value=has_new)
            return HostCopy(
                torch.cat([padded, *self.logs.known(padded)]) if self.logs.has_known else padded, self._world
            )
        # The losses are on the host already, where Python sums three numbers faster than torch.
        counted = self.parts if self._world.counts else []
        pairs = [as_pair(part.amount.tolist(), part.micro_batch.num_samples) for part in counted] or [[0.0, 0.0]]
        total, count = (math.fsum(column) for column in zip(*pairs, strict=True))
        numbers = [total, count, self.request_code, has_new, *self.logs.known_numbers()]
        return self._world.post(numbers) or HostCopy(torch.tensor(numbers, dtype=torch.float64), self._world)

    def own_pair(self) -> torch.Tensor:
        """[sum, count] of this process, on its device; zeros where another rank's are counted."""
        if not self._world.counts:
            return torch.zeros(2, dtype=torch.float64, device=self._world.device)
        return torch.stack([part.pair() for part in self.parts]).sum(0)

    def read(self) -> float:
        """The mean loss of the global batch."""
        total, count = (math.fsum(column) for column in zip(*self._pairs(), strict=True))
        self.count = count
        if self.is_late:
            self.late_factor = self._num_samples / count if count else 1.0
        return total / count if count else 0.0

    def _pairs(self) -> list[list[float]]:
        """[sum, count] of parts of the global batch."""
        if self.sent is None:
            return [part.read() for part in self.parts]
        # A captured step sends three numbers.
        total, count, self.request_code, *more = self.sent.read()
        self.logs.take_sums(more)
        return [[total, count]]

    def seconds_alone(self) -> float:
        """How long this process computed before it needed the other ranks; known once the mean was read."""
        return self._arrived.seconds_since(self._started) if self._arrived is not None else 0.0

    def non_finite(self) -> list[str]:
        """This process's micro-batches whose loss is NaN or infinite, with their first sample ids."""
        per_replica = [part.micro_batch for part in self.parts]
        return not_finite(self._world.rank, per_replica, [part.pair().tolist() for part in self.parts])


class LateLoss(LossTotal):
    """The loss of a step on GPUs that the host reads while later steps run; until then, the device judges it."""

    _host: torch.Tensor | None = None
    """Where the values of this process's micro-batches will be, when the device has reached them."""
    _arrived_pairs: list[list[float]] | None = None

    def take(self, amount: Amount, micro_batch: MicroBatch) -> tuple[torch.Tensor, float]:
        # Until it is read, the inputs of later steps need the memory.
        return super().take(amount, micro_batch.without_inputs())

    def copy(self, kept: torch.Tensor) -> HostCopy | None:
        return None

    @property
    def is_alone(self) -> bool:
        """Whether communication is off (a measured ceiling): then ranks diverge, and the loss means nothing."""
        return self._world.communication.is_off

    def values(self) -> torch.Tensor:
        """On the device: [sum, count] of all ranks, or what each micro-batch of a single process gave."""
        if self.sent is not None:
            assert isinstance(self.sent, HostCopy)
            return self.sent.join()[:2]
        home = self._world.device
        # One without samples counts for nothing, and may be NaN.
        amounts = [part.amount.to(home, non_blocking=True) for part in self._counted]
        return amounts[0] if len(amounts) == 1 else torch.stack(amounts)

    @property
    def _counted(self) -> list[PartialLoss]:
        return [part for part in self.parts if part.micro_batch.num_samples]

    def factor(self, values: torch.Tensor) -> torch.Tensor | None:
        """`late_factor` on the device, for what `values` gave."""
        if not self.is_late:
            return None
        count = values[1] if values.ndim == 1 else values[:, 1].sum()
        return torch.where(count > 0, self._num_samples / count, 1.0)

    def keep(self, host: torch.Tensor) -> None:
        """`values` are being copied there; of several processes, the sums are copied anyway."""
        self._host = host

    def arrive(self) -> None:
        """The device has finished the step, and the copy may be written again."""
        if self._host is not None:
            every = self._host.tolist()
            parts = self._counted
            every = [every] if len(parts) == 1 else every
            self._arrived_pairs = [
                as_pair(value, part.micro_batch.num_samples) for value, part in zip(every, parts, strict=True)
            ]
            self._host = None

    def _pairs(self) -> list[list[float]]:
        return self._arrived_pairs if self._arrived_pairs is not None else super()._pairs()

    def non_finite(self) -> list[str]:
        if self._arrived_pairs is None:
            return super().non_finite()
        return not_finite(self._world.rank, [part.micro_batch for part in self._counted], self._arrived_pairs)


def scale_gradients(gradients: list[torch.Tensor], factor: float | torch.Tensor) -> None:
    """Multiply gradients; by a number on a device too, whatever devices and types they have."""
    if not isinstance(factor, torch.Tensor):
        foreach_mul_(gradients, factor)
        return
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for gradient in gradients:
        kinds.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    for (device, dtype), of_kind in kinds.items():
        foreach_mul_(of_kind, factor.to(device, dtype, non_blocking=True))


def not_finite(rank: int, per_replica: list[MicroBatch], pairs: list[list[float]]) -> list[str]:
    """The micro-batches whose sum is NaN or infinite, with their first sample ids."""
    return [
        f"rank {rank} got {total} for samples {_few(micro_batch.ids)}{_in_data(micro_batch)}"
        for micro_batch, (total, _) in zip(per_replica, pairs, strict=True)
        if not math.isfinite(total)
    ]


def _few(ids: Ids) -> str:
    return f"{ids[:8].tolist()}" + " and more" * (len(ids) > 8)


def _in_data(micro_batch: MicroBatch) -> str:
    """The samples whose data is NaN or infinite before the model has seen it, where the data is still there."""
    is_bad = torch.zeros(micro_batch.num_samples, dtype=torch.bool)
    for tensor in leaves(micro_batch.inputs):
        has_rows = isinstance(tensor, torch.Tensor) and tensor.ndim > 0 and len(tensor) == len(is_bad) > 0
        if has_rows and tensor.layout is torch.strided and tensor.is_floating_point():
            is_bad |= ~tensor.isfinite().reshape(len(tensor), -1).all(1).cpu()
    bad = micro_batch.ids[is_bad.nonzero().flatten().tolist()]
    return f": among them {_few(bad)}, {BAD_DATA}" if len(bad) else ""
