"""Python, torch, and the back ends that this torch was built with."""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from evenstep.doctor.finding import Finding, Number

OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = (2, 11)
NVIDIA_DEVICES = Path("/dev")


def python() -> Finding:
    """Its version, and where it is."""
    numbers: dict[str, Number] = {"python": platform.python_version(), "system": platform.system()}
    said = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.version_info < OLDEST_PYTHON:
        return Finding("python", "bad", said, "evenstep needs Python 3.11 or newer", numbers)
    return Finding("python", "good", said, numbers=numbers)


def torch_build(num_cards: int, devices: Path = NVIDIA_DEVICES) -> Finding:
    """Its version, and whether it can use the cards of this machine."""
    built = (
        f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}" * bool(torch.version.hip)
    )
    numbers: dict[str, Number] = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cudnn": torch.backends.cudnn.version(),
        "cards": num_cards,
    }
    parts = [torch.__version__, f"built for {built or 'the CPU alone'}"]
    if numbers["cudnn"]:
        parts.append(f"cuDNN {numbers['cudnn']}")
    present = num_cards_present(devices)
    said, advice = ", ".join(parts), ""
    if present and not built:
        advice = f"{present} NVIDIA card{'s' * (present > 1)} cannot be used: install a torch that is built for CUDA"
    elif tuple(int(part) for part in torch.__version__.split(".")[:2]) < OLDEST_TORCH:
        advice = f"install torch {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]} or newer"
    return Finding("torch", "bad" if advice else "good", said, advice, numbers)


def num_cards_present(devices: Path = NVIDIA_DEVICES) -> int:
    """NVIDIA cards that the system knows, whether torch sees them or not."""
    return len(list(devices.glob("nvidia[0-9]*")))


def back_ends(num_cards: int) -> Finding:
    """What ranks can speak through."""
    there = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}
    version = _nccl_version() if there["nccl"] else None
    numbers: dict[str, Number] = {**there, "nccl_version": version}
    names = [f"nccl {version}" if name == "nccl" else name for name, is_there in there.items() if is_there]
    said = f"{', '.join(names) or 'none'}; not {_listed([name for name, is_there in there.items() if not is_there])}"
    said = said.removesuffix("; not ")
    if not there["gloo"]:
        return Finding("back ends", "bad", said, "install a torch with gloo: the one from PyPI has it", numbers)
    if num_cards > 1 and not there["nccl"]:
        advice = "cards would speak through the host: install a torch that is built for CUDA, with NCCL"
        return Finding("back ends", "warn", said, advice, numbers)
    return Finding("back ends", "good", said, numbers=numbers)


def _nccl_version() -> str:
    version = torch.cuda.nccl.version()
    return ".".join(map(str, version)) if isinstance(version, tuple) else str(version)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names)
