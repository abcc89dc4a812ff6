"""This process's batches, in an order that depends on seed, epoch and position alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from evenstep.errors import PlanError
from evenstep.order import Ids, Order, Span, share, span_at
from evenstep.task import Batch as Data
from evenstep.worker.randomness import stream
from evenstep.worker.source import Samples, Source, to_device
from evenstep.worker.world import World

Augment = Callable[[Any, torch.Generator], Any]


@dataclass(frozen=True)
class Piece:
    """What one seat computes at once. A seat with nothing to do still runs one sample, which counts for nothing:
    collectives need every rank."""

    data: Data
    ids: Ids
    num_samples: int


@dataclass(frozen=True)
class Batch:
    """One optimizer step: for each micro-batch, a piece for every seat of this process."""

    span: Span
    micro_batches: list[list[Piece]]
    loader: Loader

    @property
    def num_samples(self) -> int:
        """Samples of the whole global batch."""
        return len(self.span)

    def finish(self) -> None:
        """Say that the optimizer has taken this step: the loader's position moves past it, once."""
        end = self.span.epoch * self.loader.num_samples + self.span.stop
        if self.loader.position < end:
            self.loader.position = end
            self.loader.num_finished += 1


class Loader:
    """Iterates over what is left of the current epoch; the next iteration is the next epoch."""

    def __init__(
        self,
        source: Source,
        order: Order,
        world: World,
        batch: int,
        *,
        accumulate: int = 1,
        fit: Callable[[torch.Tensor], torch.Tensor] | None = None,
        augment: Augment | None = None,
        seed: int = 0,
    ) -> None:
        if batch < 1 or accumulate < 1:
            raise PlanError(f"batch is {batch} and accumulate {accumulate}; both are whole numbers from 1 up")
        self.num_samples = source.num_samples
        self.position = 0
        self.num_finished = 0
        self._source = source
        self._order = order
        self._world = world
        self._batch = min(batch, source.num_samples)
        self._accumulate = accumulate
        self._fit = fit or (lambda tensor: tensor)
        self._augment = augment
        self._seed = seed
        self._generator = torch.Generator()

    def __len__(self) -> int:
        """Steps from here to the end of the epoch."""
        return -(-(self.num_samples - self.position % self.num_samples) // self._batch)

    def __iter__(self) -> Iterator[Batch]:
        epoch = self.position // self.num_samples
        while self.position // self.num_samples == epoch:
            batch = self._read(span_at(self.position, self._batch, self.num_samples))
            yield batch
            batch.finish()

    def whole_pass(self) -> Iterator[Batch]:
        """Every sample once, from the first to the last; the position does not move."""
        place = 0
        while place < self.num_samples:
            batch = self._read(span_at(place, self._batch, self.num_samples))
            yield batch
            place = batch.span.stop

    def state_dict(self) -> dict[str, int]:
        """Where a later run goes on: a position, the steps that led there, and the length that gives it meaning."""
        return {"position": self.position, "num_finished": self.num_finished, "num_samples": self.num_samples}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from where `state_dict` was taken, by any number of processes."""
        self.position = state["position"]
        self.num_finished = state["num_finished"]

    def _read(self, span: Span) -> Batch:
        if isinstance(self._source, Samples):
            # A dataset may draw from torch's own generator; so it draws the same after a restart.
            torch.manual_seed(stream(self._seed, "data", span.epoch, span.start, self._world.rank))
        ids = self._order.ids(span)
        shares = [ids[_slice(share(len(ids), seat, self._world.num_seats))] for seat in self._world.seats]
        # Seat 0 has the largest share; every seat runs as many micro-batches as it does, for collectives must match.
        largest = len(share(len(ids), 0, self._world.num_seats))
        num_micro = min(self._accumulate, largest)
        micro_batches = [
            [self._piece(span, ids, own, micro, num_micro, place) for place, own in enumerate(shares)]
            for micro in range(num_micro)
        ]
        return Batch(span, micro_batches, self)

    def _piece(self, span: Span, ids: Ids, own: Ids, micro: int, num_micro: int, place: int) -> Piece:
        mine = own[_slice(share(len(own), micro, num_micro))]
        read = mine if len(mine) else ids[:1]
        data = self._source.fetch(read, self._change(span.epoch) if self._augment else None)
        device = self._world.devices[place]
        return Piece(to_device(data, lambda tensor: self._move(tensor, device)), mine, len(mine))

    def _move(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        return self._fit(tensor.to(device, non_blocking=True))

    def _change(self, epoch: int) -> Callable[[Any, int], Any]:
        augment = self._augment
        assert augment is not None

        def change(sample: Any, id_: int) -> Any:
            return augment(sample, self._generator.manual_seed(stream(self._seed, "augment", epoch, id_)))

        return change


def _slice(part: range) -> slice:
    return slice(part.start, part.stop)
