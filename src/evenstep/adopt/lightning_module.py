"""`adopt.lightning`: a LightningModule and its data, as a Task."""

from __future__ import annotations

import dis
import importlib
import inspect
import logging
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, IterableDataset

from evenstep.adopt.adopted import AdoptedTask, FirstSteps, ModelCopies, alone, rounding_as_is
from evenstep.data.adapt import adapt_train
from evenstep.errors import TaskError
from evenstep.sampling.order import Order, Span
from evenstep.strategies.base import copied
from evenstep.task import Amount, ScheduleEvery, Task
from evenstep.training.loss_context import log

HOOKS = (
    "backward",
    "configure_callbacks",
    "configure_gradient_clipping",
    "configure_model",
    "lr_scheduler_step",
    "on_after_backward",
    "on_after_batch_transfer",
    "on_before_backward",
    "on_before_batch_transfer",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "on_fit_start",
    "on_train_batch_end",
    "on_train_batch_start",
    "on_train_epoch_end",
    "on_train_epoch_start",
    "on_train_start",
    "on_validation_epoch_end",
    "optimizer_step",
    "optimizer_zero_grad",
    "transfer_batch_to_device",
)
"""Methods that a Lightning Trainer calls and evenstep does not."""
OF_TRAINER = {
    "trainer": "there is no Trainer",
    "current_epoch": "use evenstep.progress().epoch",
    "global_step": "use evenstep.progress().step",
    "all_gather": "use evenstep.gather",
}
"""What a module knows from its Trainer alone, and what to write instead."""
_thread = threading.local()
"""`found` is what a validation step has logged, in the thread that computes it."""


def adopt_lightning(module: Any, data: Any) -> AdoptedTask:
    """The task of a LightningModule, and of a LightningDataModule or a DataLoader."""
    base = _base(module)
    refuse(module, base)
    with alone():
        return LightningAdoption(module, base, data).task()


def _base(module: Any) -> type[Any]:
    for kind in type(module).__mro__:
        if kind.__name__ == "LightningModule":
            return kind
    raise TaskError(f"adopt.lightning takes a LightningModule, and got a {type(module).__name__}")


def refuse(module: Any, base: type[Any]) -> None:
    """Raise TaskError, by name, for what a LightningModule does that a Task does not."""
    name = type(module).__name__
    if not module.automatic_optimization:
        raise _refusal(f"{name} optimizes manually (automatic_optimization=False); write a custom loop")
    for hook in HOOKS:
        if getattr(type(module), hook, None) is not getattr(base, hook, None):
            raise _refusal(f"{name}.{hook} is called by Lightning's Trainer alone; write Task.after, or a custom loop")
    for function in _own_functions(module, base):
        for known in sorted(OF_TRAINER.keys() & set(function.__code__.co_names)):
            raise _refusal(f"{name}.{function.__name__} uses self.{known}: {OF_TRAINER[known]}")
    for path, layer in module.named_modules():
        if any(kind.__module__.startswith("torchmetrics.") for kind in type(layer).__mro__):
            raise _refusal(f"the metric {path} has a state on each device; take it out, and use Task.scores")
    for step in ("training_step", "validation_step"):
        if _uses_index(getattr(type(module), step)):
            raise _refusal(f"{name}.{step} uses the index of its batch; use evenstep.progress().step")


def _uses_index(step: Callable[..., Any]) -> bool:
    """Whether a step reads its second argument."""
    index = [*inspect.signature(step).parameters][2:3]
    loaded = [one.argval for one in dis.get_instructions(step) if one.opname.startswith("LOAD_FAST")]
    return any(name == found or (isinstance(found, tuple) and name in found) for name in index for found in loaded)


def _own_functions(module: Any, base: type[Any]) -> Iterator[FunctionType]:
    """The methods of a module's own classes."""
    for kind in type(module).__mro__[: type(module).__mro__.index(base)]:
        yield from (value for value in vars(kind).values() if isinstance(value, FunctionType))


def _refusal(what: str) -> TaskError:
    return TaskError(f"this module cannot be adopted: {what}")


@dataclass(frozen=True)
class Configured:
    """What configure_optimizers returned."""

    optimizer: torch.optim.Optimizer
    scheduler: LRScheduler | None = None
    every: ScheduleEvery = "epoch"


def configured(found: Any) -> Configured:
    """One optimizer and its schedule, from any of the forms that Lightning takes."""
    optimizers: list[Any] = []
    schedules: list[Any] = []
    match found:
        case (list() as optimizers, list() as schedules):
            pass
        case list() | tuple():
            optimizers = list(found)
        case _:
            optimizers = [found]
    if len(optimizers) == 1 and isinstance(optimizers[0], Mapping):
        schedules = [one for one in [optimizers[0].get("lr_scheduler")] if one is not None]
        optimizers = [optimizers[0]["optimizer"]]
    if len(optimizers) != 1 or not isinstance(optimizers[0], torch.optim.Optimizer):
        what = f"{len(optimizers)} optimizers" if len(optimizers) != 1 else f"a {type(optimizers[0]).__name__}"
        raise _refusal(f"configure_optimizers returned {what}; write a Task of several models, or a custom loop")
    return _with_schedule(optimizers[0], schedules)


def _with_schedule(optimizer: torch.optim.Optimizer, schedules: Any) -> Configured:
    if not schedules:
        return Configured(optimizer)
    how = schedules[0] if isinstance(schedules[0], Mapping) else {"scheduler": schedules[0]}
    if how.get("frequency", 1) != 1 or how.get("interval", "epoch") not in ("epoch", "step"):
        raise _refusal("its lr_scheduler has a frequency, or an interval that is neither an epoch nor a step")
    return Configured(optimizer, how["scheduler"], "step" if how.get("interval") == "step" else "epoch")


class EvenstepOrder:
    """The samples of each epoch in the order in which evenstep takes them, for the original's loader."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __len__(self) -> int:
        return self._order.lengths.of(self._epoch) or 0

    def __iter__(self) -> Iterator[int]:
        return iter(self._order.ids(Span(self._epoch, 0, len(self))).tolist())


class LightningAdoption:
    """A LightningModule, taken apart."""

    name = "a Lightning Trainer"

    def __init__(self, module: Any, base: type[Any], data: Any) -> None:
        self._module = module
        package = base.__module__.partition(".")[0]
        self._package = "lightning.pytorch" if package == "lightning" else package
        self._train, self._valid = _loaders(module, base, data)
        self._has_valid_step = type(module).validation_step is not base.validation_step
        self._schedules: WeakKeyDictionary[torch.optim.Optimizer, LRScheduler] = WeakKeyDictionary()
        self._first = configured(copied(module).configure_optimizers())

    def task(self) -> AdoptedTask:
        has_schedule = self._first.scheduler is not None
        return AdoptedTask(
            model=ModelCopies(self._module, _log_here),
            train=self._train,
            valid=self._valid,
            loss=training_loss,
            metrics=validation_values if self._valid is not None and self._has_valid_step else None,
            optimizer=self.optimizer,
            scheduler=self.scheduler if has_schedule else None,
            schedule_every=self._first.every if has_schedule else "step",
            original=self,
        )

    def optimizer(self, model: Any) -> torch.optim.Optimizer:
        """What configure_optimizers of this copy returns."""
        found = configured(model.configure_optimizers())
        if found.scheduler is not None:
            self._schedules[found.optimizer] = found.scheduler
        return rounding_as_is(found.optimizer, list(model.parameters()))

    def scheduler(self, optimizer: torch.optim.Optimizer) -> LRScheduler:
        """The one that was made with the optimizer."""
        return self._schedules[optimizer]

    def first_steps(self, num: int, task: Task, seed: Callable[[int], None]) -> FirstSteps:
        """A Lightning Trainer, for a few steps, on the samples in evenstep's order."""
        lightning = importlib.import_module(self._package)
        logging.getLogger(lightning.__name__).setLevel(logging.ERROR)
        module, losses = copied(self._module), list[float]()
        step = module.training_step

        def training_step(batch: Any, batch_idx: int) -> Any:
            seed(len(losses))
            found = step(*_arguments(step, batch, batch_idx))
            losses.append(_loss_of(found).item())
            return found

        module.training_step = training_step
        quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
        more = {"limit_val_batches": 0, "num_sanity_val_steps": 0, "devices": 1, "max_epochs": -1}
        with alone(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = lightning.Trainer(max_steps=num, **quiet, **more)
            trainer.fit(module, self._in_order(task))
        return FirstSteps(losses, {name: value.detach().cpu() for name, value in module.state_dict().items()})

    def _in_order(self, task: Task) -> Any:
        loader = self._train
        if isinstance(loader.dataset, IterableDataset):
            return loader
        order = adapt_train(task).order(0, loader.batch_size)
        assert order is not None
        sampler = cast(Any, EvenstepOrder(order))
        return DataLoader(loader.dataset, loader.batch_size, sampler=sampler, collate_fn=loader.collate_fn)


def _loaders(module: Any, base: type[Any], data: Any) -> tuple[Any, Any]:
    """The DataLoaders for training and validation; the latter may be None."""
    if isinstance(data, DataLoader):
        return data, None
    source = module if data is None else data
    if data is not None:
        data.prepare_data()
        data.setup("fit")
    of_lightning = [one for one in type(source).__mro__ if one.__name__ in (base.__name__, "LightningDataModule")]
    has_valid = all(type(source).val_dataloader is not getattr(one, "val_dataloader", None) for one in of_lightning)
    train, valid = source.train_dataloader(), source.val_dataloader() if has_valid else None
    for loader in (train, valid):
        if loader is not None and not isinstance(loader, DataLoader):
            raise _refusal(
                f"its data is a {type(loader).__name__}; give one DataLoader for training, and one to validate on"
            )
    return train, valid


def _log_here(model: nn.Module) -> None:
    """Let a copy of the module log into the Record; there is no Trainer to do so."""
    for name, function in (("log", _log), ("log_dict", _log_dict)):
        object.__setattr__(model, name, function)


def _log(name: str, value: Any, *_: Any, **__: Any) -> None:
    _log_dict({name: value})


def _log_dict(values: Mapping[str, Any], *_: Any, **__: Any) -> None:
    found: dict[str, Amount] | None = getattr(_thread, "found", None)
    if found is None:
        log(values)
    else:
        found.update(values)


@contextmanager
def _collecting() -> Iterator[dict[str, Any]]:
    _thread.found = {}
    try:
        yield _thread.found
    finally:
        _thread.found = None


def training_loss(model: Any, batch: Any) -> torch.Tensor:
    """training_step; its batch_idx is 0."""
    return _loss_of(model.training_step(*_arguments(model.training_step, batch, 0)))


def validation_values(model: Any, batch: Any) -> dict[str, Amount]:
    """What validation_step logs; the loss is what it returns, or what it logs as val_loss."""
    with _collecting() as found:
        returned = model.validation_step(*_arguments(model.validation_step, batch, 0))
    loss = returned.get("loss") if isinstance(returned, Mapping) else returned
    loss = found.get("val_loss") if loss is None else loss
    return dict(found) if loss is None else {"loss": loss, **found}


def _arguments(step: Callable[..., Any], batch: Any, index: int) -> tuple[Any, ...]:
    """The batch, and its index if the step takes one."""
    return (batch, index) if len(inspect.signature(step).parameters) > 1 else (batch,)


def _loss_of(found: Any) -> torch.Tensor:
    loss = found.get("loss") if isinstance(found, Mapping) else found
    if not isinstance(loss, torch.Tensor):
        raise TaskError(f"training_step returned {type(found).__name__}; return the loss, or a dict with it as 'loss'")
    return loss
