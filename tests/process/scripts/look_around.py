"""What a script finds in the process that it is run in, written to a file for each rank."""

import atexit
import gc
import json
import multiprocessing as mp
import os
import random
import resource
import signal
import sys
import threading
import warnings

import __main__


def open_files():
    """Name and whether it outlives an exec; the folder that is listed is open meanwhile."""
    names = [name for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")]
    return {name: [os.readlink(f"/proc/self/fd/{name}"), os.get_inheritable(int(name))] for name in names}


seen = {
    "start method": [mp.get_start_method(allow_none=True), mp.get_start_method()],
    "process": [mp.current_process().name, mp.current_process().daemon, type(mp.current_process()).__name__],
    "children": len(mp.active_children()),
    "parent": str(mp.parent_process()),
    "open files": open_files(),
    "main": {name: repr(value).partition(" object at ")[0] for name, value in vars(__main__).items() if "__" in name},
    "name": [__name__, sys.modules["__mp_main__"] is __main__],
    "argv": [sys.argv, sys.orig_argv],
    "path": sys.path,
    "environment": dict(os.environ),
    "handlers": [str(signal.getsignal(number)) for number in signal.valid_signals()],
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    "is session leader": os.getsid(0) == os.getpid(),
    "streams": [str(stream) for stream in (sys.stdin, sys.stdout, sys.stderr)],
    "buffering": [sys.stdout.line_buffering, sys.stdout.write_through, type(sys.stdout.buffer).__name__],
    "errors": [sys.stdout.errors, sys.stderr.errors, sys.stdin.errors],
    "original streams": [sys.stdin is sys.__stdin__, sys.stdout is sys.__stdout__, sys.stderr is sys.__stderr__],
    "stdin": sys.stdin.read(),
    "hooks": [str(hook) for hook in (sys.excepthook, sys.displayhook, threading.excepthook, sys.breakpointhook)],
    "flags": str(sys.flags),
    "folder": os.getcwd(),
    "umask": os.umask(0o022),
    "limits": [resource.getrlimit(one) for one in (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE)],
    "cores": sorted(os.sched_getaffinity(0)),
    "threads": [thread.name for thread in threading.enumerate()],
    "collector": [gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()],
    "warnings": [filter for filter in map(str, warnings.filters) if "__main__" in filter],
}


def count_threads(found):
    """Of torch, of the OpenMP and MKL that it computes with, and of NumPy's own library."""
    import torch
    from threadpoolctl import threadpool_info

    info = torch.__config__.parallel_info().splitlines()
    counts = [line.strip() for line in info if "get_max_threads" in line or "get_num_threads" in line]
    found.append([*counts, sorted({(one["user_api"], one["num_threads"]) for one in threadpool_info()})])


count_threads(numbers := [])
beside = threading.Thread(target=count_threads, args=(numbers,))
beside.start()
beside.join()
import numpy as np  # noqa: E402
import torch  # noqa: E402

seen["computing threads"] = numbers
seen["drawn"] = [random.random(), np.random.rand(), torch.rand(()).item()]
atexit.register(lambda: open(f"exit{os.environ['RANK']}", "w").close())
with open(f"seen{os.environ['RANK']}.json", "w") as file:
    json.dump(seen, file)
