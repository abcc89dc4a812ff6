"""Trying a task on a few samples before anything is started, so that what cannot work is said at once."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from evenstep import checkpoint
from evenstep.errors import PlanError, TaskError
from evenstep.order import Lengths, Order, lengths_of, order_name
from evenstep.plan import Plan
from evenstep.task import Task, takes_steps
from evenstep.worker.adopt import Adopted
from evenstep.worker.copies import SMALL_ENOUGH
from evenstep.worker.dry_run import DryRun, few_samples
from evenstep.worker.later import put_off_compiler
from evenstep.worker.optimizers import refuse_closure
from evenstep.worker.passes import NOT_RESIDENT, can_be_resident
from evenstep.worker.persample import Touch
from evenstep.worker.refusals import refuse_lazy
from evenstep.worker.source import Source
from evenstep.worker.state import check_foreign, refuse_difference
from evenstep.worker.stream import Stream

MADE_BY_TASK = (
    ("model", nn.Module, ""),
    ("optimizer", torch.optim.Optimizer, "parameters"),
    ("scheduler", LRScheduler, "optimizer"),
)
"""Fields of a Task, what their functions make, and what these are called with."""


def probe(plan: Plan, task: Task, train: Adopted, valid: Adopted | None, order: Order | None) -> None:
    """Check data, model, loss and metrics against the plan; `order` is that of the training samples."""
    _check_makers(task)
    source = train.source
    if not isinstance(source, Stream) and plan.batch > source.num_samples:
        raise PlanError(
            f"a global batch of {plan.batch} is larger than the {source.num_samples} training samples; "
            f"use --batch {source.num_samples} or less"
        )
    if plan.resident and not can_be_resident(source, task.augment is not None):
        raise PlanError(NOT_RESIDENT)
    lengths = lengths_of(order)
    _check_schedule(task, plan.num_steps(lengths))
    skeleton = _skeleton(task)
    if skeleton is not None:
        refuse_lazy(skeleton)
        _check_fits(plan, skeleton)
        _check_optimizer(task, skeleton)
        _check_resumes(plan, skeleton, source, order)
    num_parameters = sum(weight.numel() for weight in skeleton.parameters()) if skeleton is not None else 0
    touch = Touch(plan.seed, 0, task.augment)
    few = few_samples(source, touch)
    few_valid = few_samples(valid.source, Touch(plan.seed, 0)) if valid is not None else None
    # A larger model is tried by the workers themselves.
    if skeleton is None or num_parameters <= SMALL_ENOUGH:
        dry_run = DryRun(plan, task)
        dry_run.check(few, few_valid)
        if min(map(plan.smallest_micro_batch, plan.batch_sizes(lengths))) == 1:
            dry_run.check_alone(few_samples(source, touch, most=1), lengths)


def _check_makers(task: Task) -> None:
    """Every process makes a model, an optimizer and a scheduler of its own; what is made already cannot be taken."""
    for field, kind, argument in MADE_BY_TASK:
        made = getattr(task, field)
        if isinstance(made, kind):
            name, given = type(made).__name__, f"{argument}, ..." if argument else "..."
            raise TaskError(
                f"Task.{field} is a {name} that is made already, and every process makes its own; "
                f"write {field}={f'lambda {argument}'.rstrip()}: {name}({given})"
            )
    if not callable(task.model):
        raise TaskError(
            f"Task.model is a {type(task.model).__name__}; give a function that makes the model: model=lambda: Net()"
        )


def _check_schedule(task: Task, num_steps: int | None) -> None:
    if num_steps is None and task.scheduler is not None and takes_steps(task.scheduler):
        raise PlanError(
            "the scheduler asks for the number of steps, and a stream does not know how many it has; give --steps"
        )


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
    # Making and stepping an optimizer would import torch's compiler: more than a second of every start.
    put_off_compiler()
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
    checkpoint.tensor_table(path / checkpoint.OPTIMIZER)
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
