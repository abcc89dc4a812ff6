"""Compares between ranks what each is about to do, before it is done.

Ranks that enter one collective with tensors of different sizes abort or hang. Where the sizes happen to agree, nothing
fails, and the result is wrong. So each rank first writes down its next operation in a `Ledger`, which fsdp uses.

`check_collectives` (--check-collectives) compares every collective of torch.distributed: which one, of what dtype and
shape, and from which line. gloo adds float32 to float64 silently, and hangs where one rank broadcasts and another
reduces.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from evenstep.distributed.shm.allreduce import stores_are_ordered
from evenstep.distributed.shm.segment import Gather, Shared, share
from evenstep.distributed.world import World
from evenstep.errors import TrainingError
from evenstep.task import is_user_code

DEPTH = 1024
"""Entries of a rank that are kept: the host of a GPU may be a whole step ahead of another one."""


@dataclass(frozen=True)
class Other:
    """What another rank wrote."""

    rank: int
    entry: int


class Ledger(Protocol):
    """One rank's end."""

    waits: bool
    """Whether every entry takes a round trip, in which all ranks wait for each other."""

    def differing(self, entry: int) -> Other | None:
        """Write the next entry; a rank that wrote another one at the same point, if there is any."""


def open_ledger(gather: Gather, rank: int) -> Ledger:
    """One for all ranks that gather: in memory where they share a machine, else by a collective of 8 bytes."""
    size = len(able := gather(stores_are_ordered()))
    shared = share(gather, rank, 16 * DEPTH * size) if all(able) else None
    return SharedLedger(shared) if shared is not None else SentLedger(rank, size)


class SharedLedger:
    """Never waits: of two ranks that differ, the later one finds the other's entry."""

    waits = False

    def __init__(self, shared: Shared) -> None:
        self._numbers = shared.counters(2 * DEPTH * shared.size)
        self._own = 2 * DEPTH * shared.rank
        self._others = [(rank, 2 * DEPTH * rank) for rank in range(shared.size) if rank != shared.rank]
        self._num_written = 0
        self._fence = threading.Lock()

    def differing(self, entry: int) -> Other | None:
        self._num_written += 1
        numbers, number, place = self._numbers, self._num_written, 2 * (self._num_written % DEPTH)
        own = self._own + place
        # No rank reads an entry under the number of the one that it replaces.
        numbers[own] = 0
        numbers[own + 1] = entry
        numbers[own] = number
        # x86 may read other ranks' entries before its own are written; not across the locked instruction of a lock.
        with self._fence:
            pass
        for rank, start in self._others:
            if numbers[start + place] == number:
                theirs = numbers[start + place + 1]
                if theirs != entry and numbers[start + place] == number:
                    return Other(rank, theirs)
        return None


class SentLedger:
    """Every entry is sent to all ranks, which wait for each other."""

    waits = True

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def differing(self, entry: int) -> Other | None:
        mine = torch.tensor([entry])
        every = [torch.empty_like(mine) for _ in range(self._size)]
        dist.all_gather(every, mine)
        others = [Other(rank, int(one)) for rank, one in enumerate(every)]
        return next((other for other in others if other.entry != entry), None)


ONE_SHAPE = ("all_reduce", "broadcast", "reduce", "all_gather", "gather", "scatter", "barrier")
ANY_SHAPE = ("all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single")
LONGEST = 256


def check_collectives(world: World) -> None:
    """Compare the collectives of torch.distributed from now on; they cost a small message more."""
    if world.size == 1:
        return
    # What goes through shared memory would not be seen.
    world.communication.may_share = False
    group = dist.new_group(backend="gloo")
    gather = dist.all_gather
    for name in (*ONE_SHAPE, *ANY_SHAPE):
        setattr(dist, name, _compared(name, getattr(dist, name), functools.partial(_exchange, world, gather, group)))


def _compared(name: str, collective: Callable[..., Any], exchange: Callable[[str], list[str]]) -> Callable[..., Any]:
    signature = inspect.signature(collective)

    @functools.wraps(collective)
    def call(*arguments: Any, **options: Any) -> Any:
        # A part of the ranks has its own order of calls.
        if signature.bind(*arguments, **options).arguments.get("group") in (None, dist.group.WORLD):
            calls = exchange(f"{_what(name, arguments, options)} at {_users_line()}")
            if len({one.rpartition(" at ")[0] for one in calls}) > 1:
                lines = "\n".join(f"rank {rank} calls {one}" for rank, one in enumerate(calls[:8]))
                raise TrainingError(f"the ranks do not call the same collective:\n{lines}")
        return collective(*arguments, **options)

    return call


def _exchange(world: World, gather: Callable[..., Any], group: Any, text: str) -> list[str]:
    mine = torch.zeros(LONGEST, dtype=torch.uint8)
    data = text.encode()[:LONGEST]
    mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    every = [torch.empty_like(mine) for _ in range(world.size)]
    gather(every, mine, group=group)
    return [bytes(one.tolist()).rstrip(b"\0").decode(errors="replace") for one in every]


def _what(name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> str:
    given = (*arguments, *options.values())
    tensors = [one for one in given if isinstance(one, torch.Tensor)]
    if not tensors:
        tensors = [one for many in given if isinstance(many, list | tuple) for one in many[:1]]
    dtypes = ", ".join(str(one.dtype).removeprefix("torch.") for one in tensors)
    shapes = ", ".join(str(list(one.shape)) for one in tensors) if name in ONE_SHAPE else ""
    return " ".join(part for part in (name, f"of {dtypes}" if dtypes else "", shapes) if part)


def _users_line() -> str:
    frame = sys._getframe(2)
    while frame.f_back is not None and not is_user_code(frame.f_code.co_filename):
        frame = frame.f_back
    is_found = is_user_code(frame.f_code.co_filename)
    # The end of a long path identifies the file; the message has a fixed length.
    return f"{frame.f_code.co_filename[-LONGEST // 2 :]}:{frame.f_lineno}" if is_found else "evenstep's own line"
