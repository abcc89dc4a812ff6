"""What virtual replicas draw from: before each of their micro-batches, the generators are seeded.

Those of Python and NumPy are set to states that were computed for the whole step at once (seeds.c), where that is
possible: to seed them one by one would take a fortieth of a small step.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TypeVar

import torch

from evenstep.data.batches import Place
from evenstep.data.loader import Batch, MicroBatch
from evenstep.distributed.shm.native import load
from evenstep.distributed.world import World
from evenstep.internals import has_python_words
from evenstep.sampling.rng import (
    STATE_BYTES,
    derive_seed,
    replica_seed,
    seed_device,
    seed_devices,
    seed_host,
    set_words,
)

MOST_MICRO_BATCHES = 1 << 32
NO_EPOCH, EVALUATION = -2, -1
"""Its draws are those of no epoch: every evaluation of the same weights draws the same."""
T = TypeVar("T")


class SeededStates:
    """The states of Python's and NumPy's generators after `seed_host`, for many seeds."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._compute = library.evenstep_seed_states
        self._num = 0
        """For how many seeds there is memory."""

    def compute(self, seeds: list[int]) -> None:
        if not seeds:
            # No virtual replica of this process has samples in a short batch.
            return
        if len(seeds) > self._num:
            self._make(len(seeds))
        self._seeds[: len(seeds)] = [*seeds]
        self._compute(self._addresses[0], len(seeds), *self._addresses[1:])

    def _make(self, num: int) -> None:
        self._num, self._seeds = num, (ctypes.c_uint64 * num)()
        memory = [(ctypes.c_ubyte * (num * STATE_BYTES))() for _ in range(2)]
        self._addresses = [ctypes.addressof(self._seeds), *map(ctypes.addressof, memory)]
        views = [memoryview(one).cast("B") for one in memory]
        starts = range(0, num * STATE_BYTES, STATE_BYTES)
        self._rows = [[view[start : start + STATE_BYTES] for view in views] for start in starts]

    def set(self, index: int) -> bool:
        """Let both generators be as the index-th seed makes them; False if NumPy's is of another kind."""
        return set_words(*self._rows[index])


def _states() -> SeededStates | None:
    library = load()
    return SeededStates(library) if library is not None and has_python_words() else None


class Seeds:
    """Seeds of the virtual replicas: functions of (seed, epoch, position, virtual replica, micro-batch, repeat)."""

    def __init__(self, seed: int, world: World, what: str) -> None:
        self._seed, self._world, self._what = seed, world, what
        self._epoch = NO_EPOCH
        self._keys: list[int] = []
        """Of each virtual replica, in this epoch."""
        self._after = 0
        self._of_step: dict[Place, tuple[int, int]] = {}
        """The index and the seed of each micro-batch of the step."""
        self._states = _states()
        self.share_generator = len(world.devices) > 1
        """Whether replicas of this process draw from one generator, that of the host: they run one after the other."""
        self._has_gpus = any(device.type != "cpu" for device in world.devices)

    def begin(self, epoch: int, position: int, repeat: int, places: list[Place]) -> None:
        """Before the micro-batches of a step, which these are."""
        self._enter(epoch)
        seeds = [self._of(place, position, repeat) for place in places]
        self._of_step = dict(zip(places, enumerate(seeds), strict=True))
        if self._states is not None:
            self._states.compute(seeds)

    def _enter(self, epoch: int) -> None:
        if self._epoch != epoch:
            self._epoch, self._after = epoch, derive_seed(self._seed, "after", epoch)
            virtual = range(self._world.num_virtual or 0)
            self._keys = [derive_seed(self._seed, self._what, epoch, number) for number in virtual]

    def _of(self, place: Place, position: int, repeat: int) -> int:
        return replica_seed(self._keys[place[0]], position, place[1] + repeat * MOST_MICRO_BATCHES)

    def set(self, replica: int, place: Place) -> None:
        """Seed what a micro-batch of the step can draw from, on this replica."""
        index, seed = self._of_step[place]
        if self._states is not None and self._states.set(index):
            torch.default_generator.manual_seed(seed)
        else:
            seed_host(seed)
        if self._has_gpus:
            seed_device(seed, self._world.devices[replica])

    def finish(self, position: int, repeat: int) -> None:
        """After a step: whatever the user draws from torch next is the same on all devices."""
        seed = replica_seed(self._after, position, repeat)
        seed_devices([seed] * len(self._world.devices), self._world.devices)

    def seeded(self, work: Callable[[int, MicroBatch], T], batch: Batch, index: int) -> Callable[[int, MicroBatch], T]:
        """`work` on the micro-batches with this index, in an evaluation."""
        self._enter(EVALUATION)
        places = batch.loader.split.places(batch.num_samples)[index]

        def call(replica: int, micro_batch: MicroBatch) -> T:
            place = places[replica]
            if place is not None:
                seed = self._of(place, batch.span.start, 0)
                seed_host(seed)
                seed_device(seed, self._world.devices[replica])
            return work(replica, micro_batch)

        return call
