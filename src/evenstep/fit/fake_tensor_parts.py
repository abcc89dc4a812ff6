"""What each rank holds of a model that ranks divide: steps of its part alone, of fake tensors."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from evenstep.data.adapt import adapt_train
from evenstep.data.nested import map_tensors
from evenstep.distributed.world import World
from evenstep.fit.fake_tensor_pass import ShapeStep, memory_of, read_samples
from evenstep.fit.memory_model import Division, StepMemory
from evenstep.plan import Plan
from evenstep.private_apis import FakeTensorMode
from evenstep.strategies.base import DividesModel, RankStages, evaluating, load_strategy
from evenstep.task import Task

SAMPLES = 2
"""With which a model is watched, to see how it can be divided."""


def memory_of_ranks(plan: Plan, task: Task, division: Division, share: int, whole: StepMemory) -> list[StepMemory]:
    """What each rank holds, with its part of what real steps of the whole model took beyond their shapes."""
    found = []
    for rank in range(division.num):
        with warnings.catch_warnings():
            # Of copies of fake tensors.
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            memory = memory_of(PartStep(division, rank, plan, task), share, whole.framework_bytes)
        points = whole.excess.items()
        excess = {phase: [(num, size / division.num) for num, size in of_phase] for phase, of_phase in points}
        found.append(replace(memory, excess=excess, gaps=whole.gaps))
    return found


class PartStep(ShapeStep):
    """A step of one rank's part."""

    _stages: RankStages | None = None

    def __init__(self, division: Division, rank: int, plan: Plan, task: Task) -> None:
        self._division, self._rank = division, rank
        self._data = read_samples(adapt_train(task), task, plan, SAMPLES)
        super().__init__(plan, task, FakeTensorMode(allow_non_fake_inputs=True))

    def divide(self) -> None:
        division = self._division
        world = World(0, 1, (self.device,), ranks_per_replica=division.num, schedule=division.schedule)
        strategy = load_strategy(division.strategy)
        assert isinstance(strategy, DividesModel)
        self._stages = strategy.keep_part(self.module, world, self._rank, self._loss)

    def _loss(self, model: nn.Module) -> Any:
        data = map_tensors(self._data, self.precision.fit_tensor)
        with self.precision.autocast(self.device):
            return self.task.loss(model, self._on_device(data))

    def _compute(self, batch: Any) -> None:
        if self._stages is None:
            super()._compute(batch)
            return
        self.allocations.kind = "activations"
        outputs, self.received, before = [], 0.0, self.allocations.now("activations")
        for given, found in self._computed(self._stages, batch, is_training=True):
            outputs.append(found[0] if isinstance(found, tuple | list) else found)
            self.received += given
            del found
        self.waiting = self.allocations.now("activations") - before
        while outputs:
            output = outputs.pop()
            output.backward(torch.ones_like(output))

    def _evaluate(self, batch: Any) -> None:
        if self._stages is None:
            super()._evaluate(batch)
            return
        self.allocations.kind = "activations"
        with evaluating(self.module), torch.no_grad():
            for _ in self._computed(self._stages, batch, is_training=False):
                pass

    def _computed(self, stages: RankStages, batch: Any, *, is_training: bool) -> Any:
        """For each chunk: the bytes that it receives, and what it computes."""
        shapes = self._shapes_of_inputs(stages, batch)
        for chunk in stages.chunks:
            given = None
            if not chunk.is_first:
                given = torch.empty_like(shapes[chunk.blocks[0]]).requires_grad_(is_training)
            with self.precision.autocast(self.device):
                found = stages.stage(chunk, self.task.loss, batch, given)
            yield given.nbytes if given is not None else 0, found
            del found

    def _shapes_of_inputs(self, stages: RankStages, batch: Any) -> dict[int, torch.Tensor]:
        """What each block would get, from a computation of the whole model that is not counted."""
        found: dict[int, torch.Tensor] = {}

        def note(index: int, given: torch.Tensor) -> None:
            found[index] = torch.empty_like(given)

        hooks = [
            stages.whole.get_submodule(name).register_forward_pre_hook(
                lambda _, args, index=index: note(index, args[0])
            )
            for index, name in enumerate(stages.blocks)
        ]
        with self.allocations.paused(), torch.no_grad(), self.precision.autocast(self.device):
            self.task.loss(stages.whole, batch)
        for hook in hooks:
            hook.remove()
        return found
