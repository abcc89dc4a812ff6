"""Check a task before any process starts: its functions, its size, and one step and evaluation on a few samples."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from evenstep.best_metric import find_metric, metric_of, parse_best
from evenstep.checkpoint import files
from evenstep.checkpoint.state_dict import check_same_order, check_weights, refuse_difference
from evenstep.data.adapt import AdaptedData
from evenstep.data.augmentation import SampleTransform
from evenstep.data.dataset import Source
from evenstep.data.iterable import Stream
from evenstep.data.loader import MicroBatch
from evenstep.data.nested import map_tensors
from evenstep.data.prefetch import NOT_RESIDENT, can_be_resident
from evenstep.distributed.world import World
from evenstep.early_stopping import BestSoFar
from evenstep.errors import MAX_CHARACTERS, EvenstepError, PlanError, TaskError, shorten
from evenstep.plan import Plan
from evenstep.sampling.order import Lengths, Order, lengths_of, order_name
from evenstep.sampling.rng import Draws, Ids
from evenstep.strategies.base import SMALL_ENOUGH, copied, evaluating
from evenstep.strategy_facts import STRATEGIES, sharding
from evenstep.task import Task, describe, has_several
from evenstep.training.evaluation import Evaluator, named, prefixed
from evenstep.training.loss_amount import as_sum
from evenstep.training.loss_weighting import LossTotal
from evenstep.training.lr_scheduler import check_scheduler, make_scheduler
from evenstep.training.optimizer_compatibility import refuse_closure
from evenstep.training.optimizer_step import make_optimizer
from evenstep.training.precision import Precision
from evenstep.training.sync_batchnorm import is_local
from evenstep.training.team import refuse_lazy
from evenstep.worker.lazy_compiler import put_off_compiler

OF_LOSS = "the loss cannot be computed"
MAX_TRIED = 1024
"""A larger batch is not tried to explain an error."""
NEEDS_TWO = "Expected more than 1 value per channel"
"""Part of BatchNorm's error for one sample."""


@dataclass(frozen=True)
class SampleBatch:
    """A small batch."""

    data: Any
    ids: Ids


def sample_batch(source: Source | Stream, transform: SampleTransform, most: int = 4) -> SampleBatch:
    """The first samples of a stream; of other data the first two, the middle one and the last."""
    if isinstance(source, Stream):
        return SampleBatch(*source.first(most, transform))
    last = source.num_samples - 1
    ids = np.array(sorted({0, min(1, last), last // 2, last})[:most], dtype=np.int64)
    return SampleBatch(source.fetch(ids, ids, transform), ids)


def whole_batch(source: Source | Stream, transform: SampleTransform, batch: int) -> SampleBatch:
    """The first samples, as many as a step has."""
    if isinstance(source, Stream):
        return SampleBatch(*source.first(batch, transform))
    ids = np.arange(min(batch, source.num_samples), dtype=np.int64)
    return SampleBatch(source.fetch(ids, ids, transform), ids)


class DryRun:
    """A step and an evaluation of a temporary model on the CPU; refuses only what cannot work."""

    def __init__(self, plan: Plan, task: Task, whole: Callable[[], SampleBatch] | None = None) -> None:
        """`whole` reads the samples of a whole step: whether these work is part of the message for fewer."""
        self._whole = whole
        self._plan = plan
        self._task = task
        self._world = World(0, 1, (torch.device("cpu"),))
        self._precision = Precision("fp64" if plan.precision == "fp64" else "fp32", self._world.device)
        self._model: nn.Module | None = None
        self._fault = ""
        """The message if the next call fails."""
        self._num_tried = 0
        """On how many samples."""

    def check(self, train: SampleBatch | None, valid: Mapping[str, SampleBatch]) -> None:
        with self._refusing():
            self._fault = "the model cannot be built"
            # A copy: the task may return the model that will be trained.
            self._model = copied(self._precision.fit(self._task.model()))
            if not self._model.training:
                # As the worker does; of a model in training mode, layers may be in eval mode on purpose.
                self._model.train()
            if train is not None:
                self._step(self._model, train)
            with evaluating(self._model):
                names = [
                    prefixed(set_, name) for set_, few in valid.items() for name in self._evaluate(self._model, few)
                ]
            if names:
                self._check_best(names)

    def check_alone(self, sample: SampleBatch, lengths: Lengths) -> None:
        """Take a step on one sample, as a device with a single-sample micro-batch will."""
        model, plan = self._model, self._plan
        is_shared = plan.sync_batchnorm and min(plan.most_devices, *plan.batch_sizes(lengths)) > 1
        if model is None or (is_shared and is_local(model)):
            return
        with self._refusing(f"; {_where_alone(plan, lengths)}"):
            try:
                self._step(model, sample)
            except ValueError as error:
                if NEEDS_TWO not in str(error):
                    raise
                raise PlanError(_too_few_for_batchnorm(plan, lengths)) from error

    def _step(self, model: nn.Module, few: SampleBatch) -> None:
        data, self._num_tried = map_tensors(few.data, self._precision.fit_tensor), len(few.ids)
        if self._task.augment_batch is not None:
            self._fault = "augment_batch cannot be computed"
            data = self._task.augment_batch(data, Draws(few.ids, self._plan.seed, 0, self._world.device))
        self._fault = OF_LOSS
        LossTotal(self._world, 1).take(self._task.loss(model, data), MicroBatch(data, few.ids[:0], 1))

    def _evaluate(self, model: nn.Module, few: SampleBatch) -> list[str]:
        """The names of the values that an evaluation of these samples has."""
        task, data = self._task, map_tensors(few.data, self._precision.fit_tensor)
        self._num_tried = len(few.ids)
        self._fault = "the loss of the valid data cannot be computed"
        found = Evaluator()(getattr(task.loss, "evaluated", task.loss), model, data)
        losses = found if isinstance(found, Mapping) else {"loss": found}
        names = list(losses)
        for name, amount in losses.items():
            as_sum(amount, 1, name)
        if task.metrics is not None:
            self._fault = "the metrics cannot be computed"
            for name, amount in named(Evaluator()(task.metrics, model, data)).items():
                as_sum(amount, 1, name)
                names.append(name)
        if task.predict is not None and task.scores is not None:
            from evenstep.training.scores import as_pair_of_tensors, names_of

            self._fault = "the predictions cannot be computed"
            pair = as_pair_of_tensors(Evaluator()(task.predict, model, data))
            self._fault = "the scores cannot be computed"
            names += self._new_names(names, names_of(task.scores, pair))
        return names

    def _check_best(self, names: list[str]) -> None:
        metric, names = metric_of(self._plan.best), list(dict.fromkeys(names))
        if "" in (self._task.scores or ()):
            # It returns a dict, whose names are known after the first evaluation.
            return
        # A score may be a dict of values, named score/key.
        scores = [name for name in names if name.rpartition("/")[2] in (self._task.scores or ())]
        if find_metric(metric, names) is None and not any(metric.startswith(f"{score}/") for score in scores):
            longer = [name for name in names if name.rpartition("/")[2].startswith(metric)]
            close = longer or difflib.get_close_matches(metric[:MAX_CHARACTERS], names, n=1, cutoff=0.7)
            raise PlanError(
                f"--best is {shorten(metric)}, and an evaluation has {', '.join(names)}; "
                + (f"did you mean {close[0]}?" if close else "choose one of these")
                + "".join(f"\n{line}" for line in getattr(self._task, "left_out", ()))
            )

    def _new_names(self, names: Collection[str], scores: list[str]) -> list[str]:
        taken = [name for name in scores if name in names]
        if taken:
            raise TaskError(f"{taken[0]!r} is both a score and one of the metrics; give them different names")
        return scores

    @contextmanager
    def _refusing(self, hint: str = "") -> Iterator[None]:
        """Refuse a task whose code fails, unless it may need another device."""
        task = self._task
        try:
            yield
        except EvenstepError:
            raise
        except Exception as error:
            if any(device != "cpu" for device in self._plan.devices):
                # The worker will report it.
                self._model = None
                return
            if "valid" in self._fault and (task.augment is not None or task.augment_batch is not None):
                hint = "; augment and augment_batch change training samples alone"
            what = f"{self._fault}: {describe(error)}"
            raise TaskError(f"{what}{hint or self._tried()}") from error

    def _tried(self) -> str:
        """On how many samples it was tried, and whether that is why it failed."""
        num, whole = self._num_tried, self._whole
        if num == 0:
            return ""
        tried = f"; tried on {num} sample{'s' * (num > 1)}"
        if self._model is None or whole is None or self._fault != OF_LOSS or self._plan.batch > MAX_TRIED:
            return tried
        try:
            self._step(self._model, whole())
        except Exception:
            return tried
        return (
            f"{tried}, and it works on {self._num_tried}:\n"
            "a loss must work for any number of samples, since the last batch may be smaller"
        )


def _where_alone(plan: Plan, lengths: Lengths) -> str:
    """Which steps leave a device with one sample."""
    size, step = plan.batch, "every step"
    if plan.smallest_micro_batch(size) > 1:
        size = min(size for size in plan.batch_sizes(lengths) if plan.smallest_micro_batch(size) == 1)
        step = "the last step of an epoch"
    devices = f" over {plan.most_devices} devices" * (plan.most_devices > 1)
    whose = "a device"
    if plan.virtual_replicas is not None:
        devices, whose = f" over {plan.virtual_replicas} virtual replicas", "a virtual replica"
    parts = f" in {plan.accumulate} micro-batches" * (plan.accumulate > 1)
    return f"{step} ({size} sample{'s' * (size > 1)}{devices}{parts}) leaves one sample for {whose}"


def _too_few_for_batchnorm(plan: Plan, lengths: Lengths) -> str:
    remedies = ["drop_last=True in the Task"] * (plan.smallest_micro_batch(plan.batch) > 1)
    has_processes = STRATEGIES[plan.strategy].processes_per_device and plan.virtual_replicas is None
    can_share = has_processes and min(plan.most_devices, *plan.batch_sizes(lengths)) > 1
    remedies += ["--sync-batchnorm"] * can_share
    batch = _batch_for_two(plan, lengths)
    remedies += [f"--batch {batch}"] * (batch is not None)
    fewer = "fewer devices" if plan.virtual_replicas is None else "fewer --virtual-replicas"
    return (
        f"BatchNorm cannot be trained on one sample, and {_where_alone(plan, lengths)};\n"
        f"use {', or '.join(remedies) or fewer}"
    )


def _batch_for_two(plan: Plan, lengths: Lengths) -> int | None:
    """The nearest global batch with which every device always has at least two samples."""
    sizes = range(2 * plan.most_devices * plan.accumulate, min(2 * plan.batch, lengths.rest or 0) + 1)
    for size in sorted(sizes, key=lambda size: abs(size - plan.batch)):
        other = replace(plan, batch=size)
        if min(map(other.smallest_micro_batch, other.batch_sizes(lengths))) > 1:
            return size
    return None


FUNCTIONAL_LOSSES = {
    "BCELoss": "binary_cross_entropy",
    "BCEWithLogitsLoss": "binary_cross_entropy_with_logits",
    "CrossEntropyLoss": "cross_entropy",
    "HuberLoss": "huber_loss",
    "L1Loss": "l1_loss",
    "MSELoss": "mse_loss",
    "NLLLoss": "nll_loss",
    "SmoothL1Loss": "smooth_l1_loss",
}
"""The functions of torch.nn.functional that compute what these modules do."""
MADE_BY_TASK = (
    ("model", nn.Module, ""),
    ("optimizer", torch.optim.Optimizer, "parameters"),
    ("scheduler", LRScheduler, "optimizer"),
)
"""Fields of a Task, what their functions return, and their argument."""


def probe(plan: Plan, task: Task, train: AdaptedData, valid: Mapping[str, AdaptedData], order: Order | None) -> None:
    """Check data, model, loss and metrics against the plan; `order` is that of the training samples."""
    _check_makers(task)
    _check_evaluations(plan, task)
    source = train.source
    if not isinstance(source, Stream) and plan.batch > source.num_samples:
        raise PlanError(
            f"a global batch of {plan.batch} is larger than the {source.num_samples} training samples; "
            f"use --batch {source.num_samples} or less"
        )
    if plan.resident and not can_be_resident(source, task.augment is not None):
        raise PlanError(NOT_RESIDENT)
    lengths = lengths_of(order)
    _check_schedule(plan, task, lengths)
    skeleton = _skeleton(task)
    if skeleton is not None:
        refuse_lazy(skeleton)
        _check_fits(plan, skeleton)
        _check_optimizer(task, skeleton)
        _check_resumes(plan, skeleton, source, order)
    num_parameters = sum(weight.numel() for weight in skeleton.parameters()) if skeleton is not None else 0
    transform = SampleTransform(plan.seed, 0, task.augment)
    few = sample_batch(source, transform)
    # A larger model is tested by the workers.
    if skeleton is None or num_parameters <= SMALL_ENOUGH:
        dry_run = DryRun(plan, task, lambda: whole_batch(source, transform, plan.batch))
        dry_run.check(few, _few_of_each(plan, valid))
        if min(map(plan.smallest_micro_batch, plan.batch_sizes(lengths))) == 1:
            dry_run.check_alone(sample_batch(source, transform, most=1), lengths)
    # After the names of the metrics are known: one that does not exist has no direction.
    parse_best(plan.best)


def _few_of_each(plan: Plan, valid: Mapping[str, AdaptedData]) -> dict[str, SampleBatch]:
    return {name: sample_batch(one.source, SampleTransform(plan.seed, 0)) for name, one in valid.items()}


def probe_evaluation(plan: Plan, task: Task, valid: Mapping[str, AdaptedData]) -> None:
    """Check what evaluating a file of weights needs."""
    _check_makers(task)
    _check_evaluations(plan, task)
    if not valid:
        raise TaskError("the task has no data to evaluate on; give it: Task(..., valid=data)")
    skeleton = _skeleton(task)
    if skeleton is not None and plan.resume is not None:
        check_weights(skeleton, plan.resume, plan.allow_pickle)
    if skeleton is None or sum(weight.numel() for weight in skeleton.parameters()) <= SMALL_ENOUGH:
        # What was best in the run may be of another validation set.
        DryRun(replace(plan, best=None), task).check(None, _few_of_each(plan, valid))


def _check_evaluations(plan: Plan, task: Task) -> None:
    if task.predict is not None or task.scores is not None:
        from evenstep.training.scores import scores_of

        scores_of(task)
    given = [name for name in ("evaluate_every", "evaluate_first", "best", "stop_after") if getattr(plan, name)]
    if task.valid is None and given:
        flag = given[0].replace("_", "-")
        raise PlanError(f"--{flag} needs data to evaluate on, and the task has none; give it: Task(..., valid=data)")


def _check_schedule(plan: Plan, task: Task, lengths: Lengths) -> None:
    """Make the scheduler for a small optimizer; it may need that of the task, and is then tested by the workers."""
    if task.scheduler is None:
        return
    put_off_compiler()
    names = task.optimizer if isinstance(task.optimizer, Mapping) else ("",)
    small = {key: torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1, momentum=0.9) for key in names}
    try:
        scheduler = make_scheduler(task, small, plan, lengths, plan.num_steps(lengths))
    except EvenstepError:
        raise
    except Exception:
        return
    check_scheduler(scheduler, plan, task)


def _check_makers(task: Task) -> None:
    """Every process makes its own model, optimizer and scheduler, so the task must give functions."""
    given = [(getattr(task, field), field, kind, argument) for field, kind, argument in MADE_BY_TASK]
    for one, field, kind, argument in given:
        several = one.values() if isinstance(one, Mapping) else (one,)
        made = next((each for each in several if isinstance(each, kind)), None)
        if made is not None:
            name, arguments = type(made).__name__, f"{argument}, ..." if argument else "..."
            raise TaskError(
                f"Task.{field} is an instance of {name}, and every process makes its own; "
                f"write {field}={f'lambda {argument}'.rstrip()}: {name}({arguments})"
            )
    _check_loss(task.loss)
    if not callable(task.model):
        raise TaskError(
            f"Task.model is a {type(task.model).__name__}; give a function that makes the model: model=lambda: Net()"
        )
    if task.metrics is not None and not callable(task.metrics):
        raise TaskError(
            f"Task.metrics is a {type(task.metrics).__name__}; give a function that returns one: "
            'metrics=lambda model, batch: {"accuracy": model(batch[0]).argmax(1) == batch[1]}'
        )


def _check_loss(loss: object) -> None:
    """Refuse a loss of torch, which takes outputs and targets."""
    kind = type(loss) if isinstance(loss, nn.Module) else loss
    name = getattr(kind, "__name__", "")
    where = getattr(kind, "__module__", None)
    if where == "torch.nn.modules.loss":
        given = f"nn.{name}"
        function = f"nn.functional.{FUNCTIONAL_LOSSES[name]}" if name in FUNCTIONAL_LOSSES else f"nn.{name}(...)"
    elif where == "torch.nn.functional":
        given = function = f"nn.functional.{name}"
    else:
        return
    raise TaskError(
        f"Task.loss is {given}, and the loss is called as loss(model, batch); "
        f"write loss=lambda model, batch: {function}(model(batch[0]), batch[1])"
    )


def _skeleton(task: Task) -> nn.Module | None:
    """The model on the meta device if possible, else on the CPU; None if that fails too."""
    for device in ("meta", "cpu"):
        try:
            with torch.device(device):
                model = task.model()
        except EvenstepError:
            raise
        except Exception:
            # Some models compute with real numbers while they are built.
            continue
        if not isinstance(model, nn.Module):
            raise TaskError(f"Task.model() returned {type(model).__name__}; it must return a torch.nn.Module")
        return model
    return None


def _check_fits(plan: Plan, skeleton: nn.Module) -> None:
    """Count weights and gradients only: what is refused here cannot run."""
    width = 8 if plan.precision == "fp64" else 4
    in_host = plan.devices[0] == "cpu" or plan.cpu_offload
    copies = (len(plan.devices) if in_host else 1) / plan.num_shards
    needed = 2 * width * copies * sum(weight.numel() for weight in skeleton.parameters())
    free_bytes = psutil.virtual_memory().available if in_host else _gpu_bytes(plan.devices[0])
    if free_bytes is not None and needed > free_bytes:
        where = "the host" if plan.cpu_offload else plan.devices[0]
        raise PlanError(
            f"the model does not fit: weights and gradients need {needed / 2**30:.1f} GiB and {where} has "
            f"{free_bytes / 2**30:.1f} GiB free; use a smaller model, or --strategy {sharding()} on more GPUs"
        )


def _check_optimizer(task: Task, skeleton: nn.Module) -> None:
    # Making and stepping an optimizer would import torch's compiler: more than a second of every start.
    put_off_compiler()
    makers, parts = {"": task.optimizer}, {"": skeleton}
    if has_several(task):
        makers, parts = task.optimizer, dict(skeleton.named_children())
    for key, make in makers.items():
        try:
            optimizer = make_optimizer(make, parts[key])
        except EvenstepError:
            raise
        except Exception:
            # Some read the values, which a meta model does not have; the worker will report errors.
            return
        refuse_closure(optimizer)


def _gpu_bytes(device: str) -> int | None:
    if not device.startswith("cuda"):
        return None
    return int(torch.cuda.get_device_properties(device).total_memory)


def _check_resumes(plan: Plan, skeleton: nn.Module, source: Source | Stream, order: Order | None) -> None:
    if plan.resume is None:
        return
    path = Path(plan.resume)
    if path.is_file():
        check_weights(skeleton, plan.resume, plan.allow_pickle)
        return
    state = files.read_state(path)
    table = files.tensor_table(path / files.WEIGHTS)
    files.tensor_table(path / files.OPTIMIZER)
    own = {name: tuple(value.shape) for name, value in skeleton.state_dict().items() if isinstance(value, torch.Tensor)}
    refuse_difference(own, {name: tuple(shape) for name, (_, shape) in table.items()}, str(path))
    num_samples = None if isinstance(source, Stream) else source.num_samples
    check_same_order(path, state, plan.seed, num_samples, order_name(order))
    known = tuple(state["loader"].get("stream") or ())
    lengths = order.lengths if order is not None else Lengths(None, known)
    num_steps = plan.num_steps(lengths, *files.start_of(plan.resume))
    if num_steps is None and plan.epochs is not None and len(known) >= plan.epochs:
        num_steps = state["step"]
    if num_steps is not None and state["step"] >= num_steps:
        end = f"step {plan.steps}" if plan.steps is not None else f"epoch {plan.epochs}"
        raise PlanError(
            f"{path} is at step {state['step']}, and the plan ends with {end}: there is nothing left to do; "
            "give a larger --epochs or --steps to continue"
        )
    so_far = state.get("so_far")
    best = so_far.best_so_far if so_far is not None else None
    why = best.why_stop(plan) if best is not None and best.by == BestSoFar.of(plan).by else None
    if why is not None:
        raise PlanError(f"{path} is where the run stopped early: {why}; give a larger --stop-after to continue")
