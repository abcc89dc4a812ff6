"""What a process may use of a device, what it used at most, and one GPU that stands in for a smaller one."""

from __future__ import annotations

import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch
from torch import nn
from torch.nn import functional as F

from evenstep.distributed.cgroups import Groups
from evenstep.distributed.devices import free_gpu_bytes, return_freed_memory, take_workspaces
from evenstep.sampling.rng import fork_rng

CONTEXT_BYTES = 512 * 2**20
"""About what CUDA takes of a GPU for a process, before torch has a tensor."""


def available_bytes(device: torch.device, num_local: int = 1) -> int:
    """What this process can use from here on, in total: of a GPU, or of the machine's memory as far as it may."""
    if device.type == "cuda":
        return free_gpu_bytes(device) + torch.cuda.memory_allocated(device)
    own = psutil.Process().memory_info()
    left: list[int] = [psutil.virtual_memory().available]
    group = Groups().memory_limit()
    if group is not None:
        left.append(max(0, group[0] - group[1]))
    found: int = own.rss + min(left) // num_local
    for kind, used in ((resource.RLIMIT_DATA, own.data), (resource.RLIMIT_AS, own.vms)):
        limit, _ = resource.getrlimit(kind)
        if limit != resource.RLIM_INFINITY:
            found = min(found, own.rss + max(0, limit - used))
    return found


def warm_up() -> None:
    """Compute a little of what most steps compute: libraries that a CPU uses take their memory at the first call."""
    with fork_rng():
        model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 4))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for _ in range(2):
            F.cross_entropy(model(torch.zeros(2, 1, 4, 4)), torch.zeros(2, dtype=torch.int64)).backward()
            optimizer.step()


def workspace_bytes(device: torch.device) -> int:
    """What cuBLAS keeps of a GPU for products in forward and in backward, taken now."""
    before = torch.cuda.memory_allocated(device)
    take_workspaces(device)
    torch.cuda.synchronize(device)
    return torch.cuda.memory_allocated(device) - before


class MemoryMeter:
    """The peak of one device since it was last reset."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def reset(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            # proc(5): 5 resets the peak of resident memory.
            Path("/proc/self/clear_refs").write_text("5")

    def return_freed(self) -> None:
        """Give back what no tensor uses, so that what comes next is measured as in a fresh process."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        else:
            return_freed_memory()

    def now(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else _status("VmRSS")

    def peak(self) -> int:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            return torch.cuda.max_memory_allocated(self.device)
        return _status("VmHWM")

    def reserved(self) -> int:
        return torch.cuda.max_memory_reserved(self.device) if self.device.type == "cuda" else self.peak()


def _status(name: str) -> int:
    """A line of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


def limit_gpus(devices: Sequence[str], limit: int) -> None:
    """Let a GPU stand in for a smaller one."""
    for name in {name for name in devices if name.startswith("cuda")}:
        device = torch.device(name)
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, max(0, limit - CONTEXT_BYTES) / total), device)


@contextmanager
def only(device: torch.device, limit: float) -> Iterator[None]:
    """Within, torch may take this many bytes of a GPU, and has what it kept for later returned."""
    before = torch.cuda.get_per_process_memory_fraction(device)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)
