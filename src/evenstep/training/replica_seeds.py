"""What virtual replicas draw from: before each of their micro-batches, the generators are seeded.

They are set to states that were computed for the whole step at once (seeds.c), where that is possible: to seed them one
by one would take a twentieth of a small step.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch

from evenstep.data.batches import Place
from evenstep.data.loader import Batch, MicroBatch
from evenstep.distributed.shm.native import load
from evenstep.distributed.world import World
from evenstep.private_apis import has_python_words, seeded_torch_state
from evenstep.sampling.rng import (
    STATE_BYTES,
    derive_seed,
    first_word,
    replica_seed,
    replica_seeds,
    seed_device,
    seed_devices,
    seed_host,
    set_words,
)

MOST_MICRO_BATCHES = 1 << 32
NO_EPOCH, EVALUATION = -2, -1
"""Its draws are those of no epoch: every evaluation of the same weights draws the same."""
LANES = 4
"""Seeds that seeds.c computes beside each other: there is memory for a multiple of them."""
TORCH_BYTES = 632 * 8
"""Of a state of torch's generator of the CPU, in which seeds.c writes."""
EXAMPLES = (1, 2**32 + 5, 2**63 - 1, 4983935207590170385)
T = TypeVar("T")


class SeededStates:
    """The states of Python's, NumPy's and torch's (CPU) generators after `seed_host`, for many seeds."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._compute = library.evenstep_seed_states
        self._num = 0
        """For how many seeds there is memory."""

    def compute(self, seeds: list[int]) -> None:
        num = len(seeds)
        if num > self._num:
            self._make(num)
        # Where no virtual replica of this process has samples in a short batch, there are none.
        if num:
            self._seeds[:num] = [*seeds]
            self._compute(self._addresses[0], num, *self._addresses[1:])

    def _make(self, num: int) -> None:
        self._num = num = -(-num // LANES) * LANES
        self._seeds = (ctypes.c_uint64 * num)()
        memory = [(ctypes.c_ubyte * (num * STATE_BYTES))() for _ in range(2)]
        of_torch = np.tile(seeded_torch_state(0).numpy(), (num, 1))
        self._addresses = [ctypes.addressof(self._seeds), *map(ctypes.addressof, memory), of_torch.ctypes.data]
        views = [memoryview(one).cast("B") for one in memory]
        starts = range(0, num * STATE_BYTES, STATE_BYTES)
        rows = [[view[start : start + STATE_BYTES] for start in starts] for view in views]
        # Not rows of one tensor: `set_state` of torch 2.13 reads a view with an offset at another place.
        self._rows = list(zip(*rows, map(torch.from_numpy, of_torch), strict=True))

    def set(self, index: int) -> bool:
        """Let the generators be as the index-th seed makes them; False if NumPy's is of another kind."""
        python, numpy, of_torch = self._rows[index]
        is_set = set_words(python, numpy)
        if is_set:
            torch.default_generator.set_state(of_torch)
        return is_set

    def fit_torch(self) -> bool:
        """Whether this torch has the words of a state where seeds.c writes them."""
        self.compute([*EXAMPLES])
        return all(row[2].equal(seeded_torch_state(seed)) for row, seed in zip(self._rows, EXAMPLES, strict=False))


def _states() -> SeededStates | None:
    library = load()
    if library is None or not has_python_words() or seeded_torch_state(0).nbytes != TORCH_BYTES:
        return None
    states = SeededStates(library)
    return states if states.fit_torch() else None


class Seeds:
    """Seeds of the virtual replicas: functions of (seed, epoch, position, virtual replica, micro-batch, repeat)."""

    def __init__(self, seed: int, world: World, what: str) -> None:
        self._seed, self._world, self._what = seed, world, what
        self._epoch = NO_EPOCH
        self._keys: list[int] = []
        """Of each virtual replica, in this epoch."""
        self._after = 0
        self._began: tuple[int, int, list[Place]] = (NO_EPOCH, 0, [])
        """The epoch, the repeat and the places of the step, mostly those of the one before."""
        self._first_words: list[int] = []
        """Of each micro-batch, for `replica_seeds`."""
        self._of_step: list[int] = []
        """The seed of each micro-batch of the step."""
        self._states = _states()
        self.share_generator = len(world.devices) > 1
        """Whether replicas of this process draw from one generator, that of the host: they run one after the other."""
        self._has_gpus = any(device.type != "cpu" for device in world.devices)

    def begin(self, epoch: int, position: int, repeat: int, places: list[Place]) -> None:
        """Before the micro-batches of a step, which these are."""
        # An evaluation may have been in between.
        self._enter(epoch)
        what = epoch, repeat, places
        if self._began != what:
            numbers = [micro + repeat * MOST_MICRO_BATCHES for _, micro in places]
            self._first_words = [
                first_word(self._keys[place[0]], number) for place, number in zip(places, numbers, strict=True)
            ]
            self._began = what
        self._of_step = replica_seeds(self._first_words, position)
        if self._states is not None:
            self._states.compute(self._of_step)

    def _enter(self, epoch: int) -> None:
        if self._epoch != epoch:
            self._epoch, self._after = epoch, derive_seed(self._seed, "after", epoch)
            virtual = range(self._world.num_virtual or 0)
            self._keys = [derive_seed(self._seed, self._what, epoch, number) for number in virtual]

    def _of(self, place: Place, position: int, repeat: int) -> int:
        return replica_seed(self._keys[place[0]], position, place[1] + repeat * MOST_MICRO_BATCHES)

    def set(self, replica: int, index: int) -> None:
        """Seed what the index-th micro-batch of the step can draw from, on this replica."""
        if self._states is None or not self._states.set(index):
            seed_host(self._of_step[index])
        if self._has_gpus:
            seed_device(self._of_step[index], self._world.devices[replica])

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
