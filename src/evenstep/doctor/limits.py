"""Cores, threads, memory, shared memory and open files that a training's processes would get."""

from __future__ import annotations

import math
import os
import resource
import tempfile
from collections.abc import Mapping
from pathlib import Path

import psutil

from evenstep.distributed.cgroups import Groups
from evenstep.distributed.devices import cores_by_affinity, share_threads, usable_cores
from evenstep.distributed.worker_process import omp_num_threads
from evenstep.doctor import Finding, Status
from evenstep.report.terminal import size

LITTLE_MEMORY = 2**30
TOO_LITTLE_MEMORY = 2**28
LITTLE_SHARED = 2**30
FEW_FILES = 1024
TOO_FEW_FILES = 128
LITTLE_LOCKED = 2**26
PROBE_BYTES = 2**20
SHARED = Path("/dev/shm")
INFINIBAND = Path("/sys/class/infiniband")


def cores(groups: Groups | None = None) -> Finding:
    """Cores usable against cores present."""
    quota = (groups or Groups()).cpu_quota()
    present, allowed, usable = os.cpu_count() or 1, cores_by_affinity(), usable_cores(quota)
    numbers = {"cores": usable, "cores_present": present, "cores_by_affinity": allowed, "cores_by_quota": quota}
    if quota is not None and quota < allowed:
        said = f"{allowed} of {present} are seen, but the cgroup allows CPU time for {quota:g}"
        advice = f"evenstep counts with {usable}; for other programs OMP_NUM_THREADS={usable}: more threads are paused"
        return Finding("cores", "warn", said, advice, numbers)
    why = "" if allowed == present else " (affinity: taskset, Slurm or a container allows no more)"
    return Finding("cores", "good", f"{usable} usable of {present}{why}", numbers=numbers)


def threads(environment: Mapping[str, str], groups: Groups | None = None) -> Finding:
    """Threads that each of a few ranks would compute with."""
    num, given = usable_cores((groups or Groups()).cpu_quota()), environment.get("OMP_NUM_THREADS", "")
    requested = omp_num_threads(environment) or 0
    alone, of_two = (share_threads(requested or None, ["cpu"] * ranks) for ranks in (1, 2))
    numbers = {"threads_alone": alone, "threads_of_two": of_two}
    if requested > num:
        said = f"OMP_NUM_THREADS={requested} on {num} usable core{'s' * (num > 1)}: they wait for each other"
        return Finding("threads", "warn", said, f"unset OMP_NUM_THREADS, or set it to {num} or less", numbers)
    if given and not requested:
        said = f"OMP_NUM_THREADS={given!r} is not a number of threads"
        return Finding("threads", "warn", said, "unset OMP_NUM_THREADS", numbers)
    said = (
        f"{requested} a process, by OMP_NUM_THREADS" if requested else f"{alone} for one rank, {of_two} for each of 2"
    )
    return Finding("threads", "good", said, numbers=numbers)


def memory(groups: Groups | None = None) -> Finding:
    machine, limit = psutil.virtual_memory(), (groups or Groups()).memory_limit()
    total = machine.total if limit is None else min(machine.total, limit[0])
    free = machine.available if limit is None else max(0, min(machine.available, limit[0] - limit[1]))
    is_limited = limit is not None and limit[0] < machine.total
    numbers = {"memory_bytes": total, "free_bytes": free, "machine_bytes": machine.total}
    whose = f" (cgroup limit; the machine has {size(machine.total)})" if is_limited else ""
    status: Status = "bad" if free < TOO_LITTLE_MEMORY else "warn" if free < LITTLE_MEMORY else "good"
    advice = "" if status == "good" else "every rank takes about 300 MiB before its model: end other programs"
    if advice and is_limited:
        advice = (
            "every rank takes about 300 MiB before its model: request a larger limit (docker --memory, sbatch --mem)"
        )
    return Finding("memory", status, f"{size(free)} free of {size(total)}{whose}", advice, numbers)


def shared_memory(folder: Path = SHARED) -> Finding:
    """Size of /dev/shm, which loader workers and NCCL use to pass data."""
    name = "shared memory"
    try:
        space = os.statvfs(folder)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(PROBE_BYTES))
    except OSError as error:
        advice = "mount it (docker: --shm-size 8g); until then --workers 0 and NCCL_SHM_DISABLE=1"
        return Finding(name, "bad", f"{folder} cannot be written: {error.strerror}", advice)
    total, free = space.f_frsize * space.f_blocks, space.f_frsize * space.f_bavail
    numbers = {"shared_bytes": total, "free_bytes": free}
    said = f"{size(free)} free of {size(total)} in {folder}"
    if free < LITTLE_SHARED:
        advice = "start the container with --shm-size 8g, or remount it larger; until then --workers 0"
        return Finding(name, "warn", said, advice, numbers)
    return Finding(name, "good", said, numbers=numbers)


def open_files(limits: tuple[int, int] | None = None) -> Finding:
    """How many files, sockets and shared tensors one process may hold."""
    soft, hard = (_or_infinite(limit) for limit in limits or resource.getrlimit(resource.RLIMIT_NOFILE))
    numbers = {"files": soft if soft != math.inf else None, "files_hard": hard if hard != math.inf else None}
    said = f"{_in_words(soft)} per process (hard limit {_in_words(hard)})"
    if soft >= FEW_FILES:
        return Finding("open files", "good", said, numbers=numbers)
    wanted = int(min(hard, 65536))
    advice = (
        f"ulimit -n {wanted}" if wanted > soft else "ask for more: /etc/security/limits.conf, docker --ulimit nofile"
    )
    why = "; loader processes and links between ranks need one each"
    return Finding("open files", "bad" if soft < TOO_FEW_FILES else "warn", said + why, advice, numbers)


def locked_memory(infiniband: Path = INFINIBAND) -> Finding:
    """Memory that may be pinned, which InfiniBand needs."""
    soft, _ = (_or_infinite(limit) for limit in resource.getrlimit(resource.RLIMIT_MEMLOCK))
    numbers = {"locked_bytes": soft if soft != math.inf else None}
    said = "no limit" if soft == math.inf else f"{soft / 2**20:g} MiB may be locked"
    if soft < LITTLE_LOCKED and infiniband.is_dir():
        advice = "ulimit -l unlimited (docker --ulimit memlock=-1); until then NCCL_IB_DISABLE=1"
        return Finding("locked memory", "warn", f"{said}, and InfiniBand is here", advice, numbers)
    return Finding("locked memory", "good", said, numbers=numbers)


def _or_infinite(limit: int) -> float:
    return math.inf if limit == resource.RLIM_INFINITY else limit


def _in_words(limit: float) -> str:
    return "any number" if limit == math.inf else f"{limit:.0f}"
