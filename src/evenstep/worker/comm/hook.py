"""What DDP does with a bucket of gradients where processes share memory.

Posted when it is ready, and finished, without waiting, when a later one is; the last one waits for all. So the ways of
buckets are hidden behind the rest of backward, by the thread that computes it: there is no other one to take its core.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future
from torch.profiler import record_function

from evenstep.worker.comm.channel import Channel, takes
from evenstep.worker.tap import Moment, Tap


@dataclass(slots=True)
class OnItsWay:
    """A bucket that was posted."""

    future: Future[torch.Tensor]
    gradients: torch.Tensor
    needs: int
    """Pieces that are collected when it has arrived."""
    index: int
    begin: Moment | None


class Buckets:
    """The buckets of one model; told of to a tap while that is open, and not sent while it is muted."""

    def __init__(self, channel: Channel, tap: Tap) -> None:
        self._channel = channel
        self._tap = tap
        self._on_their_way: deque[OnItsWay] = deque()

    def take(self, bucket: Any) -> Future[torch.Tensor]:
        """DDP's communication hook."""
        if torch.autograd.profiler._is_profiler_enabled:
            # As dp's own sending is called in a trace; an engine of torch's would be in it by itself.
            with record_function("evenstep: reduce"):
                return self._take(bucket)
        return self._take(bucket)

    def _take(self, bucket: Any) -> Future[torch.Tensor]:
        gradients: torch.Tensor = bucket.buffer()
        future: Future[torch.Tensor] = Future()
        tap = self._tap
        if tap.is_muted:
            future.set_result(gradients)
            return future
        index, begin = bucket.index(), tap.now() if tap.is_open else None
        if begin is not None:
            tap.sent([gradients])
        if takes(gradients):
            needs = self._channel.post(gradients)
            self._on_their_way.append(OnItsWay(future, gradients, needs, index, begin))
        else:
            future = self._by_torch(gradients, index, begin)
        if bucket.is_last():
            # The last gradient is computed: from here on, there is nothing to hide the sending behind.
            tap.mark("communication")
            self._channel.finish()
        self._hand_over()
        return future

    def _hand_over(self) -> None:
        """Finish the futures of what has arrived."""
        collected = self._channel.advance() if self._on_their_way else 0
        while self._on_their_way and self._on_their_way[0].needs <= collected:
            arrived = self._on_their_way.popleft()
            if arrived.begin is not None:
                self._tap.travelled(f"bucket {arrived.index}", arrived.begin)
            arrived.future.set_result(arrived.gradients)

    def _by_torch(self, gradients: torch.Tensor, index: int, begin: Moment | None) -> Future[torch.Tensor]:
        """What DDP does with a bucket by itself: for types that a channel cannot add."""
        gradients.div_(dist.get_world_size())
        sending: dist.Work = dist.all_reduce(gradients, async_op=True)

        def arrived(future: Future[list[torch.Tensor]]) -> torch.Tensor:
            if begin is not None:
                self._tap.travelled(f"bucket {index}", begin)
            return future.value()[0]

        return sending.get_future().then(arrived)
