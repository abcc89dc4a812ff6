"""Steps that have the same bits on any number of devices (`--virtual-replicas V`).

A global batch is cut into V virtual replicas. Each device computes some of them, one after the other; their gradients
are summed in the order of one tree (see `evenstep.distributed.gradient_tree`). Whatever a loss draws belongs to its
virtual replica: the generators are seeded before each of its micro-batches. The loss of every micro-batch is sent as it
is, and summed once, exactly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch

from evenstep.data.batches import Turn
from evenstep.data.loader import Batch, MicroBatch
from evenstep.distributed.gradient_tree import GradientTree
from evenstep.distributed.world import World
from evenstep.errors import TaskError
from evenstep.sampling.rng import host_states, restore_host_states
from evenstep.strategies.base import DistributedModel, forget, has_sparse_gradients, one_after_another
from evenstep.task import Amount
from evenstep.training.evaluation import NamedSums
from evenstep.training.gradient_accumulation import ReplicaBackward
from evenstep.training.host_copy import HostCopy
from evenstep.training.logged_values import StepLogs
from evenstep.training.loss_amount import as_pair, as_sum
from evenstep.training.loss_weighting import LossTotal
from evenstep.training.replica_buffers import replica_buffers
from evenstep.training.replica_seeds import Seeds

if TYPE_CHECKING:
    from evenstep.distributed.shm.allreduce import PendingSum

NO_IDS = np.zeros(0, dtype=np.int64)


def refuse_sparse(model: DistributedModel) -> None:
    """Raise TaskError for gradients that the tree cannot add."""
    if has_sparse_gradients(model.module):
        raise TaskError("--virtual-replicas sums whole gradients, and a layer makes sparse ones; give it sparse=False")


class VirtualBackward:
    """Forward and backward of one global batch."""

    def __init__(self, backward: ReplicaBackward, batch: Batch, seeds: Seeds, repeat: int) -> None:
        self._backward, self._batch, self._seeds, self._repeat = backward, batch, seeds, repeat
        assert isinstance(backward.totals, VirtualLoss)
        self._totals = backward.totals
        self._start = batch.span.start
        self._buffers = [replica_buffers(model, backward.world) for model in backward.models if model.has_buffers]

    def run(self) -> None:
        for buffers in self._buffers:
            buffers.start()
        # Outside of a step the generators are the user's.
        outside = host_states()
        try:
            self._seeds.begin(self._batch.span.epoch, self._start, self._repeat, self._totals.turns.places)
            self._run()
        except BaseException:
            for buffers in self._buffers:
                buffers.undo()
            model = self._backward.models[0]
            for weights in (model.weights, *model.weights_of):
                forget(weights)
            raise
        finally:
            restore_host_states(outside)
            self._seeds.finish(self._start, self._repeat)

    def _run(self) -> None:
        model, totals = self._backward.models[0], self._totals
        run = one_after_another if self._seeds.share_generator else model.run
        trees = run(self._on_device, list(enumerate(totals.turns.of_replicas)))
        if totals.sent is None:
            # No virtual replica of this process has samples in a short batch.
            totals.send()
        split = self._batch.loader.split
        model.sum_trees(trees, split.virtual)
        for buffers in self._buffers:
            # Those without samples in a short batch are the last.
            buffers.finish(min(self._batch.num_samples, split.least))

    def _on_device(self, replica: int, turns: list[Turn]) -> GradientTree:
        model, split = self._backward.models[0], self._batch.loader.split
        weights, separate = model.weights_of[replica], model.separate[replica]
        tree = GradientTree(weights, split.virtual[split.replicas[replica]])
        num_to_run = sum([len(turn.micro_batches) for turn in turns])
        num_left = self._num_left(num_to_run)
        # fsdp's gradients are not those of its parameters.
        are_known = separate.weights is weights
        sums = model.backward_sums[replica]
        if are_known:
            sums.start()
        can_leave = are_known and self._totals.turns.num_micro == 1 and num_to_run == len(turns)
        left: list[int] | None = None
        for turn in turns:
            num_to_run -= len(turn.micro_batches)
            self._run_turn(replica, turn, not (num_to_run or num_left))
            if left is not None:
                sums.check(left)
            gradients = separate() if tree.keeps_next or not are_known else None
            left = sums.leave(gradients) if can_leave and tree.joins_next and gradients is not None else None
            if left is not None:
                tree.leave()
            else:
                tree.take(gradients if are_known else None)
        self._stand_in(replica, num_left)
        return tree

    def _run_turn(self, replica: int, turn: Turn, is_last: bool) -> None:
        """The micro-batches of one virtual replica."""
        model, (virtual, own) = self._backward.models[0], turn
        for buffers in self._buffers:
            buffers.begin(replica)
        for number, part in enumerate(own, 1):
            if number > 1:
                # Backward adds to what the last one left.
                model.separate[replica]()
            self._totals.begin(part.number)
            self._seeds.set(replica, part.own)
            model.backward_sums[replica].begin()
            micro_batch = self._batch.micro_batches[part.at][replica]
            self._backward.compute(is_last and number == len(own), replica, micro_batch)
        for buffers in self._buffers if own else ():
            buffers.end(replica, virtual)

    def _num_left(self, num_here: int) -> int:
        """Micro-batches that another rank runs and this one has not, where all must run as many."""
        return max(0, len(self._batch.micro_batches) - num_here) if self._backward.models[0].meets_in_forward else 0

    def _stand_in(self, replica: int, num: int) -> None:
        """Run the first micro-batch again, for nothing: a single sample may be too few for a model."""
        inputs = self._batch.micro_batches[0][replica].inputs if num else None
        self._totals.begin(None)
        for left in reversed(range(num)):
            with self._backward.models[0].standing_in():
                self._backward.compute(left == 0, replica, MicroBatch(inputs, NO_IDS, 0))


class VirtualLogs(StepLogs):
    """What the losses of one step gave to `evenstep.log`, each value in the place of its micro-batch."""

    def __init__(self, world: World, names: list[str], num_places: int) -> None:
        super().__init__(world, names)
        self._num_places = num_places
        self.place: int | None = None
        """That of the micro-batch whose loss is computed; replicas of one process run one after the other."""
        self._placed: list[tuple[str, int, torch.Tensor, HostCopy | None]] = []

    def take(self, logged: list[tuple[str, Amount]], num_samples: int) -> None:
        place = self.place
        if place is None:
            return
        for name, amount in logged:
            pair = as_sum(amount, num_samples, name)
            self._placed.append((name, place, pair, HostCopy(pair) if self._world.size == 1 else None))

    def own_names(self) -> list[str]:
        return [name for name, *_ in self._placed]

    def sums_of(self, names: list[str], like: torch.Tensor) -> list[torch.Tensor]:
        vectors = {name: like.new_zeros(2 * self._num_places) for name in names}
        for name, place, pair, _ in self._placed:
            if name in vectors:
                vectors[name][2 * place : 2 * place + 2] += pair.to(like)
        return list(vectors.values())

    def means(self) -> dict[str, float]:
        width = 2 * self._num_places
        if self._world.size == 1:
            vectors: dict[str, list[float]] = {}
            for name, place, _, host in self._placed:
                assert host is not None
                vector = vectors.setdefault(name, [0.0] * width)
                for index, value in enumerate(host.read(), 2 * place):
                    vector[index] += value
        else:
            vectors = {name: self._sums[width * at : width * (at + 1)] for at, name in enumerate(self._sent_names)}
        sums = {name: (math.fsum(vector[::2]), math.fsum(vector[1::2])) for name, vector in vectors.items()}
        return {name: total / count for name, (total, count) in sums.items() if count}


class VirtualLoss(LossTotal):
    """The loss of one global batch: that of each micro-batch is sent in a place of its own, to which others add 0."""

    def __init__(self, world: World, batch: Batch, request_code: float, names: list[str]) -> None:
        assert world.num_virtual is not None
        self.turns = batch.loader.split.turns(batch.num_samples)
        self._num_places = world.num_virtual * self.turns.num_micro
        self._logs = VirtualLogs(world, names, self._num_places)
        super().__init__(world, batch.num_samples, request_code, self._logs)
        # Gradients are summed, not averaged over processes.
        self._scale = 1
        # The same arithmetic on any number of devices.
        self._can_be_whole = world.num_virtual == 1
        self._places: list[int] = []
        """Of `parts`."""

    def begin(self, place: int | None) -> None:
        """Before a micro-batch; None for one that stands in for no samples."""
        self._logs.place = place

    def take(self, amount: Amount, micro_batch: MicroBatch) -> tuple[torch.Tensor, float]:
        taken = super().take(amount, micro_batch)
        if self._logs.place is None:
            self.parts.pop()
        else:
            self._places.append(self._logs.place)
        return taken

    def _post(self) -> HostCopy | PendingSum:
        """Start the sum of [request code, names are new, counts are late], sums and counts of places and of names."""
        more = [self.request_code, float(self.logs.has_new), float(self.is_late)]
        places = [2 * place for place in self._places]
        if self._world.device.type != "cpu":
            own = torch.zeros(2 * self._num_places + len(more), dtype=torch.float64, device=self._world.device)
            for index, value in enumerate(more):
                own[index].fill_(value)
            for place, part in zip(places, self.parts, strict=True):
                own[place + 3 : place + 5] = part.pair()
            return HostCopy(torch.cat([own, *self.logs.known(own)]), self._world)
        numbers = more + [0.0] * (2 * self._num_places)
        for place, part in zip(places, self.parts, strict=True):
            numbers[place + 3 : place + 5] = as_pair(part.amount.tolist(), part.micro_batch.num_samples)
        numbers += self.logs.known_numbers()
        return self._world.post(numbers) or HostCopy(torch.tensor(numbers, dtype=torch.float64), self._world)

    def _pairs(self) -> list[list[float]]:
        if self.sent is None:
            return [part.read() for part in self.parts]
        self.request_code, has_new, is_late, *more = self.sent.read()
        # This process may have computed nothing of a short batch.
        self.is_late = bool(is_late)
        width = 2 * self._num_places
        self.logs.take_sums([has_new, *more[width:]])
        return [more[place : place + 2] for place in range(0, width, 2)]


class ExactSums(NamedSums):
    """Sums that are rounded once, at the end: the same in any order of micro-batches and ranks."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._pairs: dict[str, list[torch.Tensor]] = {}

    def add(self, measured: Mapping[str, torch.Tensor]) -> None:
        for name, pair in measured.items():
            self._pairs.setdefault(name, []).append(pair)

    def means(self) -> dict[str, float]:
        own = {name: _exact(torch.stack(pairs).tolist()) for name, pairs in self._pairs.items()}
        every = self._world.gather(own)
        names = dict.fromkeys(name for of_rank in every for name in of_rank)
        means: dict[str, float] = {}
        for name in names:
            columns = zip(*(of_rank[name] for of_rank in every if name in of_rank), strict=True)
            total, count = (_sum([part for parts in column for part in parts]) for column in columns)
            means[name] = total / count if count else math.nan
        return means


def _sum(values: list[float]) -> float:
    # fsum refuses infinities of both signs.
    return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)


def _exact(pairs: list[list[float]]) -> list[list[float]]:
    """For sums and for counts, few numbers that add up to exactly what all of them do."""
    return [partial_sums(column) for column in zip(*pairs, strict=True)]


def partial_sums(values: Iterable[float]) -> list[float]:
    """Few numbers of different magnitude whose sum is exactly that of all values.

    >>> partial_sums([1e100, 1.0, -1e100]), partial_sums([0.1] * 10)
    ([1.0], [5.551115123125783e-17, 1.0])
    """
    parts: list[float] = []
    odd: list[float] = []
    for value in values:
        if not math.isfinite(value):
            odd.append(value)
            continue
        kept = 0
        for part in parts:
            high, low = (value, part) if abs(value) >= abs(part) else (part, value)
            rounded = high + low
            rest = low - (rounded - high)
            if rest:
                parts[kept] = rest
                kept += 1
            value = rounded
        parts[kept:] = [value] if value or not kept else []
    return parts + odd
