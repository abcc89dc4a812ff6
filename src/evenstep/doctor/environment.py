"""Python, torch and its backends, and environment variables that change how a training runs."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Callable, Mapping, Set
from pathlib import Path

import torch
import torch.distributed as dist

from evenstep.doctor import Finding, Number, Status
from evenstep.doctor.gpus import num_gpus
from evenstep.doctor.network import NAME_SECONDS, interfaces, resolve

OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = (2, 11)
NVIDIA_DEVICES = Path("/dev")


def python() -> Finding:
    numbers: dict[str, Number] = {"python": platform.python_version(), "system": platform.system()}
    said = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.version_info < OLDEST_PYTHON:
        return Finding("python", "bad", said, "evenstep needs Python 3.11 or newer", numbers)
    return Finding("python", "good", said, numbers=numbers)


def torch_build(num_gpus: int, devices: Path = NVIDIA_DEVICES) -> Finding:
    """torch's version, and whether it can use this machine's GPUs."""
    built = (
        f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}" * bool(torch.version.hip)
    )
    numbers: dict[str, Number] = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cudnn": torch.backends.cudnn.version(),
        "cards": num_gpus,
    }
    parts = [torch.__version__, f"built for {built or 'the CPU alone'}"]
    if numbers["cudnn"]:
        parts.append(f"cuDNN {numbers['cudnn']}")
    present = num_gpus_present(devices)
    said, advice = ", ".join(parts), ""
    if present and not built:
        advice = f"{present} NVIDIA GPU{'s' * (present > 1)} cannot be used: install a torch that is built for CUDA"
    elif tuple(int(part) for part in torch.__version__.split(".")[:2]) < OLDEST_TORCH:
        advice = f"install torch {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]} or newer"
    return Finding("torch", "bad" if advice else "good", said, advice, numbers)


def num_gpus_present(devices: Path = NVIDIA_DEVICES) -> int:
    """NVIDIA GPUs that the system has, whether torch sees them or not."""
    return len(list(devices.glob("nvidia[0-9]*")))


def back_ends(num_gpus: int) -> Finding:
    there = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}
    version = _nccl_version() if there["nccl"] else None
    numbers: dict[str, Number] = {**there, "nccl_version": version}
    names = [f"nccl {version}" if name == "nccl" else name for name, is_there in there.items() if is_there]
    missing = ", ".join(name for name, is_there in there.items() if not is_there)
    said = (", ".join(names) or "none") + f"; not {missing}" * bool(missing)
    if not there["gloo"]:
        return Finding("back ends", "bad", said, "install a torch with gloo: the one from PyPI has it", numbers)
    if num_gpus > 1 and not there["nccl"]:
        advice = "GPUs would communicate through the host: install a torch that is built for CUDA, with NCCL"
        return Finding("back ends", "warn", said, advice, numbers)
    return Finding("back ends", "good", said, numbers=numbers)


def _nccl_version() -> str:
    version = torch.cuda.nccl.version()
    return ".".join(map(str, version)) if isinstance(version, tuple) else str(version)


LISTED = re.compile(
    r"(NCCL|GLOO|TORCH|TORCHELASTIC|TORCHDYNAMO|TORCHINDUCTOR|PYTORCH|CUDA|CUBLAS|CUDNN|OMP|MKL|KMP|GOMP|EVENSTEP|UCX|FI|TP)_"
    r"|(MASTER_ADDR|MASTER_PORT|RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|USE_LIBUV|LD_PRELOAD)$"
)
SECRET = re.compile(r"TOKEN|SECRET|KEY|PASS|CREDENTIAL", re.IGNORECASE)
MAX_CHARACTERS = 60
OWN = {("TORCH_CPP_LOG_LEVEL", "ERROR")}
"""Set by evenstep for runs on many machines."""
ON = ("1", "true", "yes", "on", "y", "t")
RANK_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


Judgement = tuple[Status, str, str]
"""Status, what is wrong with a variable, and advice."""
Judge = Callable[[str], Judgement | None]


def variables(environment: Mapping[str, str]) -> list[Finding]:
    """One finding for each variable that is wrong or slow, and one that lists the rest."""
    found = {name: value for name, value in sorted(environment.items()) if LISTED.match(name)}
    found = {name: value for name, value in found.items() if (name, value) not in OWN}
    judged = {name: JUDGES[name](value) for name, value in found.items() if name in JUDGES}
    wrong = {name: judgement for name, judgement in judged.items() if judgement is not None}
    rest = [f"{name}={shown(name, value)}" for name, value in found.items() if name not in wrong]
    none = "nothing else is set that changes a run" if wrong else "no variable is set that changes a run"
    listed = Finding(
        "environment",
        "good",
        f"set: {', '.join(rest)}" if rest else none,
        numbers={name: shown(name, value) for name, value in found.items()},
    )
    return [
        *(
            Finding(name, status, f"{shown(name, found[name])}: {said}", advice)
            for name, (status, said, advice) in wrong.items()
        ),
        *left_ranks(environment),
        listed,
    ]


def shown(name: str, value: str) -> str:
    """A value to print: shortened, and hidden if its name suggests a secret."""
    if SECRET.search(name):
        return "(not shown)"
    return value or "''" if len(value) <= MAX_CHARACTERS else f"{value[: MAX_CHARACTERS - 3]}..."


def left_ranks(environment: Mapping[str, str]) -> list[Finding]:
    """Rank variables left in the shell, which a training started here would use."""
    size = environment.get("WORLD_SIZE", "1")
    if not size.isdecimal() or len(size) > 9 or int(size) <= 1 or "SLURM_JOB_ID" in environment:
        return []
    names = [name for name in RANK_NAMES if name in environment]
    said = f"WORLD_SIZE={size} is set in this shell: a program started here assumes that it is one of {size} processes"
    return [Finding("ranks", "warn", said, f"unset {' '.join(names)}")]


def missing_interfaces(text: str, present: Set[str], is_nccl: bool) -> list[str]:
    """Names in an interface list that match no interface here; NCCL matches prefixes, or exact names after `=`."""
    if is_nccl and text.startswith("^"):
        return []
    is_exact = not is_nccl or text.startswith("=")
    names = [name for name in text.removeprefix("=" if is_nccl else "").split(",") if name]
    wanted = {name: name.split(":")[0] for name in names}
    if is_exact:
        return [name for name, exact in wanted.items() if exact not in present]
    return [name for name, prefix in wanted.items() if not any(one.startswith(prefix) for one in present)]


def _interface(name: str) -> Judge:
    def judge(value: str) -> Judgement | None:
        missing = missing_interfaces(value, interfaces(), is_nccl=name.startswith("NCCL"))
        if not missing:
            return None
        said = f"no interface {', '.join(missing)} here; there are {', '.join(sorted(interfaces()))}"
        return ("bad", said, f"unset {name}, or name one that is there")

    return judge


def _if_on(status: Status, said: str, advice: str) -> Judge:
    return lambda value: (status, said, advice) if value.strip().lower() in ON else None


def _if_in(values: tuple[str, ...], said: str, advice: str) -> Judge:
    return lambda value: ("warn", said, advice) if value.strip().upper() in values else None


def _address(value: str) -> Judgement | None:
    try:
        resolve(value, NAME_SECONDS)
    except OSError as error:
        return ("warn", f"not known here ({error.strerror or error})", "unset MASTER_ADDR, or correct it")
    return None


def _visible_gpus(value: str) -> Judgement | None:
    named = [name for name in value.split(",") if name.strip()]
    if not num_gpus_present():
        return None
    if not named or named[0].strip() in ("-1", "NoDevFiles"):
        return ("warn", "it hides every GPU", "unset CUDA_VISIBLE_DEVICES to use GPUs")
    if num_gpus() < len(named):
        said = f"{len(named)} named, and torch sees {num_gpus()}: it stops at the first that is not there"
        return ("warn", said, "name GPUs that nvidia-smi -L lists, or unset CUDA_VISIBLE_DEVICES")
    return None


_DETOUR = "left over from a search for a fault? unset {0}, unless the pairs below fail without it"
JUDGES: Mapping[str, Judge] = {
    "CUDA_LAUNCH_BLOCKING": _if_on("warn", "every kernel is waited for: slow", "unset CUDA_LAUNCH_BLOCKING"),
    "CUDA_VISIBLE_DEVICES": _visible_gpus,
    "GLOO_SOCKET_IFNAME": _interface("GLOO_SOCKET_IFNAME"),
    "MASTER_ADDR": _address,
    "NCCL_DEBUG": _if_in(("INFO", "TRACE"), "NCCL prints much", "unset NCCL_DEBUG, or set it to WARN"),
    "NCCL_IB_DISABLE": _if_on("warn", "InfiniBand is not used", _DETOUR.format("NCCL_IB_DISABLE")),
    "NCCL_P2P_DISABLE": _if_on("warn", "GPUs communicate through the host", _DETOUR.format("NCCL_P2P_DISABLE")),
    "NCCL_SHM_DISABLE": _if_on("warn", "GPUs communicate through sockets", _DETOUR.format("NCCL_SHM_DISABLE")),
    "NCCL_SOCKET_IFNAME": _interface("NCCL_SOCKET_IFNAME"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": _if_on(
        "warn", "every tensor allocates memory in the driver: slow", "unset PYTORCH_NO_CUDA_MEMORY_CACHING"
    ),
    "TORCH_DISTRIBUTED_DEBUG": _if_in(
        ("DETAIL",), "every collective is compared between ranks: slow", "unset TORCH_DISTRIBUTED_DEBUG"
    ),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": lambda value: (
        ("warn", "ranks wait forever for one that failed", "unset TORCH_NCCL_ASYNC_ERROR_HANDLING")
        if value.strip() == "0"
        else None
    ),
    "TORCH_NCCL_BLOCKING_WAIT": _if_on(
        "warn", "backward waits for every all-reduce: slow", "unset TORCH_NCCL_BLOCKING_WAIT"
    ),
}
