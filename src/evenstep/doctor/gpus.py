"""GPUs: the driver's facts about them, other processes that use them, and whether they compute."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from evenstep.doctor import Finding, Number
from evenstep.doctor.bandwidth import copy_between_all, look_at_gpu
from evenstep.doctor.sandbox import Job, try_out, try_together
from evenstep.report.terminal import size

LOOK_SECONDS = 20.0
LITTLE_FREE_PART = 0.2
NVLINK_BYTES_PER_SECOND: Mapping[int, float] = {1: 20e9, 2: 25e9, 3: 25e9, 4: 25e9, 5: 50e9}
"""Nominal, of one link one way, by NVLink's version."""


def num_gpus() -> int:
    """GPUs that torch sees; initializes none of them."""
    return torch.cuda.device_count()


def open_driver() -> Any:
    """NVML, initialized; None if it is not installed."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # ImportError, or any of its own errors: no driver, no library
        return None
    return nvml


def driver(nvml: Any, environment: Mapping[str, str]) -> list[Finding]:
    """The driver's version, and whether this torch was built for a newer one."""
    if nvml is None:
        said = "unknown: nvidia-ml-py is not installed" if num_gpus() else "no NVIDIA driver, no GPUs"
        return [Finding("driver", "good", said)]
    version, cuda = nvml.nvmlSystemGetDriverVersion(), nvml.nvmlSystemGetCudaDriverVersion_v2()
    present = nvml.nvmlDeviceGetCount()
    newest = f"{cuda // 1000}.{cuda % 1000 // 10}"
    numbers: dict[str, Number] = {"driver": version, "cuda_of_driver": newest, "cards_present": present}
    said = f"{version}, for CUDA up to {newest}; {present} GPU{'s' * (present != 1)}"
    built = torch.version.cuda
    is_hidden = "CUDA_VISIBLE_DEVICES" in environment
    if built and int(built.split(".")[0]) > cuda // 1000:
        advice = f"torch is built for CUDA {built}: update the driver, or install a torch for CUDA {newest}"
        return [Finding("driver", "bad", said, advice, numbers)]
    if built and present and not num_gpus() and not is_hidden:
        advice = "torch sees none of them: run python -c 'import torch; torch.cuda.init()' for its reason"
        return [Finding("driver", "bad", said, advice, numbers)]
    return [Finding("driver", "good", said, numbers=numbers)]


def look_at_gpus(nvml: Any, seconds: float = LOOK_SECONDS) -> list[Finding]:
    """Check each GPU in a process of its own, which may hang or crash without harm."""
    jobs = [Job(look_at_gpu, (index,), 1, seconds) for index in range(num_gpus())]
    found = []
    for index, ended in enumerate(try_together(jobs)):
        name = f"cuda:{index}"
        if ended.is_well:
            found.append(judge_gpu(name, ended.returned[0], holders(nvml, ended.returned[0]["uuid"]), nvml))
        else:
            advice = "is torch built for this GPU and driver? nvidia-smi and dmesg tell more"
            found.append(Finding(name, "bad", f"does not compute: {ended.why}", advice))
    return found


def judge_gpu(name: str, facts: Mapping[str, Any], others: Sequence[str], nvml: Any = None) -> Finding:
    free, total = int(facts["free_bytes"]), int(facts["memory_bytes"])
    link = nvlink(nvml, facts["uuid"])
    said = (
        f"{facts['name']}, {size(free)} free of {size(total)}; copies {facts['copy_bytes_per_second'] / 1e9:.0f} GB/s "
        f"within itself, {facts['host_bytes_per_second'] / 1e9:.0f} GB/s to the host"
    )
    said += f", NVLink {link / 1e9:.0f} GB/s (nominal, one way)" if link else ""
    numbers: dict[str, Number] = {**facts, "nvlink_bytes_per_second": link}
    if not facts["is_right"]:
        return Finding(name, "bad", f"{said}; it computes WRONG products", "do not use it: nvidia-smi -q", numbers)
    if free < LITTLE_FREE_PART * total:
        who = f": {', '.join(others)}" if others else ""
        advice = f"other processes hold its memory{who}; end them, or choose another GPU"
        return Finding(name, "warn", said, advice, numbers)
    used = f"; also in use by {', '.join(others)}" if others else ""
    return Finding(name, "good", said + used, numbers=numbers)


def unequal(found: Sequence[Finding]) -> list[Finding]:
    """A proposal, if GPUs of different kinds would share a batch equally."""
    counts = Counter(str(one.numbers["name"]) for one in found if one.numbers.get("name"))
    if len(counts) < 2:
        return []
    kinds = ", ".join(f"{num} x {name}" for name, num in counts.items())
    advice = "with equal shares the slowest sets the pace; evenstep train --shares auto gives each what it can compute"
    return [Finding("GPU kinds", "warn", f"different: {kinds}", advice)]


def holders(nvml: Any, uuid: str) -> list[str]:
    """Other processes that hold memory of a GPU."""
    found = []
    with suppress(Exception):  # NVML's own errors: this information is optional
        handle = _handle(nvml, uuid)
        for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
            held = f" ({size(process.usedGpuMemory)})" if process.usedGpuMemory else ""
            found.append(f"process {process.pid}{held}")
    return found


def nvlink(nvml: Any, uuid: str) -> float | None:
    """Nominal bytes per second one way over all NVLinks of a GPU; None if there are none, or it is unknown."""
    total = 0.0
    with suppress(Exception):  # as above; a link that does not exist is an error of NVML's
        handle = _handle(nvml, uuid)
        for link in range(nvml.NVML_NVLINK_MAX_LINKS):
            if nvml.nvmlDeviceGetNvLinkState(handle, link):
                total += NVLINK_BYTES_PER_SECOND.get(nvml.nvmlDeviceGetNvLinkVersion(handle, link), 25e9)
    return total or None


def _handle(nvml: Any, uuid: str) -> Any:
    return nvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")


def copies_between_gpus(seconds: float = LOOK_SECONDS) -> dict[tuple[str, str], float]:
    """Measured bytes per second of copies between GPUs; empty if that fails or there is one GPU."""
    if num_gpus() < 2:
        return {}
    ended = try_out(Job(copy_between_all, (num_gpus(),), 1, seconds))
    rows = ended.returned[0]["rows"] if ended.is_well else []
    return {(str(first), str(second)): float(rate) for first, second, rate in rows}
