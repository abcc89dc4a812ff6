"""Every collective compared between ranks before it begins: which, of what type and shape, and from which line.

gloo adds float32 to float64 without a word, and waits for ever where one rank broadcasts and another reduces.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from evenstep.errors import TrainingError
from evenstep.task import is_users
from evenstep.worker.world import World

ONE_SHAPE = ("all_reduce", "broadcast", "reduce", "all_gather", "gather", "scatter", "barrier")
ANY_SHAPE = ("all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single")
LONGEST = 256


def check_collectives(world: World) -> None:
    """Compare the collectives of torch.distributed from now on; they cost a small message more."""
    if world.size == 1:
        return
    # What goes through shared memory would not be seen.
    world.nearby.may_share = False
    group = dist.new_group(backend="gloo")
    gather = dist.all_gather
    for name in (*ONE_SHAPE, *ANY_SHAPE):
        setattr(dist, name, _compared(name, getattr(dist, name), functools.partial(_tell, world, gather, group)))


def _compared(name: str, collective: Callable[..., Any], tell: Callable[[str], list[str]]) -> Callable[..., Any]:
    signature = inspect.signature(collective)

    @functools.wraps(collective)
    def call(*arguments: Any, **options: Any) -> Any:
        # A part of the ranks has its own order of calls.
        if signature.bind(*arguments, **options).arguments.get("group") in (None, dist.group.WORLD):
            told = tell(f"{_what(name, arguments, options)} at {_users_line()}")
            if len({one.rpartition(" at ")[0] for one in told}) > 1:
                calls = "\n".join(f"rank {rank} calls {one}" for rank, one in enumerate(told[:8]))
                raise TrainingError(f"the ranks do not call the same collective:\n{calls}")
        return collective(*arguments, **options)

    return call


def _tell(world: World, gather: Callable[..., Any], group: Any, text: str) -> list[str]:
    mine = torch.zeros(LONGEST, dtype=torch.uint8)
    data = text.encode()[:LONGEST]
    mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    every = [torch.empty_like(mine) for _ in range(world.size)]
    gather(every, mine, group=group)
    return [bytes(one.tolist()).rstrip(b"\0").decode(errors="replace") for one in every]


def _what(name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> str:
    given = (*arguments, *options.values())
    tensors = [one for one in given if isinstance(one, torch.Tensor)]
    if not tensors:
        tensors = [one for many in given if isinstance(many, list | tuple) for one in many[:1]]
    dtypes = ", ".join(str(one.dtype).removeprefix("torch.") for one in tensors)
    shapes = ", ".join(str(list(one.shape)) for one in tensors) if name in ONE_SHAPE else ""
    return " ".join(part for part in (name, f"of {dtypes}" if dtypes else "", shapes) if part)


def _users_line() -> str:
    frame = sys._getframe(2)
    while frame.f_back is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    is_found = is_users(frame.f_code.co_filename)
    # The end of a long path is what tells files apart, and the message has room for so much.
    return f"{frame.f_code.co_filename[-LONGEST // 2 :]}:{frame.f_lineno}" if is_found else "evenstep's own line"
