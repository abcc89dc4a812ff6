"""What a step of a task holds, found without its data and without its memory: a step of fake tensors.

Every storage that an operation makes is counted until it is freed, by kind. Two passes with different numbers of
samples go through the same moments, and each moment becomes a line.
"""

from __future__ import annotations

import json
import warnings
import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from torch import nn

from evenstep.data.adapt import AdaptedData, adapt_train, adapt_valid
from evenstep.data.augmentation import SampleTransform
from evenstep.data.iterable import Stream
from evenstep.data.nested import leaves, map_tensors
from evenstep.errors import EvenstepError
from evenstep.fit.device_memory import MemoryMeter, available_bytes, only, warm_up, workspace_bytes
from evenstep.fit.memory_model import ACCUMULATED, COUNTED, EVALUATION, STEP, UPDATE, Division, Moment, StepMemory
from evenstep.monitor.known_errors import is_out_of_memory
from evenstep.plan import Plan
from evenstep.private_apis import BatchNorm, FakeTensor, FakeTensorMode, TorchDispatchMode, tree_leaves
from evenstep.sampling.rng import Draws, Ids
from evenstep.strategies.base import copied, evaluating
from evenstep.strategies.model_units import units
from evenstep.task import Task
from evenstep.training.activation_checkpointing import checkpoint_activations
from evenstep.training.evaluation import Evaluator
from evenstep.training.fused_optimizer import fuse
from evenstep.training.optimizer_step import make_optimizer
from evenstep.training.precision import Precision
from evenstep.training.trainer import set_up_torch

FILE = "shapes.json"
MOST_READ = 256
"""Samples of the larger pass: they are read, for a collate may give any shape."""
HALF = 0.5
SAME = 0.99
"""Of a peak: with less, a library had to do with less."""
ROUNDS = 3
PARTS = (1, 2, 4)
"""Of the samples of real steps."""
FEWER = 4
"""The smaller pass has this part of them."""
REAL_SAMPLES = 4
"""Of the larger pass, where a step is computed."""
GRANULE = {"cpu": 64, "cuda": 512}
"""Allocators give memory in multiples of these bytes."""
MIXES = (0.0, 0.5, 1.0)
"""Parts of the gradients that a strategy may leave on a device: the highest moment is kept for each."""


class Allocations(TorchDispatchMode):
    """Inside, counts the bytes of all storages that operations make, by kind, until they are freed."""

    def __init__(self, granule: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kind = "activations"
        """Of what is made next."""
        self.moments: list[tuple[int, ...]] = []
        """Bytes by kind after each operation."""
        self._now = dict.fromkeys(COUNTED, 0)
        self._granule = granule
        self._is_paused = False
        self._known: dict[int, tuple[Any, str, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._is_paused:
            return result
        self.hold(tree_leaves(result))
        self.moments.append(tuple(self._now.values()))
        return result

    def hold(self, values: Iterable[Any], kind: str | None = None) -> None:
        """Count tensors; those that are counted become of this kind, if one is given."""
        for value in values:
            # What is on the meta device is held by another rank.
            if isinstance(value, torch.Tensor) and value.layout is torch.strided and value.device.type != "meta":
                self._hold(value.untyped_storage(), kind)

    def _hold(self, storage: Any, kind: str | None) -> None:
        key = id(storage)
        if key in self._known:
            reference, before, size = self._known[key]
            if kind is not None and kind != before:
                self._now[before] -= size
                self._now[kind] += size
                self._known[key] = reference, kind, size
            return
        kind = kind or self.kind
        size = -(-storage.nbytes() // self._granule) * self._granule
        self._known[key] = weakref.ref(storage, partial(self._freed, key)), kind, size
        self._now[kind] += size

    def _freed(self, key: int, _: object) -> None:
        _, kind, size = self._known.pop(key)
        self._now[kind] -= size

    def now(self, kind: str) -> int:
        """Bytes of this kind at the moment."""
        return self._now[kind]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, nothing is counted."""
        self._is_paused = True
        yield
        self._is_paused = False

    def taken(self) -> NDArray[np.float64]:
        """The moments since the last call: a row each, a column for each kind."""
        found = np.array(self.moments, dtype=np.float64).reshape(-1, len(COUNTED))
        self.moments = []
        return found


class ShapeStep:
    """A model and an optimizer of fake tensors, and steps of them."""

    waiting = 0.0
    """Bytes that a micro-batch keeps between its forward and its backward, where others come in between."""
    received = 0.0
    """Bytes that come from other ranks for a micro-batch."""

    def __init__(
        self,
        plan: Plan,
        task: Task,
        mode: FakeTensorMode | None,
        device: torch.device | None = None,
    ) -> None:
        self.plan, self.task, self._mode = plan, task, mode
        # Without memory of their own, tensors may be on the device itself.
        self.device = device or torch.device(plan.devices[0] if mode is not None else "cpu")
        self.precision = Precision(plan.precision, self.device)
        module = self._build()
        with self._shapes():
            if mode is None:
                # No copy, even for a moment: what it left behind would be measured too.
                self.module = self.precision.fit(module).to(self.device)
            else:
                self.module = copied(module, {id(one): self._placed(one) for one in _tensors(module)})
            self.divide()
            if plan.checkpoint_activations:
                checkpoint_activations(self.module)
            self.optimizer = make_optimizer(task.optimizer, self.module)
            fuse(self.optimizer, self.module)
        self.allocations = Allocations(GRANULE.get(plan.devices[0].partition(":")[0], 1))

    def divide(self) -> None:
        """Keep a rank's part of the model; here, the whole."""

    def _note_gradient(self, weight: torch.Tensor) -> None:
        self.allocations.hold([weight.grad], "gradients")

    def _shapes(self) -> AbstractContextManager[Any]:
        return self._mode if self._mode is not None else nullcontext()

    def _build(self) -> nn.Module:
        if self._mode is not None:
            try:
                with self._mode:
                    return _in_training(self.task.model())
            except EvenstepError:
                raise
            except Exception:
                # It reads values of its tensors, or a file of weights: made as it is, and then its shapes.
                pass
        return _in_training(self.task.model())

    def _placed(self, tensor: torch.Tensor) -> torch.Tensor:
        """A parameter or buffer on the device, as the precision and the memory format want it."""
        made = self.precision.fit_tensor(self._shape_of(tensor.detach()).to(self.device))
        if self.plan.channels_last and made.ndim == 4:
            made = made.contiguous(memory_format=torch.channels_last)
        return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made

    def _shape_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same without its values, where shapes are enough."""
        is_known = self._mode is None or isinstance(tensor, FakeTensor)
        return tensor if is_known else self._mode.from_tensor(tensor)  # type: ignore[union-attr]

    def passed(self, data: Any, valid: Any) -> dict[str, NDArray[np.float64]]:
        """The moments of each phase of a step with this micro-batch."""
        trained = [weight for weight in self.module.parameters() if weight.requires_grad]
        hooks = [weight.register_post_accumulate_grad_hook(self._note_gradient) for weight in trained]
        try:
            return self._passed(data, valid)
        finally:
            # A hook would keep this object, and its memory, for as long as the process lives.
            for hook in hooks:
                hook.remove()

    def _passed(self, data: Any, valid: Any) -> dict[str, NDArray[np.float64]]:
        with self._shapes():
            batch = self._on_device(data)
            held = self.allocations = Allocations(self.allocations._granule)
            held.hold(self.module.parameters(), "weights")
            held.hold(self.module.buffers(), "buffers")
            held.hold(_state(self.optimizer), "optimizer")
            held.hold(leaves(batch), "inputs")
            with held:
                self._compute(batch)
                self._update()
                held.taken()
                found = {}
                self._compute(batch)
                found[STEP] = held.taken()
                self._update()
                found[UPDATE] = held.taken()
                self._compute(batch)
                held.taken()
                self._compute(batch)
                found[ACCUMULATED] = held.taken()
                self._forget()
                held.taken()
                if valid is not None:
                    inputs = self._on_device(valid)
                    held.hold(leaves(inputs), "inputs")
                    held.taken()
                    self._evaluate(inputs)
                    found[EVALUATION] = held.taken()
        return found

    def measured(self, data: Any, meter: MemoryMeter) -> dict[str, int]:
        """The peaks of real steps."""
        batch = self._on_device(data)
        self._compute(batch)
        self._update()
        # The heap of a CPU grows for some steps, until what is freed can be used again.
        rounds = ROUNDS if self.device.type == "cpu" else 1
        meter.reset()
        for number in range(rounds):
            if number > 0:
                self._update()
            self._compute(batch)
        found = {STEP: meter.peak()}
        meter.reset()
        for _ in range(rounds):
            self._compute(batch)
        found[ACCUMULATED] = meter.peak()
        self._update()
        return found

    def runs(self, data: Any, meter: MemoryMeter, least: float) -> bool:
        """Whether steps have the memory that they had before."""
        try:
            return max(self.measured(data, meter).values()) >= least
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        self._forget()
        return False

    def held(self) -> dict[str, float]:
        """Bytes between two steps; gradients are counted too."""
        weights = list(self.module.parameters())
        return {
            "weights": _bytes(weights),
            "buffers": _bytes(self.module.buffers()),
            "gradients": _bytes(weight for weight in weights if weight.requires_grad),
            "optimizer": _bytes(_state(self.optimizer)),
        }

    def unit_bytes(self) -> list[float]:
        """Of each part that a sharded model gathers at a time, the rest last."""
        found = [_bytes(unit.parameters()) for unit in units(self.module)]
        return [*found, _bytes(self.module.parameters()) - sum(found)]

    def _on_device(self, data: Any) -> Any:
        def made(tensor: torch.Tensor) -> torch.Tensor:
            return self._shape_of(tensor).to(self.device)

        return map_tensors(data, made)

    def _compute(self, batch: Any) -> None:
        self.allocations.kind = "activations"
        with self.precision.autocast(self.device):
            loss = self.task.loss(self.module, batch)
        loss = loss[0] if isinstance(loss, tuple | list) else loss
        loss.backward()

    def _update(self) -> None:
        self.allocations.kind = "optimizer"
        self.optimizer.step()
        self._forget()

    def _forget(self) -> None:
        for weight in self.module.parameters():
            weight.grad = None

    def _evaluate(self, batch: Any) -> None:
        self.allocations.kind = "activations"
        evaluate, loss = Evaluator(), getattr(self.task.loss, "evaluated", self.task.loss)
        with evaluating(self.module), self.precision.autocast(self.device):
            evaluate(loss, self.module, batch)
            if self.task.metrics is not None:
                evaluate(self.task.metrics, self.module, batch)


def _in_training(module: nn.Module) -> nn.Module:
    return module if module.training else module.train()


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def _state(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [one for one in tree_leaves(list(optimizer.state.values())) if isinstance(one, torch.Tensor)]


def _bytes(tensors: Iterable[torch.Tensor]) -> float:
    return float(sum(tensor.nbytes for tensor in tensors if tensor.device.type != "meta"))


def lines(large: NDArray[np.float64], small: NDArray[np.float64], sizes: tuple[int, int], most: int) -> list[Moment]:
    """The moments that may be the highest, each as a line through two passes of these numbers of samples."""
    if len(large) == 0:
        return []
    if large.shape != small.shape:
        # Other operations with fewer samples: the highest of each.
        large, small = (one[[int(one.sum(1).argmax())]] for one in (large, small))
    slope = (large - small) / ((sizes[0] - sizes[1]) or 1)
    fixed = large - slope * sizes[0]
    if sizes[0] == sizes[1]:
        slope, fixed = np.zeros_like(large), large
    kept = {_highest(fixed + slope * size, mix) for size in _grid(most) for mix in MIXES}
    return [
        Moment(
            dict(zip(COUNTED, fixed[index].tolist(), strict=True)),
            dict(zip(COUNTED, slope[index].tolist(), strict=True)),
        )
        for index in sorted(kept)
    ]


def _highest(moments: NDArray[np.float64], mix: float) -> int:
    weights = np.array([mix if kind == "gradients" else 0.0 if kind == "inputs" else 1.0 for kind in COUNTED])
    return int((moments @ weights).argmax())


def _grid(most: int) -> list[int]:
    found = [1]
    while found[-1] < most:
        found.append(2 * found[-1])
    return found


def read_samples(data: AdaptedData, task: Task, plan: Plan, num: int) -> Any:
    """As many samples as a micro-batch, the longest ones where the sampler knows lengths."""
    transform = SampleTransform(plan.seed, 0, task.augment)
    source = data.source
    if isinstance(source, Stream):
        batch, ids = source.first(num, transform)
    else:
        ids = longest(data, num)
        if len(ids) < num:
            ids = np.resize(ids, num)
        batch = source.fetch(ids, ids, transform)
    if task.augment_batch is not None:
        batch = task.augment_batch(batch, Draws(ids, plan.seed, 0, torch.device("cpu")))
    return batch


def longest(data: AdaptedData, num: int) -> Ids:
    """The ids of the longest samples; of the first, where the sampler does not know lengths."""
    assert not isinstance(data.source, Stream)
    lengths = getattr(data.sampler, "lengths", None)
    if lengths is None:
        return np.arange(min(num, data.source.num_samples), dtype=np.int64)
    return np.argsort(np.asarray(lengths), kind="stable")[::-1][:num].astype(np.int64)


def measure_shapes(
    plan: Plan,
    task: Task,
    run_folder: Path,
    *,
    share: int,
    limit: int | None = None,
    division: Division | None = None,
    is_tried: bool = False,
) -> Iterator[str]:
    """What a worker does to find what a step holds; it writes a file, and yields nothing.

    On a CPU, what `is_tried` afterwards is corrected by real steps of each strategy, not by those of one device.
    """
    set_up_torch(plan)
    device = torch.device(plan.devices[0])
    available = available_bytes(device)
    if device.type == "cpu":
        warm_up()
    framework = psutil.Process().memory_info().rss if device.type == "cpu" else workspace_bytes(device)
    found = step_memory(plan, task, share, float(framework))
    if not found.is_real and not (is_tried and device.type == "cpu"):
        found = calibrated(plan, task, found, share, min(available, limit or available))
    if division is not None and not found.is_real:
        from evenstep.fit.fake_tensor_parts import memory_of_ranks

        found = replace(found, ranks=memory_of_ranks(plan, task, division, share, found))
    (run_folder / FILE).write_text(json.dumps(asdict(replace(found, available_bytes=available))))
    yield from ()


def calibrated(plan: Plan, task: Task, memory: StepMemory, share: int, limit: float) -> StepMemory:
    """The same, with what real steps of some samples take beyond it: workspaces of libraries, gaps of the allocator."""
    sizes = _real_sizes(memory, share, limit)
    if not sizes:
        return memory
    device = torch.device(plan.devices[0])
    meter = MemoryMeter(device)
    meter.reset()
    before = meter.now()
    data = adapt_train(task)
    step: ShapeStep | None = None
    excess: dict[str, list[tuple[int, float]]] = {STEP: [], ACCUMULATED: []}
    for num in sizes:
        # What the optimizer keeps lies between what the first step makes: one model for each size.
        step = None
        meter.return_freed()
        step = ShapeStep(plan, task, None, device)
        batch = map_tensors(read_samples(data, task, plan, num), step.precision.fit_tensor)
        for phase, peak in step.measured(batch, meter).items():
            forecast = max(sum(moment.at(num).values()) for moment in memory.phases[phase])
            excess[phase].append((num, peak - before - forecast))
    gaps = gaps_of(step, batch, meter) if step is not None and device.type == "cuda" else 0.0
    return replace(memory, excess=excess, gaps=gaps)


GAPS = (0.7, 0.5, 0.36, 0.25, 0.18, 0.13, 0.1, 0.07, 0.05)
MOST_GAPS = 0.9


def gaps_of(step: ShapeStep, data: Any, meter: MemoryMeter) -> float:
    """Of the peak: the least that a GPU must have beyond it, so that the same steps run and take the same.

    From much to little: where cuDNN does not get the workspace that it wants, it takes another algorithm and keeps it.
    """
    peak = max(step.measured(data, meter).values())
    found = MOST_GAPS
    for gaps in GAPS:
        with only(meter.device, peak * (1 + gaps)):
            if not step.runs(data, meter, peak * SAME):
                break
        found = gaps
    return found


def _real_sizes(memory: StepMemory, share: int, limit: float) -> list[int]:
    """Numbers of samples, the fewest first: the share, or as much as takes half of the limit, and parts of that."""
    least = 2 if memory.has_batchnorm else 1

    def takes(num: int) -> float:
        moments = [*memory.phases[ACCUMULATED], *memory.phases[UPDATE]]
        return memory.framework_bytes + max(sum(moment.at(num).values()) for moment in moments)

    large = share
    while large > least and takes(large) > HALF * limit:
        large = large * 3 // 4
    if large <= least or takes(large) > HALF * limit:
        return []
    return sorted({max(least, large // part) for part in PARTS})


def step_memory(plan: Plan, task: Task, share: int, framework: float) -> StepMemory:
    """By shapes alone; where a task reads values of its tensors, by real steps with a few samples."""
    try:
        with warnings.catch_warnings():
            # Of torch's own RNNs.
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            return _passes(plan, task, share, framework, FakeTensorMode(allow_non_fake_inputs=True))
    except EvenstepError:
        raise
    except Exception as error:
        first = f"{type(error).__name__}: {error}".splitlines()[0]
        found = _passes(plan, task, min(share, REAL_SAMPLES), framework, None)
        found.notes.append(f"shapes alone do not say what a step does ({first}): a few samples were computed")
        return found


def _passes(plan: Plan, task: Task, share: int, framework: float, mode: FakeTensorMode | None) -> StepMemory:
    return memory_of(ShapeStep(plan, task, mode), share, framework, is_real=mode is None)


def memory_of(step: ShapeStep, share: int, framework: float, *, is_real: bool = False) -> StepMemory:
    """Two passes of a step, as lines."""
    plan, task = step.plan, step.task
    train, valid = adapt_train(task), next(iter(adapt_valid(task).values()), None)
    has_batchnorm = any(isinstance(layer, BatchNorm) for layer in step.module.modules())
    large = min(share, MOST_READ)
    small = min(large, max(2 if has_batchnorm else 1, large // FEWER))
    fit, plain = step.precision.fit_tensor, replace(task, augment=None, augment_batch=None)
    passed, read, waiting, received = [], [], [], []
    for num in (large, small):
        data = map_tensors(read_samples(train, task, plan, num), fit)
        more = map_tensors(read_samples(valid, plain, plan, num), fit) if valid is not None else None
        passed.append(step.passed(data, more))
        waiting.append(step.waiting)
        received.append(step.received / num)
        read.append(sum(one.nbytes for one in leaves(data) if isinstance(one, torch.Tensor)) / num)
    held = step.held()
    moments = {phase: lines(passed[0][phase], passed[1][phase], (large, small), share) for phase in passed[0]}
    if task.ema is not None:
        # The average is held like a buffer.
        for moment in (one for phase in moments.values() for one in phase):
            moment.fixed["buffers"] += held["weights"]
    return StepMemory(
        held=held,
        phases=moments,
        input_bytes=read[0],
        unit_bytes=step.unit_bytes(),
        framework_bytes=framework,
        has_batchnorm=has_batchnorm,
        is_real=is_real,
        waiting=_line(waiting, (large, small)),
        received_bytes=received[0],
    )


def _line(values: list[float], sizes: tuple[int, int]) -> tuple[float, float]:
    """A fixed part, and a part for each sample."""
    slope = (values[0] - values[1]) / ((sizes[0] - sizes[1]) or 1)
    return values[0] - slope * sizes[0], slope
