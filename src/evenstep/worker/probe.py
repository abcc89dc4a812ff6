"""Trying a task on a few samples before anything is started, so that what cannot work is said at once."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import nn

from evenstep import checkpoint
from evenstep.errors import EvenstepError, PlanError, TaskError
from evenstep.order import Lengths, Order, order_name
from evenstep.plan import Plan
from evenstep.task import Task, describe, takes_steps
from evenstep.worker.adopt import Adopted
from evenstep.worker.loader import Piece
from evenstep.worker.optimizers import refuse_closure
from evenstep.worker.passes import NOT_RESIDENT, can_be_resident
from evenstep.worker.precision import Precision
from evenstep.worker.source import Source, to_device
from evenstep.worker.state import check_foreign, refuse_difference
from evenstep.worker.stream import Stream
from evenstep.worker.totals import Totals
from evenstep.worker.world import World

SMALL_ENOUGH = 20_000_000
"""Parameters up to which the loss is tried on the CPU here; a larger model is tried by the workers themselves."""


def probe(plan: Plan, task: Task, train: Adopted) -> Lengths:
    """Check data, model and loss against the plan; how many samples each epoch will have."""
    source = train.source
    if not isinstance(source, Stream) and plan.batch > source.num_samples:
        raise PlanError(
            f"a global batch of {plan.batch} is larger than the {source.num_samples} training samples; "
            f"use --batch {source.num_samples} or less"
        )
    if plan.resident and not can_be_resident(source, task.augment is not None):
        raise PlanError(NOT_RESIDENT)
    order = train.order(plan.seed, plan.batch)
    lengths = order.lengths if order is not None else Lengths(None)
    _check_schedule(task, plan.num_steps(lengths))
    skeleton = _skeleton(task)
    if skeleton is not None:
        _check_fits(plan, skeleton)
        _check_optimizer(task, skeleton)
        _check_resumes(plan, skeleton, source, order)
    num_parameters = sum(weight.numel() for weight in skeleton.parameters()) if skeleton is not None else 0
    data = _first_samples(source)
    if skeleton is None or num_parameters <= SMALL_ENOUGH:
        _check_loss(plan, task, data)
    return lengths


def _check_schedule(task: Task, num_steps: int | None) -> None:
    if num_steps is None and task.scheduler is not None and takes_steps(task.scheduler):
        raise PlanError(
            "the scheduler asks for the number of steps, and a stream does not know how many it has; give --steps"
        )


def _first_samples(source: Source | Stream) -> Any:
    if isinstance(source, Stream):
        return source.first(4)
    last = source.num_samples - 1
    return source.fetch(np.array(sorted({0, min(1, last), last // 2, last}), dtype=np.int64))


def _skeleton(task: Task) -> nn.Module | None:
    """The model with shapes and no memory if it can be built so, else with memory; None if that fails too."""
    for device in ("meta", "cpu"):
        try:
            with torch.device(device):
                model = task.model()
        except Exception:
            # Some models compute with real numbers while they are built.
            continue
        if not isinstance(model, nn.Module):
            raise TaskError(f"Task.model() returned {type(model).__name__}; it must return a torch.nn.Module")
        return model
    return None


def _check_fits(plan: Plan, skeleton: nn.Module) -> None:
    """Weights, gradients and nothing else: what is refused here cannot possibly run."""
    width = 8 if plan.precision == "fp64" else 4
    copies = len(plan.devices) if plan.strategy in ("dp", "ddp") else 1
    on_cpu = plan.devices[0] == "cpu"
    sharers = copies if on_cpu else 1
    needed = 2 * width * sharers * sum(weight.numel() for weight in skeleton.parameters())
    if plan.strategy == "fsdp" and not on_cpu:
        needed //= len(plan.devices)
    room = psutil.virtual_memory().available if on_cpu else _card_bytes(plan.devices[0])
    if room is not None and needed > room:
        raise PlanError(
            f"the model does not fit: weights and gradients need {needed / 2**30:.1f} GiB and {plan.devices[0]} has "
            f"{room / 2**30:.1f} GiB free; use a smaller model, or --strategy fsdp on more cards"
        )


def _check_optimizer(task: Task, skeleton: nn.Module) -> None:
    try:
        optimizer = task.optimizer(skeleton.parameters())
    except Exception:
        # Some look at the numbers, of which a skeleton has none; the worker will say.
        return
    refuse_closure(optimizer)


def _card_bytes(device: str) -> int | None:
    if not device.startswith("cuda"):
        return None
    return int(torch.cuda.get_device_properties(device).total_memory)


def _check_resumes(plan: Plan, skeleton: nn.Module, source: Source | Stream, order: Order | None) -> None:
    if plan.resume is None:
        return
    path = Path(plan.resume)
    if path.is_file():
        check_foreign(skeleton, plan.resume, plan.allow_pickle)
        return
    state = checkpoint.read_state(path)
    table = checkpoint.tensor_table(path / checkpoint.WEIGHTS)
    own = {name: tuple(value.shape) for name, value in skeleton.state_dict().items() if isinstance(value, torch.Tensor)}
    refuse_difference(own, {name: tuple(shape) for name, (_, shape) in table.items()}, str(path))
    num_samples = None if isinstance(source, Stream) else source.num_samples
    checkpoint.check_same_order(path, state, plan.seed, num_samples, order_name(order))
    known = tuple(state["loader"].get("stream") or ())
    lengths = order.lengths if order is not None else Lengths(None, known)
    num_steps = plan.num_steps(lengths, *checkpoint.start_of(plan.resume))
    if num_steps is None and plan.epochs is not None and len(known) >= plan.epochs:
        num_steps = state["step"]
    if num_steps is not None and state["step"] >= num_steps:
        raise PlanError(
            f"{path} is at step {state['step']} and the plan ends at step {num_steps}: "
            "there is nothing left to do; give a larger --epochs or --steps to go on"
        )


def _check_loss(plan: Plan, task: Task, data: Any) -> None:
    """One forward of a throw-away model on the CPU; only what is certainly wrong is refused."""
    world = World(0, 1, (torch.device("cpu"),))
    precision = Precision("fp64" if plan.precision == "fp64" else "fp32", world.device)
    what = "loss"
    try:
        # A copy: the task may hand out the one model that will be trained.
        model = copy.deepcopy(precision.fit(task.model()))
        amount = task.loss(model, to_device(data, precision.fit_tensor))
        Totals(world, 1).take(amount, Piece(data, np.zeros(0, dtype=np.int64), 1))
        if task.metrics is not None:
            what = "metrics"
            with torch.no_grad():
                task.metrics(model.eval(), to_device(data, precision.fit_tensor))
    except EvenstepError:
        raise
    except Exception as error:
        if any(device != "cpu" for device in plan.devices):
            # It may need the card; the worker will say.
            return
        raise TaskError(f"the {what} cannot be computed: {describe(error)}") from error
