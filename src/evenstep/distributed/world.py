"""Who this process is among the others, and the few things that all of them do together."""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
from msgspec import Meta

from evenstep.distributed.heartbeat import JOINING, Heartbeat, open_heartbeat
from evenstep.distributed.process import read_rank
from evenstep.distributed.shm.scalars import Letter, Mailbox, Sums
from evenstep.errors import BadInput, PlanError
from evenstep.profiling.spans import Tap
from evenstep.schema import read_variables

_INTERFACE = "GLOO_SOCKET_IFNAME"
STORE = "EVENSTEP_STORE"
"""The file through which the processes of one machine meet; set by the launcher."""
HEARTBEATS = "EVENSTEP_BEATS"
"""The file in which processes leave their signs of life, and the slot of this one in it; set by the launcher."""


@dataclass
class Nearby:
    """What processes of one machine share."""

    may_share: bool = True
    """Not where every collective is to be compared: those of torch alone are."""
    mailbox: Mailbox | None = None


@dataclass(frozen=True)
class World:
    """This process: its rank, how many there are, and the devices that it drives.

    A *seat* is a device of the whole world. Under dp one process drives all seats; otherwise each drives one.
    """

    rank: int
    size: int
    devices: tuple[torch.device, ...]
    heartbeat: Heartbeat = field(default_factory=Heartbeat, compare=False, repr=False)
    tap: Tap = field(default_factory=Tap, compare=False, repr=False)
    nearby: Nearby = field(default_factory=Nearby, compare=False, repr=False)
    lent: tuple[torch.device, ...] = ()
    """More devices, which the strategy's engine uses by itself."""

    @cached_property
    def device(self) -> torch.device:
        """The first of this process's devices."""
        return self.devices[0]

    @property
    def is_main(self) -> bool:
        """Whether this is the process that prints and writes files."""
        return self.rank == 0

    @cached_property
    def num_replicas(self) -> int:
        return self.size * len(self.devices)

    @cached_property
    def replicas(self) -> range:
        """The seats that this process drives."""
        return range(self.rank * len(self.devices), (self.rank + 1) * len(self.devices))

    def post(self, numbers: Sequence[float]) -> Letter | None:
        """Sum a few numbers of the host over all processes; None where nothing faster than `total` can do it."""
        mailbox = self.nearby.mailbox if self.nearby.may_share else None
        if mailbox is None or self.tap.is_muted:
            return None
        self.heartbeat.collective()
        return mailbox.post(numbers)

    def total(self, values: torch.Tensor) -> dist.Work | Sums | None:
        """Sum `values` over all processes, in place; what is returned must be waited for."""
        if self.size == 1 or self.tap.is_muted:
            return None
        self.heartbeat.collective()
        mailbox = self.nearby.mailbox if self.nearby.may_share else None
        if mailbox is not None and mailbox.takes(values):
            return Sums(mailbox.post(values.reshape(-1).tolist()), values)
        work: dist.Work = dist.all_reduce(values, async_op=True)
        return work

    def gather(self, value: Any) -> list[Any]:
        """`value` (anything JSON can hold) of every process, in the order of ranks, on every process."""
        if self.size == 1:
            return [value]
        self.heartbeat.collective()
        mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(mine)]))
        longest = int(max(lengths))
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(mine)] = mine
        texts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(texts, padded)
        return [json.loads(bytes(text[: int(length)].tolist())) for text, length in zip(texts, lengths, strict=True)]

    def agree(self, problem: str | None) -> list[str]:
        """What went wrong on any process, so that all of them stop together; empty if nothing did."""
        return [f"rank {rank}: {text}" for rank, text in enumerate(self.gather(problem)) if text]

    def barrier(self) -> None:
        """Wait for all processes."""
        self.gather(None)


def read_heartbeat(environment: Mapping[str, str] = os.environ) -> Heartbeat:
    """Where this process leaves its signs of life; nowhere that others look, if no launcher asked for them."""
    path, _, slot = environment.get(HEARTBEATS, "").rpartition(":")
    return open_heartbeat(path, int(slot)) if slot.isdecimal() and os.path.exists(path) else Heartbeat()


def spare_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """A folder of this run on another disk than its own, most of the time: that of the signs of life."""
    path, _, _ = environment.get(HEARTBEATS, "").rpartition(":")
    return Path(path).parent if path else Path(os.devnull)


def join_world(devices: Sequence[str], needs_group: bool) -> World:
    """Bind this process to its device and meet the others.

    `devices` are those of the whole machine if there are several processes, and this process's own if it is alone.
    """
    rank, size, local_rank = read_rank()
    if size > 1 and local_rank >= len(devices):
        raise PlanError(f"local rank {local_rank} has no device among {', '.join(devices)}; give one per process")
    own = [devices[local_rank]] if size > 1 else list(devices)
    world = World(rank, size, tuple(torch.device(_indexed(name)) for name in own), read_heartbeat())
    world.heartbeat.beat(JOINING)
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    if needs_group or size > 1:
        _meet(world, backend=backend_for(devices))
    if size > 1 and world.device.type == "cpu":
        world.nearby.mailbox = Mailbox.open(world.gather, rank, size)
    return world


def backend_for(devices: Sequence[str]) -> str:
    """NCCL where every process has a card of its own; gloo on CPU and where processes share a card."""
    own_gpus = len(set(devices)) == len(devices) and all(name.startswith("cuda") for name in devices)
    return "cpu:gloo,cuda:nccl" if own_gpus else "gloo"


@dataclass(frozen=True)
class _Address:
    """Where ranks meet that torchrun started."""

    MASTER_ADDR: str = ""
    MASTER_PORT: Annotated[int, Meta(ge=0, le=65535)] | None = None


def _meet(world: World, backend: str) -> None:
    if dist.is_initialized():
        return
    atexit.register(_let_go)
    path = os.environ.get(STORE)
    if path is None and world.size > 1:
        address = read_variables(_Address, os.environ)
        if not address.MASTER_ADDR or address.MASTER_PORT is None:
            raise BadInput(
                f"WORLD_SIZE is {world.size}, and MASTER_ADDR and MASTER_PORT do not say where the ranks meet; "
                "start this with evenstep run or torchrun"
            )
        dist.init_process_group(backend)
        return
    # One machine: meet through a file and speak over loopback, so that nothing listens to the outside.
    store: Any = dist.FileStore(path, world.size) if path else dist.HashStore()  # type: ignore[attr-defined]
    with _over_loopback(stays=world.size > 1):
        dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size)


@contextmanager
def _over_loopback(stays: bool) -> Iterator[None]:
    """Have gloo listen on loopback alone, unless the user chose an interface.

    It `stays` so among ranks, for groups that they make later; what a process alone starts may have to reach others.
    """
    is_ours = _INTERFACE not in os.environ
    os.environ.setdefault(_INTERFACE, "lo0" if sys.platform == "darwin" else "lo")
    try:
        yield
    finally:
        if is_ours and not stays:
            del os.environ[_INTERFACE]


def _let_go() -> None:
    """Leave the others in good order, at the end of a program that did not fail.

    gloo's threads get a moment to drop the tensors of the last collective. They need the interpreter for that; one
    that is being taken apart refuses, and the process aborts with "terminate called without an active exception"
    (seen in 1 of 20 ends of a process).
    """
    if not _failed and not hasattr(sys, "last_value") and dist.is_initialized():
        dist.destroy_process_group()
    time.sleep(0.05)


_failed = False


def leave_group_of_one() -> None:
    """Before this process is copied: a copy would take the group of a process alone for that of all copies."""
    if dist.is_initialized() and dist.get_world_size() == 1:
        dist.destroy_process_group()


def stay_in_group() -> None:
    """This process failed: leaving the group in order would wait for ranks that wait for this one."""
    global _failed
    _failed = True


def _indexed(name: str) -> str:
    """`cuda` alone means whatever is current at each call; a process must not move between cards."""
    return "cuda:0" if name == "cuda" else name
