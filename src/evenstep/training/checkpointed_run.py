"""What a checkpoint holds: model, optimizer, scheduler, the loader's position, the step, random generators."""

from __future__ import annotations

import json
import sys
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from safetensors.torch import load_file
from torch.optim.lr_scheduler import LRScheduler

import evenstep
from evenstep.checkpoint import atomic_write, files, integrity
from evenstep.checkpoint.custom_loop_values import with_tensors, without_tensors
from evenstep.checkpoint.files import State
from evenstep.checkpoint.saving_by_ranks import (
    AfterSaving,
    Finishing,
    LocalFolder,
    SharedFolder,
    Unsettled,
)
from evenstep.checkpoint.sharded_safetensors import TensorFile, Writable, stored_tensors
from evenstep.checkpoint.state_dict import (
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
from evenstep.sampling.order import Lengths, order_name
from evenstep.sampling.rng import (
    derive_seed,
    device_state,
    host_state,
    restore_device_state,
    restore_host_state,
    seed_everything,
)
from evenstep.strategies.base import NOTHING, DistributedModel
from evenstep.task import Amount
from evenstep.training.evaluation import Means
from evenstep.training.lr_scheduler import Schedulers, SteppedAfter
from evenstep.training.team import Team

if TYPE_CHECKING:
    from evenstep.record import Summary
    from evenstep.training.custom_loop_record import LoopRecord
    from evenstep.training.ema import WeightAverage

T = TypeVar("T")
V = TypeVar("V")
_PAIRS = "(pairs)"


class Loaded(dict[str, Any]):
    """What the loop had added to the checkpoint with `run.save(..., name=value)`, and lines to log about it."""

    def __init__(self, added: Mapping[str, Any], notes: list[str]) -> None:
        super().__init__(added)
        self.notes = notes


class Run:
    """A training as it stands; `save` under any strategy and size, `load` into any other.

    run = evenstep.Run(team, model, optimizer, loader, scheduler)    # the last, if there is one
    run.save("checkpoints"); run.load("checkpoints")

    Several models, optimizers and schedulers are given as dicts: Run(team, {"g": g, "d": d}, {"g": g_optimizer, ...}).

    With a folder, a custom loop leaves there what `evenstep train` does, checkpoints and a Record:

    run = evenstep.Run(team, model, optimizer, loader, folder="runs/mine", log="tensorboard", best="accuracy")
    run.load()                                           # where an earlier start of it was saved, if there is one
    for batch in loader: ...; run.log(loss)              # one row for each step
    run.evaluate(metrics, model, valid); run.save(); run.finish()
    """

    def __init__(
        self,
        team: Team,
        model: DistributedModel | Mapping[str, DistributedModel],
        optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer],
        loader: Loader | None = None,
        scheduler: LRScheduler | Schedulers | Mapping[str, LRScheduler] | None = None,
        num_steps: int | None = None,
        *,
        folder: str | Path | None = None,
        log: str | None = None,
        best: str | None = None,
    ) -> None:
        self.team = team
        self.models = _named(model)
        self.optimizers = _named(optimizer)
        self.loader = loader if loader is not None else team.own_batches
        self.scheduler = Schedulers(scheduler) if isinstance(scheduler, Mapping) else scheduler
        self.num_steps = num_steps
        """What the schedule was made for, where it depends on that."""
        self.stepped_after: SteppedAfter = "step"
        """What the scheduler counts."""
        self.before_save: Callable[[], None] = lambda: None
        """What else must be on the disk before a checkpoint is, such as a record of its steps; rank 0 calls it."""
        self.average: WeightAverage | None = None
        """Of the weights, where a task has one."""
        self.loaded: Mapping[str, Any] = {}
        """The state of the checkpoint that was loaded."""
        self._made_with = {key: made_with(one) for key, one in self.optimizers.items()}
        self._built = {key: _trained(model) for key, model in self.models.items()}
        """Which parameters required gradients at the start; layers may be unfrozen between steps."""
        if set(self.optimizers) - set(self.models):
            raise TaskError(f"optimizers {list(self.optimizers)} and models {list(self.models)} need the same names")
        self._check_own_scheduler()
        self.folder = Path(folder) if folder is not None else None
        self._saved: Path | None = None
        """The last checkpoint."""
        self._unsettled: Unsettled | None = None
        """A checkpoint that rank 0 finishes in the background."""
        self._saved_to: set[Path] = set()
        """Folders in which rank 0 may have left files for the next checkpoint."""
        # A custom loop does not call `close`.
        weakref.finalize(self, _drop_spares, self._saved_to)
        self._record = self._begin_record(log, best)

    def _check_own_scheduler(self) -> None:
        if self.scheduler is not None:
            _check_scheduler(self.scheduler)
        elif len(self.optimizers) == 1 and "initial_lr" in next(iter(self.optimizers.values())).param_groups[0]:
            warnings.warn(
                "the optimizer has a scheduler that this Run does not save, so that a resumed training would begin its "
                "schedule again; write Run(team, model, optimizer, loader, scheduler)",
                stacklevel=3,
            )

    def _begin_record(self, log: str | None, best: str | None) -> LoopRecord | None:
        """The Record of a custom loop that has a folder."""
        if self.folder is None:
            if log is not None or best is not None:
                raise TaskError('log and best need a run folder: Run(..., folder="runs/mine", log="tensorboard")')
            return None
        from evenstep.training.custom_loop_record import LoopChoices, LoopRecord, loop_plan

        plan = loop_plan(self.team, self.loader, self.folder, LoopChoices(log, best))
        record = LoopRecord(self.team, self.folder, plan, self.loader.facts())
        self.before_save = record.flush
        return record

    @property
    def step(self) -> int:
        """Global batches that were finished; of a loop without a loader, updates of the optimizer with the most."""
        return self.loader.num_finished

    def log(self, loss: float | torch.Tensor, **values: float | torch.Tensor) -> None:
        """Write the row of a step to the Record, after its backward; `loss` is what `team.backward` returned.

        `values` are other numbers of this step, as rank 0 has them: `run.log(d_loss, g_loss=g_loss)`.
        """
        record, batch = self._recorded(), self.team.current
        if batch is None:
            raise TaskError("run.log writes the row of a step; call it after team.backward")
        from evenstep.training.custom_loop_record import LoopStep

        norm, self.team.grad_norm = self.team.grad_norm, None
        record.add_step(
            LoopStep(
                step=self.step if batch.is_finished else self.step + 1,
                epoch=batch.span.epoch,
                loss=float(loss),
                samples=batch.num_samples,
                count=getattr(loss, "count", batch.num_samples),
                lr=float(self._first_groups()[0]["lr"]),
                input_seconds=self.loader.waited_seconds,
                epoch_samples=self.loader.lengths.of(batch.span.epoch) or 0,
                logged={**getattr(loss, "logged", {}), **{name: float(value) for name, value in values.items()}},
                grad_norm=float(norm) if norm is not None and batch.is_finished else None,
            )
        )

    def evaluate(
        self, function: Callable[[Any, Any], Mapping[str, Amount]], model: DistributedModel, batches: Loader
    ) -> Means:
        """`team.evaluate`, with a row in the Record; all processes get the same values."""
        record, started = self._recorded(), time.perf_counter()
        means = self.team.evaluate(function, model, batches)
        epoch = self.loader.epoch - self.loader.is_between_epochs
        record.add_evaluation(self.step, max(0, epoch), means, time.perf_counter() - started)
        return means

    @property
    def evaluations_since_best(self) -> int:
        """How many evaluations came after the best one by the metric that `best` names; the same on all processes."""
        best = self._recorded().best
        if best is None:
            raise TaskError('this Run does not know which metric decides; make it with Run(..., best="accuracy")')
        return best.num_since

    def averaged(self) -> AbstractContextManager[None]:
        """Inside, the models have the average of their weights, if there is one."""
        return self.average.in_place() if self.average is not None else NOTHING

    def finish(self) -> Summary:
        """Write the summary of the run to its Record; every process calls this, after the last step."""
        record = self._recorded()
        self.settle()
        return record.finish(self._saved)

    def _recorded(self) -> LoopRecord:
        if self._record is None:
            raise TaskError('this Run has no folder to write to; make it with Run(..., folder="runs/mine")')
        return self._record

    def save(
        self,
        folder: str | Path | None = None,
        *,
        keep: int = 2,
        is_best: bool = False,
        in_background: bool = False,
        **extra: Any,
    ) -> Path:
        """Write a checkpoint below `folder`; every process calls this and writes its shards, all know how it went.

        `load` returns the `extra` values: tensors, and what JSON can hold, as rank 0 has them. Without a folder it is
        written into that of the run. With `in_background`, a large one is there after `settle`, which the next `save`
        calls.
        """
        self.settle()
        folder = self._checkpoints(folder)
        is_best = is_best or (self._record is not None and self._record.is_best_at(self.step))
        optimizers: dict[str, Any] = {}
        tensors = self._tensors(optimizers)
        link: dict[str, torch.Tensor] = {}
        for key, model in self.models.items():
            link |= _prefixed(key, model.link_state())
        so_far = {"so_far": asdict(self._record.so_far())} if self._record is not None else {}
        state = {**self._state(), "optimizers": optimizers}
        _refuse_taken(extra, state)
        added: dict[str, torch.Tensor] = {}
        state |= {**so_far, **without_tensors(extra, added)}
        with self.averaged():
            if self.average is not None:
                tensors[files.EMA] = self._weights()
        of_main = {files.LINK: link, files.EXTRA: added} if self.team.world.is_main else {}
        tensors |= {name: {**one} for name, one in of_main.items() if one}
        tensor_files, problem = _tensor_files(tensors)
        # Agreed on before anything is written: of a sharded weight, another rank may hold the part that is spoilt.
        self._stop_if(self._first_not_finite() or problem, folder)
        self._write(folder, tensor_files, state, AfterSaving(keep, is_best, in_background))
        self._saved = folder / files.step_name(self.step)
        if self._record is not None:
            self._record.pause_ended()
        return self._saved

    def settle(self) -> None:
        """Wait for a checkpoint that is being written in the background; every process calls this."""
        unsettled, self._unsettled = self._unsettled, None
        if unsettled is None:
            return
        finishing = unsettled.finishing
        if finishing is not None:
            finishing.wait()
        saved, self._saved = self._saved, unsettled.saved_before
        self._stop_if(finishing.problem if finishing is not None else None, unsettled.folder, unsettled.step)
        self._saved = saved

    def close(self) -> None:
        """Wait for this process's part of a checkpoint, without the others: one of them may have failed."""
        if self._unsettled is not None and self._unsettled.finishing is not None:
            self._unsettled.finishing.wait()
        _drop_spares(self._saved_to)

    def _weights(self) -> dict[str, Writable]:
        return {
            name: value
            for key, model in self.models.items()
            for name, value in _prefixed(key, weights(model.module)).items()
        }

    def _tensors(self, optimizers: dict[str, Any]) -> dict[str, dict[str, Writable]]:
        """The tensors of each file, as they lie on this rank; other state of optimizers goes to `optimizers`."""
        moments: dict[str, Writable] = {}
        for key, optimizer in self.optimizers.items():
            of_optimizer, optimizers[key] = optimizer_state(self.models[key].module, optimizer)
            optimizers[key]["made_with"] = self._made_with[key]
            moments |= _prefixed(key, of_optimizer)
        return {files.WEIGHTS: self._weights(), files.OPTIMIZER: moments}

    def _write(
        self, folder: Path, tensor_files: Mapping[str, TensorFile], state: Mapping[str, Any], after: AfterSaving
    ) -> None:
        """Write all files and make them the latest checkpoint; SaveFailed on all ranks if one could not."""
        is_sharded = any(file.is_sharded for file in tensor_files.values())
        is_large = (
            sum(tensor_files[name].nbytes for name in (files.WEIGHTS, files.OPTIMIZER)) >= atomic_write.LARGE_BYTES
        )
        beside, problem = self._begin(folder, tensor_files, state)
        try:
            if is_sharded:
                self._stop_if(problem, folder)
            problem = problem or self._fill(beside, tensor_files, is_sharded)
            if is_sharded or (after.in_background and is_large):
                self._stop_if(problem, folder)
        except BaseException:
            if beside is not None:
                atomic_write.remove(beside)
            raise
        finishing = Finishing(beside, self.step, after.point) if beside is not None and problem is None else None
        if after.in_background and is_large:
            if finishing is not None:
                finishing.start()
            self._unsettled = Unsettled(finishing, self.step, folder, self._saved)
            return
        if finishing is not None:
            finishing.run()
            problem = finishing.problem
        self._stop_if(problem, folder)

    def _begin(
        self, folder: Path, tensor_files: Mapping[str, TensorFile], state: Mapping[str, Any]
    ) -> tuple[Path | None, str | None]:
        """On rank 0: the folder of a checkpoint that is being written, or what went wrong."""
        if not self.team.world.is_main:
            return None, None
        beside = None
        try:
            text = json.dumps(state)
            self.before_save()
            beside = atomic_write.begin(folder, self.step)
            (beside / files.STATE).write_text(text)
            self._saved_to.add(folder)
            sizes = {name: file.nbytes for name, file in tensor_files.items()}
            taken = atomic_write.take_spares(folder, beside, sizes)
            for name, file in tensor_files.items():
                file.create(beside / name, is_there=name in taken)
        except Exception as error:
            if beside is not None:
                atomic_write.remove(beside)
            return None, f"{type(error).__name__}: {error}"
        return beside, None

    def _fill(self, beside: Path | None, tensor_files: Mapping[str, TensorFile], is_sharded: bool) -> str | None:
        """Write what this rank holds of each file; what went wrong on this rank."""
        if not is_sharded and beside is None:
            return None
        place = SharedFolder(self.team.world, beside) if is_sharded else LocalFolder(beside or Path())
        for name, file in tensor_files.items():
            with self.averaged() if name == files.EMA else NOTHING:
                place.fill(name, file)
        if place.problem is not None and beside is not None:
            atomic_write.remove(beside)
        return place.problem

    def _checkpoints(self, folder: str | Path | None) -> Path:
        if folder is not None:
            return Path(folder)
        if self.folder is None:
            raise TaskError('run.save needs a folder: run.save("checkpoints"), or Run(..., folder="runs/mine")')
        return self.folder / files.FOLDER

    def _stop_if(self, problem: str | None, folder: str | Path, step: int | None = None) -> None:
        """Raise on all ranks if any of them has a problem."""
        problems = self.team.world.agree(problem)
        if problems:
            raise SaveFailed(
                f"the checkpoint of step {self.step if step is None else step} could not be written ({problems[0]}).\n"
                f"Earlier checkpoints in {folder} were not touched: fix the cause, then resume from there."
            )

    def load(self, where: str | Path | None = None, *, allow_pickle: bool = False) -> Loaded:
        """Resume from a checkpoint (or a folder of them), or start from a file of weights.

        Returns what `save` was given besides, by name. Without an argument, from the folder of the run, if anything was
        saved there. Every process calls this.
        """
        self.settle()
        if where is None:
            return self._load_own(allow_pickle)
        if Path(where).is_file():
            return Loaded({}, self._load_foreign(str(where), allow_pickle))
        path, notes = integrity.find(str(where))
        if self.team.world.is_main:
            # A run that was killed there could not delete them.
            self._saved_to.add(path.parent)
        state = files.read_state(path)
        check_same_order(path, state, self.team.seed, self.loader.num_samples, order_name(self.loader.order))
        tensors = stored_tensors(path / files.WEIGHTS)
        moments = stored_tensors(path / files.OPTIMIZER)
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
        notes += self._changed_numerics(state)
        notes += self._load_average(path)
        self._load_link(path)
        self.loaded = state
        if rates is None and self.scheduler is not None and state["scheduler"] is not None:
            self.scheduler.load_state_dict(unpacked(state["scheduler"]))
        for group, rate in zip(self._scheduled_groups(), rates or [], strict=False):
            group["lr"] = rate
        if self._record is not None:
            self._record.recall(self.loader.facts(), state.get("so_far"))
        added = load_file(path / files.EXTRA) if (path / files.EXTRA).exists() else {}
        extra = {name: value for name, value in state.items() if name not in _TAKEN}
        return Loaded(with_tensors(extra, added), notes)

    def _load_own(self, allow_pickle: bool) -> Loaded:
        self._recorded().continues = True
        checkpoints = self._checkpoints(None)
        # Asked by rank 0 for all: it may be writing where other machines do not see it yet.
        if not self.team.world.gather(bool(integrity.whole(checkpoints)))[0]:
            return Loaded({}, [])
        loaded = self.load(checkpoints, allow_pickle=allow_pickle)
        for note in loaded.notes if self.team.world.is_main else ():
            print(note, file=sys.stderr)
        return loaded

    def _other_schedule(self, state: State, notes: list[str]) -> list[float] | None:
        """The learning rates of a schedule made for another length, advanced to this step; None if it is the same."""
        if self.scheduler is None or None in (state["num_steps"], self.num_steps):
            return None
        # What evaluations gave is not known here.
        if state["num_steps"] == self.num_steps or self.stepped_after == "evaluation":
            return None
        notes.append(f"the schedule was made for {state['num_steps']} steps and is now made for {self.num_steps}")
        with warnings.catch_warnings():
            # "step() before optimizer.step()": so it is, the steps were taken by the run before.
            warnings.simplefilter("ignore", UserWarning)
            for _ in range(self._epochs_of(state) if self.stepped_after == "epoch" else state["step"]):
                self.scheduler.step()
        return [group["lr"] for group in self._scheduled_groups()]

    def _epochs_of(self, state: State) -> int:
        stream = state["loader"].get("stream")
        lengths = Lengths(None, tuple(stream or ())) if self.loader.order is None else self.loader.lengths
        return lengths.locate(state["loader"]["position"])[0]

    def _first_groups(self) -> list[dict[str, Any]]:
        return next(iter(self.optimizers.values())).param_groups

    def _scheduled_groups(self) -> list[dict[str, Any]]:
        if not isinstance(self.scheduler, Schedulers):
            return self._first_groups()
        return [group for key in self.scheduler.parts for group in self.optimizers[key].param_groups]

    def _first_not_finite(self) -> str | None:
        """The first parameter that holds NaN or infinity, on this rank; buffers may (a mask of -inf is fine)."""
        for key, model in self.models.items():
            for name, weight in model.module.named_parameters():
                if not is_finite(weight):
                    where = f"{key}.{name}" if key else name
                    return f"{where} holds NaN or infinity; a gradient was not finite though the loss was"
        return None

    def _load_average(self, path: Path) -> list[str]:
        """Continue the average of the weights; a line to log if there is none to continue, or none is continued."""
        is_saved = (path / files.EMA).exists()
        if self.average is None:
            return [f"{path} has an average of the weights (ema), and the task has none any more"] if is_saved else []
        if not is_saved:
            self.average.restart()
            return [f"{path} has no average of the weights (ema): it begins with the weights of step {self.step}"]
        tensors = stored_tensors(path / files.EMA)
        with self.average.in_place():
            for key, model in self.models.items():
                load_weights(model.module, _unprefixed(key, tensors), str(path))
        return []

    def _load_link(self, path: Path) -> None:
        """What `--link` kept; one that keeps something else, or nothing, leaves it alone."""
        tensors = load_file(path / files.LINK) if (path / files.LINK).exists() else {}
        for key, model in self.models.items():
            model.load_link_state(_unprefixed(key, tensors))

    def _load_foreign(self, path: str, allow_pickle: bool) -> list[str]:
        loaded = read_weights(path, allow_pickle)
        if not all(_unprefixed(key, loaded) for key in self.models):
            raise CheckpointError(f"{path} is one model's weights, and this run has {len(self.models)} models")
        for key, model in self.models.items():
            stripped = load_weights(model.module, _unprefixed(key, loaded), path)
        if self.average is not None:
            self.average.restart()
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
            **self._numerics(),
            "generators": self._generators(),
            "requires_grad": {
                key: {name: flag for name, flag in _trained(model).items() if flag != self._built[key].get(name)}
                for key, model in self.models.items()
            },
        }

    def _numerics(self) -> dict[str, Any]:
        if self.team.world.num_virtual is None:
            return {}
        from evenstep.distributed.numerics import numerics

        return {"numerics": numerics(self.team.world)}

    def _changed_numerics(self, state: State) -> list[str]:
        """A line to log if virtual replicas would now give other bits."""
        before, now = state.get("numerics"), self._numerics().get("numerics")
        if before is None and now is None:
            return []
        from evenstep.distributed.numerics import differences

        none = {"replicas": "none"}
        changed = differences(before or none, now or none)
        return [f"results may not be bit-identical to the run before: {'; '.join(changed)}"] if changed else []

    def _generators(self) -> list[dict[str, Any]]:
        """The states of random generators; ranks that compute one replica together draw the same numbers."""
        world = self.team.world
        return world.gather({**host_state(), **device_state(world.devices)})[:: world.ranks_per_replica]

    def _restore(self, state: State) -> None:
        for key, model in self.models.items():
            changed = state.get("requires_grad", {}).get(key, {})
            for name, weight in model.module.named_parameters():
                weight.requires_grad_(changed.get(name, weight.requires_grad))
        self.loader.load_state_dict(state["loader"])
        self.team.resumed_at = (self.step, self.loader.epoch)
        if self.team.precision.scaler is not None and state["scaler"]:
            self.team.precision.scaler.load_state_dict(state["scaler"])
        world = self.team.world
        # With virtual replicas, the generators are the same on all ranks.
        rank = world.data_rank if world.num_virtual is None else 0
        if len(state["generators"]) == world.data_size or (world.num_virtual is not None and state["generators"]):
            restore_host_state(state["generators"][rank])
            try:
                restore_device_state(state["generators"][rank], world.devices)
            except (ValueError, RuntimeError, TypeError) as error:
                raise CheckpointError(f"its states of torch's generators cannot be restored: {error}") from error
        else:
            seed_everything(derive_seed(self.team.seed, "host", self.step, world.data_rank))


_TAKEN = frozenset(files.State.__annotations__)
"""Names in a checkpoint's state."""


def _refuse_taken(extra: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    taken = sorted(set(extra) & set(state))
    if taken:
        raise TaskError(f"{taken[0]!r} is a reserved checkpoint key; save yours under another name")


def _trained(model: DistributedModel) -> dict[str, bool]:
    return {name: weight.requires_grad for name, weight in model.module.named_parameters()}


def _named(one_or_more: T | Mapping[str, T]) -> dict[str, T]:
    return dict(one_or_more) if isinstance(one_or_more, Mapping) else {"": one_or_more}


def _tensor_files(tensors: Mapping[str, Mapping[str, Writable]]) -> tuple[dict[str, TensorFile], str | None]:
    """The files to be written, or why there are none: one tensor may be of a type that files do not have."""
    try:
        return {name: TensorFile(one) for name, one in tensors.items()}, None
    except CheckpointError as error:
        # Not raised: rank 0 alone may have the tensor, and the others would wait for it.
        return {}, str(error)


def _drop_spares(folders: Iterable[Path]) -> None:
    for folder in folders:
        atomic_write.drop_spare(folder)


def _prefixed(key: str, tensors: Mapping[str, V]) -> dict[str, V]:
    return {f"{key}.{name}" if key else name: value for name, value in tensors.items()}


def _unprefixed(key: str, tensors: Mapping[str, V]) -> dict[str, V]:
    if not key:
        return dict(tensors)
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


def _check_scheduler(scheduler: LRScheduler | Schedulers) -> None:
    for one in scheduler.parts.values() if isinstance(scheduler, Schedulers) else (scheduler,):
        try:
            json.dumps(packed(one.state_dict()))
        except TypeError as error:
            raise TaskError(f"the state of {type(one).__name__} cannot be saved as JSON ({error})") from error
