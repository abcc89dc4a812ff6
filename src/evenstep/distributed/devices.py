"""This machine's devices, CUDA streams, threads and versions, and the memory that a process used."""

from __future__ import annotations

import ctypes
import math
import os
import platform
import resource
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch.nn import functional as F

import evenstep
from evenstep.distributed.cgroups import own_quota
from evenstep.distributed.worker_process import omp_num_threads, read_local_size
from evenstep.errors import PlanError, shorten
from evenstep.plan import check_device_names

if TYPE_CHECKING:
    from evenstep.distributed.world import World

MOST_PROCESSES_PER_CORE = 8


def available_devices(rank: tuple[int, int, int]) -> list[str]:
    """A device for each process of this machine: GPUs if there are enough, else the CPU."""
    return list(choose_devices(read_local_size() or rank[1]))


def choose_devices(count: int) -> tuple[str, ...]:
    """`count` devices of the best kind that this machine has."""
    if count < 1:
        raise PlanError(f"{count} devices were requested; give 1 or more, or a list such as cpu,cpu")
    gpus = torch.cuda.device_count()
    if gpus:
        if count > gpus:
            raise PlanError(
                f"{count} devices were requested and this machine has {gpus} CUDA device{'s' * (gpus > 1)}; "
                f"use --devices {gpus}, or name them: --devices {','.join(['cpu'] * min(count, 4))}"
            )
        return tuple(f"cuda:{index}" for index in range(count))
    if count == 1 and torch.backends.mps.is_available():
        return ("mps",)
    _refuse_too_many(count)
    return ("cpu",) * count


def count_processes(given: str, name: str = "--devices") -> int:
    """Processes for this machine: a number, or torchrun's `gpu`, `cpu` and `auto`; `name` is what was set to it."""
    if given.isdecimal() and len(given) < 10:
        return int(given)
    num_gpus = torch.cuda.device_count()
    counts = {"gpu": num_gpus, "cpu": os.cpu_count() or 1, "auto": num_gpus or os.cpu_count() or 1}
    if given not in counts:
        raise PlanError(f"{name} is {shorten(repr(given))}; write a number such as 2, or gpu, cpu or auto")
    if not counts[given]:
        raise PlanError(f"{name} gpu: this machine has no CUDA device; write cpu, or a number")
    return counts[given]


def check_devices(devices: Sequence[str]) -> None:
    """Refuse devices that this machine does not have."""
    check_device_names(devices)
    gpus = torch.cuda.device_count()
    for name in devices:
        if name.startswith("cuda") and int(name.partition(":")[2] or 0) >= gpus:
            have = f"cuda:0 to cuda:{gpus - 1}" if gpus > 1 else "cuda:0" if gpus else "no CUDA device"
            raise PlanError(f"device {name} does not exist: this machine has {have}; on the CPU use --devices cpu")
        if name == "mps" and not torch.backends.mps.is_available():
            raise PlanError("device mps does not exist here; use --devices cpu")
    _refuse_too_many(list(devices).count("cpu"))


def free_gpu_bytes(device: torch.device) -> int:
    """What tensors may still take of a GPU: the rest of what torch reserved, and what it may reserve."""
    reserved = torch.cuda.memory_reserved(device)
    total = torch.cuda.get_device_properties(device).total_memory
    allowed = int(torch.cuda.get_per_process_memory_fraction(device) * total) - reserved
    return reserved - torch.cuda.memory_allocated(device) + max(0, min(torch.cuda.mem_get_info(device)[0], allowed))


def _refuse_too_many(count: int) -> None:
    most = MOST_PROCESSES_PER_CORE * num_cores()
    if count > most:
        raise PlanError(
            f"{count} CPU devices on {num_cores()} cores; {most} is the most that makes sense: use --devices {most}"
        )


def num_cores() -> int:
    """Cores that this process can use: allowed by both its affinity and its control group's quota."""
    return usable_cores(own_quota())


def usable_cores(quota: float | None) -> int:
    """The same for a quota of CPU time, in cores (None: no limit); a fraction counts as a core."""
    allowed = cores_by_affinity()
    return allowed if quota is None else max(1, min(allowed, math.ceil(quota)))


def cores_by_affinity() -> int:
    """Cores on which this process may run, for however short a time."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def share_threads(threads: int | None, devices: Sequence[str]) -> int:
    """Threads for one process (or replica), so that those of one machine share its cores."""
    return threads or omp_num_threads() or max(1, num_cores() // len(devices))


def keep_freed_memory() -> None:
    """Let this process reuse memory that it freed, instead of returning it to the system.

    A step of virtual replicas allocates and frees several gradients; that the system clears their pages each time takes
    a tenth of the step of a network of a million parameters.
    """
    trim_threshold, mmap_threshold = -1, -3
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(mmap_threshold, 1 << 30)
        library.mallopt(trim_threshold, (1 << 31) - 1)


def return_freed_memory() -> None:
    """Give memory that this process freed back to the system, wherever it lies in the heap; glibc alone does it."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def threads_for_replicas() -> int:
    """Threads of each process with virtual replicas: as many on any number of devices, for kernels sum by threads."""
    return omp_num_threads() or 1


def choose_repeatable_kernels(names: Sequence[str]) -> None:
    """On GPUs, use kernels that give the same bits every time; torch warns of an operation that has none.

    Before the first computation: cuBLAS reads its variable when it is first used.
    """
    if not any(name.startswith("cuda") for name in names):
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    # It would fill every new tensor with NaN first.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False


def facts(world: World | None = None) -> dict[str, Any]:
    """Versions and hardware, recorded with every measurement; no host name, user or environment.

    With virtual replicas, also what the bits depend on.
    """
    more: dict[str, Any] = {}
    if world is not None and world.num_virtual is not None:
        from evenstep.distributed.numerics import numerics

        more = {"numerics": numerics(world)}
    return {
        **more,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "evenstep": evenstep.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "cores": num_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "cuda": torch.version.cuda if torch.cuda.is_available() else None,
        "cards": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "threads": torch.get_num_threads(),
    }


def peak_bytes(world: World) -> dict[str, int]:
    """Peak memory of this process's devices: what torch allocated on a GPU, the whole process on the CPU."""
    return {
        f"rank{world.rank} {device}": torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]["peak"]
        if device.type == "cuda"
        else _peak_process()
        for device in (*world.devices, *world.delegated)
    }


def _peak_process() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def leave_default_stream(device: torch.device) -> None:
    """Switch this thread to a side stream: the default stream cannot be captured in a CUDA graph.

    One stream for everything, in all runs of a process: DDP's autograd nodes belong to the stream on which it is made,
    and what cuBLAS keeps for each stream stays for as long as the process lives.
    """
    if device.type == "cuda" and torch.cuda.current_stream(device) == torch.cuda.default_stream(device):
        is_first = device not in _STREAMS
        if is_first:
            _STREAMS[device] = torch.cuda.Stream(device)
        _STREAMS[device].wait_stream(torch.cuda.default_stream(device))
        torch.cuda.set_stream(_STREAMS[device])
        if is_first:
            take_workspaces(device)


_STREAMS: dict[torch.device, torch.cuda.Stream] = {}
"""The side stream of each GPU on which this process trained."""


def take_workspaces(device: torch.device) -> None:
    """Let cuBLAS take its workspaces for the current stream: one for this thread and one for that of backward.

    Later they would be cut out of the largest free block, such as that of an activation, and torch could neither
    release the rest of it nor use it as a whole again.
    """
    weight = torch.ones(64, 64, device=device, requires_grad=True)
    with torch.enable_grad():
        F.linear(weight, weight, weight[0]).sum().backward()


def return_to_default_stream(device: torch.device) -> None:
    """Switch this thread back to the default stream."""
    if device.type == "cuda":
        stream = torch.cuda.default_stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        torch.cuda.set_stream(stream)
