"""Steps of `--link local:STEPS`: each rank takes its own with its share of the batch, and rounds of them are joined.

Nothing is sent between two ends of a round, not even a loss: those of a round are summed at its end, and known then.
Those of `--link streaming:STEPS` are sent with every fragment, and known when the next one is sent.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from evenstep.data.loader import Batch
from evenstep.distributed.world import World
from evenstep.errors import NonFiniteLoss, TaskError
from evenstep.link_method import LinkMethod
from evenstep.monitor.nonfinite import NonFiniteMean, explain
from evenstep.training.logged_values import StepLogs, means_of
from evenstep.training.loss_weighting import LossTotal, MeanLoss
from evenstep.training.step import Eager, Recipe, Taken
from evenstep.training.team import Launched


class LocalLoss(LossTotal):
    """The loss of this rank's share of a global batch, which counts as its mean until the round ends."""

    def __init__(self, world: World, num_samples: int) -> None:
        alone = replace(world, size=1)
        super().__init__(alone, num_samples, logs=StepLogs(alone, []))
        self._scale, self._can_be_whole = world.size, False
        self.total = 0.0

    def read(self) -> float:
        self.total, self.count = (math.fsum(column) for column in zip(*self._pairs(), strict=True))
        if self.is_late:
            # As if all ranks counted as much: how much they did is known at the end of the round.
            self.late_factor = self._num_samples / (self.count * self._scale) if self.count else 1.0
        return self.total / self.count if self.count else 0.0


class LocalStep:
    """A step of a round; its loss is that of the global batch, when the round has ended."""

    def __init__(self, step: int, epoch: int, loss: LocalLoss, seconds: float) -> None:
        self.step, self.epoch, self.own, self.seconds = step, epoch, loss, seconds
        self.mean: MeanLoss | None = None

    def read(self) -> MeanLoss:
        assert self.mean is not None, "read before its round has ended"
        return self.mean

    def know(self, total: float, count: float, logged: Mapping[str, float]) -> None:
        """The sums, and the means of logged values, over all ranks."""
        self.mean = MeanLoss(total / count if count else 0.0, count, self.seconds, dict(logged))


class LossSums:
    """The losses of some steps, and requests, on their way from all ranks."""

    def __init__(self, recipe: Recipe, steps: list[LocalStep], digest: float = 0.0) -> None:
        """`digest` is a number that must be the same on all ranks."""
        self._recipe, self._steps = recipe, steps
        self._logs = [one.own.logs.own_pairs() for one in steps]
        losses = [number for one in steps for number in (one.own.total, one.own.count)]
        others = [recipe.team.requests.encode(), digest, digest * digest, any(self._logs)]
        self._sums = torch.tensor([*others, *losses], dtype=torch.float64)
        self._work = recipe.team.world.total(self._sums)

    def wait(self) -> None:
        """From here on, the losses are known, and requests agreed on."""
        team = self._recipe.team
        if self._work is not None:
            self._work.wait()
        requests, digests, squares, num_logging, *totals = self._sums.tolist()
        if squares * team.world.size != digests * digests:
            raise TaskError(
                "--link local averages the state of the optimizer, and ranks have state of different parameters: some "
                "rank used a parameter in this round that another did not; leave --link out"
            )
        every = team.world.gather(self._logs) if num_logging else [self._logs]
        for number, one in enumerate(self._steps):
            total, count = totals[2 * number : 2 * number + 2]
            one.know(total, count, _logged([of_rank[number] for of_rank in every]))
        self._refuse_non_finite()
        team.requests.agree(requests)

    def _refuse_non_finite(self) -> None:
        first = next((one for one in self._steps if not math.isfinite(one.read())), None)
        if first is not None:
            team = self._recipe.team
            found = NonFiniteMean(
                float(first.read()), first.step, first.epoch, team.precision.name, first.own.non_finite()
            )
            raise NonFiniteLoss(explain(team.world, self._recipe.model, found))


class LocalSteps(Eager):
    """Rounds end after every `num_steps` steps of the run, at the end of an epoch, and where `ends_at` is true."""

    def __init__(self, recipe: Recipe, method: LinkMethod, ends_at: Callable[[int], bool]) -> None:
        super().__init__(recipe)
        self.lag = method.num_steps - 1
        self._method, self._ends_at = method, ends_at
        self._round: list[LocalStep] = []
        """Its steps so far, whose losses were not sent yet."""
        self._model = recipe.model

    def take(self, batch: Batch) -> Taken:
        began = time.perf_counter()
        recipe, team = self._recipe, self._recipe.team
        # One that was agreed on at the end of the last round has been saved since.
        team.requests.save = False
        self._model.begin_round()
        launched = team.launch_local(recipe.loss, self._model, batch, LocalLoss(team.world, batch.num_samples))
        own = self._read(launched)
        self.update()
        step = batch.loader.num_finished
        taken = LocalStep(step, batch.span.epoch, own, time.perf_counter() - began)
        self._round.append(taken)
        if batch.is_epoch_end or self._ends_at(step):
            self._end_round(step)
        else:
            self._continue_round(step)
        return taken

    def _read(self, launched: Launched) -> LocalLoss:
        own = launched.totals
        assert isinstance(own, LocalLoss)
        own.read()
        launched.complete(own.late_factor)
        return own

    def _continue_round(self, step: int) -> None:
        if step % self._method.num_steps == 0:
            self._end_round(step)

    def _end_round(self, step: int) -> None:
        tensors = self._inner_tensors()
        LossSums(self._recipe, self._round, _digest(tensors)).wait()
        self._model.end_round(step, [tensor for _, tensor in tensors])
        self._round = []

    def _inner_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """What the optimizer keeps of parameters; counts of steps are the same on all ranks."""
        state = self._recipe.optimizer.state
        return [
            (f"{index}/{key}", value)
            for index, weight in enumerate(self._model.weights)
            for key, value in sorted(state.get(weight, {}).items())
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.ndim
        ]


class StreamingSteps(LocalSteps):
    """Fragments are sent within a round, which ends at the end of an epoch and where `ends_at` is true.

    With each of them goes what was not sent yet of the losses. All of it arrives, and requests are agreed on, when the
    next fragment is sent: ranks wait for nothing that was sent just now.
    """

    def __init__(self, recipe: Recipe, method: LinkMethod, ends_at: Callable[[int], bool]) -> None:
        super().__init__(recipe, method, ends_at)
        # Of two fragments: one is on its way, and the steps that the next will report are being taken.
        self.lag = 2 * math.ceil(method.num_steps / method.num_fragments) - 1
        self._under_way: LossSums | None = None

    def _continue_round(self, step: int) -> None:
        if self._method.fragment_after(step) is None:
            return
        self._receive()
        if any(self._recipe.team.requests.agreed):
            # To save or to stop, for which ranks must be equal.
            self._end_round(step)
            return
        self._model.exchange_fragment(step)
        self._under_way, self._round = LossSums(self._recipe, self._round), []

    def _receive(self) -> None:
        if self._under_way is not None:
            sums, self._under_way = self._under_way, None
            sums.wait()

    def _end_round(self, step: int) -> None:
        self._receive()
        super()._end_round(step)


def _logged(per_rank: Sequence[Mapping[str, list[list[float]]]]) -> dict[str, float]:
    """The means over ranks of what each logged in one step."""
    names = dict.fromkeys(name for own in per_rank for name in own)
    return means_of({name: [pair for own in per_rank for pair in own.get(name, [])] for name in names})


def _digest(tensors: list[tuple[str, torch.Tensor]]) -> float:
    """A number of 16 bits, whose square is exact: the same only where all ranks have the same tensors."""
    text = repr([(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors])
    return float(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=2).digest(), "little"))
