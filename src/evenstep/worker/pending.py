"""A step that a card is taking while the host is ahead of it: its loss comes a little later."""

from __future__ import annotations

import math
from typing import Any

import torch

from evenstep.errors import NonFiniteLoss
from evenstep.worker.captured import Captured
from evenstep.worker.loader import Batch
from evenstep.worker.nonfinite import explain
from evenstep.worker.stepping import Outcome, Recipe
from evenstep.worker.totals import not_finite


class Pending:
    """A step that the card is taking; its loss is on its way to the host."""

    def __init__(
        self, recipe: Recipe, captured: Captured, batch: Batch, place: int, event: torch.cuda.Event, wish: float
    ) -> None:
        self.event = event
        self._place = place
        self._values: Any = None
        self._outcome: Outcome | None = None
        self._step = batch.loader.num_finished
        self._recipe = recipe
        self._captured = captured
        self._batch = batch
        self._wish = wish

    def arrive(self) -> Any:
        """Wait until the step is over; afterwards its event and its place are free."""
        if self._values is None:
            self.event.synchronize()
            self._values = self._captured.read(self._place)
        return self._values

    def read(self) -> Outcome:
        """What it gave; NonFiniteLoss if that is no number. The weights are then those of the step before it."""
        if self._outcome is None:
            self._outcome = self._read()
        return self._outcome

    def _read(self) -> Outcome:
        values = self.arrive()
        pairs = self._captured.pairs(values)
        total, count = (math.fsum(column) for column in zip(*pairs, strict=True))
        team = self._recipe.team
        team.requests.agree(values[2] if team.world.size > 1 else self._wish)
        team.last_count = count
        mean = total / count if count else 0.0
        if not math.isfinite(mean):
            pieces = [piece for pieces in self._batch.micro_batches for piece in pieces]
            spoilt = not_finite(team.world.rank, pieces, pairs) if team.world.size == 1 else []
            more = (mean, spoilt, self._batch, self._recipe.model, self._step)
            raise NonFiniteLoss(explain(team.world, team.precision.name, *more))
        return Outcome(mean, count)
