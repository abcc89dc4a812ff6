"""The five verbs of a training loop: join, wrap, backward, step, evaluate.

team = evenstep.join(strategy="ddp")                    # alone, under evenstep, or under torchrun
model = team.wrap(Net())
optimizer = torch.optim.Adam(model.parameters())
for batch in team.loader((images, labels), batch=64):   # 64 is the global batch
    loss = team.backward(loss_function, model, batch)   # the mean over the global batch
    team.step(optimizer)

`Refusals` raises for what would otherwise train wrongly and silently.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from evenstep.data.adapt import adapt, per_rank
from evenstep.data.augmentation import Augment
from evenstep.data.consistency_check import check_consistent, check_equal_lengths
from evenstep.data.feature_scaler import unfitted
from evenstep.data.loader import Batch, Loader, MicroBatch
from evenstep.data.prefetch import LoaderOptions, unchanged
from evenstep.distributed.devices import (
    available_devices,
    choose_repeatable_kernels,
    keep_freed_memory,
    return_freed_memory,
    threads_for_replicas,
)
from evenstep.distributed.heartbeat import EVALUATING, FORWARD, UPDATE
from evenstep.distributed.preemption import Requests
from evenstep.distributed.worker_process import read_rank
from evenstep.distributed.world import World, join_world
from evenstep.errors import NonFiniteLoss, PlanError, TaskError
from evenstep.mesh import arrange, check_precision
from evenstep.monitor.nonfinite import NonFiniteMean, explain
from evenstep.plan import PrecisionName, check_offload, check_replicas
from evenstep.sampling.rng import (
    Draws,
    derive_seed,
    fork_rng,
    replica_seed,
    restore_rng_states,
    rng_states,
    seed_devices,
    seed_everything,
)
from evenstep.strategies.base import (
    NOTHING,
    DistributedModel,
    Frozen,
    StrategySettings,
    forget,
    load_strategy,
    on,
    one_after_another,
)
from evenstep.strategy_facts import DEFAULT, DEFAULT_IN_ONE_PROCESS, REFERENCE, STRATEGIES, with_processes
from evenstep.task import Amount
from evenstep.training.evaluation import Evaluator, Means, NamedSums, named
from evenstep.training.fused_optimizer import FusedAdam
from evenstep.training.gradient_accumulation import ReplicaBackward, accumulate_gradients
from evenstep.training.logged_values import StepLogs
from evenstep.training.loss_amount import as_sum
from evenstep.training.loss_context import LossContext
from evenstep.training.loss_weighting import LateLoss, LossTotal, MeanLoss, scale_gradients
from evenstep.training.optimizer_compatibility import refuse_closure, sharded_updates
from evenstep.training.optimizer_step import UpdateSettings, WeightUpdate, step_optimizer
from evenstep.training.precision import Precision
from evenstep.typed_values import check_choice

if TYPE_CHECKING:
    from evenstep.data.own_batches import OwnBatches
    from evenstep.training.replica_seeds import Seeds
    from evenstep.training.scores import Scores
    from evenstep.training.whole_matrix_update import WholeUpdates


class Refusals:
    """Checks each wrapped model and each optimizer once."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._known: set[int] = set()
        self._trainable: dict[DistributedModel, list[bool]] = {}

    def learn(self, model: DistributedModel) -> None:
        """Remember a wrapped model."""
        self._known |= {id(weight) for weight in model.weights}
        self._trainable[model] = [weight.requires_grad for weight in model.weights]

    def refuse_model(self, model: DistributedModel) -> None:
        """Before each backward."""
        if self._world.num_replicas > 1:
            self._follow(model)
        if model.is_checked:
            return
        # One that has seen no data would let everything through as it is.
        if unfitted(model.module):
            raise TaskError(
                "the model has a Scaler that has seen no data; fit it before the model is wrapped:\n"
                "scaler.fit(loader.whole_data(), team.world)"
            )
        model.is_checked = True

    def _follow(self, model: DistributedModel) -> None:
        """Strategies learn at the start which parameters train; all ranks must change that after the same step."""
        flags = [weight.requires_grad for weight in model.weights]
        if flags == self._trainable[model] or not any(flags):
            return
        if any(other != flags for other in self._world.gather(flags)):
            raise TaskError("requires_grad of some parameters changed on some ranks only; change it on all of them")
        self._trainable[model] = flags
        model.follow_requires_grad()

    def refuse_optimizer(self, optimizer: torch.optim.Optimizer) -> WholeUpdates | None:
        """Before its first update: an optimizer over parameters of an unwrapped model would train nothing.

        Returns how it updates sharded parameters that it needs whole. All ranks call this.
        """
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        if any(id(weight) not in self._known for weight in weights):
            raise TaskError(
                "the optimizer holds parameters that are not the team's; make it after team.wrap, from what that "
                "returned:\nmodel = team.wrap(Net()); optimizer = Adam(model.parameters())"
            )
        refuse_closure(optimizer)
        return sharded_updates(optimizer, self._world)


def refuse_lazy(model: nn.Module) -> None:
    """Raise TaskError for layers that get their shapes in their first forward: parameters are distributed before it."""
    lazy = [
        f"{name or 'the model'} ({type(layer).__name__})"
        for name, layer in model.named_modules()
        if any(map(is_lazy, (*layer.parameters(recurse=False), *layer.buffers(recurse=False))))
    ]
    if lazy:
        raise TaskError(
            f"{lazy[0]} has no shape before its first forward, and parameters are distributed before that;\n"
            "run one where the model is made: net = Net(); net(torch.zeros(1, 3, 32, 32)); return net"
        )


T = TypeVar("T")
Loss = Callable[..., Amount]
Models = DistributedModel | Sequence[DistributedModel]
BATCHES_BETWEEN_AGREEMENTS = 8


class Interrupted(Exception):
    """An evaluation was interrupted by a request to stop."""


def join(
    strategy: str | None = None,
    devices: Sequence[str] | None = None,
    precision: PrecisionName = "fp32",
    seed: int = 0,
    virtual_replicas: int | None = None,
    mesh: str | None = None,
    cpu_offload: bool = False,
) -> Team:
    """Become one of the processes that train together; a process alone is a team of one.

    `devices` are those of this machine, one for each process (for `dp`: one for each replica). torch's default process
    group exists afterwards, also for one process, so that other libraries can query rank and size. With
    `virtual_replicas`, the training has the same bits on any number of devices up to that. `mesh` arranges the ranks of
    a strategy that splits or shards models: "data=2,tensor=2", "fsdp=2,tensor=2", "data=2,fsdp=4". With
    `cpu_offload`, fsdp keeps its shards in host memory.
    """
    if virtual_replicas is not None:
        choose_repeatable_kernels(devices or available_devices(read_rank()))
    team = join_team(strategy, devices, precision, seed, needs_group=True, mesh=mesh, cpu_offload=cpu_offload)
    if virtual_replicas is None:
        return team
    torch.set_num_threads(threads_for_replicas())
    return team.with_replicas(virtual_replicas)


def join_team(
    strategy: str | None,
    devices: Sequence[str] | None,
    precision: PrecisionName,
    seed: int,
    *,
    needs_group: bool,
    mesh: str | None = None,
    schedule: str = "1f1b",
    cpu_offload: bool = False,
) -> Team:
    """The same; a process alone makes a process group only if that is needed."""
    _, size, _ = read_rank()
    chosen = strategy or _default_strategy(size, devices or ())
    check_choice("strategy", chosen, STRATEGIES, PlanError)
    many = STRATEGIES[chosen].processes_per_device
    if size > 1 and not many:
        raise PlanError(f"{chosen} runs in one process, and there are {size}; use {with_processes()}")
    names = devices or available_devices(read_rank())
    if cpu_offload:
        check_offload(STRATEGIES[chosen], names, precision, None)
    world = join_world(names, needs_group=many or needs_group)
    if STRATEGIES[chosen].drives_from_first:
        world = replace(world, devices=world.devices[:1], delegated=world.devices[1:])
    check_precision(STRATEGIES[chosen], precision)
    arranged = arrange(mesh, STRATEGIES[chosen], size)
    if arranged is not None:
        world = replace(
            world,
            ranks_per_replica=arranged.ranks_per_replica,
            num_shards=arranged.num_shards,
            schedule=schedule,
        )
    seed_everything(seed)
    return Team(world, chosen, Precision(precision, world.device), seed, cpu_offload)


def _default_strategy(num_processes: int, devices: Sequence[str]) -> str:
    if num_processes > 1:
        return DEFAULT
    return DEFAULT_IN_ONE_PROCESS if len(devices) > 1 else REFERENCE


class Team:
    """This process's part in a training: its rank and devices, its strategy, its precision."""

    def __init__(self, world: World, strategy: str, precision: Precision, seed: int, cpu_offload: bool = False) -> None:
        self.world = world
        self.precision = precision
        self.seed = seed
        self.facts = STRATEGIES[strategy]
        self.strategy = load_strategy(strategy, StrategySettings(half=precision.half, cpu_offload=cpu_offload))
        self._cpu_offload = cpu_offload
        self.models: list[DistributedModel] = []
        """What `wrap` returned."""
        self.called_in_loss: set[str] = set()
        """What losses have called of `evenstep.training.loss_context`."""
        self._log_names: list[str] = []
        """What losses have logged, in the order that all ranks agreed on."""
        self.resumed_at = (0, 0)
        """The steps taken and the epoch of the checkpoint that was loaded."""
        self.requests = Requests()
        self._settings: WeakKeyDictionary[torch.optim.Optimizer, UpdateSettings] = WeakKeyDictionary()
        self._refusals = Refusals(world)
        self.current: Batch | None = None
        """The batch of the last backward."""
        self.grad_norm: torch.Tensor | None = None
        """Of the last step that clipped, before clipping, on the device."""
        self._own_batches: OwnBatches | None = None
        self.virtual_seeds: Seeds | None = None
        """Of virtual replicas, if there are such."""
        self._repeats = 0
        self._keys: tuple[int, list[int]] = (-1, [])
        """The epoch, and the key of dropout's seed for each replica."""

    def with_replicas(self, num: int) -> Team:
        """The same team, whose batches are cut into virtual replicas."""
        from evenstep.training.replica_seeds import Seeds

        check_replicas(num, self.world.num_replicas, self.facts)
        if self._cpu_offload:
            check_offload(self.facts, (), self.precision.name, num)
        self.world = replace(self.world, num_virtual=num)
        if self.world.device.type == "cpu":
            keep_freed_memory()
        self._refusals = Refusals(self.world)
        self._settings.clear()
        self.virtual_seeds = Seeds(self.seed, self.world, "dropout")
        return self

    def wrap(self, model: nn.Module, sample: Callable[[nn.Module], object] | None = None) -> DistributedModel:
        """Put the model on every device of the team.

        `sample(model)` computes what a step does, on any data: from it fsdp learns which layers' parameters are used
        outside of these layers (weights averaged in a buffer, a penalty on all weights), and keeps those together.
        """
        refuse_lazy(model)
        fitted = self.precision.fit(model)
        if self.world.size > 1:
            from evenstep.monitor.replica_check import refuse_different_models

            refuse_different_models(self.world, fitted)
        distributed = self.strategy.wrap(fitted, self.world, sample)
        if self.virtual_seeds is not None:
            from evenstep.training.virtual_replicas import refuse_sparse

            refuse_sparse(distributed)
        self._refusals.learn(distributed)
        self.models.append(distributed)
        if self.world.size > 1 and self.world.device.type == "cpu" and (self.facts.shards or self.facts.model_axis):
            # Of the whole model, and of what it computed to see how it can be divided.
            return_freed_memory()
        return distributed

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse an optimizer that `step` could not use; `step` does so too, after the first backward."""
        self._settings_of(optimizer)

    def _settings_of(self, optimizer: torch.optim.Optimizer) -> UpdateSettings:
        found = self._settings.get(optimizer)
        if found is None:
            whole = self._refusals.refuse_optimizer(optimizer)
            found = self._settings[optimizer] = UpdateSettings(
                scaler=self.precision.scaler,
                is_exact=self.world.num_virtual is not None,
                ranks=self.world.model_ranks if self.world.ranks_per_replica > 1 else None,
                whole=whole,
                adam=FusedAdam(self.world.device) if self.world.device.type == "cpu" else None,
            )
        return found

    def loader(
        self,
        data: Any,
        batch: int | None = None,
        *,
        shuffle: bool = True,
        sampler: Any = None,
        accumulate: int = 1,
        collate: Callable[[list[Any]], Any] | None = None,
        augment: Augment | None = None,
        augment_batch: Callable[[Any, Draws], Any] | None = None,
        workers: int | None = None,
        resident: bool = False,
        drop_last: bool = False,
        mine: bool = False,
        what: str = "train",
    ) -> Loader:
        """This process's part of every global batch of `data`, in the order of `sampler`, or shuffled, or as it is.

        All processes give the same data, and compare what they read in the first batches. `mine=True` is for data
        that each process has for itself, such as what it has collected: as many samples on each, all of which are
        used, an equal part of every batch from each. `what` is its name in messages. `batch` is the global batch; that
        of a DataLoader, if left out. `drop_last` leaves out a short last batch of an epoch.
        """
        adopted = adapt(data, collate, sampler, what, shuffle=shuffle).dropping(drop_last)
        batch = batch if batch is not None else adopted.batch
        if batch is None:
            raise TaskError("team.loader needs the size of the global batch: team.loader(data, batch=64)")
        if mine and self.world.num_virtual is not None:
            raise TaskError(
                "mine=True is data of one process, and what virtual replicas compute does not depend on processes; "
                "give all processes the same data, without mine=True"
            )
        if mine and self.world.data_size > 1:
            adopted = per_rank(adopted, self.world.data_size)
        order = adopted.order(self.seed, batch)
        if order is not None and order.num_ranks > 1:
            check_equal_lengths(self.world, order)
        reading = LoaderOptions(
            seed=self.seed,
            accumulate=accumulate,
            augment=augment,
            augment_batch=augment_batch,
            workers=workers if workers is not None else adopted.workers,
            worker_init=adopted.worker_init,
            dataset=getattr(data, "dataset", data),
            drop_last=adopted.drop_last,
            resident=resident,
            compare=not mine,
            fit=self._fit,
        )
        return Loader(adopted.source, order, self.world, batch, reading)

    @property
    def _fit(self) -> Callable[[torch.Tensor], torch.Tensor]:
        return self.precision.fit_tensor if self.precision.name == "fp64" else unchanged

    @property
    def own_batches(self) -> OwnBatches:
        """The steps of a loop that has no loader, or none that lasts."""
        if self._own_batches is None:
            from evenstep.data.own_batches import OwnBatches

            self._own_batches = OwnBatches(self.world, self._fit)
        return self._own_batches

    def backward(self, loss: Callable[[Any, Any], Amount], model: Models = (), batch: Any = None) -> MeanLoss:
        """Compute the gradients of the global batch; returns its mean loss, a float that knows its `count`.

        `batch` is one of a loader, or tensors with a row for each sample: this process's part of the global batch,
        which may be larger than another's. Of several models the first is trained, and the others are frozen:
        `backward(loss, (d, g), batch)` calls `loss((d, g), data)`.
        """
        if not callable(loss):
            # model and batch have defaults for this: in `backward(loss(model, batch))` they are missing.
            raise TaskError(
                f"backward takes the function that computes the loss, and got a {type(loss).__name__}; give the "
                "function: team.backward(loss, model, batch)"
            )
        models = (model,) if isinstance(model, DistributedModel) else _as_tuple(model)
        if not isinstance(batch, Batch):
            batch = self.own_batches.make(batch)
            # A second backward before a step: of other samples, at the same position.
            is_again = self.current is not None and self.current.span == batch.span and not self.current.is_finished
        else:
            is_again = batch is self.current
        repeat = self._repeats + 1 if is_again else 0
        with Frozen(models[1:]) if len(models) > 1 else NOTHING:
            return self.compute_gradients(models, batch, partial(self._on_replicas, loss, models, batch), repeat)

    def launch(self, loss: Loss, models: tuple[DistributedModel, ...], batch: Batch) -> Launched:
        """`backward` of a loader's batch on GPUs, which reads nothing: its loss is read when later steps run."""
        repeat = self._repeats + 1 if batch is self.current else 0
        with Frozen(models[1:]) if len(models) > 1 else NOTHING:
            return self.launch_gradients(
                models, batch, partial(self._on_replicas, loss, models, batch), repeat, is_late=True
            )

    def launch_local(self, loss: Loss, model: DistributedModel, batch: Batch, totals: LossTotal) -> Launched:
        """`backward` of this process's part of a batch alone: nothing is sent."""
        self._prepare((model,), batch, 0)
        self._on_replicas(loss, (model,), batch, totals)
        return Launched(self, model, batch, totals, [])

    def _on_replicas(self, loss: Loss, models: tuple[DistributedModel, ...], batch: Batch, totals: LossTotal) -> None:
        context = LossContext(self.world, batch, self.called_in_loss, partial(self._step_of, batch, models[0]))
        backward = ReplicaBackward(self.world, self.precision, loss, models, totals, context)
        if self.virtual_seeds is not None:
            from evenstep.training.virtual_replicas import VirtualBackward

            VirtualBackward(backward, batch, self.virtual_seeds, self._repeats).run()
            return
        accumulate_gradients(backward, batch)

    def compute_gradients(
        self,
        models: tuple[DistributedModel, ...],
        batch: Batch,
        compute: Callable[[LossTotal], None],
        repeat: int = 0,
    ) -> MeanLoss:
        """The mean loss of a global batch whose gradients and losses `compute` leaves behind.

        The `repeat`-th backward of one batch draws other numbers for dropout than the first.
        """
        launched = self.launch_gradients(models, batch, compute, repeat)
        mean = launched.read()
        launched.complete(launched.totals.late_factor)
        return mean

    def launch_gradients(
        self,
        models: tuple[DistributedModel, ...],
        batch: Batch,
        compute: Callable[[LossTotal], None],
        repeat: int = 0,
        is_late: bool = False,
    ) -> Launched:
        """The same, before the loss is read."""
        earlier = self._prepare(models, batch, repeat)
        totals = self._loss_total(batch, is_late)
        compute(totals)
        return Launched(self, models[0], batch, totals, earlier)

    def _prepare(
        self, models: tuple[DistributedModel, ...], batch: Batch, repeat: int
    ) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """Before a backward; returns gradients of an earlier one."""
        self._refusals.refuse_model(models[0])
        check_consistent(self.world, batch)
        self.start_batch(batch, repeat)
        earlier = _put_aside(models[0])
        # Others may be waited for from here on.
        self.world.spans.begin(FORWARD)
        for one in models:
            one.sync_replicas(is_training=True)
        return earlier

    def _loss_total(self, batch: Batch, is_late: bool) -> LossTotal:
        if self.virtual_seeds is not None:
            from evenstep.training.virtual_replicas import VirtualLoss

            return VirtualLoss(self.world, batch, self.requests.encode(), self._log_names)
        logs = StepLogs(self.world, self._log_names)
        make = LateLoss if is_late else LossTotal
        return make(self.world, batch.num_samples, self.requests.encode(), logs)

    def start_batch(self, batch: Batch, repeat: int = 0, seeds: bool = True) -> None:
        """Seed dropout for this batch, unless nothing draws: different on every replica, the same after a restart."""
        self.current, self._repeats = batch, repeat
        if not seeds or self.virtual_seeds is not None:
            return
        epoch, start = batch.span.epoch, batch.span.start
        if self._keys[0] != epoch:
            self._keys = (epoch, [derive_seed(self.seed, "dropout", epoch, replica) for replica in self.world.replicas])
        seed_devices([replica_seed(key, start, repeat) for key in self._keys[1]], self.world.devices)

    def step(self, optimizer: torch.optim.Optimizer, clip: float | None = None) -> WeightUpdate:
        """Update the weights and forget the gradients; false if fp16's scaler had every rank skip this one.

        `clip=math.inf` measures the norm of the gradients and clips nothing.
        """
        taken = self.update(optimizer, clip)
        if self._own_batches is not None:
            self._own_batches.stepped(optimizer)
        if taken.grad_norm is not None:
            self.grad_norm = taken.grad_norm
        self.finish_batch()
        return taken

    def update(self, optimizer: torch.optim.Optimizer, clip: float | None = None) -> WeightUpdate:
        """The same, before another update in the same step."""
        self.world.spans.begin(UPDATE)
        return step_optimizer(optimizer, clip, self._settings_of(optimizer))

    def finish_batch(self) -> None:
        """The step of the current batch is taken."""
        if self.current is not None and not self.current.is_finished:
            self.current.finish()
            if self._own_batches is not None and self.current.loader is not self._own_batches:
                self._own_batches.count(self.current)

    def evaluate(
        self,
        function: Callable[[Any, Any], Mapping[str, Amount]],
        model: DistributedModel,
        batches: Loader,
        *,
        scores: Scores | None = None,
        can_stop: bool = False,
    ) -> Means:
        """Means of named values over all of `batches`, every sample once, the same on every process; and `scores`.

        Where it `can_stop`, it raises Interrupted on all processes if any of them has a request to stop.
        """
        if not isinstance(batches, Loader):
            raise TaskError(f"evaluate takes what Team.loader returned, and got a {type(batches).__name__}")
        model.sync_replicas(is_training=False)
        sums = self._named_sums()
        num_samples = 0
        evaluate = Evaluator()
        replica_measure = partial(self._replica_measure, partial(self._values, function, model), evaluate)
        if scores is not None:
            scores.reset()
        # What virtual replicas draw in an evaluation does not change what is drawn after it.
        with model.evaluating(), NOTHING if self.virtual_seeds is None else fork_rng():
            for number, batch in enumerate(batches.whole_pass(), 1):
                self.world.spans.begin(EVALUATING)
                num_samples = batch.span.stop
                if can_stop and number % BATCHES_BETWEEN_AGREEMENTS == 0:
                    self._stop_together()
                context = LossContext(self.world, batch, at=self._at)
                if scores is not None:
                    scores.add(self, model, batch)
                for index, per_replica in enumerate(batch.micro_batches):
                    run = self.runner(model) if evaluate.has_succeeded else partial(self._try_alone, model, context)
                    measure = self.seeded(partial(replica_measure, context), batch, index)
                    for measured in run(measure, list(enumerate(per_replica))):
                        sums.add(measured)
        means = sums.means()
        return Means({**means, **(scores.compute(self.world) if scores is not None else {})}, num_samples)

    def _named_sums(self) -> NamedSums:
        if self.virtual_seeds is None:
            return NamedSums(self.world)
        from evenstep.training.virtual_replicas import ExactSums

        return ExactSums(self.world)

    def runner(self, model: DistributedModel) -> Callable[..., list[Any]]:
        """What calls a function for each replica: beside each other, unless they draw from one generator."""
        seeds = self.virtual_seeds
        return one_after_another if seeds is not None and seeds.share_generator else model.run

    def seeded(self, work: Callable[..., T], batch: Batch, index: int) -> Callable[..., T]:
        """`work(replica, micro_batch)` of an evaluation; the draws of virtual replicas do not depend on devices."""
        return work if self.virtual_seeds is None else self.virtual_seeds.seeded(work, batch, index)

    def _step_of(self, batch: Batch, model: DistributedModel) -> tuple[int, int]:
        """The number of the step in which a backward of this model is, and the epoch.

        After an update of one of several models, a backward of another one is still in the same step.
        """
        own = self._own_batches
        is_begun = batch.is_finished or (batch.loader is own and own is not None and not own.begins_step(model.weights))
        return batch.loader.num_finished + (not is_begun), batch.span.epoch

    def _at(self) -> tuple[int, int]:
        """The steps taken and the epoch, as an evaluation sees them."""
        batch = self.current
        return self.resumed_at if batch is None else (batch.loader.num_finished, batch.span.epoch)

    def _try_alone(
        self, model: DistributedModel, context: LossContext, work: Callable[..., T], arguments: list[tuple[Any, ...]]
    ) -> list[T]:
        """The first replica decides for all whether gradients are needed, before threads draw numbers."""
        before = rng_states()
        context.is_alone = len(self.world.devices) > 1
        found = one_after_another(work, arguments)
        if not context.is_alone or "gather" not in context.called:
            return found
        # What it computed is of no replica's own rows.
        restore_rng_states(before)
        context.is_alone = False
        return model.run(work, arguments)

    def _stop_together(self) -> None:
        """Raise Interrupted on all processes if one of them has a request to stop."""
        request_code = torch.full((), self.requests.encode(), dtype=torch.float64)
        work = self.world.total(request_code)
        if work is not None:
            work.wait()
        self.requests.agree(request_code.item())
        if self.requests.stop:
            raise Interrupted

    def infer(self, function: Callable[[Any], T], model: DistributedModel) -> T:
        """`function(model)` on the first replica of every process, without gradients; all processes must call it."""
        model.sync_replicas(is_training=False)
        with torch.no_grad(), model.evaluating():
            answer: T = model.loss_modules[0](function)
        return answer

    def _values(
        self,
        function: Callable[..., Mapping[str, Amount]],
        model: DistributedModel,
        replica: int,
        micro_batch: MicroBatch,
    ) -> Mapping[str, Amount]:
        """The named values of one replica's micro-batch."""
        with self.precision.autocast(self.world.devices[replica]):
            return named(model.loss_modules[replica](function, micro_batch.inputs))

    def _replica_measure(
        self,
        values: Callable[[int, MicroBatch], Mapping[str, Amount]],
        evaluate: Evaluator,
        context: LossContext,
        replica: int,
        micro_batch: MicroBatch,
    ) -> dict[str, torch.Tensor]:
        home = self.world.device
        with on(self.world.devices[replica]), context.on(replica, micro_batch.num_samples):
            found = evaluate(partial(values, replica, micro_batch))
        return {name: as_sum(amount, micro_batch.num_samples, name).to(home) for name, amount in found.items()}


class Launched:
    """A backward whose loss has not been read; on a GPU, it may still be running."""

    def __init__(
        self,
        team: Team,
        model: DistributedModel,
        batch: Batch,
        totals: LossTotal,
        earlier: list[tuple[nn.Parameter, torch.Tensor]],
    ) -> None:
        self.totals = totals
        self._team, self._model, self._earlier = team, model, earlier
        self._step, self._epoch = batch.loader.num_finished + 1, batch.span.epoch

    def read(self) -> MeanLoss:
        """Wait for the loss; NonFiniteLoss, on all ranks, if it is NaN or infinite."""
        team, totals = self._team, self.totals
        mean = totals.read()
        compute_seconds = totals.seconds_alone()
        team.requests.agree(totals.request_code)
        # Without communication (a measured ceiling) ranks diverge, and the loss means nothing.
        if not math.isfinite(mean) and not team.world.communication.is_off:
            forget(self._model.weights)
            loss = NonFiniteMean(mean, self._step, self._epoch, team.precision.name, totals.non_finite())
            raise NonFiniteLoss(explain(team.world, self._model, loss))
        return MeanLoss(mean, totals.count, compute_seconds, totals.logs.means())

    def complete(self, factor: float | torch.Tensor | None) -> None:
        """Multiply the gradients by what was not known before backward, and add those of an earlier backward."""
        if factor is not None:
            scale_gradients([weight.grad for weight in self._model.weights if weight.grad is not None], factor)
        for weight, gradient in self._earlier:
            weight.grad = gradient if weight.grad is None else weight.grad + gradient


def _put_aside(model: DistributedModel) -> list[tuple[nn.Parameter, torch.Tensor]]:
    """Gradients of an earlier backward, taken off their parameters: what is scaled or averaged next is not theirs."""
    # Copies: with gradient_as_bucket_view, DDP's gradients may be views of buckets that the next backward writes.
    earlier = [(weight, weight.grad.clone()) for weight in model.weights if weight.grad is not None]
    if earlier:
        forget(model.weights)
    return earlier


def _as_tuple(model: Models) -> tuple[DistributedModel, ...]:
    models = tuple(model) if isinstance(model, tuple | list) else (model,)
    if not models or not all(isinstance(one, DistributedModel) for one in models):
        odd = next((type(one).__name__ for one in models if not isinstance(one, DistributedModel)), "nothing")
        raise TaskError(f"backward takes what Team.wrap returned, one or a tuple of them, and got {odd}")
    return models
