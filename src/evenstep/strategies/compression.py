"""Sums over machines that send less than all digits: bf16, PowerSGD, and the largest numbers (top-k).

What PowerSGD and top-k leave out of one step is added to the next (error feedback). These errors are kept by the name
of a parameter, so that they survive other buckets, and a checkpoint holds their sum over machines: it is what later
steps will add, whatever the number of machines.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist

from evenstep.distributed.machines import Exchange, Message
from evenstep.link_method import LinkMethod

Tensors = dict[str, torch.Tensor]
ERROR, BASIS = "error", "basis"
"""What is kept of a parameter: see `Compression.state`."""


class Compression(Exchange, Protocol):
    """An exchange with a state that a checkpoint holds; every leader has one."""

    def state(self) -> Tensors:
        """By "parameter/kind"; all leaders call this. Errors are those of all machines together."""

    def load_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Continue with what `state` returned, with any number of machines."""


def compression(method: LinkMethod, group: dist.ProcessGroup) -> Compression:
    """The exchange that `--link` names."""
    if method.name == "powersgd":
        return PowerSum(group, int(method.value))
    return TopSum(group, method.value) if method.name == "topk" else HalfSum(group)


class HalfSum:
    """An all-reduce in bfloat16; every hop of it rounds."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def start(self, message: Message) -> Callable[[], None]:
        half = message.values.to(torch.bfloat16)
        work: dist.Work = dist.all_reduce(half, group=self._group, async_op=True)

        def finish() -> None:
            work.wait()
            message.values.copy_(half)

        return finish

    def state(self) -> Tensors:
        return {}

    def load_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        pass


class Errors:
    """What was left out so far, by the name of a parameter."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._num = group, dist.get_world_size(group)
        self._left: Tensors = {}

    def add_to(self, name: str, gradient: torch.Tensor) -> None:
        if name in self._left:
            gradient.add_(self._left[name].to(gradient.dtype))

    def keep(self, name: str, left: torch.Tensor) -> None:
        self._left[name] = left

    def state(self) -> Tensors:
        """The sum over machines, of which each keeps an equal part: what it will add to the sum is the same."""
        found = {}
        for name in sorted(self._left):
            total = self._left[name].contiguous()
            dist.all_reduce(total, group=self._group)
            found[f"{name}/{ERROR}"] = total
            self._left[name] = total / self._num
        return found

    def load_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._left = {name: total / self._num for name, total in _of_kind(tensors, ERROR)}


def _of_kind(tensors: Mapping[str, torch.Tensor], kind: str) -> list[tuple[str, torch.Tensor]]:
    ends = f"/{kind}"
    return [(key.removesuffix(ends), value) for key, value in tensors.items() if key.endswith(ends)]


class PowerSum:
    """PowerSGD (Vogels et al. 2019): a matrix is sent as two thin ones, of `rank` columns each.

    One power iteration for each step, from the basis of the step before. Vectors, and matrices that two thin ones
    would not make smaller, are sent as they are.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int) -> None:
        self._group, self._rank = group, rank
        self._errors = Errors(group)
        self._bases: Tensors = {}

    def start(self, message: Message) -> Callable[[], None]:
        # Its second all-reduce depends on the first: all of it in one thread, where messages keep their order.
        return partial(self._exchange, message)

    def _exchange(self, message: Message) -> None:
        if not message.parts:
            dist.all_reduce(message.values, group=self._group)
            return
        large = [(name, part) for name, part in message.parts if is_compressed(part.shape, self._rank)]
        small = [part for _, part in message.parts if not is_compressed(part.shape, self._rank)]
        if large:
            self._exchange_matrices(large, small)
        else:
            self._sum(small)

    def _exchange_matrices(self, large: Sequence[tuple[str, torch.Tensor]], small: Sequence[torch.Tensor]) -> None:
        """What is sent as it is goes along with the first of two messages: each costs a latency."""
        for name, part in large:
            self._errors.add_to(name, part)
        # bf16 gradients are computed with in fp32: QR has no narrower type.
        matrices = [_as_matrix(part) for _, part in large]
        left = [matrix @ self._basis(name, matrix) for (name, _), matrix in zip(large, matrices, strict=True)]
        self._sum([*small, *left])
        left = [torch.linalg.qr(one).Q for one in left]
        right = [matrix.T @ one for matrix, one in zip(matrices, left, strict=True)]
        own = [one.clone() for one in right]
        self._sum(right)
        for index, (name, part) in enumerate(large):
            sent = left[index] @ own[index].T
            self._errors.keep(name, (matrices[index] - sent).view(part.shape))
            self._bases[name] = right[index]
            part.copy_((left[index] @ right[index].T).view(part.shape))

    def _basis(self, name: str, matrix: torch.Tensor) -> torch.Tensor:
        found = self._bases.get(name)
        if found is None:
            # The same on every machine, whatever has been drawn there.
            seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little")
            generator = torch.Generator().manual_seed(seed)
            found = torch.randn(matrix.shape[1], self._rank, generator=generator, dtype=torch.float64)
        return found.to(matrix.dtype)

    def _sum(self, tensors: Sequence[torch.Tensor]) -> None:
        """In one message."""
        if not tensors:
            return
        flat = torch.cat([one.reshape(-1) for one in tensors])
        dist.all_reduce(flat, group=self._group)
        for one, summed in zip(tensors, flat.split([one.numel() for one in tensors]), strict=True):
            one.copy_(summed.view(one.shape))

    def state(self) -> Tensors:
        return {**self._errors.state(), **{f"{name}/{BASIS}": basis for name, basis in self._bases.items()}}

    def load_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._errors.load_state(tensors)
        self._bases = {name: basis for name, basis in _of_kind(tensors, BASIS) if basis.shape[1] == self._rank}


def is_compressed(shape: Sequence[int], rank: int) -> bool:
    """Whether two thin matrices have fewer numbers than a parameter of this shape.

    >>> is_compressed((256, 784), 2), is_compressed((256,), 2), is_compressed((4, 4), 2)
    (True, False, False)
    """
    if len(shape) < 2:
        return False
    rows, columns = shape[0], torch.Size(shape[1:]).numel()
    return rank * (rows + columns) < rows * columns


def _as_matrix(part: torch.Tensor) -> torch.Tensor:
    wide = part if part.dtype in (torch.float32, torch.float64) else part.float()
    return wide.reshape(part.shape[0], -1).clone()


class TopSum:
    """The largest numbers of a message, with their places; what is not sent is added to the next step."""

    def __init__(self, group: dist.ProcessGroup, fraction: float) -> None:
        self._group, self._fraction = group, fraction
        self._errors = Errors(group)

    def start(self, message: Message) -> Callable[[], None]:
        return partial(self._exchange, message)

    def _exchange(self, message: Message) -> None:
        values = message.values
        if not message.parts:
            dist.all_reduce(values, group=self._group)
            return
        for name, part in message.parts:
            self._errors.add_to(name, part)
        places = values.abs().topk(max(1, round(self._fraction * values.numel())), sorted=False).indices
        largest = values[places]
        left = values.clone()
        left[places] = 0
        for name, part in message.parts:
            start = part.storage_offset() - values.storage_offset()
            self._errors.keep(name, left.as_strided(part.shape, part.stride(), start).clone())
        values.zero_()
        # In the order of machines, on each of them.
        for found, there in zip(self._gathered(largest), self._gathered(places.int()), strict=True):
            values.index_add_(0, there.long(), found)

    def _gathered(self, mine: torch.Tensor) -> list[torch.Tensor]:
        every = [torch.empty_like(mine) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(every, mine, group=self._group)
        return every

    def state(self) -> Tensors:
        return self._errors.state()

    def load_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._errors.load_state(tensors)


def sent_share(method: LinkMethod, shapes: Sequence[Sequence[int]], num_machines: int) -> float:
    """What a method sends, as a part of what exact gradients take in float32.

    >>> sent_share(LinkMethod("bf16"), [(10, 10)], 2)
    0.5
    """
    numbers = [torch.Size(shape).numel() for shape in shapes]
    if method.name == "powersgd":
        rank = int(method.value)
        sent = [
            rank * (shape[0] + number // shape[0]) if is_compressed(shape, rank) else number
            for shape, number in zip(shapes, numbers, strict=True)
        ]
        return sum(sent) / max(1, sum(numbers))
    if method.name == "topk":
        # A number and its place, to each other machine; a ring sends every number about twice.
        return method.value * 2 * (num_machines - 1) / (2 * (num_machines - 1) / num_machines)
    if method.is_local:
        # Parameters, and two averages of an optimizer such as AdamW, which fragments are sent without.
        return (1 if method.is_streaming else 3) / method.num_steps
    return 0.5 if method.name == "bf16" else 1.0
