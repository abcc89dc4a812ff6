"""One process per device; each runs a stage of the model, and micro-batches pass through all stages.

Every rank of a replica has the batch. The first stage calls the user's loss, whose call of the model ends where the
next stage begins; the last one calls the loss too, with a model that begins with what it received. So the loss may be
any function of one call of the model. torch's `distributed.pipelining` wants micro-batches of one size and a loss of
outputs and targets alone: a short last batch would have to be padded, with samples that a mean over the batch counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from evenstep.distributed.devices import leave_default_stream
from evenstep.distributed.slices import OnStage, place, place_buffer
from evenstep.distributed.world import World
from evenstep.errors import TaskError
from evenstep.internals import broadcast_coalesced, call_hooks, tree_leaves
from evenstep.strategies.base import NOTHING, DistributedModel, LossModule, Sample
from evenstep.strategies.ddp import SEND_BYTES, Averaging, send_from_rank_0, trained
from evenstep.strategies.pipeline_cut import StageCut, find_cut
from evenstep.strategies.single import Single
from evenstep.strategies.tensor import GroupChannel

HEADER = 12
"""Numbers that are sent before a tensor: its type, its dimensions."""
TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class StepTotals(Protocol):
    """The loss of a global batch."""

    is_late: bool

    def send(self) -> None:
        """Start the sum over ranks."""


class StageBackward(Protocol):
    """What a stage computes of a micro-batch, with everything that surrounds a loss."""

    @property
    def totals(self) -> StepTotals:
        """Of the step."""

    @property
    def models(self) -> tuple[DistributedModel, ...]:
        """The first one is trained."""

    def computed(self, stage: Callable[..., Any], micro_batch: Any) -> Any:
        """The output of a stage that is not the last."""

    def staged(self, stage: Callable[..., Any], micro_batch: Any, sends: bool) -> Callable[[], None]:
        """The loss on the last stage; returns its backward."""


class Handed(BaseException):
    """The output of a stage: raised where the next one begins, through the user's forward and loss."""

    def __init__(self, output: torch.Tensor) -> None:
        super().__init__()
        self.output = output


class Neighbours:
    """Sends tensors to the next and the previous stage; a group for each direction, so that none waits."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.ranks = world.model_ranks
        first = world.data_rank * world.ranks_per_replica
        every = [
            list(range(start, start + world.ranks_per_replica))
            for start in range(0, world.size, world.ranks_per_replica)
        ]
        groups = {ranks[0]: dist.new_group(ranks) for ranks in every}
        self._groups = {1: self.ranks.group, -1: groups[first]}
        self._pending: list[tuple[dist.Work, torch.Tensor]] = []

    def send(self, tensor: torch.Tensor, step: int) -> None:
        """To the next stage (1) or the previous one (-1), without waiting."""
        sent = tensor.detach().contiguous()
        header = torch.zeros(HEADER, dtype=torch.int64)
        header[: 2 + sent.ndim] = torch.tensor([TYPES.index(sent.dtype), sent.ndim, *sent.shape])
        arrived = self._world.spans.send("activations" if step > 0 else "gradients", [sent], waits=True)
        self._start(header.to(self._world.device), step)
        self._start(sent, step)
        arrived()

    def _start(self, tensor: torch.Tensor, step: int) -> None:
        work = dist.isend(tensor, group=self._groups[step], group_dst=self.ranks.rank + step)
        assert work is not None
        self._pending.append((work, tensor))

    def receive(self, step: int) -> torch.Tensor:
        """From the previous stage, what it sent to the next one (1); or from the next one, backwards (-1)."""
        self._world.heartbeat.collective()
        self._world.spans.part("communication")
        header = torch.zeros(HEADER, dtype=torch.int64, device=self._world.device)
        dist.recv(header, group=self._groups[step], group_src=self.ranks.rank - step)
        kind, ndim, *shape = header.tolist()
        tensor = torch.empty(shape[:ndim], dtype=TYPES[kind], device=self._world.device)
        dist.recv(tensor, group=self._groups[step], group_src=self.ranks.rank - step)
        return tensor

    def settle(self) -> None:
        """Wait until all that was sent has arrived."""
        for work, _ in self._pending:
            work.wait()
        self._pending.clear()


class StageModule(LossModule):
    """This rank's stage of a model; called as a loss module, it passes one batch through, for an evaluation."""

    def __init__(self, model: nn.Module, cut: StageCut, neighbours: Neighbours) -> None:
        super().__init__(model)
        self._neighbours = neighbours
        ranks = neighbours.ranks
        self.is_first, self.is_last = ranks.rank == 0, ranks.rank == ranks.size - 1
        self._own = cut.own(ranks.rank)
        self._arguments = cut.arguments
        self._between = {index for index, stage in enumerate(cut.stage_of) if 0 < stage < ranks.size - 1}
        # In a list: the blocks are registered in the model.
        self._blocks = [[model.get_submodule(name) for name in cut.blocks]]
        self._received: torch.Tensor | None = None
        self._seen: Any = None
        self._replace_others()

    def _replace_others(self) -> None:
        """Blocks of other stages hand over what they got, or give back what was received."""
        (blocks,) = self._blocks
        for index, block in enumerate(blocks):
            if index in self._own:
                continue
            # They have run, or will, on the rank of the block.
            for hooks in call_hooks(block):
                hooks.clear()
            if self.is_first and index == self._own[-1] + 1:
                vars(block)["forward"] = _hand_over
            else:
                vars(block)["forward"] = partial(self._begin if index == 0 else self._pass_on, index)
        if self.is_last:
            self.model.register_forward_pre_hook(self._on_meta, with_kwargs=True)

    def _begin(self, index: int, _: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
        assert self._received is not None
        return self._pass_on(index, self._received, *args, **named)

    def _pass_on(self, index: int, given: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
        # The stages between the first and the last call their blocks with what was seen then.
        if index in self._between and (now := _numbers(args, named)) != (seen := _numbers(*self._arguments[index])):
            raise TaskError(
                f"block {index} gets {now} besides its input, and got {seen} when the model was cut; a pipeline needs "
                "the same for every batch: let the block compute it from its input, use --stages 2, or use fsdp"
            )
        return given

    def _on_meta(self, _: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """What is computed before the first block is computed on another rank; here, only its shapes."""
        self._refuse_other_inputs(args, named)
        return _as_meta(args), _as_meta(named)

    def _refuse_other_inputs(self, *given: Any) -> None:
        tensors = [one for one in tree_leaves(given) if isinstance(one, torch.Tensor)]
        if self._seen is None:
            self._seen = tensors
        elif len(tensors) != len(self._seen) or not all(map(torch.equal, tensors, self._seen)):
            raise TaskError(
                "the model is called twice with different inputs for one batch, which a pipeline passes through once; "
                "call it once and use its output twice, or use fsdp"
            )

    def stage(self, work: Callable[..., Any], data: Any, received: torch.Tensor | None) -> Any:
        """What this stage makes of a micro-batch: the result of `work` on the last one, else what to hand over."""
        self._received, self._seen = received, None
        if self.is_last:
            return self._end(work, data)
        if self.is_first:
            try:
                work(self.model, data)
            except Handed as handed:
                return handed.output
            raise TaskError("the loss did not call the model; pipeline needs one call of model(...) in every loss")
        (blocks,) = self._blocks
        output: Any = received
        for index in self._own:
            args, named = self._arguments[index]
            output = blocks[index](output, *args, **named)
        return output

    def _end(self, work: Callable[..., Any], data: Any) -> Any:
        try:
            return work(self.model, data)
        except (RuntimeError, NotImplementedError) as error:
            if "meta" not in str(error):
                raise
            raise TaskError(
                "forward uses something behind its blocks, or reads numbers of it, that it computes before them, on "
                f"another rank: {error}\ncompute it in the loss or in a block, or use fsdp"
            ) from error

    def forward(self, work: Callable[..., Any], *arguments: Any) -> Any:
        received = None if self.is_first else self._neighbours.receive(1)
        (data,) = arguments or (None,)
        found = self.stage(work if arguments else lambda model, _: work(model), data, received)
        if self.is_last:
            return found
        self._neighbours.send(found, 1)
        self._neighbours.settle()
        return {}


def _as_meta(value: Any) -> Any:
    """Shapes in place of tensors; what is neither a tensor, a list, a tuple nor a dict stays."""
    if isinstance(value, torch.Tensor):
        return value.to("meta")
    if isinstance(value, dict):
        return {name: _as_meta(one) for name, one in value.items()}
    return type(value)(map(_as_meta, value)) if type(value) in (list, tuple) else value


def _numbers(*arguments: Any) -> list[Any]:
    return [one for one in tree_leaves(arguments) if isinstance(one, int | float | str | torch.Size)]


def _hand_over(given: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    raise Handed(given)


class Pipeline(Single):
    """Consecutive blocks on each rank of a replica; replicas average their gradients."""

    def wrap(self, model: nn.Module, world: World, sample: Sample | None = None) -> DistributedModel:
        if world.size == 1:
            return super().wrap(model, world)
        if world.ranks_per_replica == 1:
            raise TaskError("a pipeline of one stage is ddp; use --strategy ddp, or --stages 2")
        model.to(world.device)
        leave_default_stream(world.device)
        with torch.no_grad():
            send_from_rank_0([tensor.data for tensor in (*model.parameters(), *model.buffers())])
        cut = find_cut(model, world, sample)
        neighbours = Neighbours(world)
        _distribute(model, cut, neighbours.ranks)
        return PipelineModel(model, StageModule(model, cut, neighbours), world, cut)


def _distribute(model: nn.Module, cut: StageCut, ranks: World) -> None:
    """Keep the parameters of this rank's stage; those of others stay as names and shapes."""
    placed: dict[int, nn.Parameter] = {}
    for name, weight in list(model.named_parameters(remove_duplicate=False)):
        if id(weight) in placed:
            # Tied inside of a block: one parameter on all ranks.
            prefix, _, last = name.rpartition(".")
            setattr(model.get_submodule(prefix), last, placed[id(weight)])
        else:
            part = OnStage(ranks, tuple(weight.shape), weight.dtype, cut.owners[name])
            placed[id(weight)] = place(model, name, part)
    for name, buffer in list(model.named_buffers()):
        place_buffer(model, name, OnStage(ranks, tuple(buffer.shape), buffer.dtype, cut.owners[name]))
        if name in cut.before and ranks.rank == ranks.size - 1:
            prefix, _, last = name.rpartition(".")
            setattr(model.get_submodule(prefix), last, buffer.to("meta"))


class PipelineModel(DistributedModel):
    """A stage on each rank; gradients are averaged over replicas after the last backward."""

    def __init__(self, model: nn.Module, stage: StageModule, world: World, cut: StageCut) -> None:
        super().__init__(model, [stage])
        self._stage, self._world = stage, world
        self._neighbours = stage._neighbours
        self._data_ranks = world.data_ranks
        self._averaging = self._made()
        self.schedule = self._run
        self.notes = _described(cut, model)

    def _made(self) -> Averaging | None:
        own = [(name, weight) for name, weight in trained(self.module) if not weight.is_meta]
        if self._data_ranks.size == 1 or not own:
            return None
        return Averaging(GroupChannel(self._data_ranks), self.module, self._world, own)

    def sync_replicas(self, is_training: bool) -> None:
        own = [one for one in self.module.buffers() if not one.is_meta]
        if own and self._data_ranks.size > 1 and not self._world.communication.is_off:
            broadcast_coalesced(self._data_ranks.group, own, SEND_BYTES, 0)

    def sync_gradients(self, is_last: bool) -> AbstractContextManager[None]:
        return self._averaging if is_last and self._averaging is not None else NOTHING

    def follow_requires_grad(self) -> None:
        self._averaging = self._made()

    def _run(self, backward: StageBackward, micro_batches: Sequence[Any]) -> None:
        """All micro-batches of a step; backwards run in their order, so that sums are those of accumulation."""
        steps = StageSteps(self._stage, self._neighbours, backward)
        with self.sync_gradients(is_last=True):
            for is_forward, index in order_of(self._world, len(micro_batches)):
                if is_forward:
                    steps.forward(micro_batches[index], is_last=index == len(micro_batches) - 1)
                else:
                    steps.backward()
            self._neighbours.settle()
        if not self._stage.is_last:
            # The count of a loss that is a pair is known to the last stage alone.
            backward.totals.is_late = True
            backward.totals.send()


def order_of(world: World, num: int) -> Iterator[tuple[bool, int]]:
    """Forwards (True) and backwards of a stage, in order: one of each in turn, or all forwards first."""
    stage = world.rank % world.ranks_per_replica
    ahead = num if world.schedule == "gpipe" else min(num, world.ranks_per_replica - 1 - stage)
    yield from ((True, index) for index in range(ahead))
    for index in range(ahead, num):
        yield True, index
        yield False, index - ahead
    yield from ((False, index) for index in range(num - ahead, num))


class StageSteps:
    """Forwards and backwards of this stage in one step, each micro-batch in turn."""

    def __init__(self, stage: StageModule, neighbours: Neighbours, backward: StageBackward) -> None:
        self._stage, self._neighbours, self._backward = stage, neighbours, backward
        self._waiting: list[tuple[torch.Tensor | None, Any]] = []

    def forward(self, micro_batch: Any, is_last: bool) -> None:
        """Receive, compute, send."""
        received = None if self._stage.is_first else self._neighbours.receive(1).requires_grad_()
        if self._stage.is_last:
            found = self._backward.staged(
                lambda loss, data: self._stage.stage(loss, data, received), micro_batch, sends=is_last
            )
            self._waiting.append((received, found))
            return
        output = self._backward.computed(lambda loss, data: self._stage.stage(loss, data, received), micro_batch)
        if not isinstance(output, torch.Tensor):
            raise TaskError(f"a block returned a {type(output).__name__}; pipeline passes on one tensor")
        self._waiting.append((received, output))
        self._neighbours.send(output, 1)

    def backward(self) -> None:
        """Of the oldest micro-batch; the gradient of what was received goes back."""
        received, found = self._waiting.pop(0)
        if self._stage.is_last:
            found()
        else:
            torch.autograd.backward([found], [self._neighbours.receive(-1)])
        self._backward.models[0].separate[0]()
        if received is not None:
            gradient = received.grad if received.grad is not None else torch.zeros_like(received)
            self._neighbours.send(gradient, -1)


MOST_BLOCKS = 8


def _described(cut: StageCut, model: nn.Module) -> list[str]:
    sizes: dict[int, int] = {}
    for name, weight in model.named_parameters():
        sizes[cut.owners[name]] = sizes.get(cut.owners[name], 0) + weight.numel()
    shown = [
        f"stage {stage}: {cut.blocks[own[0]]} to {cut.blocks[own[-1]]} ({sizes.get(stage, 0):,} parameters)"
        for stage in range(max(cut.stage_of) + 1)
        if (own := cut.own(stage))
    ]
    more = f" and {len(shown) - MOST_BLOCKS} more" if len(shown) > MOST_BLOCKS else ""
    return [f"pipeline: {'; '.join(shown[:MOST_BLOCKS])}{more}"]
