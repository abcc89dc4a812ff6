"""Several models in one task, each with its loss and optimizer, stepped in turn: a GAN, an actor and its critic.

    Task(
        model=lambda: {"d": Discriminator(), "g": Generator()},
        loss={"d": d_loss, "g": g_loss},                           # d_loss(models, batch), with models.d and models.g
        optimizer={"d": lambda parameters: Adam(parameters), "g": ...},
    )

`in_turn` makes of it a task of one model, `NamedModels`, whose loss is the sum; what builds, checks and evaluates tasks
needs to know no more. Only a step does: each model has a wrapper, and is frozen while another is trained.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from evenstep.data.loader import Batch
from evenstep.errors import TaskError
from evenstep.strategies.base import SMALL_ENOUGH, DistributedModel, Sample, copied
from evenstep.task import Amount, Task, has_several
from evenstep.training.checkpointed_run import Run
from evenstep.training.fused_optimizer import is_fused
from evenstep.training.host_copy import HostCopy
from evenstep.training.loss_weighting import MeanLoss
from evenstep.training.lr_scheduler import Schedulers
from evenstep.training.optimizer_step import WeightUpdate
from evenstep.training.step import Taken, agreed_when_read, reads_late

if TYPE_CHECKING:
    from evenstep.training.deferred_loss import Ahead, FiniteGuard

T = TypeVar("T")
Loss = Callable[[Any, Any], Amount]
MakeOptimizer = Callable[..., torch.optim.Optimizer]
OWN_LOOP = "for anything else, write a loop: docs/task.md, 'Your own loop'"


class NamedModels(nn.Module):
    """What a loss of several models gets: `models.g` or `models["g"]`."""

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for key, model in models.items():
            self.add_module(key, model)

    def __getitem__(self, key: str) -> nn.Module:
        return dict(self.items())[key]

    def items(self) -> Iterator[tuple[str, nn.Module]]:
        """Names and models, in their order."""
        return self.named_children()


class LossesInTurn:
    """The losses of several models; called, their sum."""

    def __init__(self, parts: Mapping[str, Loss]) -> None:
        self.parts = dict(parts)

    def __call__(self, models: Any, batch: Any) -> Amount:
        return self.evaluated(models, batch)["loss"]

    def evaluated(self, models: Any, batch: Any) -> dict[str, Amount]:
        """What an evaluation shows: the sum, and each by its name."""
        amounts = {key: loss(models, batch) for key, loss in self.parts.items()}
        return {"loss": sum(map(_mean, amounts.values())), **{f"loss/{key}": one for key, one in amounts.items()}}


def _mean(amount: Any) -> Any:
    return amount[0] / amount[1] if isinstance(amount, tuple | list) else amount


def in_turn(task: Task) -> Task:
    """A task of several models as one of a single model; any other task as it is."""
    if not has_several(task) or isinstance(task.loss, LossesInTurn):
        return task
    losses, optimizers = task.loss, task.optimizer
    if not isinstance(losses, Mapping) or not isinstance(optimizers, Mapping) or list(losses) != list(optimizers):
        raise TaskError(
            f"Task.loss has {_keys(losses)} and Task.optimizer {_keys(optimizers)}; give both as dicts with the same "
            f"keys, in the order in which they are stepped; {OWN_LOOP}"
        )
    _check_schedulers(task.scheduler, optimizers)
    return replace(task, model=partial(_make_models, task.model, tuple(losses)), loss=LossesInTurn(losses))


def _check_schedulers(given: Any, optimizers: Mapping[str, Any]) -> None:
    if given is None or (isinstance(given, Mapping) and set(given) <= set(optimizers)):
        return
    what = f"has {_keys(given)}" if isinstance(given, Mapping) else "is one for all"
    raise TaskError(
        f"Task.scheduler {what}, and the optimizers are {_keys(optimizers)}; give a dict with keys of these: "
        f"scheduler={{{next(iter(optimizers))!r}: lambda optimizer: ...}}"
    )


def _make_models(make: Callable[[], Any], trained: tuple[str, ...]) -> NamedModels:
    made = make()
    if not isinstance(made, Mapping) or not all(isinstance(one, nn.Module) for one in made.values()):
        raise TaskError(
            f"Task.loss has {_keys(trained)}, so Task.model() must return a dict of modules with these keys"
        )
    missing = [key for key in trained if key not in made]
    if missing:
        raise TaskError(f"Task.loss has {missing[0]!r}, and Task.model() made only {_keys(made)}")
    odd = next((key for key in made if not key.isidentifier() or hasattr(NamedModels, key)), None)
    if odd is not None:
        raise TaskError(f"a model cannot be called {odd!r}; use a name that can follow a dot, such as models.g")
    for key, model in made.items():
        if not model.training:
            # As pretrained models often come.
            model.train()
        if key not in trained:
            model.requires_grad_(False)
    return NamedModels(made)


def _keys(given: Any) -> str:
    return ", ".join(map(str, given)) if isinstance(given, Mapping | tuple) else f"a {type(given).__name__}"


def parts_of(model: nn.Module) -> dict[str, nn.Module]:
    """The models that are wrapped, one by one; a single one has no name."""
    return dict(model.items()) if isinstance(model, NamedModels) else {"": model}


def optimizers_of(task: Task) -> dict[str, MakeOptimizer]:
    """The functions that make the optimizers, by the name of the model."""
    return dict(task.optimizer) if isinstance(task.optimizer, Mapping) else {"": task.optimizer}


def samples_of(model: nn.Module, compute: Callable[[nn.Module], object]) -> dict[str, Sample | None]:
    """For each model, what computes the loss with a copy of it in its place; made before any of them is wrapped."""
    parts = parts_of(model)
    if "" in parts:
        return {"": compute}
    if sum(weight.numel() for weight in model.parameters()) > SMALL_ENOUGH:
        return dict.fromkeys(parts)
    copies = {key: copied(part) for key, part in parts.items()}

    def sample(key: str, one: nn.Module) -> object:
        device = next(one.parameters()).device
        return compute(NamedModels({**{name: copy.to(device) for name, copy in copies.items()}, key: one}))

    return {key: partial(sample, key) for key in parts}


class JointLoss(nn.Module):
    """Runs a function of all models as the forward of each, one inside the other."""

    def __init__(self, bound: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self._views: dict[tuple[int, ...], NamedModels] = {}
        self._bound = list(bound.items())
        for key, module in bound.items():
            self.add_module(key, module)

    def forward(self, work: Callable[..., T], *arguments: Any) -> T:
        keys = [key for key, _ in self._bound]

        def inner(*bare: nn.Module) -> T:
            return work(view(self._views, keys, bare), *arguments)

        for _, module in reversed(self._bound):
            inner = _inside(module, inner)
        return inner()


def _inside(bound: nn.Module, inner: Callable[..., T]) -> Callable[..., T]:
    return lambda *bare: bound(lambda model: inner(*bare, model))


def view(views: dict[tuple[int, ...], NamedModels], keys: Sequence[str], bare: Sequence[nn.Module]) -> NamedModels:
    """These models by their names; made once for each replica."""
    ids = tuple(map(id, bare))
    if ids not in views:
        views[ids] = NamedModels(dict(zip(keys, bare, strict=True)))
    return views[ids]


class JointModel(DistributedModel):
    """Several wrapped models as one, for everything but a step."""

    def __init__(self, models: Mapping[str, DistributedModel]) -> None:
        self._models = list(models.values())
        replicas: list[nn.Module] = [
            JointLoss({key: model.loss_modules[replica] for key, model in models.items()})
            for replica in range(len(self._models[0].loss_modules))
        ]
        super().__init__(NamedModels({key: model.module for key, model in models.items()}), replicas)

    def run(self, work: Callable[..., T], arguments: Sequence[tuple[Any, ...]]) -> list[T]:
        return self._models[0].run(work, arguments)

    def sync_replicas(self, is_training: bool) -> None:
        for model in self._models:
            model.sync_replicas(is_training)

    def time_communication(self) -> None:
        for model in self._models:
            model.time_communication()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        with ExitStack() as stack:
            for model in self._models:
                stack.enter_context(model.evaluating())
            yield


class InTurn:
    """Eager steps of several models: of each backward and update, one after the other, on the same batch."""

    def __init__(self, run: Run, losses: LossesInTurn, clip: float | None) -> None:
        self.messages: list[str] = []
        self._run, self._team = run, run.team
        self._losses, self._clip = losses.parts, clip
        self._views: dict[tuple[int, ...], NamedModels] = {}
        is_cuda = run.team.world.device.type == "cuda"
        # As of `Eager`: norms are known when the next step has begun.
        self.lag = int(clip is not None and is_cuda)
        if is_cuda:
            self.messages.append("fast: steps stay eager: the task has several optimizers")

        self._late: tuple[FiniteGuard, Ahead] | None = None
        if reads_late(run.team, [weight for model in run.models.values() for weight in model.weights]):
            from evenstep.training.deferred_loss import LAG, Ahead, FiniteGuard

            self._late = FiniteGuard(run.team.world.device), Ahead(run.team.world.device)
            # As of `LateSteps`.
            self.lag = LAG if all(is_fused(run.optimizers[key]) for key in self._losses) else self.lag

    def recheck(self) -> None:
        pass

    def take(self, batch: Batch) -> Taken:
        if self._late is None:
            return self._take_early(batch)
        from evenstep.training.deferred_loss import can_be_stopped

        guard, ahead = self._late
        if all(can_be_stopped(self._run.optimizers[key]) for key in self._losses):
            return self._take_late(batch, guard, ahead)
        ahead.settle()
        return agreed_when_read(self._team.requests, partial(self._take_early, batch))

    def _take_early(self, batch: Batch) -> Taken:
        losses: dict[str, MeanLoss] = {}
        updates: dict[str, WeightUpdate] = {}
        rates = self._rates()
        for key, (loss, models) in self._turns():
            losses[key] = self._team.backward(loss, models, batch)
            updates[key] = self._team.update(self._run.optimizers[key], self._clip)
        self._finish(updates)
        return DoneInTurn(_total(losses, rates), updates)

    def _take_late(self, batch: Batch, guard: FiniteGuard, ahead: Ahead) -> Taken:
        from evenstep.training.deferred_loss import LateStep, judge

        launched = []
        updates: dict[str, WeightUpdate] = {}
        rates = self._rates()
        for key, (loss, models) in self._turns():
            launched.append(self._team.launch(loss, models, batch))
            judge(launched[-1], guard, ahead, key)
            with guard.stopping(self._run.optimizers[key]):
                updates[key] = self._team.update(self._run.optimizers[key], self._clip)
        self._finish(updates)
        found = [update.grad_norm for update in updates.values() if update.grad_norm is not None]
        norms = ahead.copy("norms", torch.stack(found)) if found else None
        step = LateStep(self._team, launched, norms, partial(self._combined, rates))
        ahead.add(step)
        return step

    def _combined(self, rates: Mapping[str, float], losses: list[MeanLoss], norms: list[float]) -> MeanLoss:
        total = _total(dict(zip(self._losses, losses, strict=True)), rates)
        return _with_norms(total, dict(zip(self._losses, norms, strict=False)))

    def _turns(self) -> Iterator[tuple[str, tuple[Loss, tuple[DistributedModel, ...]]]]:
        """For each loss, by its name: the function, and the models with the one that it trains first."""
        for key, loss in self._losses.items():
            keys = [key, *(other for other in self._run.models if other != key)]
            yield key, (partial(self._call, loss, keys), tuple(self._run.models[one] for one in keys))

    def _rates(self) -> dict[str, float]:
        """Of optimizers that have a scheduler."""
        parts = self._run.scheduler.parts if isinstance(self._run.scheduler, Schedulers) else ()
        return {f"lr/{key}": float(self._run.optimizers[key].param_groups[0]["lr"]) for key in parts}

    def _finish(self, updates: Mapping[str, WeightUpdate]) -> None:
        run = self._run
        self._team.finish_batch()
        if isinstance(run.scheduler, Schedulers) and run.stepped_after == "step":
            for key, scheduler in run.scheduler.parts.items():
                if updates[key]:
                    scheduler.step()
        if run.average is not None and all(updates.values()):
            run.average.update()

    def _call(self, loss: Loss, keys: Sequence[str], bare: Sequence[nn.Module], data: Any) -> Amount:
        return loss(view(self._views, keys, bare), data)


class DoneInTurn:
    """A step of several models; with `--clip`, the norm of each one's gradients, and of all of them."""

    def __init__(self, loss: MeanLoss, updates: Mapping[str, WeightUpdate]) -> None:
        self._loss = loss
        self._norms = {
            key: HostCopy(update.grad_norm) for key, update in updates.items() if update.grad_norm is not None
        }

    def read(self) -> MeanLoss:
        norms, self._norms = {key: float(copy.read()) for key, copy in self._norms.items()}, {}
        return _with_norms(self._loss, norms)


def _with_norms(loss: MeanLoss, norms: Mapping[str, float]) -> MeanLoss:
    if norms:
        loss.logged |= {f"grad_norm/{key}": norm for key, norm in norms.items()}
        loss.grad_norm = math.hypot(*norms.values())
    return loss


def _total(losses: Mapping[str, MeanLoss], rates: Mapping[str, float]) -> MeanLoss:
    logged = {name: value for loss in losses.values() for name, value in loss.logged.items()} | dict(rates)
    logged |= {f"loss/{key}": float(loss) for key, loss in losses.items()}
    *_, last = losses.values()
    seconds = sum(loss.compute_seconds for loss in losses.values())
    return MeanLoss(math.fsum(losses.values()), last.count, seconds, logged)
