"""Every replica holds the same bits: a checksum of parameters and buffers, compared across ranks now and then.

Where groups of ranks hold a copy of a sharded model each, a shard is compared with that of the other groups.

Averaged gradients keep replicas equal only if every rank applies the same ones to the same weights. Where one does
not, nothing fails: the ranks train models of their own, and one of them is saved.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from evenstep.checkpoint.shards import is_sharded
from evenstep.distributed.parameter_slices import slice_of
from evenstep.distributed.world import World
from evenstep.errors import TaskError, TrainingError
from evenstep.private_apis import NormBase

Sums = dict[str, int]
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MULTIPLIER = 0x9E3779B97F4A7C15  # odd, so that no difference is multiplied away
_CAUSES = (
    "Usual causes: forward was called around the wrapper, so that gradients were not averaged; parameters were "
    "changed\nunder `if rank == 0`; an update drew random numbers that differ between ranks. "
    "Switch this check off with --check-every 0"
)


def refuse_different_models(world: World, model: nn.Module) -> None:
    """Raise TaskError, on every rank, if one has built a model of other tensors: sums of such would hang, or be noise.

    All ranks call this together, before anything of the model is sent.
    """
    mine = {name: _kind(tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    if len(set(world.gather(hashlib.blake2b(repr(mine).encode()).hexdigest()))) == 1:
        return
    first, *others = world.gather(mine)
    for rank, other in enumerate(others, 1):
        for name in (*first, *other):
            here, there = first.get(name, "not there"), other.get(name, "not there")
            if here != there:
                raise TaskError(
                    f"rank {rank} has built another model than rank 0: {name} is {there} on rank {rank} and {here} on "
                    "rank 0;\nbuild the same one on every rank"
                )
    raise TaskError("the ranks have built models whose parameters come in different orders; build the same one on each")


def _kind(tensor: torch.Tensor) -> str:
    """`float32 [16, 4]`; a parameter that is not trained is another kind of thing."""
    shape = "of a shape to come" if is_lazy(tensor) else str(list(tensor.shape))
    is_frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
    return f"{str(tensor.dtype).removeprefix('torch.')} {shape}{', not trained' * is_frozen}"


class ReplicaCheck:
    """Compares this rank's replica with those of the other ranks."""

    def __init__(self, world: World, module: nn.Module) -> None:
        self._world = world
        self._module = module
        self._last_equal: int | None = None
        self._moving: set[str] = set()
        self._buffers: Sums = {}
        if world.size > 1:
            self._still(*self._sums())

    def compare(self, step: int) -> None:
        """Raise TrainingError, on every rank, if replicas differ; all ranks call this after the same steps."""
        if self._world.size == 1:
            return
        sums, shards = self._still(*self._sums()), self._shard_sums()
        is_same = self._is_same(combined(sums.values()), combined(shards.values()))
        if is_same or not (message := self._explain(sums, shards, step)):
            self._last_equal = step
            return
        raise TrainingError(message)

    def _shard_sums(self) -> Sums:
        """Of parameters of which another group of ranks holds the same shard."""
        found = {
            name: one.to_local()
            for name, one in self._module.named_parameters()
            if is_sharded(one) and one.device_mesh.size() < self._world.size
        }
        return dict(zip(found, checksums(list(found.values())), strict=True))

    def _sums(self) -> tuple[Sums, Sums]:
        parameters = dict(_comparable(self._module.named_parameters()))
        buffers = dict(_comparable(_still_buffers(self._module, self._moving)))
        values = checksums([*parameters.values(), *buffers.values()])
        named = list(zip((*parameters, *buffers), values, strict=True))
        return dict(named[: len(parameters)]), dict(named[len(parameters) :])

    def _still(self, parameters: Sums, buffers: Sums) -> Sums:
        """The sums of what must be equal: parameters, and the buffers that nothing has changed so far.

        A buffer that forward changes (running statistics of a user's own layer, a codebook) follows the samples of
        its rank; the next forward starts from rank 0's again, so it cannot drift.
        """
        self._moving |= {name for name, value in buffers.items() if self._buffers.get(name, value) != value}
        self._buffers = {name: value for name, value in buffers.items() if name not in self._moving}
        return {**parameters, **self._buffers}

    @property
    def _num_shards(self) -> int:
        """Ranks with shards that differ; of those that compute a replica together, each has its own."""
        num = self._world.num_shards
        return self._world.size if num is None else num * self._world.ranks_per_replica

    def _is_same(self, value: int, of_shards: int) -> bool:
        """Whether all ranks gave this number, and those with the same shard the same one for it; 16 bytes each."""
        mine = torch.tensor([value, of_shards])
        every = [torch.empty_like(mine) for _ in range(self._world.size)]
        dist.all_gather(every, mine)
        numbers: list[list[int]] = torch.stack(every).tolist()
        return all(
            whole == value and shard == numbers[rank % self._num_shards][1]
            for rank, (whole, shard) in enumerate(numbers)
        )

    def _explain(self, sums: Sums, shards: Sums, step: int) -> str | None:
        ranks_sums = self._world.gather({"sums": sums, "shards": shards, "moving": sorted(self._moving)})
        moving = {name for other in ranks_sums for name in other["moving"]}
        self._moving |= moving
        message = differing([other["sums"] for other in ranks_sums], moving, step, self._last_equal)
        for first in range(self._num_shards):
            ranks = range(first, self._world.size, self._num_shards)
            found = [ranks_sums[rank]["shards"] for rank in ranks]
            message = message or differing(found, moving, step, self._last_equal, ranks)
        return message


def _comparable(named: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    # A sharded tensor has no replica to compare with.
    whole = ((name, one) for name, one in named if not is_sharded(one) and slice_of(one) is None)
    return ((name, one) for name, one in whole if one.layout == torch.strided and not one.is_meta)


def _still_buffers(module: nn.Module, moving: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Buffers by name, without those known to change and without the statistics of BatchNorm and its kind.

    Between two of DDP's broadcasts every rank adds its own samples to these: they differ, and rightly.
    """
    for prefix, layer in module.named_modules():
        if not isinstance(layer, NormBase):
            for name, buffer in layer.named_buffers(prefix, recurse=False):
                if name not in moving:
                    yield name, buffer


@torch.no_grad()
def checksums(tensors: Sequence[torch.Tensor]) -> list[int]:
    """One number for the bits of each tensor: computed where it lies, read by the host in one go."""
    sums = [_sum_of_bits(tensor.detach()) for tensor in tensors]
    if not sums:
        return []
    numbers: list[int] = torch.stack([one.to(sums[0].device) for one in sums]).tolist()
    return numbers


def _sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor's bits, read as integers: exact, in whatever order it is added up.

    It depends on how the tensor lies in memory, which is the same on all ranks: they run one program.
    """
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    size = tensor.element_size()
    is_whole_words = tensor.is_contiguous() and (tensor.numel() * size) % 8 == 0
    if is_whole_words and (tensor.storage_offset() * size) % 8 == 0:
        # Eight bytes at a time, in their own type: torch adds those up ten times faster than ones that it must widen.
        return tensor.view(-1).view(torch.int64).sum()
    integers = tensor.view(_INTEGERS[size])
    return integers.sum(dtype=torch.int32 if size == 4 else torch.int64).to(torch.int64)


def combined(sums: Iterable[int]) -> int:
    """One signed 64-bit number for all values, each weighted by its position: opposite differences do not cancel."""
    number = 1
    for one in sums:
        number = (number * _MULTIPLIER + one) % 2**64
    return number - 2**63


def differing(
    ranks_sums: Sequence[Sums], moving: set[str], step: int, last_equal: int | None, ranks: range | None = None
) -> str | None:
    """A message about the first tensor that differs between ranks; None if all are equal.

    `ranks` are those whose sums are given, if not all.
    """
    ranks = ranks if ranks is not None else range(len(ranks_sums))
    names = dict.fromkeys(name for sums in ranks_sums for name in sums if name not in moving)
    unequal = {name: apart for name in names if (apart := _ranks_apart([sums.get(name) for sums in ranks_sums], ranks))}
    if not unequal:
        return None
    first = next(iter(unequal))
    more = f" (the first of {len(unequal)} tensors that differ)" if len(unequal) > 1 else ""
    since = f"they were still equal at step {last_equal}" if last_equal is not None else "it is the first comparison"
    return f"replicas differ: {first} {unequal[first]}{more}, seen after step {step}; {since}.\n{_CAUSES}"


def _ranks_apart(values: Sequence[int | None], ranks: range) -> str | None:
    """Which ranks hold something else than most do, or, where there is no majority, than the first of them."""
    ((usual, count), *_) = Counter(values).most_common()
    if count == len(values):
        return None
    has_majority = count > len(values) / 2
    usual = usual if has_majority else values[0]
    others = [rank for rank, value in zip(ranks, values, strict=True) if value != usual]
    shown = ", ".join(str(rank) for rank in others[:8]) + (" ..." if len(others) > 8 else "")
    noun = f"rank {shown}" if len(others) == 1 else f"ranks {shown}"
    return f"on {noun} is not that of {'the other ranks' if has_majority else f'rank {ranks[0]}'}"
