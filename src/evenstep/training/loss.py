"""A loss is a sum and a count, each summed over micro-batches, replicas and processes."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from evenstep.data.loader import MicroBatch
from evenstep.distributed.world import World
from evenstep.errors import TaskError
from evenstep.internals import foreach_mul_
from evenstep.task import Amount

if TYPE_CHECKING:
    from evenstep.distributed.shm.allreduce import PendingSum


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


def as_pair(values: Any, num_samples: int) -> list[float]:
    """[sum, count] of values on the host: that pair, or a mean over `num_samples`."""
    if isinstance(values, list):
        return values
    return [values * num_samples if num_samples else 0.0, num_samples]


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
            _check_pair(amount, "loss")
        loss: torch.Tensor = _checked(amount[0] if is_pair else amount)
        kept = as_sum(amount, micro_batch.num_samples, "loss") if is_pair else loss.detach()
        self.parts.append(PartialLoss(micro_batch, kept, self.copy(kept)))
        weight = micro_batch.num_samples
        if is_pair and weight == self._num_samples and self._can_be_whole:
            # The whole batch: no other count is to come.
            return loss / _at_least_one(amount[1]), 1.0
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


class StepLogs:
    """What the losses of one step gave to `evenstep.log`; sums over processes travel with those of the loss.

    `names` are those that all ranks know, in one order, from step to step. Where a rank has another one, the ranks
    agree on it after the step, in two collectives more.
    """

    def __init__(self, world: World, names: list[str]) -> None:
        self.names = names
        self._sent_names = list(names)
        """Those whose sums travel with this step's loss; when it is read, more may be known."""
        self._world = world
        self._own: list[tuple[str, torch.Tensor, HostCopy | None]] = []
        self._sums: list[float] = []

    def take(self, logged: list[tuple[str, Amount]], num_samples: int) -> None:
        """Add what the loss of one micro-batch logged."""
        for name, amount in logged:
            pair = as_sum(amount, num_samples, name)
            self._own.append((name, pair, HostCopy(pair) if self._world.size == 1 else None))

    @property
    def has_new(self) -> bool:
        """Whether this rank has a name that not all know."""
        return any(name not in self._sent_names for name in self.own_names())

    @property
    def has_known(self) -> bool:
        """Whether sums of names travel with the loss."""
        return bool(self._sent_names)

    def own_names(self) -> list[str]:
        """What the losses of this rank logged."""
        return [name for name, _, _ in self._own]

    def known(self, like: torch.Tensor) -> list[torch.Tensor]:
        """[sum, count] of each name that all ranks know, on the device."""
        return self.sums_of(self._sent_names, like)

    def sums_of(self, names: list[str], like: torch.Tensor) -> list[torch.Tensor]:
        """[sum, count] of each of these names."""
        return _pairs_of(names, self._own if self._world.counts else [], like)

    def known_numbers(self) -> list[float]:
        """The same on the host."""
        return torch.cat(self.known(torch.zeros(1, dtype=torch.float64))).tolist() if self._sent_names else []

    def take_sums(self, more: list[float]) -> None:
        """What was sent beside the loss, summed over ranks; all ranks call this."""
        has_new, *self._sums = more or [0.0]
        if not has_new or self._world.communication.is_off:
            return
        every = self._world.gather(self.own_names())
        found = dict.fromkeys(name for of_rank in every for name in of_rank)
        new = [name for name in found if name not in self._sent_names]
        table = torch.cat(self.sums_of(new, torch.zeros(1, dtype=torch.float64)))
        work = self._world.total(table)
        if work is not None:
            work.wait()
        self._sums += table.tolist()
        self._sent_names += new
        self.names += [name for name in new if name not in self.names]

    def own_pairs(self) -> dict[str, list[list[float]]]:
        """[sum, count] of each part of this process, by name."""
        pairs: dict[str, list[list[float]]] = {}
        for name, _, host in self._own:
            assert host is not None
            pairs.setdefault(name, []).append(host.read())
        return pairs

    def means(self) -> dict[str, float]:
        """The mean of each name, over all that was counted; none of what no sample had."""
        if self._world.size == 1:
            return means_of(self.own_pairs())
        return means_of({name: [self._sums[2 * index : 2 * index + 2]] for index, name in enumerate(self._sent_names)})


def means_of(pairs: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, float]:
    """The mean of each name, from [sum, count] of all its parts.

    >>> means_of({"a": [[1.0, 2.0], [3.0, 2.0]], "b": [[0.0, 0.0]]})
    {'a': 1.0}
    """
    # Threads add their parts in any order: fsum gives the same sum in each.
    sums = {name: [math.fsum(column) for column in zip(*every, strict=True)] for name, every in pairs.items()}
    return {name: total / count for name, (total, count) in sums.items() if count}


def _pairs_of(
    names: list[str], logged: list[tuple[str, torch.Tensor, HostCopy | None]], like: torch.Tensor
) -> list[torch.Tensor]:
    """[sum, count] of each name."""
    pairs = {name: like.new_zeros(2) for name in names}
    for name, pair, _ in logged:
        if name in pairs:
            pairs[name] = pairs[name] + pair.to(like)
    return list(pairs.values())


def not_finite(rank: int, per_replica: list[MicroBatch], pairs: list[list[float]]) -> list[str]:
    """The micro-batches whose sum is NaN or infinite, with their first sample ids."""
    return [
        f"rank {rank} got {total} for samples {micro_batch.ids[:8].tolist()}" + " and more" * (len(micro_batch.ids) > 8)
        for micro_batch, (total, _) in zip(per_replica, pairs, strict=True)
        if not math.isfinite(total)
    ]


class DeviceTime:
    """A point in time on the device: on a GPU, the host runs ahead of it."""

    def __init__(self, world: World) -> None:
        self._time = time.perf_counter()
        self._event: torch.cuda.Event | None = None
        if world.size > 1 and world.device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()

    def seconds_since(self, earlier: DeviceTime) -> float:
        """Both must have been reached by the device."""
        if self._event is None or earlier._event is None:
            return self._time - earlier._time
        return float(earlier._event.elapsed_time(self._event)) / 1000


class HostCopy:
    """An asynchronous copy of a small tensor to the host, summed over processes if a world is given."""

    def __init__(self, values: torch.Tensor, world: World | None = None) -> None:
        self._work = world.total(values) if world is not None else None
        self._values = self._on_gpu = values
        self._event: torch.cuda.Event | None = None
        if values.is_cuda:
            # On a side stream: backward must not queue behind the slowest rank's forward.
            stream = side_stream(values.device)
            stream.wait_stream(torch.cuda.current_stream(values.device))
            with torch.cuda.stream(stream):
                if self._work is not None:
                    self._work.wait()
                self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
                self._values.copy_(values, non_blocking=True)
                values.record_stream(stream)
                self._event = torch.cuda.Event()
                self._event.record(stream)

    def join(self) -> torch.Tensor:
        """The values on the GPU, for which the current stream waits."""
        assert self._event is not None
        torch.cuda.current_stream(self._on_gpu.device).wait_event(self._event)
        return self._on_gpu

    def read(self) -> Any:
        """The values, as floats; waits until they have arrived."""
        if self._event is not None:
            self._event.synchronize()
        elif self._work is not None:
            self._work.wait()
        return self._values.tolist()


_SIDE_STREAMS: dict[torch.device, torch.cuda.Stream] = {}


def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of copies to the host: on that of the computation, they would delay the next kernel."""
    if device not in _SIDE_STREAMS:
        _SIDE_STREAMS[device] = torch.cuda.Stream(device)
    return _SIDE_STREAMS[device]


def as_sum(amount: Any, num_samples: int, what: str) -> torch.Tensor:
    """[sum, count] of a mean over samples, of one value per sample, or of a pair (sum, count).

    An empty micro-batch (`num_samples` 0) gives [0, 0].
    """
    # new_full, not new_tensor: copying a number to a GPU makes the host wait for the GPU.
    if isinstance(amount, tuple | list):
        _check_pair(amount, what)
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


def _at_least_one(count: Any) -> Any:
    """A count to divide by; of a batch that counts nothing, the sum is zero already."""
    if isinstance(count, torch.Tensor):
        return torch.where(count == 0, torch.ones_like(count), count).reshape(())
    return count or 1


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.float32 if tensor.device.type == "mps" else torch.float64


def _check_pair(amount: Any, what: str) -> None:
    if len(amount) != 2:
        raise TaskError(f"{what} returned {len(amount)} values; return a mean, or a pair (sum, count)")
    count = amount[1]
    if isinstance(count, torch.Tensor) and count.numel() != 1:
        raise TaskError(f"the count of {what} has shape {tuple(count.shape)}; it is one number, such as its sum()")
    if not isinstance(count, torch.Tensor | int | float):
        raise TaskError(f"the count of {what} is a {type(count).__name__}; it is one number, such as len(batch)")


def _checked(loss: Any) -> torch.Tensor:
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
