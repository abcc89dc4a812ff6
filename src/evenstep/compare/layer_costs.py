"""How a model can be divided, seen by running it: the seconds of its blocks, and what a rank computes of split layers.

It runs in a process of its own, on one device: sums over ranks change no shapes, so a rank's part is computed alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from evenstep.data.adapt import adapt_train
from evenstep.data.nested import map_tensors
from evenstep.distributed.world import Communication, World
from evenstep.errors import TaskError
from evenstep.fit.fake_tensor_pass import ShapeStep, read_samples
from evenstep.plan import Plan
from evenstep.predict.calibration import no_stages_known
from evenstep.predict.model_division import BlockShare, ModelDivision, TensorShare
from evenstep.strategies.base import copied
from evenstep.strategies.pipeline_cut import BEFORE, BEHIND, find_cut
from evenstep.strategies.tensor import split_layers
from evenstep.strategies.tensor_layers import ReplicaRanks
from evenstep.strategies.tensor_plan import plan_of
from evenstep.task import Task
from evenstep.training.trainer import set_up_torch

PASSES = 5
"""Of which the fastest counts, after one that does not."""


@dataclass(frozen=True)
class LookRequest:
    """What to find out about a model."""

    samples: int
    ranks: Sequence[int]
    """Over how many its layers may be split."""
    blocks: bool
    """Whether a pipeline may cut it."""


def look_at_model(plan: Plan, task: Task, run_folder: Path, request: LookRequest) -> Iterator[str]:
    """What a worker does to see how a model can be divided; it writes a file, and yields nothing."""
    set_up_torch(plan)
    look = ModelLook(plan, task, request.samples)
    found = look.blocks() if request.blocks else ModelDivision(why_no_blocks=no_stages_known())
    look.tensors(request.ranks, found)
    replace(found, parameters=float(_size(look.model))).write(run_folder)
    yield from ()


class ModelLook:
    """A model with one batch, computed on one device."""

    def __init__(self, plan: Plan, task: Task, samples: int) -> None:
        self._step = ShapeStep(plan, task, None, torch.device(plan.devices[0]))
        self._device, self._task, self._samples = self._step.device, task, samples
        fit = self._step.precision.fit_tensor
        data = map_tensors(read_samples(adapt_train(task), task, plan, samples), fit)
        self._batch = map_tensors(data, lambda one: one.to(self._device))

    @property
    def model(self) -> nn.Module:
        return self._step.module

    def _loss(self, model: nn.Module) -> torch.Tensor:
        with self._step.precision.autocast(self._device):
            loss = self._task.loss(model, self._batch)
        found: torch.Tensor = loss[0] if isinstance(loss, tuple | list) else loss
        return found

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def _passed(self, model: nn.Module) -> tuple[float, float]:
        """Seconds of one forward and one backward."""
        began = self._now()
        loss = self._loss(model)
        between = self._now()
        loss.backward()
        end = self._now()
        for weight in model.parameters():
            weight.grad = None
        return between - began, end - between

    def blocks(self) -> ModelDivision:
        """The blocks between which a pipeline could cut it, each with its share; or why there are none."""
        world = World(0, 1, (self._device,), ranks_per_replica=2, schedule="1f1b")
        try:
            cut = find_cut(self.model, world, self._loss)
        except TaskError as error:
            return ModelDivision(why_no_blocks=_reason(error))
        sizes = dict.fromkeys((BEFORE, BEHIND, *range(len(cut.blocks))), 0)
        for name, weight in self.model.named_parameters():
            sizes[_where(name, cut.blocks, cut.stages[name])] += weight.numel()
        marks = BlockMarks(self.model, cut.blocks, self._now)
        runs = [self._marked(marks) for _ in range(PASSES + 1)][1:]
        fastest = [[min(run[kind][at] for run in runs) for at in range(len(cut.blocks) + 2)] for kind in (0, 1)]
        forward, backward = ([one / (sum(times) or 1.0) for one in times] for times in fastest)
        places = [BEFORE, *range(len(cut.blocks)), BEHIND]
        before, *blocks, behind = (
            BlockShare(
                parameters=sizes[where],
                forward=forward[at],
                backward=backward[at],
                output_bytes=marks.output_bytes[where] / self._samples if where >= 0 else 0.0,
            )
            for at, where in enumerate(places)
        )
        return ModelDivision(blocks=blocks, before=before, behind=behind)

    def _marked(self, marks: BlockMarks) -> tuple[list[float], list[float]]:
        with marks:
            began = self._now()
            loss = self._loss(self.model)
            between = self._now()
            loss.backward()
            end = self._now()
        for weight in self.model.parameters():
            weight.grad = None
        return marks.forward(began, between), marks.backward(between, end)

    def tensors(self, ranks: Sequence[int], found: ModelDivision) -> None:
        """Add what each of some ranks would compute of split layers, or why nothing is split."""
        for num in ranks:
            try:
                found.tensors.append(self._tensor(num))
            except TaskError as error:
                found.why_no_tensors[str(num)] = _reason(error)

    def _tensor(self, num: int) -> TensorShare:
        world = World(0, 1, (self._device,), ranks_per_replica=num)
        own = World(0, num, (self._device,) * num, communication=Communication(is_off=True))
        vars(own)["model_ranks"] = own
        part, sums = copied(self.model), NotedSums(own)
        split_layers(part, plan_of(part, world, self._loss), sums)
        self._passed(part)
        noted = list(sums.num_bytes)
        whole, parts = [], []
        # In turns, so that what else the machine does slows down both.
        for _ in range(PASSES):
            whole.append(self._passed(self.model))
            parts.append(self._passed(part))
        forward, backward = (
            min(1.0, min(one[kind] for one in parts) / min(one[kind] for one in whole)) for kind in (0, 1)
        )
        return TensorShare(
            ranks=num,
            forward=forward,
            backward=backward,
            parameters=_size(part) / max(1, _size(self.model)),
            sums=[size / self._samples for size in noted],
        )


def _reason(error: TaskError) -> str:
    """Its first line; the others say what to do."""
    return str(error).splitlines()[0].rstrip(";")


def _size(model: nn.Module) -> int:
    return sum(weight.numel() for weight in model.parameters())


def _where(name: str, blocks: Sequence[str], stage: int) -> int:
    """The block of a parameter; outside of them, before the first or behind the last one."""
    inside = [index for index, block in enumerate(blocks) if name.startswith(f"{block}.")]
    return inside[0] if inside else BEFORE if stage == 0 else BEHIND


class NotedSums(ReplicaRanks):
    """Notes what would be summed over ranks."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.num_bytes: list[int] = []

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        self.num_bytes.append(values.nbytes)
        return super().sum(values)


class BlockMarks:
    """Inside, notes when each block begins and ends, in forward and in backward."""

    def __init__(self, model: nn.Module, blocks: Sequence[str], now: Callable[[], float]) -> None:
        self._blocks, self._now = [model.get_submodule(name) for name in blocks], now
        self.output_bytes = [0] * len(blocks)
        self._begins, self._ends = [0.0] * len(blocks), [0.0] * len(blocks)
        self._gradients: dict[int, float] = {}
        """When the gradient of each block's output was there; of the first one's input, at -1."""
        self._hooks = ExitStack()

    def __enter__(self) -> BlockMarks:
        self._gradients.clear()
        for index, block in enumerate(self._blocks):
            begin = block.register_forward_pre_hook(lambda _, args, index=index: self._began(index, args[0]))
            end = block.register_forward_hook(lambda _, args, out, index=index: self._ended(index, out))
            self._hooks.callback(begin.remove)
            self._hooks.callback(end.remove)
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.close()

    def _began(self, index: int, given: torch.Tensor) -> None:
        if index == 0 and given.requires_grad:
            given.register_hook(lambda _: self._note(-1))
        self._begins[index] = self._now()

    def _ended(self, index: int, out: Any) -> None:
        self._ends[index] = self._now()
        self.output_bytes[index] = out.nbytes
        if out.requires_grad:
            out.register_hook(lambda _: self._note(index))

    def _note(self, index: int) -> None:
        self._gradients[index] = self._now()

    def forward(self, began: float, end: float) -> list[float]:
        """Seconds before the first block, of each, and behind the last one."""
        each = [after - before for before, after in zip(self._begins, self._ends, strict=True)]
        return [max(0.0, self._begins[0] - began), *each, max(0.0, end - self._ends[-1])]

    def backward(self, began: float, end: float) -> list[float]:
        """The same of backward, which runs through them the other way."""
        last = len(self._blocks) - 1
        # Where no gradient goes through, backward ends.
        moments = [self._gradients.get(index, end) for index in range(last, -2, -1)]
        each = [max(0.0, after - before) for before, after in pairwise(moments)]
        return [max(0.0, end - moments[-1]), *each[::-1], max(0.0, moments[0] - began)]
