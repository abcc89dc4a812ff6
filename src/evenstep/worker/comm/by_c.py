"""A channel whose work is done in C: each stage in one pass over memory, and waiting without the interpreter."""

from __future__ import annotations

import ctypes
import time
from array import array
from collections.abc import Sequence
from itertools import accumulate

import torch

from evenstep.worker.comm.channel import DTYPES, SMALL_BYTES, Ring
from evenstep.worker.comm.memory import Shared
from evenstep.worker.comm.peers import LOOK_SECONDS

SLOTS = (2**18, 8)
"""Bytes of a slot, and slots at most: a piece lies in one core's cache, a ring in that of all."""


class ByC:
    """See channel.py."""

    def __init__(self, shared: Shared, ring: Ring, library: ctypes.CDLL) -> None:
        self._peers, self._library = shared.peers, library
        self._memory = shared.memory
        self._handle = library.evenstep_open(
            self._memory.data_ptr(),
            *(shared.rank, shared.size, ring.num_slots, ring.slot_bytes, SMALL_BYTES, shared.peers.may_spin),
        )
        if not self._handle:
            raise MemoryError

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._library.evenstep_close(self._handle)

    def average(self, tensors: Sequence[torch.Tensor]) -> None:
        places = array("Q", [tensor.data_ptr() for tensor in tensors])
        ends = array("q", accumulate(tensor.numel() for tensor in tensors))
        self._library.evenstep_begin(
            *(self._handle, places.buffer_info()[0], ends.buffer_info()[0], len(ends)),
            DTYPES.index(tensors[0].dtype),
        )
        began = time.perf_counter()
        # Slices: between two of them Python sees signals, and a process that has ended is noticed.
        while not self._library.evenstep_advance(self._handle, LOOK_SECONDS):
            lost = self._peers.lost()
            # What it posted before its end counts.
            if not self._library.evenstep_advance(self._handle, 0.0):
                self._peers.judge(lost, time.perf_counter() - began)
