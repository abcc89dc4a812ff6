"""The trainer: one rank's whole part in a run. It builds, resumes, trains, evaluates and saves.

`perform` joins the process group, runs a trainer, writes the Record on rank 0, and adds what is known to an error.

What a plain run does not need (CUDA graphs, monitors of several ranks, the profiler, an audit) is imported
here, when a run first uses it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from evenstep.best_metric import find_metric, parse_best
from evenstep.checkpoint import atomic_write, files
from evenstep.checkpoint.save_interval import SaveInterval
from evenstep.data.adapt import validation_sets
from evenstep.data.feature_scaler import unfitted
from evenstep.data.loader import Loader
from evenstep.data.prefetch import explain_worker_death, is_worker_death
from evenstep.distributed import devices
from evenstep.distributed.devices import return_to_default_stream
from evenstep.distributed.heartbeat import BACKWARD, BUILDING, COMPARING, ENDING, EVALUATING, FORWARD, SAVING
from evenstep.distributed.huge_pages import use_huge_pages
from evenstep.distributed.preemption import SIGNALS
from evenstep.early_stopping import BestSoFar
from evenstep.errors import BadInput, Preempted, TaskError, TrainingError
from evenstep.link_method import parse_link
from evenstep.monitor.check_interval import is_check_due
from evenstep.monitor.known_errors import Situation, is_out_of_memory, note
from evenstep.plan import AUTO, Plan, parse_shares
from evenstep.record import (
    EpochEnd,
    Evaluation,
    MeasuredShares,
    Record,
    RecordWriter,
    Row,
    Step,
    Summary,
    Tally,
    has_begun,
)
from evenstep.sampling.rng import derive_seed, fork_rng, seed_everything
from evenstep.strategy_facts import DEFAULT
from evenstep.task import Task, has_several
from evenstep.training.checkpointed_run import Run
from evenstep.training.evaluation import LossAndMetrics, Means, prefixed
from evenstep.training.fused_optimizer import fuse
from evenstep.training.loop import is_done, train
from evenstep.training.lr_scheduler import check_scheduler, make_scheduler, stepped_after
from evenstep.training.optimizer_step import make_optimizer
from evenstep.training.step import Recipe, Stepper, eager_steps
from evenstep.training.sync_batchnorm import is_local, synchronised
from evenstep.training.team import Interrupted, Team, join_team

if TYPE_CHECKING:
    from evenstep.audit import SamplesWriter
    from evenstep.monitor.replica_check import ReplicaCheck
    from evenstep.monitor.stragglers import StragglerMonitor
    from evenstep.profiling.profiler import Tracing
    from evenstep.strategies.base import DistributedModel
    from evenstep.training.layer_statistics import InspectedSteps
    from evenstep.training.measured_shares import MeasuredSteps
    from evenstep.training.replay_check import ReplayCheck
    from evenstep.training.scores import Scores

FADED = 1e-3
"""Of the first learning rate: a smaller part of it after one epoch of several is a mistake."""

LOCAL_NORM = "BatchNorm uses each device's share of a batch; {} makes it the same as on one device"
OWN_MASKS = "dropout draws another mask on each device; --virtual-replicas {} gives one result on any number of devices"

Event = Row | str
"""What a trainer yields: rows of the Record, and lines to log."""


class Trainer:
    """A plan and a task, built and ready to run on this rank."""

    def __init__(self, plan: Plan, task: Task, run_folder: Path, team: Team) -> None:
        self.plan = plan
        self.task = task
        self.team = team
        self.spans = team.world.spans
        self.spans.begin(BUILDING)
        self.folder = run_folder
        self.checkpoints = run_folder / files.FOLDER
        self.run = self._build()
        if task.after is not None or task.after_every is not None:
            from evenstep.training.after_hook import check_after

            check_after(task)
        self.valid = {
            name: self._loader(data, shuffle=False, what="valid") for name, data in validation_sets(task.valid).items()
        }
        self.inspected: InspectedSteps | None = None
        """The stepper, with `--statistics`."""
        self.measured: MeasuredSteps | None = None
        """The stepper, with `--shares auto`."""
        self.stepper = self._stepper()
        self.scores = self._scores()
        self.peaks: dict[str, int] = {}
        self.best = BestSoFar.of(plan)
        self.tally = Tally()
        """Steps of this run, those before a restart included; of those, rank 0 alone knows."""
        self.evaluated: Evaluation | None = None
        """The last evaluation; at first, that of the checkpoint from which this run resumes in its own folder."""
        self.saved: Path | None = None
        """The last checkpoint."""
        self.stopped: str | None = None
        """Why the run ends before its plan does."""
        self.is_evaluation_due = False
        self.is_again = team.world.is_main and has_begun(run_folder)
        """Whether this run was started before, in its own folder."""
        self.samples: SamplesWriter | None = None
        self.replicas: ReplicaCheck | None = None
        self.pace: StragglerMonitor | None = None
        self.replays: ReplayCheck | None = None
        self._add_checks()
        self._compute_seconds = 0.0
        self.tracing: Tracing | None = None
        self._save_interval = SaveInterval()
        if plan.restarts or plan.machines:
            team.requests.save_is_due = self._save_interval.is_due

    def _scores(self) -> Scores | None:
        if self.task.scores is None:
            return None
        from evenstep.training.scores import scores_of

        return scores_of(self.task)

    def _add_checks(self) -> None:
        """What watches the steps: an audit, a comparison of replicas and of their speed, replays on other devices."""
        world = self.team.world
        if self.plan.audit and world.is_main:
            from evenstep.audit import SamplesWriter

            self.samples = SamplesWriter(self.folder)
        if world.size > 1:
            from evenstep.monitor.replica_check import ReplicaCheck
            from evenstep.monitor.stragglers import StragglerMonitor

            self.replicas, self.pace = ReplicaCheck(world, self._model.module), StragglerMonitor(world)
        if self.plan.replay_every is not None:
            from evenstep.training.replay_check import ReplayCheck

            if has_several(self.task):
                raise TaskError("--replay-every checks tasks of one model, and this one has several; leave it out")
            self.replays = ReplayCheck(self._recipe(), self.run.loader, self.plan.replay_every)

    def resume(self) -> list[str]:
        """Load what the plan resumes from; returns lines to log about it and about the model."""
        is_shared = self.plan.most_devices > 1 and self.plan.virtual_replicas is None
        notes = [self._about_norm()] if is_shared and is_local(self._model.module) else []
        replicas = self.team.world.num_replicas
        if is_shared and replicas > 1 and self.team.facts.model_axis is None and _has_dropout(self._model.module):
            notes.append(OWN_MASKS.format(replicas))
        # What an adopted task does not do.
        notes += getattr(self.task, "left_out", ())
        if self.plan.virtual_replicas is not None:
            from evenstep.distributed.numerics import unequal_kinds

            notes += unequal_kinds(self.team.world)
        if self.plan.resume is not None:
            notes += self.run.load(self.plan.resume, allow_pickle=self.plan.allow_pickle).notes
            self.is_evaluation_due = bool(self.run.loaded.get("evaluation_due"))
            notes += self._recall_best(self.run.loaded.get("so_far"))
            if self.measured is not None:
                notes += self._recall_shares(self.measured)
            if self.is_again and Path(self.plan.resume).resolve().parent == self.checkpoints.resolve():
                self._recall(self.run.loaded.get("so_far"))
        return notes

    def _about_norm(self) -> str:
        joins = "" if self.team.facts.processes_per_device else f"--strategy {DEFAULT} "
        return LOCAL_NORM.format(f"{joins}--sync-batchnorm")

    def _recall(self, so_far: files.Totals | None) -> None:
        if so_far is not None and so_far.best_so_far is not None:
            self.tally, self.evaluated = so_far.tally, so_far.evaluation
            return
        # A checkpoint of an evenstep that did not write it down: all rows are read, once.
        record = Record.read(self.folder, kinds=("step", "evaluation"))
        self.tally = Tally.of(step for step in record.steps if step.step <= self.run.step)
        for one in record.evaluations:
            if one.step <= self.run.step:
                self._is_best(one)
                self.evaluated = one if one.step == self.run.step else None

    def _recall_best(self, so_far: files.Totals | None) -> list[str]:
        """Continue to look for the best where the checkpoint was saved; a line to log if it starts again."""
        before = so_far.best_so_far if so_far is not None else None
        if before is None:
            return []
        if before.by == self.best.by:
            self.best = before
            self._keep_best()
            return []
        return [f"--best was {before.by} and is now {self.best.by}: the best so far is not known"]

    def _keep_best(self) -> None:
        assert self.plan.resume is not None
        if not self.team.world.is_main or self.best.best is None:
            return
        path = atomic_write.keep_best(self.checkpoints, Path(self.plan.resume), self.best.best.step)
        if path is not None:
            runs = self.folder.parent.resolve()
            # As the command was given it: the task may have changed the working folder.
            shown = Path(self.plan.out) / path.relative_to(runs) if path.is_relative_to(runs) else path
            self.best.best = replace(self.best.best, checkpoint=str(shown))

    def _recall_shares(self, measured: MeasuredSteps) -> list[str]:
        """Use what this run measured before a restart; a line to log."""
        from evenstep.training.measured_shares import kept_shares

        shares = kept_shares(self.plan, self.run.loaded.get("plan") or {}, self.team.world.num_replicas)
        if shares is None:
            return []
        measured.share_out(shares)
        self.plan = replace(self.plan, shares=",".join(map(str, shares)))
        return [f"--shares auto: {self.plan.shares}, as measured before the restart"]

    def _keep_shares(self, row: MeasuredShares) -> MeasuredShares:
        """From now on they are those of the plan, in checkpoints and in plan.json too."""
        from evenstep.training.measured_shares import keep_in_plan

        assert self.measured is not None
        self.measured.row = None
        self.plan = replace(self.plan, shares=",".join(map(str, row.shares)))
        if self.team.world.is_main:
            keep_in_plan(self.folder, row.shares)
        return row

    @property
    def facts(self) -> dict[str, Any]:
        """How samples are drawn, where this start resumes, and where its samples are written."""
        file = {"samples_file": self.samples.path.name} if self.samples is not None else {}
        return {**self.run.loader.facts(), **file}

    def _start_tracing(self) -> Tracing | None:
        if self.plan.profile is None:
            return None
        from evenstep.profiling.profiler import Tracing

        self._model.time_communication()
        return Tracing(self.plan.profile, self.team.world, self.folder, self.run.step, self.run.num_steps)

    def situation(self, error: BaseException) -> Situation | None:
        """What the advice needs to know about a step that ran out of memory; None for any other failure."""
        if not is_out_of_memory(error):
            return None
        from evenstep.monitor.out_of_memory import FailedStep, diagnose, fit_command

        command = fit_command(self.plan)
        if self.spans.heartbeat.phase not in (FORWARD, BACKWARD):
            return Situation(command=command)
        world = self.team.world
        step = FailedStep(
            module=self._model.module,
            loss=self.task.loss,
            read_inputs=lambda: next(iter(self.run.loader)).micro_batches[0][0].inputs,
            autocast=self.team.precision.autocast,
            device=world.device,
        )
        largest = max(map(len, self.run.loader.split.by_replica(self.plan.batch)))
        return replace(diagnose(error, step, largest, self.plan.accumulate), command=command)

    def trainable_names(self) -> list[str]:
        """In the order in which DDP counts parameters."""
        return [name for name, weight in self._model.module.named_parameters() if weight.requires_grad]

    def close(self) -> None:
        """End the loaders' worker processes and the log of samples; wait for a checkpoint."""
        self.run.close()
        for loader in (self.run.loader, *self.valid.values()):
            loader.close()
        if self.samples is not None:
            self.samples.close()
        if self.tracing is not None:
            self.tracing.abandon()
        for device in reversed(self.team.world.devices):
            return_to_default_stream(device)

    def events(self) -> Iterator[Event]:
        """Everything from the first step to the summary."""
        started = time.perf_counter()
        seconds_before = self.tally.seconds
        self.saved = Path(self.plan.resume) if self.is_again and self.plan.resume is not None else None
        yield from self._before()
        self.tracing = self._start_tracing()
        steps = train(self.run, self.stepper, self.plan, self._peak_bytes, waits_at=self._waits_at)
        for step, ids, compute_seconds, is_rest in steps if self.stopped is None else ():
            yield from self._messages()
            if is_rest:
                self.tally.add(step)
                yield step
                continue
            if self.tracing is not None:
                yield from self.tracing.after(step.step)
            self.tally.add(step)
            if self.plan.audit:
                self._write_samples(step, ids)
            yield step
            if self.inspected is not None:
                yield from self.inspected.up_to(step.step)
            if self.measured is not None and self.measured.row is not None:
                yield self._keep_shares(self.measured.row)
            if step.step < self.run.step:
                # The GPU runs ahead of what is known; the rest is done at a step at which all ranks synchronize.
                self._add_to_pace(step, compute_seconds)
                continue
            yield from self._compared(step, compute_seconds)
            if self.replays is not None and self.replays.is_due(step.step):
                yield from self.replays.after(step.step)
            yield from self._after(step)
            if self.stopped is not None:
                steps.close()
                break
        if self.tracing is not None:
            yield from self.tracing.finish()
        if self.replays is not None:
            yield self.replays.summary(time.perf_counter() - started)
        self.spans.begin(ENDING)
        self.run.settle()
        shown = self._infer(self.task.show) if self.task.show is not None else None
        yield self._sum_up(shown, time.perf_counter() - started + seconds_before)

    def _before(self) -> Iterator[Event]:
        """The evaluation that a checkpoint was saved without, or the one before the first step."""
        if self.is_evaluation_due:
            epoch = self.run.loader.epoch - self.run.loader.is_between_epochs
            is_best = yield from self._evaluated(epoch, can_stop=False)
            self._save(is_best)
        elif self.plan.evaluate_first and self.run.step == 0:
            evaluation = self._evaluate(0, can_stop=True)
            if evaluation is not None:
                yield evaluation
        self.stopped = self.best.why_stop(self.plan)

    def _after(self, step: Step) -> Iterator[Event]:
        """After a step: evaluate, save and stop, each where it is due."""
        requests = self.team.requests
        is_end = is_done(self.run, self.plan)
        is_epoch_end = self.run.loader.is_between_epochs or is_end
        if is_epoch_end and not is_end and step.epoch == 0:
            yield from self._faded_rate(step)
        if self.run.stepped_after == "epoch" and self.run.loader.is_between_epochs and self.run.scheduler is not None:
            self.run.scheduler.step()
        is_due, is_best = self._is_evaluated(step.step, is_epoch_end, is_end), False
        # The last step is evaluated and saved, also after a request to stop.
        is_asked = requests.stop and not is_end
        if is_due and not is_asked:
            is_best = yield from self._evaluated(step.epoch, can_stop=not is_end)
            self.stopped = self.best.why_stop(self.plan) if not is_end else None
            is_asked = requests.stop and not is_end and self.stopped is None
        elif is_epoch_end and not is_asked:
            self._gather_peaks()
            yield EpochEnd(step=step.step, epoch=step.epoch, train_loss=self.tally.train_loss or 0.0)
        if self._is_after(step.step, is_epoch_end):
            self._call_after(step)
        is_over = is_epoch_end or is_asked or self.stopped is not None
        if is_over or is_best or requests.save or self._is_saved(step.step):
            self._save(is_best, evaluation_due=is_due and self._current_evaluation is None)
        if is_asked:
            self._stop(step.step)

    def _is_after(self, step: int, is_epoch_end: bool = False) -> bool:
        every = self.task.after_every
        return self.task.after is not None and (is_epoch_end if every is None else step % every == 0)

    def _call_after(self, step: Step) -> None:
        from evenstep.training.after_hook import BetweenSteps

        assert self.task.after is not None
        evaluation, run = self._current_evaluation, self.run
        modules = {key: model.module for key, model in run.models.items()}
        self.task.after(
            BetweenSteps(
                model=modules.get("", modules),
                optimizer=run.optimizers.get("", run.optimizers),
                step=step.step,
                epoch=step.epoch,
                loss=step.loss,
                metrics=evaluation.values if evaluation is not None else {},
                folder=self.folder,
                rank=self.team.world.rank,
                infer=self._infer,
            )
        )
        self.stepper.recheck()

    def _infer(self, function: Callable[[Any], Any]) -> Any:
        with self.run.averaged():
            return self.team.infer(function, self._model)

    def _faded_rate(self, step: Step) -> Iterator[str]:
        """Warn of a schedule that was meant to be stepped once per epoch."""
        group = next(iter(self.run.optimizers.values())).param_groups[0]
        # A scheduler notes the first rate in its optimizer.
        first, now = float(group.get("initial_lr", 0.0)), float(group["lr"])
        if self.team.world.is_main and now < FADED * first:
            yield (
                f"the learning rate fell from {first:.3g} to {now:.3g} in the first epoch: the scheduler is stepped "
                f"after every optimizer step ({step.step} per epoch), not after every epoch; for that, write "
                'Task(..., schedule_every="epoch")'
            )

    def _stop(self, step: int) -> None:
        """Leave, all ranks together: no rank ends while another still reads what it sent."""
        self.run.settle()
        self.team.world.barrier()
        if self.team.requests.is_interrupt:
            raise KeyboardInterrupt
        raise Preempted(f"stopped: saved step-{step:08d}")

    def _compared(self, step: Step, compute_seconds: float) -> Iterator[str]:
        """Every few steps, check whether the replicas are still equal and whether a rank is slow."""
        self._add_to_pace(step, compute_seconds)
        if self.replicas is None or self.pace is None or not is_check_due(step.step, self.plan):
            return
        with self.spans.during(COMPARING):
            if self.plan.check_every:
                self.replicas.compare(step.step)
            slow = self.pace.judge()
        if slow:
            yield slow

    def _add_to_pace(self, step: Step, compute_seconds: float) -> None:
        if self.pace is None:
            return
        # A replayed CUDA graph does not know: the last step that did stands for it.
        self._compute_seconds = compute_seconds or self._compute_seconds
        waited = step.seconds - step.input_seconds - self._compute_seconds
        self.pace.add(step.input_seconds, self._compute_seconds, max(0.0, waited))

    def _waits_at(self, step: int) -> bool:
        """Whether something is done after this step that needs it to be over."""
        if self._is_saved(step) or self._is_evaluated(step) or self._is_after(step):
            return True
        if self.tracing is not None and self.tracing.waits_at(step):
            return True
        if self.replays is not None and self.replays.is_due(step):
            return True
        return (
            self.replicas is not None and not parse_link(self.plan.link).is_streaming and is_check_due(step, self.plan)
        )

    def _messages(self) -> list[str]:
        sources = [self.stepper.messages, *[model.notes for model in self.run.models.values()]]
        if not any(sources):
            return []
        messages = [message for source in sources for message in source]
        for source in sources:
            source.clear()
        return messages if self.team.world.is_main else []

    @cached_property
    def _model(self) -> Any:
        """All models of the task as one."""
        if "" in self.run.models:
            return self.run.models[""]
        from evenstep.training.several_models import JointModel

        return JointModel(self.run.models)

    def _build(self) -> Run:
        plan, task, team = self.plan, self.task, self.team
        loader = self._loader(
            task.train,
            sampler=task.sampler,
            drop_last=task.drop_last,
            augment=task.augment,
            augment_batch=task.augment_batch,
        )
        module = self._make_module()
        self._fit_scalers(module, loader)
        if not module.training:
            # As pretrained models often come; without this, dropout and batch statistics would stay off, unsaid.
            module.train()
        if plan.sync_batchnorm:
            module = synchronised(module)
        if plan.channels_last:
            module = module.to(memory_format=torch.channels_last)
        if plan.checkpoint_activations:
            from evenstep.training.activation_checkpointing import checkpoint_activations

            checkpoint_activations(module)
        models = self._wrap(module, partial(self._compute_sample, loader))
        if plan.compile:
            for replica in (replica for model in models.values() for replica in model.replicas):
                replica.compile()
        makers = task.optimizer if has_several(task) else {"": task.optimizer}
        optimizers = {key: make_optimizer(make, models[key].module) for key, make in makers.items()}
        for key, optimizer in optimizers.items():
            fuse(optimizer, models[key].module, is_exact=plan.virtual_replicas is not None)
            team.check(optimizer)
        num_steps = plan.num_steps(loader.lengths, *files.start_of(plan.resume))
        scheduler = make_scheduler(task, optimizers, plan, loader.lengths, num_steps)
        check_scheduler(scheduler, plan, task)
        # From here on Python's and NumPy's draws (in a dataset, for example) differ between ranks.
        rank = team.world.data_rank if plan.virtual_replicas is None else 0
        seed_everything(derive_seed(plan.seed, "host", 0, rank))
        run = Run(team, models, optimizers, loader, scheduler, num_steps)
        run.stepped_after = stepped_after(scheduler, task)
        if task.ema is not None:
            from evenstep.training.ema import WeightAverage

            run.average = WeightAverage(models.values(), task.ema)
        return run

    def _make_module(self) -> Any:
        """What the task makes; of a model that will be sharded, large tensors lie in a file until they are."""
        world = self.team.world
        if not self.team.facts.shards or world.size == 1:
            return self.task.model()
        from evenstep.training.file_backed_init import build

        return build(lambda: self.team.precision.fit(self.task.model()), world, self.folder)

    def _wrap(self, module: nn.Module, compute: Callable[[nn.Module], object]) -> dict[str, DistributedModel]:
        """The wrapped model, or several by their names."""
        if not has_several(self.task):
            return {"": self.team.wrap(module, compute)}
        from evenstep.training.several_models import parts_of, samples_of

        fitted = self.team.precision.fit(module)
        samples = samples_of(fitted, compute)
        return {key: self.team.wrap(part, samples[key]) for key, part in parts_of(fitted).items()}

    def _compute_sample(self, loader: Loader, model: nn.Module) -> None:
        data = loader.peek()
        with fork_rng(), self.team.precision.autocast(self.team.world.device):
            self.task.loss(model, data)

    def _stepper(self) -> Stepper:
        if has_several(self.task):
            from evenstep.training.several_models import InTurn

            if self.plan.statistics is not None:
                raise TaskError("--statistics is for tasks of one model; use evenstep.log in the losses instead")
            if parse_link(self.plan.link).is_local:
                raise TaskError("--link local is for tasks of one model; leave it out")
            if self.plan.shares == AUTO:
                raise TaskError("--shares auto measures tasks of one model; give numbers, such as --shares 5,3")
            return InTurn(self.run, self.task.loss, self.plan.clip)
        recipe = self._recipe()
        if self.plan.shares == AUTO:
            from evenstep.training.measured_shares import MeasuredSteps

            loaders = [self.run.loader, *self.valid.values()]
            self.measured = MeasuredSteps(recipe, self._usual_stepper, self.plan, loaders)
            return self.measured
        return self._usual_stepper(recipe)

    def _usual_stepper(self, recipe: Recipe) -> Stepper:
        method = parse_link(self.plan.link)
        if method.is_local and self.team.world.size > 1:
            from evenstep.training.local_steps import LocalSteps, StreamingSteps

            if self.task.ema is not None:
                raise TaskError(f"--link {self.plan.link} has no average of weights (ema) in a round; leave one out")
            steps = StreamingSteps if method.is_streaming else LocalSteps
            return steps(recipe, method, lambda step: step == self.plan.steps or self._waits_at(step))
        if self.plan.statistics is not None:
            from evenstep.training.layer_statistics import InspectedSteps

            self.inspected = InspectedSteps(recipe, self.plan.statistics)
            return self.inspected
        if self.plan.fast == "auto" and self.plan.profile is None and self.team.world.device.type == "cuda":
            from evenstep.training.cuda_graphs.runner import Fast, can_be_fast

            is_eager = self.plan.virtual_replicas is not None or self.plan.checkpoint_activations
            if not is_eager and can_be_fast(recipe):
                return Fast(recipe)
        eager = eager_steps(recipe)
        if self.plan.virtual_replicas is not None and self.team.world.device.type == "cuda":
            eager.messages.append("fast: steps stay eager: --virtual-replicas seeds every micro-batch")
        return eager

    def _recipe(self) -> Recipe:
        (optimizer,) = self.run.optimizers.values()
        run, plan = self.run, self.plan
        is_scheduled = run.stepped_after == "step"
        return Recipe(
            self.team, self.task.loss, self._model, optimizer, plan.clip, run.scheduler, is_scheduled, run.average
        )

    def _loader(self, data: Any, **how: Any) -> Loader:
        plan = self.plan
        loader = self.team.loader(
            data,
            plan.batch,
            accumulate=plan.accumulate,
            collate=self.task.collate,
            workers=plan.workers,
            resident=plan.resident,
            **how,
        )
        shares = parse_shares(plan.shares) if plan.shares is not None else None
        if shares is not None:
            loader.share_out(shares)
        return loader

    def _fit_scalers(self, module: nn.Module, loader: Loader) -> None:
        """Statistics of what is trained on, each rank's share merged; a resumed run has them in its weights."""
        if self.plan.resume is not None:
            return
        # A stream may have no end: read no more of it than the steps of the plan.
        num_batches = self.plan.steps if loader.num_samples is None else None
        try:
            for scaler in unfitted(module):
                scaler.fit(loader.whole_data(num_batches), self.team.world)
        except BaseException:
            loader.close()
            raise

    def _write_samples(self, step: Step, ids: list[int]) -> None:
        counted = ids if self.team.world.counts else []
        every = [id_ for of_rank in self.team.world.gather(counted) for id_ in of_rank]
        if self.samples is not None:
            self.samples.append(step.epoch, step.step, every)

    def _audit(self) -> dict[str, Any] | None:
        """What the samples of this run amount to; rank 0 alone looks."""
        if self.samples is None:
            return None
        from evenstep.audit import audit

        self.samples.close()
        found = audit([self.folder])
        if not found.is_clean:
            raise TrainingError("\n".join([found.sentence(), *found.problems[:5]]))
        return found.to_json()

    def _is_saved(self, step: int) -> bool:
        return self.plan.checkpoint_every is not None and step % self.plan.checkpoint_every == 0

    def _is_evaluated(self, step: int, is_epoch_end: bool = False, is_end: bool = False) -> bool:
        every = self.plan.evaluate_every
        is_due = is_epoch_end if every is None else step % every == 0 or is_end
        return is_due and bool(self.valid)

    @property
    def _current_evaluation(self) -> Evaluation | None:
        """That of the weights as they are now."""
        return self.evaluated if self.evaluated is not None and self.evaluated.step == self.run.step else None

    def _evaluated(self, epoch: int, can_stop: bool) -> Generator[Event, None, bool]:
        """Evaluate; returns whether this is the best evaluation so far, False if it was interrupted."""
        evaluation = self._evaluate(epoch, can_stop)
        if evaluation is None:
            return False
        self.evaluated = evaluation
        yield evaluation
        is_best = self._is_best(evaluation)
        plateau: Any = self.run.scheduler if self.run.stepped_after == "evaluation" else None
        if plateau is not None:
            metric = find_metric(parse_best(self.plan.best)[0], evaluation.values)
            assert metric is not None
            plateau.step(evaluation.values[metric])
        return is_best

    def _is_best(self, evaluation: Evaluation) -> bool:
        """Whether it is the best so far; from now on it is known as that."""
        return self.best.add(evaluation, str(self.plan.folder / files.FOLDER / files.step_name(evaluation.step)))

    def _gather_peaks(self) -> None:
        self.spans.begin(EVALUATING)
        self.peaks = {
            name: size
            for peaks in self.team.world.gather(devices.peak_bytes(self.team.world))
            for name, size in peaks.items()
        }

    def _evaluate(self, epoch: int, can_stop: bool) -> Evaluation | None:
        self._gather_peaks()
        if not self.valid:
            return None
        started = time.perf_counter()
        try:
            with self.run.averaged():
                values = self._values(can_stop)
        except Interrupted:
            return None
        return Evaluation(
            step=self.run.step,
            epoch=epoch,
            values=self._agreed(values),
            samples=values.num_samples,
            seconds=time.perf_counter() - started,
            train_loss=self.tally.train_loss,
        )

    def _values(self, can_stop: bool) -> Means:
        """Of all validation sets."""
        values: dict[str, float] = {}
        num_samples = 0
        for set_, loader in self.valid.items():
            found = self.team.evaluate(
                LossAndMetrics(self.task), self._model, loader, scores=self.scores, can_stop=can_stop
            )
            values |= {prefixed(set_, name): value for name, value in found.items()}
            num_samples += found.num_samples
        return Means(values, num_samples)

    def _agreed(self, values: dict[str, float]) -> dict[str, float]:
        """Those of rank 0, where all ranks decide by them: whether to save or to stop, the learning rate."""
        deciding = (self.plan.evaluate_every, self.plan.stop_after, self.run.stepped_after == "evaluation")
        found: dict[str, float] = self.team.world.gather(dict(values))[0] if any(deciding) else dict(values)
        return found

    def _save(self, is_best: bool = False, evaluation_due: bool = False) -> None:
        started = time.monotonic()
        current, best = self._current_evaluation, self.best.best
        with self.spans.during(SAVING):
            self.saved = self.run.save(
                self.checkpoints,
                keep=self.plan.keep,
                is_best=is_best,
                in_background=True,
                valid=current.values if current is not None else {},
                plan=self.plan.to_json(),
                evaluation_due=evaluation_due,
                so_far=asdict(
                    files.Totals(
                        tally=self.tally,
                        best=best.value if best is not None else None,
                        evaluation=current,
                        best_so_far=self.best,
                    )
                ),
            )
        self._save_interval.saved(time.monotonic() - started)

    def _peak_bytes(self) -> dict[str, int]:
        return {**self.peaks, **devices.peak_bytes(self.team.world)}

    def _sum_up(self, shown: str | None, seconds: float) -> Summary:
        run = self.plan.folder
        return Summary(
            strategy=self.plan.strategy,
            devices=list(self.plan.devices),
            steps=self.tally.steps,
            samples=self.tally.samples,
            train_loss=self.tally.train_loss,
            valid=self.evaluated.values if self.evaluated is not None else {},
            samples_per_second=self.tally.samples_per_second,
            seconds=seconds,
            peak_bytes={**self._peak_bytes()},
            checkpoint=str(run / files.FOLDER / self.saved.name) if self.saved is not None else None,
            run=str(run),
            shown=shown,
            audit=self._audit(),
            best=self.best.best,
            stopped=self.stopped,
        )


def _has_dropout(model: nn.Module) -> bool:
    """Whether a layer drops anything."""
    kinds = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
    return any(isinstance(layer, kinds) and layer.p > 0 for layer in model.modules())


def perform(
    plan: Plan, task: Task, run_folder: Path, *more_signals: signal.Signals, make: Callable[..., Trainer] = Trainer
) -> Iterator[Event]:
    """Run the plan on this rank, yielding its events; rank 0 writes the Record.

    In a folder that already has a Record, the run continues it. SIGTERM, SIGUSR1, SIGHUP and `more_signals` request a
    stop: all ranks agree on a step, save there, and raise Preempted. `make` makes another kind of Trainer.
    """
    use_huge_pages()
    set_up_torch(plan)
    team = join_team(
        *(plan.strategy, plan.devices, plan.precision, plan.seed),
        needs_group=False,
        mesh=plan.mesh,
        schedule=plan.pipeline_schedule,
        cpu_offload=plan.cpu_offload,
    )
    if plan.virtual_replicas is not None:
        team = team.with_replicas(plan.virtual_replicas)
    team.world.communication.link = plan.link
    if plan.check_collectives:
        from evenstep.distributed.collective_check import check_collectives

        check_collectives(team.world)
    if plan.resume is not None and team.world.size > 1:
        from evenstep.checkpoint.broadcast import broadcast_checkpoint

        plan = replace(plan, resume=broadcast_checkpoint(team.world, plan.resume))
    with team.requests.listening(*SIGNALS, *more_signals), explain_worker_death():
        yield from _perform(make(plan, task, run_folder, team))


def _perform(trainer: Trainer) -> Iterator[Event]:
    team = trainer.team
    yield from trainer.resume()
    if trainer.plan.resume is not None and team.world.size > 1:
        from evenstep.checkpoint.broadcast import remove_copies

        remove_copies()
    record: RecordWriter | None = None
    if team.world.is_main:
        record = RecordWriter(trainer.folder, trainer.plan, devices.facts(team.world), trainer.facts)
        trainer.run.before_save = record.flush
    try:
        for event in trainer.events():
            if record is not None and not isinstance(event, str):
                record.append(event)
            yield event
        if record is not None:
            record.flush()
        team.world.spans.begin(ENDING)
        # No rank exits while another still reads what it sent.
        team.world.barrier()
    except BadInput as error:
        if trainer.run.step == 0:
            raise
        # Bad input is refused before anything starts; this happened during training.
        raise TrainingError(f"at step {trainer.run.step + 1}: {error}") from error
    except Exception as error:
        if is_worker_death(error):
            raise
        note(error, trainer.run.step + 1, trainer.trainable_names(), trainer.situation(error))
        raise
    finally:
        trainer.close()
        if record is not None:
            record.close()


def set_up_torch(plan: Plan) -> None:
    """Configure torch in this process, before the first computation."""
    fixed = devices.threads_for_replicas() if plan.virtual_replicas is not None else None
    torch.set_num_threads(devices.share_threads(plan.threads or fixed, plan.devices))
    if plan.deterministic:
        # Required by cuBLAS, which reads it when it is first used.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = plan.deterministic
    torch.backends.cudnn.benchmark = plan.cudnn_benchmark
    if plan.virtual_replicas is not None and not plan.deterministic:
        devices.choose_repeatable_kernels(plan.devices)
