"""Which ranks share a machine, and sums over all ranks that cross the network once for each machine.

The ranks of a machine sum through shared memory. The first rank of each, its leader, sends that sum to the other
machines and shares what comes back. Sent by every rank, the same gradients would cross the network several times.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from evenstep.distributed.shm.allreduce import Channel, open_channel
from evenstep.distributed.shm.native import load
from evenstep.distributed.world import World

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_PROCESSES = "/proc/self/ns/pid"


@dataclass(frozen=True)
class Machines:
    """The ranks of each machine. Without shared memory, every rank counts as a machine of its own."""

    groups: tuple[tuple[int, ...], ...]
    rank: int

    @classmethod
    def of(cls, world: World, *, may_share: bool = True) -> Machines:
        """Found by all ranks together."""
        keys = world.gather(_machine_key() if may_share and world.communication.may_share else None)
        if None in keys:
            return cls(tuple((rank,) for rank in range(world.size)), world.rank)
        groups = {key: tuple(rank for rank, other in enumerate(keys) if other == key) for key in dict.fromkeys(keys)}
        return cls(tuple(groups.values()), world.rank)

    @cached_property
    def own(self) -> tuple[int, ...]:
        """The ranks of this machine."""
        return next(group for group in self.groups if self.rank in group)

    @property
    def leaders(self) -> list[int]:
        """The first rank of each machine."""
        return [group[0] for group in self.groups]

    @property
    def is_leader(self) -> bool:
        return self.rank == self.own[0]

    @property
    def have_several_ranks(self) -> bool:
        """Whether there are several machines, and several ranks on one of them."""
        return 1 < len(self.groups) < sum(map(len, self.groups))


def _machine_key() -> str | None:
    """The same for processes that can share memory; None where this one cannot."""
    with suppress(OSError):
        if hasattr(os, "memfd_create") and load() is not None:
            return f"{_BOOT.read_text().strip()} {os.readlink(_PROCESSES)}"
    return None


SHORT_TURN = 100_000
"""Nanoseconds, the least that Linux takes."""


@contextmanager
def _short_turns() -> Iterator[None]:
    """Threads that are started here run as soon as they are woken, also while backward keeps all cores busy.

    They do little at a time, but the network waits for it.
    """
    library = load()
    if library is None:
        yield
        return
    library.evenstep_set_turns(SHORT_TURN)
    try:
        yield
    finally:
        library.evenstep_set_turns(0)


class Exchange(Protocol):
    """Sums a tensor over machines, in place; only leaders have one."""

    def start(self, message: Message) -> Callable[[], None]:
        """Begin; the result waits until it is done. Leaders begin the same messages in the same order."""


@dataclass(frozen=True)
class Message:
    """A flat tensor, and what it is made of."""

    values: torch.Tensor
    parts: Sequence[tuple[str, torch.Tensor]] = ()
    """Names and views, such as the gradients of a bucket."""
    arrived: Callable[[], None] = lambda: None


class WholeSum:
    """An all-reduce as it is: the exact sum up to rounding."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def start(self, message: Message) -> Callable[[], None]:
        work: dist.Work = dist.all_reduce(message.values, group=self._group, async_op=True)
        return work.wait  # type: ignore[return-value]


class PairSum:
    """Between two machines: each sends all it has, and adds what it receives.

    The same bytes as a ring of two, but one message for each instead of two, of which the second waits for the first.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._is_first = dist.get_rank(group) == 0
        self._other = dist.get_global_rank(group, 1 if self._is_first else 0)
        self._unused: dict[tuple[torch.dtype, int], list[torch.Tensor]] = {}
        """Memory of messages received before."""

    def start(self, message: Message) -> Callable[[], None]:
        values, group = message.values, self._group
        unused = self._unused.setdefault((values.dtype, len(values)), [])
        received = unused.pop() if unused else torch.empty_like(values)
        works = [dist.irecv(received, self._other, group), dist.isend(values, self._other, group)]

        def finish() -> None:
            for work in works:
                work.wait()  # type: ignore[union-attr]
            # In one order on both machines: of two NaNs, the first is the sum.
            torch.add(*((values, received) if self._is_first else (received, values)), out=values)
            unused.append(received)

        return finish


class MachineSum:
    """One rank's end of a sum over all ranks.

    Two threads, so that one message is summed inside the machine while another one is on the network.
    """

    def __init__(self, world: World, machines: Machines, channels: tuple[Channel, Channel] | None) -> None:
        self._machines, self._size = machines, world.size
        self._sums: Channel | None = channels[0] if channels is not None else None
        self._copies: Channel | None = channels[1] if channels is not None else None
        self.exchange: Exchange | None = None
        self._num_begun, self._num_summed = 0, 0
        """Messages; where both are equal, no thread uses the channel for sums."""
        self._inside: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._outside: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        with _short_turns():
            for work in (self._sum_inside, self._finish):
                threading.Thread(target=work, daemon=True, name="evenstep-link").start()

    @classmethod
    def open(cls, world: World, num_bytes: int, *, may_share: bool = True) -> MachineSum:
        """For messages of up to `num_bytes`; all ranks call this."""
        machines = Machines.of(world, may_share=may_share)
        channels = None
        if any(len(group) > 1 for group in machines.groups):
            channels = _channels(world, machines, num_bytes)
            if not all(world.gather(channels is not None or len(machines.own) == 1)):
                machines, channels = Machines.of(world, may_share=False), None
        made = cls(world, machines, channels)
        with _short_turns():
            group = dist.new_group(machines.leaders, backend="gloo")
        if machines.is_leader:
            made.group = group
            made.exchange = PairSum(group) if len(machines.groups) == 2 else WholeSum(group)
        return made

    group: dist.ProcessGroup | None = None
    """Of the leaders; None on other ranks."""

    @property
    def machines(self) -> Machines:
        return self._machines

    def start(self, message: Message) -> torch.futures.Future[torch.Tensor]:
        """Begin to average; all ranks begin the same messages in the same order."""
        job = _Job(message)
        if self._num_summed == self._num_begun:
            job.run(self._begin_inside)
        self._num_begun += 1
        if job.is_summed:
            self._pass_on(job)
        else:
            self._inside.put(job)
        return job.future

    def average(self, values: torch.Tensor) -> None:
        """Average a flat tensor in place."""
        self.start(Message(values)).wait()

    def close(self) -> None:
        """End the threads; nothing may be under way."""
        self._inside.put(None)

    def _sum_inside(self) -> None:
        while (job := self._inside.get()) is not None:
            job.run(self._finish_inside)
            self._pass_on(job)
        self._outside.put(None)

    def _begin_inside(self, job: _Job) -> None:
        """Without waiting: threads of a busy machine start late, and the network waits for them."""
        job.is_begun = True
        job.is_summed = self._sums is None or self._sums.begin_sum_to_first(job.message.values)

    def _finish_inside(self, job: _Job) -> None:
        if not job.is_begun:
            self._begin_inside(job)
        if self._sums is not None and not job.is_summed:
            self._sums.finish()

    def _pass_on(self, job: _Job) -> None:
        job.run(self._send)
        self._outside.put(job)
        self._num_summed += 1

    def _send(self, job: _Job) -> None:
        if self.exchange is not None:
            # Before it is sent: a narrow type must not overflow in the sum.
            job.message.values.mul_(1 / self._size)
            job.wait = self.exchange.start(job.message)

    def _finish(self) -> None:
        while (job := self._outside.get()) is not None:
            job.run(self._receive_and_share)
            job.finish()

    def _receive_and_share(self, job: _Job) -> None:
        job.wait()
        if self._copies is not None:
            self._copies.copy_from_first(job.message.values)


def _channels(world: World, machines: Machines, num_bytes: int) -> tuple[Channel, Channel] | None:
    own = machines.own

    def gather(value: Any) -> list[Any]:
        every = world.gather(value)
        return [every[rank] for rank in own]

    made = [open_channel(gather, own.index(world.rank), num_bytes, load(), is_background=True) for _ in range(2)]
    return (made[0], made[1]) if made[0] is not None and made[1] is not None else None


class _Job:
    """A message under way."""

    def __init__(self, message: Message) -> None:
        self.message = message
        self.future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        self.wait: Callable[[], object] = lambda: None
        self.is_begun, self.is_summed = False, False
        """Inside the machine."""
        self._error: BaseException | None = None

    def run(self, work: Callable[[_Job], None]) -> None:
        """The next part of it; after an error, none."""
        if self._error is None:
            try:
                work(self)
            except BaseException as error:
                self._error = error

    def finish(self) -> None:
        """Give the result, or the error, to whoever waits."""
        if self._error is not None:
            self.future.set_exception(self._error)  # type: ignore[arg-type]
        else:
            self.future.set_result(self.message.values)
        self.message.arrived()
