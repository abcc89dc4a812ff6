"""Records a training for comparison: the tensors of every step, as whole tensors under the user's own names, on disk.

Dropout is disabled in the recording process, since each device draws its own. Downcasts (`logits.float()` in float64)
and random draws are detected, with the user's line. A run can also start from slightly perturbed weights: where a ReLU
or a max-pool decides, the last digit of a weight can flip the decision, and a split batch is rounded differently, so
that a correct configuration may differ from one device. `Evidence` reads a recorded run.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from evenstep.audit.sample_log import FILE, Problems, read_lines
from evenstep.checkpoint import files
from evenstep.checkpoint.shards import is_sharded
from evenstep.checkpoint.state_dict import Tensors
from evenstep.data.nested import leaves
from evenstep.distributed.parameter_slices import joined, slices_of, whole_state
from evenstep.distributed.worker_process import read_rank
from evenstep.plan import Plan
from evenstep.private_apis import BatchNorm, DisableTorchFunction, global_generators, python_state, replace_function
from evenstep.record import Record, Step
from evenstep.sampling.rng import is_same_numpy, numpy_state
from evenstep.task import Amount, Task
from evenstep.training.optimizer_step import make_optimizer
from evenstep.training.several_models import LossesInTurn
from evenstep.training.trainer import Event, Trainer, perform

_DROPS = ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout")


class DropoutOff:
    """Disables `F.dropout`, `nn.Dropout` and dropout in attention; `was_used` is true if any was enabled.

    Functions are replaced rather than a torch mode entered: modes are per thread, and dp computes in threads; nor
    would a mode be there when an activation checkpoint computes forward again.
    """

    def __init__(self) -> None:
        self.was_used = False
        for name in [*_DROPS, *(f"{name}_" for name in _DROPS)]:
            disabled = self._without_dropout(getattr(torch, name))
            replace_function(name, disabled)
        attention = F.scaled_dot_product_attention
        _replace_everywhere(attention, self._attention_without_dropout(attention))

    def in_layers(self, model: nn.Module) -> nn.Module:
        """Recurrent layers hand their dropout to a kernel that has it inside."""
        for layer in model.modules():
            if isinstance(layer, nn.RNNBase) and layer.dropout:
                self.was_used = True
                layer.dropout = 0.0
        return model

    def _without_dropout(self, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def disabled(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
            self.was_used = self.was_used or bool(train and p)
            return function(input, p, False)

        return disabled

    def _attention_without_dropout(self, attention: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def disabled(*given: Any, **named: Any) -> torch.Tensor:
            # query, key, value, mask, dropout, ...
            chance = named.pop("dropout_p", given[4] if len(given) > 4 else 0.0)
            self.was_used = self.was_used or bool(chance)
            return attention(*given[:4], *((0.0,) if len(given) > 4 else ()), *given[5:], **named)

        return disabled


def _replace_everywhere(old: object, new: object) -> None:
    """In every module that has imported it, under whatever name."""
    for module in list(sys.modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if value is old:
                setattr(module, name, new)


MOST_LINES = 3
_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
_TORCH = os.path.dirname(torch.__file__) + os.sep
_PYTHON = os.path.dirname(os.__file__) + os.sep


class DrawDetector(TorchFunctionMode):
    """Notes which random generators advance, and the user's lines that draw.

    An operation draws if a generator advances during it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.generators: list[str] = []
        self._states: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        states = torch_states()
        if not same_torch(states, self._states):
            self._note(traceback.extract_stack())
        self._states = states
        return result

    def _note(self, stack: traceback.StackSummary) -> None:
        line = innermost(stack)
        if line is not None and line not in self.lines and len(self.lines) < MOST_LINES:
            self.lines.append(line)

    @contextmanager
    def watching(self) -> Iterator[None]:
        python, numpy = python_state(), numpy_state()
        own = self._states = torch_states()
        outside = sys.getprofile()
        sys.setprofile(self._called)
        try:
            with self:
                yield
        finally:
            sys.setprofile(outside)
            moved = {
                "Python's": python != python_state(),
                "NumPy's": not is_same_numpy(numpy, numpy_state()),
                "torch's": not same_torch(own, torch_states()),
            }
            self.generators = [name for name, has_moved in moved.items() if has_moved]

    def _called(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_call" and _generator_of(argument):
            self._note(traceback.extract_stack(frame))


def _generator_of(function: Callable[..., Any]) -> bool:
    return any(getattr(function, "__self__", None) is generator for generator in global_generators())


def torch_states() -> list[torch.Tensor]:
    """The generator states of the CPU and of every GPU that was used."""
    with DisableTorchFunction():
        gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        return [torch.get_rng_state(), *gpus]


def same_torch(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """Whether torch drew nothing in between."""
    with DisableTorchFunction():
        # A GPU that was first used in between had drawn nothing before.
        return all(a.equal(b) for a, b in zip(one, other, strict=False))


def innermost(stack: traceback.StackSummary) -> str | None:
    """The line nearest to what happened: the user's, or that of a library between them and torch."""
    shown = [frame for frame in stack if _is_shown(frame.filename)]
    return f"{short_path(shown[-1].filename)}:{shown[-1].lineno}: {shown[-1].line}" if shown else None


def _is_shown(filename: str) -> bool:
    """Whether a file is neither ours, torch's nor Python's own."""
    is_pythons = filename.startswith(_PYTHON) and f"{os.sep}site-packages{os.sep}" not in filename
    return not (is_pythons or filename.startswith(("<", _OURS, _TORCH)))


def short_path(path: str) -> str:
    """As seen from the folder that one is in, or from that of installed packages."""
    _, _, installed = path.rpartition(f"{os.sep}site-packages{os.sep}")
    near = os.path.relpath(path)
    return installed if installed != path else path if near.startswith("..") else near


class DowncastDetector(TorchFunctionMode):
    """Notes the first line at which a float64 is cast to a lower precision.

    A function mode: a dispatch mode would see the same, but imports sympy.
    """

    def __init__(self) -> None:
        super().__init__()
        self.line: str | None = None

    def check_parameters(self, model: nn.Module) -> None:
        """Note a complex parameter, which stays as it is: `Module.double` changes real ones alone."""
        kept = (name for name, weight in model.named_parameters() if weight.dtype is torch.complex64)
        self.line = next((f"the parameter {name} is complex64" for name in kept), self.line)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.line is None and torch.float64 in _dtypes(args) and any(map(_is_narrow, _dtypes(result))):
            self.line = innermost(traceback.extract_stack()) or str(func)
        return result


def _is_narrow(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize < 8


def _dtypes(value: Any) -> set[torch.dtype]:
    return {leaf.dtype for leaf in leaves(value) if isinstance(leaf, torch.Tensor)}


FOLDER = "witness"
FACTS = "facts.json"
MOST_ELEMENTS = 50_000
"""Of a larger tensor, evenly spaced elements and the norm are kept."""
VALID_BATCHES = 4
"""Evaluation uses this many batches and one sample: enough to see whether samples are counted correctly."""
Norms = Literal["own", "eval"]


def perform_watched(
    plan: Plan, task: Task, run_folder: Path, *, norms: Norms = "own", perturbation: int = 0
) -> Iterator[Event]:
    """`perform` without dropout, with a file for each step; `norms="eval"`: BatchNorm uses its running statistics.

    With the number of a `perturbation`, it starts from slightly perturbed weights.
    """
    if perturbation:
        make = task.model
        task = replace(task, model=lambda: perturbed(make(), perturbation))
    watch = Watch(plan, run_folder / FOLDER)
    for event in perform(replace(plan, fast="off"), watch.over(task, norms), run_folder, make=WatchedRun):
        if isinstance(event, Step):
            watch.write(event.step)
        yield event
    watch.finish()


class WatchedRun(Trainer):
    """A run whose steps are known one by one: what is recorded belongs to the last one."""

    def _waits_at(self, step: int) -> bool:
        return True


class Watch:
    """Records tensors before and after each optimizer step; all ranks take part.

    A step that fp16's scaler skips leaves no file: how many were taken is not how many the Record counts.
    """

    def __init__(self, plan: Plan, folder: Path) -> None:
        self._plan = plan
        self._folder = folder
        self._is_main = read_rank()[0] == 0
        self._dropout = self._without_dropout()
        self._narrow = DowncastDetector()
        self._taken: Tensors = {}
        self._written: tuple[int, Tensors] = (0, {})
        """The last step that was not skipped, and what was recorded of it."""
        self._is_taken = False
        self._is_first = True
        self._module: nn.Module | None = None
        self._weights: dict[str, nn.Parameter] = {}
        if self._is_main:
            folder.mkdir(exist_ok=True)

    def _without_dropout(self) -> DropoutOff | None:
        return DropoutOff()

    def over(self, task: Task, norms: Norms = "own") -> Task:
        """The same task, with its model and optimizer recorded."""

        def model() -> nn.Module:
            self._module = task.model() if self._dropout is None else self._dropout.in_layers(task.model())
            if self._plan.precision == "fp64":
                self._narrow.check_parameters(self._module)
            return without_batch_statistics(self._module) if norms == "eval" else self._module

        most = VALID_BATCHES * self._plan.batch + 1
        recorded = replace(task, model=model, valid=fewer(task.valid, most), show=None)
        if task.after is not None:
            recorded = replace(recorded, after=self._recorded_after(task.after))
        if not isinstance(task.loss, LossesInTurn):
            return replace(recorded, loss=self._checked(task.loss), optimizer=self._recorded(task.optimizer))
        losses = LossesInTurn({key: self._checked(loss) for key, loss in task.loss.parts.items()})
        optimizers = {key: self._recorded(make, f"{key}.") for key, make in task.optimizer.items()}
        return replace(recorded, loss=losses, optimizer=optimizers)

    def _checked(self, loss: Callable[..., Amount]) -> Callable[..., Amount]:
        """The same loss; on one device, the first call is checked for downcasts."""

        def checked(model: nn.Module, batch: Any) -> Amount:
            if self._is_first and self._plan.precision == "fp64" and len(self._plan.devices) == 1:
                with self._narrow:
                    return loss(model, batch)
            return loss(model, batch)

        return checked

    def _recorded(self, make: Callable[..., torch.optim.Optimizer], prefix: str = "") -> Callable[..., Any]:
        """The same optimizer, whose steps are recorded."""

        def optimizer(model: nn.Module) -> torch.optim.Optimizer:
            # Under dp these are the parameters that each device owns.
            self._weights |= {f"{prefix}{name}": weight for name, weight in model.named_parameters()}
            made = make_optimizer(make, model)
            made.register_step_pre_hook(lambda *_: None if _is_skipped(made) else self._before())
            made.register_step_post_hook(lambda *_: None if _is_skipped(made) else self._after(made))
            return made

        return optimizer

    def _recorded_after(self, after: Callable[[Any], None]) -> Callable[[Any], None]:
        """The same function; what it changes belongs to the step before it, as in a checkpoint."""

        def recorded(run: Any) -> None:
            after(run)
            if run.step == self._written[0]:
                self._take_model()
                self.write(run.step)

        return recorded

    def write(self, step: int) -> None:
        """Write what was recorded since the last step, or more of that one, under its number in the Record."""
        if self._is_taken:
            before = self._written[1] if step == self._written[0] else {}
            self._written = step, {**before, **self._taken}
            if self._is_main:
                save_file(self._written[1], self._folder / f"step-{step:08d}.safetensors")
        self._taken, self._is_taken = {}, False

    def finish(self) -> None:
        if self._is_main:
            assert self._module is not None
            facts = {
                "dropout": self._dropout is not None and self._dropout.was_used,
                "narrow": self._narrow.line,
                "parameters": list(self._weights),
                "passing": _passing(self._module),
                "aliases": _aliases(self._module),
            }
            (self._folder / FACTS).write_text(json.dumps(facts))

    def _before(self) -> None:
        if self._is_first:
            self._is_first = False
            self._take("start", {name: joined(weight) for name, weight in self._weights.items()})
        gradients = {
            name: whole_state(weight, {} if weight.grad is None else {"": weight.grad}).get("")
            for name, weight in self._weights.items()
        }
        self._take("gradient", {name: one for name, one in gradients.items() if one is not None})

    def _take_model(self) -> None:
        assert self._module is not None
        self._is_taken = True
        # Of several models, some may have no optimizer.
        every = {**dict(self._module.named_parameters()), **self._weights}
        self._take("weight", {name: joined(weight) for name, weight in every.items()})
        slices = slices_of(self._module)
        buffers = self._module.named_buffers()
        self._take("buffer", {name: slices[name].join(one) if name in slices else one for name, one in buffers})

    def _after(self, optimizer: torch.optim.Optimizer) -> None:
        self._take_model()
        states = {
            f"{name}/{key}": value
            for name, weight in self._weights.items()
            for key, value in whole_state(weight, optimizer.state.get(weight, {})).items()
            if isinstance(value, torch.Tensor)
        }
        self._take("optimizer", states)

    def _take(self, kind: str, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            # A collective under fsdp: every rank is here.
            full = tensor.full_tensor() if is_sharded(tensor) else tensor
            if self._is_main:
                self._taken |= self._kept(f"{kind}/{name}", full)

    def _kept(self, key: str, tensor: torch.Tensor) -> Tensors:
        """What is written of a tensor."""
        return sampled(key, tensor)


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
    every = (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    return {name: first[id(tensor)] for name, tensor in chain(*every) if first[id(tensor)] != name}


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
        if isinstance(layer, BatchNorm):
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


@dataclass(frozen=True)
class Failure:
    message: str

    @property
    def first_lines(self) -> str:
        """Without where the logs are: they are removed."""
        lines = [
            line.strip() for line in self.message.splitlines() if not line.startswith(("full logs:", "continue from"))
        ]
        return "\n".join(lines[:6])


@dataclass(frozen=True)
class Evidence:
    """A run folder."""

    folder: Path

    @cached_property
    def record(self) -> Record:
        return Record.read(self.folder)

    @cached_property
    def steps(self) -> list[int]:
        """Those that the optimizer took: fp16's scaler skips some."""
        return sorted(int(path.stem.removeprefix("step-")) for path in (self.folder / FOLDER).glob("*.safetensors"))

    @cached_property
    def begin(self) -> int:
        """The step from which it resumes; 0 for a run from the start."""
        return self.record.data.get("step", 0)

    @cached_property
    def losses(self) -> dict[int, float]:
        return {step.step: step.loss for step in self.record.steps}

    @cached_property
    def ids(self) -> dict[int, list[Any]]:
        path = self.folder / FILE
        return {line.step: line.ids for line in read_lines(path, Problems())} if path.exists() else {}

    @cached_property
    def facts(self) -> dict[str, Any]:
        values: dict[str, Any] = json.loads((self.folder / FOLDER / FACTS).read_text())
        return values

    def tensors(self, step: int) -> Tensors:
        """Everything of one step, in the model's order: `gradient/NAME`, `weight/NAME`, `optimizer/NAME/KEY` ..."""
        loaded = load_file(self.folder / FOLDER / f"step-{step:08d}.safetensors")
        indices = {name: index for index, name in enumerate(self.facts["parameters"])}
        return {key: loaded[key] for key in sorted(loaded, key=lambda key: _model_order(key, indices))}

    def checkpoint(self, step: int) -> Path:
        return self.folder / files.FOLDER / f"step-{step:08d}"

    def forget_checkpoints(self) -> None:
        """Delete them: those of a large model are large."""
        shutil.rmtree(self.folder / files.FOLDER, ignore_errors=True)

    @cached_property
    def without_gradient(self) -> list[str]:
        """Parameters that no gradient reached in any step."""
        reached = {key for step in self.steps for key in self.tensors(step) if key.startswith("gradient/")}
        return [name for name in self.facts["parameters"] if f"gradient/{name}" not in reached]


def _model_order(key: str, indices: dict[str, int]) -> tuple[int, str]:
    kind, _, name = key.partition("/")
    name = name.rpartition("/")[0] if kind == "optimizer" else name
    return indices.get(name, len(indices)), key


STRENGTH = 2.0**-19
"""How far a weight is moved at most, relative to itself: the last four bits of a float32, about what sums lose."""
LEAST = {"fp64": 1e-5, "fp32": 1e-5, "tf32": 1e-3, "bf16": 1e-2, "fp16": 1e-2}
"""What rounding may do to any tensor, relative to its size, where a task does not compute in float64 throughout."""
MOST_TRIED = 10
"""Of five decisions that rounding had turned (CIFAR-10), disturbances of half and of twice this strength turned each
again in a third to nearly all of the tries: ten in vain are rare."""


@torch.no_grad()
def perturbed(model: nn.Module, number: int) -> nn.Module:
    """The same model; every weight is moved by a random part of STRENGTH, or by a last digit if that is more."""
    # Its own, so that nothing else is drawn otherwise than without it.
    draws = torch.Generator().manual_seed(number)
    for weight in model.parameters():
        if weight.is_floating_point() or weight.is_complex():
            strength = max(STRENGTH, torch.finfo(weight.dtype).eps)
            weight.mul_(1 + strength * (2 * torch.rand(weight.shape, generator=draws) - 1).to(weight.device))
    return model
