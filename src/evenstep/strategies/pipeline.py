"""One process per device; each runs a stage of the model, or several chunks, and micro-batches pass through all.

Every rank of a replica has the batch. The first stage calls the user's loss, whose call of the model ends where the
next stage begins; the last one calls the loss too, with a model that begins with what it received. So the loss may be
any function of one call of the model. torch's `distributed.pipelining` wants micro-batches of one size and a loss of
outputs and targets alone: a short last batch would have to be padded, with samples that a mean over the batch counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from evenstep.distributed.devices import leave_default_stream
from evenstep.distributed.parameter_slices import OnStage, place, place_buffer
from evenstep.distributed.world import World
from evenstep.errors import TaskError
from evenstep.pipeline_schedule import chunks_of, order_of
from evenstep.private_apis import broadcast_coalesced, call_hooks, tree_leaves
from evenstep.strategies.base import NOTHING, DistributedModel, LossModule, RankStages, Sample, copied, go_back
from evenstep.strategies.ddp import SEND_BYTES, Averaging, send_from_rank_0, trained
from evenstep.strategies.pipeline_cut import StageCut, find_cut
from evenstep.strategies.single import Single
from evenstep.strategies.split_backward import SplitBackward
from evenstep.strategies.tensor import GroupChannel

HEADER = 12
"""Numbers that are sent before a tensor: its type, its dimensions."""
MESSAGES = 2
"""For each tensor: the header, and itself."""
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

    def goes_back(self) -> None:
        """A backward begins."""

    def computed(self, stage: Callable[..., Any], micro_batch: Any) -> Any:
        """The output of a stage that is not the last."""

    def staged(self, stage: Callable[..., Any], micro_batch: Any, sends: bool) -> tuple[torch.Tensor, float]:
        """The loss on the last stage, and its weight in that of the batch."""


class Handed(BaseException):
    """The output of a stage: raised where the next one begins, through the user's forward and loss."""

    def __init__(self, output: torch.Tensor) -> None:
        super().__init__()
        self.output = output


class Neighbours:
    """Sends tensors to the next and the previous stage; a group for each direction, so that none waits.

    With several chunks on each rank, the last rank sends to the first one: messages of their own, for two ranks are
    both neighbours of each other.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.ranks = world.model_ranks
        self._groups = {(1, False): self.ranks.group, (-1, False): _new_group(world)}
        if chunks_of(world.schedule) > 1:
            self._groups |= {(1, True): _new_group(world), (-1, True): _new_group(world)}
        self._pending: dict[tuple[int, int], list[tuple[dist.Work, torch.Tensor]]] = {}
        """By direction and chunk; tensors must stay until they have arrived."""

    def send(self, tensor: torch.Tensor, step: int, chunk: Chunk) -> None:
        """To the next stage (1) or the previous one (-1), without waiting."""
        sent = tensor.detach().contiguous()
        header = torch.zeros(HEADER, dtype=torch.int64)
        header[: 2 + sent.ndim] = torch.tensor([TYPES.index(sent.dtype), sent.ndim, *sent.shape])
        arrived = self._world.spans.send("activations" if step > 0 else "gradients", [sent], waits=True)
        pending = self._pending.setdefault((step, chunk.blocks[0]), [])
        pending += [self._started(header.to(self._world.device), step), self._started(sent, step)]
        arrived()

    def _started(self, tensor: torch.Tensor, step: int) -> tuple[dist.Work, torch.Tensor]:
        to = self.ranks.rank + step
        wraps = not 0 <= to < self.ranks.size
        work = dist.isend(tensor, group=self._groups[step, wraps], group_dst=to % self.ranks.size)
        assert work is not None
        return work, tensor

    def receive(self, step: int) -> torch.Tensor:
        """From the previous stage, what it sent to the next one (1); or from the next one, backwards (-1)."""
        self._world.heartbeat.collective()
        source = self.ranks.rank - step
        group = self._groups[step, not 0 <= source < self.ranks.size]
        # The message begins when the other rank is done: until then, this is the bubble.
        self._world.spans.part("bubble")
        header = torch.zeros(HEADER, dtype=torch.int64, device=self._world.device)
        dist.recv(header, group=group, group_src=source % self.ranks.size)
        kind, ndim, *shape = header.tolist()
        self._world.spans.part("communication")
        tensor = torch.empty(shape[:ndim], dtype=TYPES[kind], device=self._world.device)
        dist.recv(tensor, group=group, group_src=source % self.ranks.size)
        return tensor

    def let_go(self, chunk: Chunk) -> None:
        """Of the oldest output that a chunk sent: its gradient is here, so it has arrived."""
        pending = self._pending[1, chunk.blocks[0]]
        for work, _ in pending[:MESSAGES]:
            work.wait()
        del pending[:MESSAGES]

    def settle(self) -> None:
        """Wait until all that was sent has arrived."""
        for work, _ in (one for of_chunk in self._pending.values() for one in of_chunk):
            work.wait()
        self._pending.clear()


def _new_group(world: World) -> Any:
    """One more process group for the ranks of this replica; all ranks call this together."""
    num = world.ranks_per_replica
    groups = [dist.new_group(list(range(start, start + num))) for start in range(0, world.size, num)]
    return groups[world.data_rank]


@dataclass(frozen=True)
class Chunk:
    """Consecutive blocks on one rank."""

    blocks: list[int]
    is_first: bool
    is_last: bool


class StageModule(LossModule):
    """This rank's stage of a model; called as a loss module, it passes one batch through, for an evaluation."""

    def __init__(self, model: nn.Module, cut: StageCut, ranks: World, neighbours: Neighbours | None = None) -> None:
        """Without neighbours, `stage` alone can be called."""
        super().__init__(model)
        self._neighbours, last = neighbours, cut.num_stages - 1
        self.is_first, self.is_last = ranks.rank == 0, ranks.rank == ranks.size - 1
        self.chunks = [
            Chunk(cut.own(stage), is_first=stage == 0, is_last=stage == last)
            for stage in range(ranks.rank, cut.num_stages, ranks.size)
        ]
        self._arguments = cut.arguments
        self._between = {index for index, stage in enumerate(cut.stage_of) if 0 < stage < last}
        # In a list: the blocks are registered in the model.
        self._blocks = [[model.get_submodule(name) for name in cut.blocks]]
        self._received: torch.Tensor | None = None
        self._seen: Any = None
        self._replace_others()

    def _replace_others(self) -> None:
        """Blocks of other ranks hand over what they got, or give back what was received."""
        (blocks,) = self._blocks
        own = {index for chunk in self.chunks for index in chunk.blocks}
        for index, block in enumerate(blocks):
            if index in own:
                continue
            # They have run, or will, on the rank of the block.
            for hooks in call_hooks(block):
                hooks.clear()
            if self.is_first and index == self.chunks[0].blocks[-1] + 1:
                vars(block)["forward"] = _hand_over
            else:
                vars(block)["forward"] = self._passing(index)
        if self.is_last:
            self.model.register_forward_pre_hook(self._on_meta, with_kwargs=True)

    def _passing(self, index: int) -> Callable[..., torch.Tensor]:
        return partial(self._begin if index == 0 else self._pass_on, index)

    @contextmanager
    def _without_earlier_chunks(self) -> Iterator[None]:
        """Inside, this rank's chunks before the last one pass on what they get: they have computed already."""
        (blocks,) = self._blocks
        earlier = [(index, blocks[index]) for chunk in self.chunks[:-1] for index in chunk.blocks]
        before = [(vars(block).get("forward"), [dict(hooks) for hooks in call_hooks(block)]) for _, block in earlier]
        for index, block in earlier:
            vars(block)["forward"] = self._passing(index)
            for hooks in call_hooks(block):
                hooks.clear()
        try:
            yield
        finally:
            for (_, block), (forward, own_hooks) in zip(earlier, before, strict=True):
                del vars(block)["forward"]
                if forward is not None:
                    vars(block)["forward"] = forward
                for hooks, own in zip(call_hooks(block), own_hooks, strict=True):
                    hooks.update(own)

    def _begin(self, index: int, _: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
        assert self._received is not None
        return self._pass_on(index, self._received, *args, **named)

    def _pass_on(self, index: int, given: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
        # The stages between the first and the last call their blocks with what was seen then.
        if index in self._between and (now := _numbers(args, named)) != (seen := _numbers(*self._arguments[index])):
            raise TaskError(
                f"block {index} got {now} as extra arguments, and {seen} when the model was split; they must be the "
                "same for every batch: let the block compute it from its input, use --stages 2 (not interleaved), "
                "or use fsdp"
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

    def stage(self, chunk: Chunk, work: Callable[..., Any], data: Any, received: torch.Tensor | None) -> Any:
        """What a chunk makes of a micro-batch: the result of `work` in the last one, else what to hand over."""
        self._received, self._seen = received, None
        if chunk.is_last:
            with self._without_earlier_chunks() if len(self.chunks) > 1 else NOTHING:
                return self._end(work, data)
        if chunk.is_first:
            try:
                work(self.model, data)
            except Handed as handed:
                return handed.output
            raise TaskError("the loss did not call the model; pipeline needs one call of model(...) in every loss")
        (blocks,) = self._blocks
        output: Any = received
        for index in chunk.blocks:
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
                "forward uses, after its blocks, a value that it computes before them, which only another rank has: "
                f"{error}\ncompute it in the loss or in a block, or use fsdp"
            ) from error

    def forward(self, work: Callable[..., Any], *arguments: Any) -> Any:
        (data,) = arguments or (None,)
        found: Any = {}
        assert self._neighbours is not None
        for chunk in self.chunks:
            received = None if chunk.is_first else self._neighbours.receive(1)
            found = self.stage(chunk, work if arguments else lambda model, _: work(model), data, received)
            if not chunk.is_last:
                self._neighbours.send(found, 1, chunk)
        self._neighbours.settle()
        return found if self.is_last else {}


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
    """Some blocks on each rank of a replica; replicas average their gradients."""

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
        distribute(model, cut, neighbours.ranks)
        stage = StageModule(model, cut, neighbours.ranks, neighbours)
        return PipelineModel(model, stage, neighbours, world, cut)

    def keep_part(self, model: nn.Module, world: World, rank: int, sample: Sample) -> RankStages:
        whole = copied(model)
        # Without values, no block takes its time.
        cut = find_cut(model, world, sample, is_timed=False)
        own = World(rank, world.ranks_per_replica, world.devices)
        distribute(model, cut, own)
        stage = StageModule(model, cut, own)
        return RankStages(stage.chunks, stage.stage, whole, cut.blocks)


def distribute(model: nn.Module, cut: StageCut, ranks: World) -> None:
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

    needs_communication = True

    def __init__(
        self, model: nn.Module, stage: StageModule, neighbours: Neighbours, world: World, cut: StageCut
    ) -> None:
        super().__init__(model, [stage])
        self._stage, self._neighbours, self._world = stage, neighbours, world
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
        steps = StageSteps(self._stage, self._neighbours, backward, splits=self._world.schedule == "zero-bubble")
        ranks, num = self._neighbours.ranks, len(micro_batches)
        with self.sync_gradients(is_last=True):
            for one in order_of(self._world.schedule, ranks.size, ranks.rank, num):
                chunk = self._stage.chunks[one.chunk]
                if one.name == "forward":
                    steps.forward(chunk, micro_batches[one.micro_batch], is_last=one.micro_batch == num - 1)
                elif one.name == "backward":
                    steps.backward(chunk)
                else:
                    steps.weights()
            self._neighbours.settle()
        # Until the others are done, too.
        self._world.spans.part("bubble")
        if not self._stage.is_last:
            # The count of a loss that is a pair is known to the last stage alone.
            backward.totals.is_late = True
            backward.totals.send()


class StageSteps:
    """Forwards and backwards of this rank in one step, each micro-batch in turn."""

    def __init__(
        self, stage: StageModule, neighbours: Neighbours, backward: StageBackward, *, splits: bool = False
    ) -> None:
        self._stage, self._neighbours, self._backward, self._splits = stage, neighbours, backward, splits
        self._waiting: dict[int, list[tuple[torch.Tensor | None, torch.Tensor, float]]] = {}
        """By the first block of a chunk: what it received, its output or loss, and the weight of a loss."""
        self._halves: list[SplitBackward | None] = []
        """Backwards whose weights have no gradients yet; None for one that is complete."""

    def forward(self, chunk: Chunk, micro_batch: Any, is_last: bool) -> None:
        """Receive, compute, send."""
        received = None if chunk.is_first else self._neighbours.receive(1).requires_grad_()

        def stage(loss: Callable[..., Any], data: Any) -> Any:
            return self._stage.stage(chunk, loss, data, received)

        waiting = self._waiting.setdefault(chunk.blocks[0], [])
        if chunk.is_last:
            waiting.append((received, *self._backward.staged(stage, micro_batch, sends=is_last)))
            return
        output = self._backward.computed(stage, micro_batch)
        if not isinstance(output, torch.Tensor):
            raise TaskError(f"a block returned a {type(output).__name__}; pipeline passes on one tensor")
        waiting.append((received, output, 1.0))
        self._neighbours.send(output, 1, chunk)

    def backward(self, chunk: Chunk) -> None:
        """Of the oldest micro-batch; the gradient of what was received goes back."""
        received, output, weight = self._waiting[chunk.blocks[0]].pop(0)
        gradient = None
        if not chunk.is_last:
            gradient = self._neighbours.receive(-1)
            self._neighbours.let_go(chunk)
        self._backward.goes_back()
        half = SplitBackward(output, received) if self._splits and received is not None else None
        if half is not None:
            half.of_inputs(torch.full_like(output, weight) if gradient is None else gradient)
        elif gradient is None:
            go_back(output, weight)
        else:
            torch.autograd.backward([output], [gradient])
        self._halves.append(half)
        self._backward.models[0].separate[0]()
        if received is not None:
            found = received.grad if received.grad is not None else torch.zeros_like(received)
            self._neighbours.send(found, -1, chunk)

    def weights(self) -> None:
        """What the oldest backward left out."""
        half = self._halves.pop(0)
        if half is not None:
            half.of_weights()
            self._backward.models[0].separate[0]()


MOST_BLOCKS = 8


def _described(cut: StageCut, model: nn.Module) -> list[str]:
    sizes = [0] * cut.num_stages
    for name, weight in model.named_parameters():
        sizes[cut.stages[name]] += weight.numel()
    every = [cut.own(stage) for stage in range(cut.num_stages)]
    shown = [
        f"stage {stage}: {cut.blocks[own[0]]} to {cut.blocks[own[-1]]} ({sizes[stage]:,} parameters)"
        for stage, own in enumerate(every)
    ]
    more = f" and {len(shown) - MOST_BLOCKS} more" if len(shown) > MOST_BLOCKS else ""
    return [f"pipeline: {'; '.join(shown[:MOST_BLOCKS])}{more}"]
