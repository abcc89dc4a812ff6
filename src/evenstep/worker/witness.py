"""A training that is watched: what every step computed, as whole tensors under the user's own names, on the disk."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from evenstep.plan import Plan
from evenstep.record import Step
from evenstep.task import Amount, Task
from evenstep.worker.dropouts import DropoutOff
from evenstep.worker.job import Event
from evenstep.worker.lifeline import read_rank
from evenstep.worker.narrow import NarrowSeen
from evenstep.worker.perform import perform
from evenstep.worker.state import Tensors, is_sharded

FOLDER = "witness"
FACTS = "facts.json"
MOST_ELEMENTS = 50_000
"""Of a larger tensor, every so many-th element and the norm are kept."""
VALID_BATCHES = 4
"""Evaluated are so many batches and one sample: enough to see whether they are counted rightly."""
Norms = Literal["own", "eval"]


def perform_watched(plan: Plan, task: Task, run_folder: Path, *, norms: Norms = "own") -> Iterator[Event]:
    """`perform` without dropout, with a file for each step beside its Record; BatchNorm may be kept from its batch."""
    watch = Watch(plan, run_folder / FOLDER)
    for event in perform(replace(plan, fast="off"), watch.over(task, norms), run_folder):
        if isinstance(event, Step):
            watch.write(event.step)
        yield event
    watch.finish()


class Watch:
    """Takes, before and after each of the optimizer's steps, what there is to compare; all ranks take part.

    A step that fp16's scaler skips leaves no file: how many were taken is not how many the Record counts.
    """

    def __init__(self, plan: Plan, folder: Path) -> None:
        self._plan = plan
        self._folder = folder
        self._is_main = read_rank()[0] == 0
        self._dropout = DropoutOff()
        self._narrow = NarrowSeen()
        self._taken: Tensors = {}
        self._is_first = True
        self._module: nn.Module | None = None
        self._weights: dict[str, nn.Parameter] = {}
        if self._is_main:
            folder.mkdir(exist_ok=True)

    def over(self, task: Task, norms: Norms) -> Task:
        """The same task, with its model and its optimizer in view."""

        def model() -> nn.Module:
            self._module = self._dropout.in_layers(task.model())
            if self._plan.precision == "fp64":
                self._narrow.look_at(self._module)
            return without_batch_statistics(self._module) if norms == "eval" else self._module

        def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
            assert self._module is not None
            given = list(parameters)
            # Under dp these are the parameters that each device owns; their names are those of the first replica.
            names = [name for name, _ in self._module.named_parameters()]
            self._weights = dict(zip(names, given, strict=True))
            made = task.optimizer(iter(given))
            made.register_step_pre_hook(lambda *_: None if _is_skipped(made) else self._before())
            made.register_step_post_hook(lambda *_: None if _is_skipped(made) else self._after(made))
            return made

        def loss(model: nn.Module, batch: Any) -> Amount:
            """The first one on one device is looked at closely."""
            if self._is_first and self._plan.precision == "fp64" and len(self._plan.devices) == 1:
                with self._narrow:
                    return task.loss(model, batch)
            return task.loss(model, batch)

        most = VALID_BATCHES * self._plan.batch + 1
        valid = fewer(task.valid, most)
        return replace(task, model=model, loss=loss, optimizer=optimizer, valid=valid, show=None)

    def write(self, step: int) -> None:
        """What was taken since the last step, under the number that the Record has for it."""
        if self._is_main and self._taken:
            save_file(self._taken, self._folder / f"step-{step:08d}.safetensors")
        self._taken = {}

    def finish(self) -> None:
        """Say what was seen over all steps."""
        if self._is_main:
            assert self._module is not None
            facts = {
                "dropout": self._dropout.was_used,
                "narrow": self._narrow.place,
                "parameters": list(self._weights),
                "passing": _passing(self._module),
                "aliases": _aliases(self._module),
            }
            (self._folder / FACTS).write_text(json.dumps(facts))

    def _before(self) -> None:
        if self._is_first:
            self._is_first = False
            self._take("start", self._weights)
        self._take("gradient", {name: w.grad for name, w in self._weights.items() if w.grad is not None})

    def _after(self, optimizer: torch.optim.Optimizer) -> None:
        assert self._module is not None
        self._take("weight", self._weights)
        self._take("buffer", dict(self._module.named_buffers()))
        states = {
            f"{name}/{key}": value
            for name, weight in self._weights.items()
            for key, value in optimizer.state.get(weight, {}).items()
            if isinstance(value, torch.Tensor)
        }
        self._take("optimizer", states)

    def _take(self, kind: str, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            # A collective under fsdp: every rank is here.
            full = tensor.full_tensor() if is_sharded(tensor) else tensor
            if self._is_main:
                self._taken |= sampled(f"{kind}/{name}", full)


def _is_skipped(optimizer: torch.optim.Optimizer) -> bool:
    """Whether fp16's scaler has a fused update skip this step: it is called, and its kernel does nothing."""
    found: torch.Tensor | None = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)


def _passing(module: nn.Module) -> list[str]:
    """Buffers that no checkpoint holds, on purpose (`persistent=False`)."""
    saved = module.state_dict()
    return [name for name, _ in module.named_buffers() if name not in saved]


def _aliases(module: nn.Module) -> dict[str, str]:
    """Second names of tied weights and buffers, which checkpoints hold too, and the first ones."""
    first = {id(tensor): name for name, tensor in (*module.named_parameters(), *module.named_buffers())}
    every = (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    )
    return {name: first[id(tensor)] for name, tensor in every if first[id(tensor)] != name}


@torch.no_grad()
def sampled(key: str, tensor: torch.Tensor) -> Tensors:
    """The tensor flat and on the CPU; of a large one a fixed part, and its norm."""
    dense = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    flat = as_real(dense.detach()).reshape(-1)
    stride = -(-flat.numel() // MOST_ELEMENTS) or 1
    kept = {key: flat[::stride].to("cpu", copy=True).contiguous()}
    if stride > 1 and flat.is_floating_point():
        kept[f"norm/{key}"] = flat.double().norm().cpu()
    return kept


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """A complex number as two: no file holds complex128, and two numbers are compared like any others."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def without_batch_statistics(model: nn.Module) -> nn.Module:
    """Every BatchNorm normalizes by what it remembers, so that no sample depends on its neighbours."""
    for layer in model.modules():
        if isinstance(layer, _BatchNorm):
            layer.eval()
    return model


def fewer(data: Any, most: int) -> Any:
    """The first samples of validation data; a stream stays as it is."""
    if isinstance(data, DataLoader) and not isinstance(data.dataset, IterableDataset):
        return DataLoader(fewer(data.dataset, most), batch_size=data.batch_size, collate_fn=data.collate_fn)
    if isinstance(data, torch.Tensor | np.ndarray):
        return data[:most]
    if isinstance(data, Mapping):
        return {name: fewer(column, most) for name, column in data.items()}
    if isinstance(data, tuple) and data and all(isinstance(one, torch.Tensor | np.ndarray) for one in data):
        columns = [column[:most] for column in data]
        return type(data)(*columns) if hasattr(data, "_fields") else tuple(columns)
    is_known = isinstance(data, Dataset) and not isinstance(data, IterableDataset) and hasattr(data, "__len__")
    return Subset(data, range(most)) if is_known and len(data) > most else data
