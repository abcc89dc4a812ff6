"""This process's rank, world size and devices, and the collectives that all ranks take part in."""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from evenstep.distributed.heartbeat import JOINING, Heartbeat, open_heartbeat
from evenstep.distributed.step_spans import Spans
from evenstep.distributed.worker_process import check_master, read_rank, worker_spec
from evenstep.errors import PlanError

if TYPE_CHECKING:
    from evenstep.distributed.shm.allreduce import PendingSum, PendingTensorSum, ScalarAllReduce

_INTERFACE = "GLOO_SOCKET_IFNAME"


@dataclass
class Communication:
    """How this process reaches the other ranks."""

    is_off: bool = False
    """True while `compare` measures steps in which strategies send nothing."""
    may_share: bool = True
    """False under --check-collectives, which sees only torch's collectives."""
    scalars: ScalarAllReduce | None = None
    """Through memory that the ranks of one machine share."""
    link: str | None = None
    """How gradients are sent, as `--link` has it."""


@dataclass(frozen=True)
class World:
    """This process: its rank, the world size, and the devices that it drives.

    A replica is one device's copy of the model. Under dp one process drives all replicas; otherwise each drives one.
    """

    rank: int
    size: int
    devices: tuple[torch.device, ...]
    spans: Spans = field(default_factory=Spans, compare=False, repr=False)
    communication: Communication = field(default_factory=Communication, compare=False, repr=False)
    delegated: tuple[torch.device, ...] = ()
    """More devices, which nn.DataParallel drives from the first one."""
    num_virtual: int | None = None
    """Virtual replicas (`--virtual-replicas`), if the batch is cut into such."""
    ranks_per_replica: int = 1
    """Consecutive ranks that compute one replica together, and read the same samples."""
    num_shards: int | None = None
    """Ranks that hold the shards of one copy of the model, or of this rank's part of it; None: all of them.

    Those are consecutive, or one in each of as many consecutive replicas.
    """
    schedule: str = "1f1b"
    """In which order the stages of a pipeline compute."""
    group: Any = None
    """The process group of these ranks; None: that of all."""

    @cached_property
    def device(self) -> torch.device:
        """The first of this process's devices."""
        return self.devices[0]

    @property
    def heartbeat(self) -> Heartbeat:
        """What the launcher sees of this process."""
        return self.spans.heartbeat

    @property
    def is_main(self) -> bool:
        """Whether this is the process that prints and writes files."""
        return self.rank == 0

    @cached_property
    def data_rank(self) -> int:
        """The rank among those with samples of their own; the same for all that compute one replica together."""
        return self.rank // self.ranks_per_replica

    @cached_property
    def data_size(self) -> int:
        """Ranks, or groups of ranks, with samples of their own."""
        return self.size // self.ranks_per_replica

    @cached_property
    def counts(self) -> bool:
        """Whether what this rank computed is counted; of those that compute one replica together, the last one's is."""
        return (self.rank + 1) % self.ranks_per_replica == 0

    @cached_property
    def num_replicas(self) -> int:
        return self.data_size * len(self.devices)

    @cached_property
    def replicas(self) -> range:
        """The replicas that this process drives."""
        return range(self.data_rank * len(self.devices), (self.data_rank + 1) * len(self.devices))

    @cached_property
    def model_ranks(self) -> World:
        """This process among the ranks that compute its replica together; all ranks ask for this together."""
        first = self.data_rank * self.ranks_per_replica
        return self._part([range(start, start + self.ranks_per_replica) for start in self._firsts()], first)

    @cached_property
    def data_ranks(self) -> World:
        """This process among the ranks that hold the same part of other replicas; all ranks ask for this together."""
        columns = [range(start, self.size, self.ranks_per_replica) for start in range(self.ranks_per_replica)]
        return self._part(columns, self.rank % self.ranks_per_replica)

    def _firsts(self) -> range:
        return range(0, self.size, self.ranks_per_replica)

    def _part(self, every: Sequence[range], first: int) -> World:
        # A process group is made by all ranks, members or not, in one order.
        groups = {ranks[0]: dist.new_group(list(ranks)) for ranks in every if len(ranks) > 1}
        (own,) = [ranks for ranks in every if ranks[0] == first]
        of_part = Communication(is_off=self.communication.is_off)
        return replace(
            self,
            rank=own.index(self.rank),
            size=len(own),
            communication=of_part,
            ranks_per_replica=1,
            group=groups.get(first),
        )

    def post(self, numbers: Sequence[float]) -> PendingSum | None:
        """Start to sum a few numbers on the host over all ranks; None where `total` has to do it."""
        scalars = self.communication.scalars if self.communication.may_share else None
        if scalars is None or self.communication.is_off or len(numbers) > scalars.most_numbers:
            return None
        self.heartbeat.collective()
        return scalars.post(numbers)

    def total(self, values: torch.Tensor) -> dist.Work | PendingTensorSum | None:
        """Sum `values` over all ranks, in place; wait for the returned work."""
        if self.size == 1 or self.communication.is_off:
            return None
        self.heartbeat.collective()
        scalars = self.communication.scalars if self.communication.may_share else None
        if scalars is not None and scalars.takes(values):
            return scalars.post_tensor(values)
        work: dist.Work = dist.all_reduce(values, group=self.group, async_op=True)
        return work

    def gather(self, value: Any) -> list[Any]:
        """The `value` (anything JSON can hold) of every rank, in rank order, on every rank."""
        if self.size == 1:
            return [value]
        padded, lengths = self._padded(json.dumps(value).encode())
        texts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(texts, padded, group=self.group)
        return [json.loads(bytes(text[:length].tolist())) for text, length in zip(texts, lengths, strict=True)]

    def collect(self, data: bytes) -> list[bytes]:
        """The `data` of every rank, in rank order, on rank 0; an empty list on the others."""
        if self.size == 1:
            return [data]
        padded, lengths = self._padded(data)
        found = [torch.empty_like(padded) for _ in range(self.size)] if self.is_main else None
        dist.gather(padded, found)
        return [one[:length].numpy().tobytes() for one, length in zip(found or (), lengths, strict=bool(found))]

    def _padded(self, data: bytes) -> tuple[torch.Tensor, list[int]]:
        """The bytes of this rank in a tensor that is as long on all ranks; and how many are meant on each."""
        self.heartbeat.collective()
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(data)]), group=self.group)
        padded = torch.zeros(int(max(lengths)), dtype=torch.uint8)
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return padded, [int(length) for length in lengths]

    def agree(self, problem: str | None) -> list[str]:
        """The problems of all ranks, so that all stop together; empty if there are none."""
        return [f"rank {rank}: {text}" for rank, text in enumerate(self.gather(problem)) if text]

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.gather(None)


def read_heartbeat() -> Heartbeat:
    """This process's heartbeat; without a launcher, one that is not read."""
    spec = worker_spec()
    return open_heartbeat(spec.heartbeats, spec.slot) if spec and os.path.exists(spec.heartbeats) else Heartbeat()


def spare_folder() -> Path:
    """A folder of this run that is usually on another disk than the run folder: that of the heartbeat file."""
    spec = worker_spec()
    return Path(spec.heartbeats).parent if spec and spec.heartbeats else Path(os.devnull)


def join_world(devices: Sequence[str], needs_group: bool) -> World:
    """Bind this process to its device and join the process group.

    `devices` are those of the whole machine if there are several processes, and this process's own if it is alone.
    """
    rank, size, local_rank = read_rank()
    if size > 1 and local_rank >= len(devices):
        raise PlanError(f"local rank {local_rank} has no device among {', '.join(devices)}; give one per process")
    own = [devices[local_rank]] if size > 1 else list(devices)
    world = World(rank, size, tuple(torch.device(_indexed(name)) for name in own), Spans(read_heartbeat()))
    world.spans.begin(JOINING)
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    if needs_group or size > 1:
        _meet(world, backend=backend_for(devices))
    if size > 1 and world.device.type == "cpu":
        from evenstep.distributed.shm.allreduce import ScalarAllReduce

        world.communication.scalars = ScalarAllReduce.open(world.gather, rank, size)
    return world


def backend_for(devices: Sequence[str]) -> str:
    """NCCL where every process has its own GPU; gloo on CPUs and where processes share a GPU."""
    own_gpus = len(set(devices)) == len(devices) and all(name.startswith("cuda") for name in devices)
    return "cpu:gloo,cuda:nccl" if own_gpus else "gloo"


def _meet(world: World, backend: str) -> None:
    if dist.is_initialized():
        return
    atexit.register(_let_go)
    spec = worker_spec()
    path = spec.store if spec is not None else None
    if path is None and world.size > 1:
        check_master(world.size)
        dist.init_process_group(backend)
        return
    # One machine: rendezvous through a file and connect over loopback, so that nothing listens on other interfaces.
    store: Any = dist.FileStore(path, world.size) if path else dist.HashStore()  # type: ignore[attr-defined]
    with _over_loopback(stays=world.size > 1):
        dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size)


@contextmanager
def _over_loopback(stays: bool) -> Iterator[None]:
    """Let gloo listen on loopback only, unless the user chose an interface.

    Ranks keep this (`stays`) for later process groups; what a single process starts may have to reach other machines.
    """
    is_ours = _INTERFACE not in os.environ
    os.environ.setdefault(_INTERFACE, "lo0" if sys.platform == "darwin" else "lo")
    try:
        yield
    finally:
        if is_ours and not stays:
            del os.environ[_INTERFACE]


def _let_go() -> None:
    """Destroy the process group at the end of a program that did not fail.

    gloo's threads then get some time to release the tensors of the last collective. They need the GIL for that; an
    interpreter that is shutting down refuses it, and the process aborts with "terminate called without an active
    exception" (seen at 1 of 20 process exits).
    """
    if not _failed and not hasattr(sys, "last_value") and dist.is_initialized():
        dist.destroy_process_group()
    time.sleep(0.05)


_failed = False


def leave_group_of_one() -> None:
    """Before a fork: a child would take the process group of a single process for that of all ranks."""
    if dist.is_initialized() and dist.get_world_size() == 1:
        dist.destroy_process_group()


def stay_in_group() -> None:
    """This process failed: destroying the group would wait for ranks that wait for this one."""
    global _failed
    _failed = True


def _indexed(name: str) -> str:
    """`cuda` means the current device at each call; a process must stay on one GPU."""
    return "cuda:0" if name == "cuda" else name
