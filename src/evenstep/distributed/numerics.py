"""What the bits of a result depend on besides the computation: threads, the kind of device, the version of torch.

With `--virtual-replicas` these are written to the Record and to checkpoints, and a run that differs says so.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from evenstep.distributed.world import World

LABELS = {"replicas": "--virtual-replicas", "threads": "threads per process", "device": "device", "torch": "torch"}


def numerics(world: World) -> dict[str, Any]:
    """Of this process."""
    return {
        "replicas": world.num_virtual,
        "threads": torch.get_num_threads(),
        "device": kind_of(world.device),
        "torch": torch.__version__,
    }


def kind_of(device: torch.device) -> str:
    """The GPU, or the CPU and the instructions that its kernels are made of."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else 'CPU'} ({torch.backends.cpu.get_cpu_capability()})"


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What differs, in words.

    >>> differences({"threads": 2, "torch": "2.11"}, {"threads": 1, "torch": "2.11"})
    ['threads per process 2 before, 1 now']
    """
    pairs = [(label, before[name], now[name]) for name, label in LABELS.items() if name in before and name in now]
    return [f"{label} {was} before, {is_} now" for label, was, is_ in pairs if was != is_]


def unequal_kinds(world: World) -> list[str]:
    """A line to log where the ranks compute on different kinds of devices, or with other threads; all call this."""
    every = world.gather(numerics(world))
    for rank, other in enumerate(every):
        found = [
            f"{label} {other[name]}, on rank 0 {every[0][name]}"
            for name, label in LABELS.items()
            if other[name] != every[0][name]
        ]
        if found:
            return [
                "--virtual-replicas: results may depend on which device computes what, and not be bit-identical: rank "
                f"{rank} has {found[0]}"
            ]
    return []
