"""What a checkpoint holds: model, optimizer, scheduler, the loader's position, the step, random generators."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

import evenstep
from evenstep.checkpoint import files
from evenstep.checkpoint.files import State
from evenstep.checkpoint.state import (
    check_same_order,
    load_optimizer_state,
    load_weights,
    made_with,
    optimizer_state,
    read_weights,
    unused_options,
    weights,
)
from evenstep.data.loader import Loader
from evenstep.errors import CheckpointError, SaveFailed, TaskError
from evenstep.monitor.nonfinite import is_finite
from evenstep.sampling.order import order_name
from evenstep.sampling.rng import derive_seed, host_state, restore_host_state, seed_everything
from evenstep.strategies.base import DistributedModel
from evenstep.training.team import Team

T = TypeVar("T")
_PAIRS = "(pairs)"


class Run:
    """A training as it stands; `save` under any strategy and size, `load` into any other.

    run = evenstep.Run(team, model, optimizer, loader, scheduler)    # the last, if there is one
    run.save("checkpoints"); run.load("checkpoints")

    Several models and optimizers are given as dicts: Run(team, {"g": g, "d": d}, {"g": g_optimizer, ...}, loader).
    """

    def __init__(
        self,
        team: Team,
        model: DistributedModel | Mapping[str, DistributedModel],
        optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer],
        loader: Loader,
        scheduler: LRScheduler | None = None,
        num_steps: int | None = None,
    ) -> None:
        self.team = team
        self.models = _named(model)
        self.optimizers = _named(optimizer)
        self.loader = loader
        self.scheduler = scheduler
        self.num_steps = num_steps
        """What the schedule was made for, where it depends on that."""
        self.before_save: Callable[[], None] = lambda: None
        """What else must be on the disk before a checkpoint is, such as a record of its steps; rank 0 calls it."""
        self.loaded: Mapping[str, Any] = {}
        """The state of the checkpoint that was loaded."""
        self._made_with = {key: made_with(one) for key, one in self.optimizers.items()}
        if set(self.optimizers) - set(self.models):
            raise TaskError(f"optimizers {list(self.optimizers)} and models {list(self.models)} need the same names")
        if scheduler is not None:
            _check_scheduler(scheduler)
        elif len(self.optimizers) == 1 and "initial_lr" in next(iter(self.optimizers.values())).param_groups[0]:
            warnings.warn(
                "the optimizer has a scheduler that this Run does not save, so that a resumed training would begin its "
                "schedule again; write Run(team, model, optimizer, loader, scheduler)",
                stacklevel=2,
            )

    @property
    def step(self) -> int:
        """Global batches that were finished."""
        return self.loader.num_finished

    def save(self, folder: str | Path, *, keep: int = 2, is_best: bool = False, **extra: Any) -> Path:
        """Write a checkpoint below `folder`; every process calls this, rank 0 writes, all of them know how it went."""
        main = self.team.world.is_main
        tensors: dict[str, torch.Tensor] = {}
        moments: dict[str, torch.Tensor] = {}
        optimizers: dict[str, Any] = {}
        for key, model in self.models.items():
            tensors |= _prefixed(key, weights(model.module, keep=main))
            if key in self.optimizers:
                of_optimizer, optimizers[key] = optimizer_state(model.module, self.optimizers[key], keep=main)
                optimizers[key]["made_with"] = self._made_with[key]
                moments |= _prefixed(key, of_optimizer)
        state = {**self._state(), "optimizers": optimizers, **extra}
        # Agreed on before anything is written: of a sharded weight, another rank may hold the part that is spoilt.
        self._stop_if(self._first_not_finite(), folder)
        problem = None
        path = Path(folder) / f"step-{self.step:08d}"
        if main:
            try:
                writers = {
                    files.WEIGHTS: lambda file: save_file(tensors, file),
                    files.OPTIMIZER: lambda file: save_file(moments, file),
                    files.STATE: lambda file: file.write_text(json.dumps(state)),
                }
                self.before_save()
                files.write(Path(folder), self.step, writers)
                if is_best:
                    files.point(Path(folder), "best", path.name)
                files.prune(Path(folder), keep)
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
        self._stop_if(problem, folder)
        return path

    def _stop_if(self, problem: str | None, folder: str | Path) -> None:
        """Raise on all ranks if any of them has a problem."""
        problems = self.team.world.agree(problem)
        if problems:
            raise SaveFailed(
                f"the checkpoint of step {self.step} could not be written ({problems[0]}).\n"
                f"Earlier checkpoints in {folder} were not touched: fix the cause, then resume from there."
            )

    def load(self, where: str | Path, *, allow_pickle: bool = False) -> list[str]:
        """Resume from a checkpoint (or a folder of them), or start from a file of weights; returns lines to log."""
        if Path(where).is_file():
            return self._load_foreign(str(where), allow_pickle)
        path, notes = files.find(str(where))
        state = files.read_state(path)
        check_same_order(path, state, self.team.seed, self.loader.num_samples, order_name(self.loader.order))
        tensors = load_file(path / files.WEIGHTS)
        moments = load_file(path / files.OPTIMIZER)
        rates = self._other_schedule(state, notes)
        missing = sorted(set(self.optimizers) - set(state["optimizers"]))
        if missing:
            raise CheckpointError(f"{path} has no state of the optimizer {missing[0]!r}; start from its weights alone")
        for key, model in self.models.items():
            load_weights(model.module, _unprefixed(key, tensors), str(path))
            if key in self.optimizers:
                saved, optimizer = state["optimizers"][key], self.optimizers[key]
                unused = unused_options(optimizer, saved, resets_lr=rates is not None)
                self._made_with[key] = saved.get("made_with", self._made_with[key])
                load_optimizer_state(model.module, optimizer, _unprefixed(key, moments), saved)
                notes += [f"{one}; for that, start from its weights: --resume {path / files.WEIGHTS}" for one in unused]
        self._restore(state)
        self.loaded = state
        if rates is None and self.scheduler is not None and state["scheduler"] is not None:
            self.scheduler.load_state_dict(unpacked(state["scheduler"]))
        for group, rate in zip(self._first_groups(), rates or [], strict=False):
            group["lr"] = rate
        return notes

    def _other_schedule(self, state: State, notes: list[str]) -> list[float] | None:
        """The learning rates of a schedule made for another length, advanced to this step; None if it is the same."""
        if self.scheduler is None or None in (state["num_steps"], self.num_steps):
            return None
        if state["num_steps"] == self.num_steps:
            return None
        notes.append(f"the schedule was made for {state['num_steps']} steps and is now made for {self.num_steps}")
        with warnings.catch_warnings():
            # "step() before optimizer.step()": so it is, the steps were taken by the run before.
            warnings.simplefilter("ignore", UserWarning)
            for _ in range(state["step"]):
                self.scheduler.step()
        return [group["lr"] for group in self._first_groups()]

    def _first_groups(self) -> list[dict[str, Any]]:
        return next(iter(self.optimizers.values())).param_groups

    def _first_not_finite(self) -> str | None:
        """The first parameter that holds NaN or infinity, on this rank; buffers may (a mask of -inf is fine)."""
        for key, model in self.models.items():
            for name, weight in model.module.named_parameters():
                if not is_finite(weight):
                    where = f"{key}.{name}" if key else name
                    return f"{where} holds NaN or infinity; a gradient was not finite though the loss was"
        return None

    def _load_foreign(self, path: str, allow_pickle: bool) -> list[str]:
        if len(self.models) > 1:
            raise CheckpointError(f"{path} is one model's weights, and this run has {len(self.models)} models")
        loaded = read_weights(path, allow_pickle)
        (model,) = self.models.values()
        stripped = load_weights(model.module, loaded, path)
        return [f"{path}: {stripped or 'weights loaded'}; optimizer and data start from the beginning"]

    def _state(self) -> dict[str, Any]:
        scaler = self.team.precision.scaler
        return {
            "format": files.FORMAT,
            "evenstep": evenstep.__version__,
            "torch": torch.__version__,
            "step": self.step,
            "loader": self.loader.state_dict(),
            "seed": self.team.seed,
            "num_steps": self.num_steps,
            "scheduler": packed(self.scheduler.state_dict()) if self.scheduler else None,
            "scaler": scaler.state_dict() if scaler else None,
            "generators": self.team.world.gather(host_state()),
        }

    def _restore(self, state: State) -> None:
        self.loader.load_state_dict(state["loader"])
        if self.team.precision.scaler is not None and state["scaler"]:
            self.team.precision.scaler.load_state_dict(state["scaler"])
        world = self.team.world
        if len(state["generators"]) == world.size:
            restore_host_state(state["generators"][world.rank])
        else:
            seed_everything(derive_seed(self.team.seed, "host", self.step, world.rank))


def _named(one_or_more: T | Mapping[str, T]) -> dict[str, T]:
    return dict(one_or_more) if isinstance(one_or_more, Mapping) else {"": one_or_more}


def _prefixed(key: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"{key}.{name}": value for name, value in tensors.items()} if key else tensors


def _unprefixed(key: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    if not key:
        return tensors
    return {name.removeprefix(f"{key}."): value for name, value in tensors.items() if name.startswith(f"{key}.")}


def packed(value: Any) -> Any:
    """A state as JSON can hold it: JSON's keys are strings, and MultiStepLR's milestones are not."""
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {key: packed(one) for key, one in value.items()}
        return {_PAIRS: [[key, packed(one)] for key, one in value.items()]}
    return [packed(one) for one in value] if isinstance(value, list | tuple) else value


def unpacked(value: Any) -> Any:
    """What `packed` was given; tables of counts come back as Counters, which schedulers need."""
    if isinstance(value, dict):
        if _PAIRS in value:
            return Counter({key: unpacked(one) for key, one in value[_PAIRS]})
        return {key: unpacked(one) for key, one in value.items()}
    return [unpacked(one) for one in value] if isinstance(value, list) else value


def _check_scheduler(scheduler: LRScheduler) -> None:
    if isinstance(scheduler, ReduceLROnPlateau):
        raise TaskError("ReduceLROnPlateau needs a metric at every step; use a scheduler that counts optimizer steps")
    try:
        json.dumps(packed(scheduler.state_dict()))
    except TypeError as error:
        raise TaskError(f"the state of {type(scheduler).__name__} cannot be saved as JSON ({error})") from error
