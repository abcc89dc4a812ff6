"""The rows of all replicas, with gradients: what `evenstep.gather` does between processes and between threads.

Every replica gets all rows, in the order of the samples. In backward, the gradients that all replicas have for a row
are summed and go back to the replica that it came from. Each replica's loss is weighted by its share of the samples.
Since these weights add up to 1, the sum is the gradient of one device, whether a replica returns the loss of all rows
or that of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Protocol

import torch
import torch.distributed as dist

from evenstep.distributed.world import World
from evenstep.errors import TaskError


class RowExchange(Protocol):
    """One replica's end of one gather."""

    def collect(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows of all replicas."""

    def sum_own(self, gradients: torch.Tensor) -> torch.Tensor:
        """The sum over all replicas of the gradients of this one's rows."""


class GatherRows(torch.autograd.Function):
    """All rows; its gradient is `ScatterRows`."""

    @staticmethod
    def forward(context: Any, rows: torch.Tensor, exchange: RowExchange) -> torch.Tensor:
        context.exchange = exchange
        return exchange.collect(rows)

    @staticmethod
    def backward(context: Any, gradients: torch.Tensor) -> Any:
        return ScatterRows.apply(gradients, context.exchange), None  # type: ignore[no-untyped-call]


class ScatterRows(torch.autograd.Function):
    """The sums for own rows; its gradient is `GatherRows`."""

    @staticmethod
    def forward(context: Any, gradients: torch.Tensor, exchange: RowExchange) -> torch.Tensor:
        context.exchange = exchange
        return exchange.sum_own(gradients)

    @staticmethod
    def backward(context: Any, rows: torch.Tensor) -> Any:
        return GatherRows.apply(rows, context.exchange), None  # type: ignore[no-untyped-call]


def gather_rows(rows: torch.Tensor, exchange: RowExchange) -> torch.Tensor:
    """The rows of all replicas, each with its gradient."""
    every: torch.Tensor = GatherRows.apply(rows, exchange)  # type: ignore[no-untyped-call]
    return every


class ProcessRows:
    """Between processes, by collectives; all ranks call them in the same order."""

    def __init__(self, world: World, counts: Sequence[int]) -> None:
        self._world, self._counts = world, counts
        self._own = own_rows(counts, world.rank)

    def collect(self, rows: torch.Tensor) -> torch.Tensor:
        counts, most = self._counts, max(self._counts)
        own = rows[: counts[self._world.rank]]
        if len(own) < most:
            own = torch.cat([own, own.new_zeros(most - len(own), *own.shape[1:])])
        # As bytes: gloo has no collective for every type.
        sent = own.contiguous().flatten().view(torch.uint8)
        every = sent.new_empty(len(counts) * len(sent))
        if self._world.communication.is_off:
            every.view(len(counts), -1).copy_(sent)
        else:
            self._world.heartbeat.collective()
            arrived = self._world.spans.send("gather", [sent], waits=True)
            dist.all_gather(list(every.view(len(counts), -1)), sent, group=self._world.group)
            arrived()
        of_ranks = every.view(rows.dtype).view(len(counts), most, *rows.shape[1:])
        if min(counts) == most:
            return of_ranks.flatten(0, 1)
        return torch.cat([part[:count] for part, count in zip(of_ranks, counts, strict=True)])

    def sum_own(self, gradients: torch.Tensor) -> torch.Tensor:
        # Half precision is too narrow for sums over many ranks.
        total = gradients.float() if gradients.dtype.itemsize < 4 else gradients.clone()
        total = total.contiguous()
        if not self._world.communication.is_off:
            self._world.heartbeat.collective()
            arrived = self._world.spans.send("gradients of gather", [total], waits=True)
            dist.all_reduce(total, group=self._world.group)
            arrived()
        return or_one(total[self._own].to(gradients.dtype))


class ThreadRows:
    """Between the replicas of one process, each of which runs in its own thread."""

    def __init__(self, meeting: Meeting, replica: int, counts: Sequence[int], device: torch.device) -> None:
        self._meeting, self._replica, self._device = meeting, replica, device
        self._count, self._own = counts[replica], own_rows(counts, replica)

    def collect(self, rows: torch.Tensor) -> torch.Tensor:
        # A copy: the loss may change its own tensor while another thread reads it.
        every = self._meeting.exchange(self._replica, rows.detach()[: self._count].clone())
        return torch.cat([one.to(self._device) for one in every])

    def sum_own(self, gradients: torch.Tensor) -> torch.Tensor:
        every = self._meeting.exchange(self._replica, gradients.detach())
        own = [one[self._own].to(self._device) for one in every]
        return or_one(torch.stack(own).sum(0))


class RepeatedRows:
    """One replica's rows, repeated, in place of all: a loss is tried with them, and its values are not used."""

    def __init__(self, replica: int, counts: Sequence[int]) -> None:
        self._own, self._num = own_rows(counts, replica), sum(counts)

    def collect(self, rows: torch.Tensor) -> torch.Tensor:
        return rows[torch.arange(self._num, device=rows.device) % len(rows)]

    def sum_own(self, gradients: torch.Tensor) -> torch.Tensor:
        return or_one(gradients[self._own])


def own_rows(counts: Sequence[int], replica: int) -> slice:
    """Where the rows of a replica are among all.

    >>> own_rows([4, 3, 3], 1)
    slice(4, 7, None)
    """
    ends = [0, *accumulate(counts)]
    return slice(ends[replica], ends[replica + 1])


def or_one(rows: torch.Tensor) -> torch.Tensor:
    """A replica without samples runs one that counts for nothing, and has a gradient of zero."""
    return rows if len(rows) else rows.new_zeros(1, *rows.shape[1:])


class MeetingLeft(TaskError):
    """Another replica ended, by an error of its own or by calling `gather` less often."""


class Meeting:
    """Where the threads of all replicas of a process exchange values, in the order of their calls."""

    def __init__(self, num_replicas: int) -> None:
        self._num = num_replicas
        self._changed = threading.Condition()
        self._calls = [0] * num_replicas
        self._values: dict[int, dict[int, torch.Tensor]] = {}
        """Of each call, by replica."""
        self._left: set[int] = set()

    def exchange(self, replica: int, value: torch.Tensor) -> list[torch.Tensor]:
        """The values of all replicas in the same call; waits for them."""
        with self._changed:
            values = self._values.setdefault(self._calls[replica], {})
            self._calls[replica] += 1
            values[replica] = value
            self._changed.notify_all()
            self._changed.wait_for(lambda: len(values) == self._num or self._left - values.keys())
            if len(values) < self._num:
                missing = min(self._left - values.keys())
                raise MeetingLeft(
                    f"replica {replica} waits in evenstep.gather, and replica {missing} did not call it: "
                    "call it on every replica, as often, also for samples that need nothing"
                )
            return [values[one] for one in range(self._num)]

    def leave(self, replica: int) -> None:
        """This replica will not come again; whoever waits for it is released."""
        with self._changed:
            self._left.add(replica)
            self._changed.notify_all()
