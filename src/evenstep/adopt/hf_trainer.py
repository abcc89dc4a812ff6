"""`adopt.trainer`: what a Trainer of transformers was given, as a Task."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from evenstep.adopt.adopted import AdoptedTask, FirstSteps, ModelCopies, alone, moved
from evenstep.adopt.hf_metrics import TrainerMetrics, best_of, left_out
from evenstep.errors import TaskError
from evenstep.private_apis import num_items_in_batch
from evenstep.sampling.rng import fork_rng
from evenstep.task import Amount, Task

INSTEAD = {
    "train": "its loop",
    "_inner_training_loop": "its loop",
    "_run_epoch": "its loop",
    "training_step": "how a step is computed",
    "get_batch_samples": "how batches are read",
    "_prepare_inputs": "how batches are prepared",
    "_clip_grad_norm": "how gradients are clipped",
}
"""Methods of a Trainer that evenstep does not call, and what a subclass changes by them."""
ARGUMENTS = {
    "deepspeed": "use --strategy fsdp",
    "fsdp": "use --strategy fsdp",
    "auto_find_batch_size": "it changes the batch; leave it out",
    "neftune_noise_alpha": "add the noise in the model",
    "torch_compile": "leave it out, and use --compile",
    "use_liger_kernel": "apply the kernel to the model yourself, before the Trainer is made",
}
"""Arguments that are refused if they are set, and what to do instead."""
LOOPS = ("reduce_lr_on_plateau", "greedy")
OWN_CALLBACKS = ("transformers.trainer_callback", "transformers.integrations", "transformers.utils.notebook")


def adopt_trainer(make: Callable[[], Any]) -> AdoptedTask:
    """The task of a Trainer, or of a function that makes one."""
    import transformers

    with alone(), fork_rng():
        trainer = make if isinstance(make, transformers.Trainer) else make()
        if not isinstance(trainer, transformers.Trainer):
            raise TaskError(
                f"adopt.trainer takes a transformers.Trainer, or a function that makes one; got {trainer!r}"
            )
        refuse(trainer)
        return Adoption(trainer).task()


def refuse(trainer: Any) -> None:
    """Raise TaskError, by name, for what a Trainer does that a Task does not."""
    import transformers

    kind, args = type(trainer), trainer.args
    for name, changes in INSTEAD.items():
        if getattr(kind, name, None) is not getattr(transformers.Trainer, name, None):
            raise _refusal(f"{kind.__name__}.{name} changes {changes}; write a Task, or a custom loop")
    for callback in trainer.callback_handler.callbacks:
        name = type(callback).__name__
        if name == "EarlyStoppingCallback":
            raise _refusal("EarlyStoppingCallback: leave it out, and use --stop-after")
        if not type(callback).__module__.startswith(OWN_CALLBACKS):
            raise _refusal(f"the callback {name} may change the training; write what it does into Task.after")
    for name, advice in ARGUMENTS.items():
        if getattr(args, name, None):
            raise _refusal(f"TrainingArguments({name}=...): {advice}")
    if (
        str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)) in LOOPS
        or trainer.lr_scheduler is not None
    ):
        raise _refusal(
            "its learning rate scheduler; give lr_scheduler_type one that counts steps, or set Task.scheduler"
        )
    if args.world_size > 1:
        raise TaskError(
            "the Trainer was made in one of several processes, and has joined them itself; give the function that "
            "makes it:\nevenstep.adopt.trainer(make_trainer)"
        )
    if trainer.train_dataset is None:
        raise TaskError("the Trainer has no train_dataset; give it one")


def _refusal(what: str) -> TaskError:
    return TaskError(f"this Trainer cannot be adopted: {what}")


def _seed_as_when_made(trainer: Any) -> None:
    """Seed as the making of a Trainer does, which its loader is made after: the order of the samples depends on it."""
    from transformers import set_seed

    set_seed(trainer.args.seed)


class OriginalOrder:
    """The samples of each epoch in the order in which the Trainer's own loader takes them."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._loader.batch_sampler.sampler)

    def __iter__(self) -> Iterator[int]:
        # Not through its batches, of which drop_last may have left one out.
        sampler = self._loader.batch_sampler.sampler
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(self._epoch)
        return iter(sampler)


class Adoption:
    """A Trainer, taken apart."""

    name = "transformers.Trainer"

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        _seed_as_when_made(trainer)
        self._loader = trainer.get_train_dataloader()
        self._is_stream = isinstance(self._loader.dataset, torch.utils.data.IterableDataset)
        self._normalizes = self._divides_by_items()

    def task(self) -> AdoptedTask:
        trainer, args = self.trainer, self.trainer.args
        batch = args.per_device_train_batch_size * args.gradient_accumulation_steps
        metrics = TrainerMetrics.of(trainer)
        return AdoptedTask(
            model=ModelCopies(trainer.model, self._prepare),
            train=self._loader.dataset,
            valid=self._valid(),
            collate=self._loader.collate_fn,
            sampler=None if self._is_stream else OriginalOrder(self._loader),
            drop_last=args.dataloader_drop_last,
            loss=self.loss,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            batch=batch,
            steps=self._steps(batch),
            epochs=max(1, int(args.num_train_epochs)),
            clip=args.max_grad_norm or None,
            accumulate=args.gradient_accumulation_steps,
            precision="bf16" if args.bf16 else "fp16" if args.fp16 else None,
            predict=metrics.predict if metrics is not None else None,
            scores={"": metrics.score} if metrics is not None else None,
            best=best_of(trainer, metrics),
            original=self,
            left_out=tuple(left_out(trainer, metrics)),
        )

    def loss(self, model: nn.Module, batch: Any) -> Amount:
        """The mean over samples; or, where the Trainer divides by the labels that count, the pair (sum, count)."""
        device = next(value.device for value in batch.values() if isinstance(value, torch.Tensor))
        count = num_items_in_batch(self.trainer, batch, device)
        if count is None or not self._normalizes:
            mean: torch.Tensor = self.trainer.compute_loss(model, dict(batch), num_items_in_batch=count)
            return mean
        return self.trainer.compute_loss(model, dict(batch), num_items_in_batch=torch.ones_like(count)), count

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Its optimizer, with its groups."""
        made = self.trainer.create_optimizer()
        return moved(made, self.trainer.model.parameters(), parameters)

    def scheduler(self, optimizer: torch.optim.Optimizer, num_steps: int) -> LRScheduler:
        """Its schedule, for this number of steps."""
        self.trainer.lr_scheduler = None
        made: LRScheduler = self.trainer.create_scheduler(num_steps, optimizer)
        self.trainer.lr_scheduler = None
        return made

    def first_steps(self, num: int, task: Task, seed: Callable[[int], None]) -> FirstSteps:
        """Trainer.train, for a few steps; nothing is saved, evaluated or reported."""
        trainer, args = self.trainer, self.trainer.args
        step, losses = trainer.training_step, list[float]()

        def training_step(*arguments: Any, **named: Any) -> torch.Tensor:
            if len(losses) <= trainer.state.global_step:
                seed(trainer.state.global_step)
                losses.append(0.0)
            loss: torch.Tensor = step(*arguments, **named)
            losses[-1] += loss.item()
            return loss

        trainer.training_step = training_step
        args.max_steps = num
        args.save_strategy, args.eval_strategy, args.logging_strategy = "no", "no", "no"
        for callback in list(trainer.callback_handler.callbacks):
            if type(callback).__name__ != "DefaultFlowCallback":
                trainer.remove_callback(callback)
        _seed_as_when_made(trainer)
        with alone():
            trainer.train()
        weights = {name: value.detach().cpu() for name, value in trainer.model.state_dict().items()}
        return FirstSteps(losses, weights)

    def _prepare(self, model: nn.Module) -> None:
        args = self.trainer.args
        if args.gradient_checkpointing:
            model.gradient_checkpointing_enable(args.gradient_checkpointing_kwargs)  # type: ignore[operator]

    def _valid(self) -> Any:
        given = self.trainer.eval_dataset
        if given is None:
            return None
        if isinstance(given, dict):
            return {name: self.trainer.get_eval_dataloader(one).dataset for name, one in given.items()}
        return self.trainer.get_eval_dataloader().dataset

    def _steps(self, batch: int) -> int | None:
        """The number of steps, where it is not a whole number of epochs."""
        args = self.trainer.args
        if args.max_steps > 0:
            return int(args.max_steps)
        if args.num_train_epochs == int(args.num_train_epochs):
            return None
        per_epoch: int = math.ceil(len(self._loader.dataset) / batch)
        return math.ceil(float(args.num_train_epochs) * per_epoch)

    @torch.no_grad()
    def _divides_by_items(self) -> bool:
        """Whether the loss is a sum that is divided by `num_items_in_batch`, tried on a few samples.

        Some models take that argument and ignore it.
        """
        few = self._loader.collate_fn([self._loader.dataset[0]]) if not self._is_stream else {}
        count = num_items_in_batch(self.trainer, few, torch.device("cpu")) if "labels" in few else None
        if count is None:
            return False
        model = self.trainer.model.cpu().eval()
        once, twice = (
            self.trainer.compute_loss(model, dict(few), num_items_in_batch=torch.tensor(number)).item()
            for number in (1, 2)
        )
        return bool(math.isclose(once, 2 * twice, rel_tol=1e-3))
