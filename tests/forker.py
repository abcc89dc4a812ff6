"""The process from which commands of tests are forked: it has imported what they import, and nothing else.

`python forker.py DESCRIPTOR`: requests come through this socket. No thread is started here and nothing is computed but
the parser of the command line, so that a fork is what a new Python would be after its imports. No pytest.
"""

from __future__ import annotations

import fcntl
import functools
import importlib
import io
import json
import multiprocessing.process
import os
import runpy
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import BuiltinImporter
from multiprocessing import util
from types import ModuleType
from typing import Any, ClassVar

MODULES = (
    "torch.distributed.elastic.multiprocessing.api",
    "multiprocessing.synchronize",
    "sklearn.datasets",
    "evenstep.cli",
    "evenstep.distributed.shm.allreduce",
    "evenstep.launcher.launch",
    "evenstep.monitor.replica_check",
    "evenstep.monitor.stragglers",
    "evenstep.training.trainer",
    "evenstep.worker.main",
)
READ_BY_LIBRARIES = (
    *("ATEN", "BLIS", "CUBLAS", "GLIBC", "GLOG", "GOMP", "GOTO", "KMP", "LANG", "LC_", "LD_", "MALLOC", "MKL", "OMP"),
    *("OPENBLAS", "PYTHON", "PYTORCH", "TMP", "TORCH_"),
)
"""How the names begin of variables that Python and libraries in C read once. What Python code reads is noted."""


MOST_FILES = 16


@dataclass(frozen=True)
class Imports:
    """The variables with which modules were imported, the names of those that were read, and what modules have set."""

    variables: Mapping[str, str]
    read: frozenset[str]
    set_by_modules: Mapping[str, str]

    def fit(self, variables: Mapping[str, str]) -> bool:
        """Whether a new Python with these variables would have imported the same."""
        changed = {name for name, _ in variables.items() ^ self.variables.items()}
        changed -= self.set_by_modules.keys()
        return not any(name in self.read or name.startswith(READ_BY_LIBRARIES) for name in changed)


def send(connection: socket.socket, message: Mapping[str, Any], files: Sequence[int] = ()) -> None:
    content = json.dumps(message).encode()
    socket.send_fds(connection, [len(content).to_bytes(8, "big")], files)
    connection.sendall(content)


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """A message and the files that came with it; EOFError when the other side has ended."""
    length, files, _, _ = socket.recv_fds(connection, 8, MOST_FILES)
    if not length:
        raise EOFError
    content = b""
    while len(content) < int.from_bytes(length, "big"):
        content += connection.recv(2**20)
    return json.loads(content), files


class NotedVariables(os._Environ):  # type: ignore[type-arg]
    """os.environ, which notes what is read from it."""

    names: ClassVar[set[str]] = set()

    def __getitem__(self, name: str) -> str:
        NotedVariables.names.add(name)
        return str(super().__getitem__(name))


def import_all() -> Imports:
    """Import what commands do, and note which variables are read meanwhile."""
    variables, usual = dict(os.environ), type(os.environ)
    os.environ.__class__ = NotedVariables
    for name in MODULES:
        importlib.import_module(name)
    os.environ.__class__ = usual
    new = {name: value for name, value in os.environ.items() if name not in variables}
    return Imports(variables, frozenset(NotedVariables.names), new)


def keep_parser() -> None:
    """Typer builds every command with its options whenever one is run, for 0.1 s: build them once."""
    import typer.main

    from evenstep.cli import app

    typer.main.get_command = functools.cache(typer.main.get_command)
    typer.main.get_command(app)


def serve(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork a process for every request; returns in these alone, with what is asked for and its streams."""
    while True:
        try:
            request, files = receive(connection)
        except (EOFError, ConnectionError):
            os._exit(0)
        reading, writing = os.pipe()
        between = os.fork()
        if between == 0:
            parent = os.getpid()
            child = os.fork()
            if child == 0:
                # Whoever sent the request adopts it when the process between them has ended.
                while os.getppid() == parent:
                    time.sleep(0.0002)
                connection.detach()
                return request, files
            os.write(writing, str(child).encode())
            os._exit(0)
        os.waitpid(between, 0)
        send(connection, {"pid": int(os.read(reading, 20))})
        for file in (reading, writing, *files):
            os.close(file)


def become(request: Mapping[str, Any], files: Sequence[int]) -> None:
    """Take over streams, folder, variables and arguments, as Python does when it starts."""
    if request["new session"]:
        os.setsid()
    numbers = (0, 1, 2, *request["more files"])
    # Above all numbers that are taken next: a copy must not end one that is still to be copied.
    copies = [fcntl.fcntl(file, fcntl.F_DUPFD, 1000) for file in files]
    for number, copy in zip(numbers, copies, strict=True):
        os.dup2(copy, number)
    close_files(keep=numbers)
    open_streams()
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["variables"])
    sys.orig_argv, sys.argv = request["words"], ["-m", *request["words"][3:]]
    sys.path[0] = multiprocessing.process.ORIGINAL_DIR = os.getcwd()  # type: ignore[attr-defined]
    new_main()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    signal.signal(signal.SIGINT, signal.SIG_IGN if request["ignores SIGINT"] else signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


def close_files(keep: Sequence[int]) -> None:
    for file in map(int, os.listdir("/proc/self/fd")):
        if file > 2 and file not in keep:
            with suppress(OSError):  # the folder that was listed
                os.close(file)


def open_streams() -> None:
    """As Python opens them: by lines to a terminal, and to stderr always; with PYTHONUNBUFFERED at once."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        before, mode = getattr(sys, name), "r" if number == 0 else "w"
        at_once = before.write_through
        buffer: Any = open(number, f"{mode}b", 0 if at_once and mode == "w" else -1, closefd=False)  # noqa: SIM115
        raw = getattr(buffer, "raw", buffer)
        raw.name = f"<{name}>"
        by_lines = not at_once and (number == 2 or raw.isatty())
        stream = io.TextIOWrapper(buffer, before.encoding, before.errors, "\n", by_lines, at_once)
        stream.mode = mode  # type: ignore[misc]
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def new_main() -> ModuleType:
    main = ModuleType("__main__")
    vars(main).update(__loader__=BuiltinImporter, __annotations__={}, __builtins__=sys.modules["builtins"])
    # multiprocessing gives it the second name when it is imported.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main
    return main


class ForkedServers:
    """multiprocessing's `spawnv_passfds`: the command's own fork server, for its ranks, is a fork of it."""

    def __init__(self, imports: Imports) -> None:
        self._imports = imports
        self._usual = util.spawnv_passfds

    def __call__(self, path: str, args: Sequence[str], passfds: Sequence[int]) -> int:
        if "multiprocessing.forkserver" not in args[-1]:
            return self._usual(path, args, passfds)
        util.spawnv_passfds = self._usual
        # Threads that compute do not survive a fork: after the first computation it is too late.
        if len(os.listdir("/proc/self/task")) > 1 or not self._imports.fit(os.environ):
            return self._usual(path, args, passfds)
        pid = os.fork()
        if pid == 0:
            run_code(args, passfds)
        return pid


def run_code(args: Sequence[str], passfds: Sequence[int]) -> None:
    """Be `python -c CODE`: nothing of the command remains but its imports."""
    from evenstep.private_apis import become_main_process, forget_exit_handlers

    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    close_files(passfds)
    open_streams()
    become_main_process()
    forget_exit_handlers()
    sys.orig_argv, sys.argv, sys.path[0] = list(map(os.fsdecode, args)), ["-c"], ""
    try:
        exec(args[-1], vars(new_main()))
    except SystemExit:
        os._exit(0)
    finally:
        os._exit(1)


def main() -> None:
    # Ctrl-C in the terminal is for the tests; a signal to a fork stays pending until it has its handlers.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    connection = socket.socket(fileno=int(sys.argv[1]))
    sys.path[0] = os.getcwd()
    imports = import_all()
    keep_parser()
    assert threading.active_count() == 1
    send(connection, {"read": sorted(imports.read), "set": imports.set_by_modules})
    request, files = serve(connection)
    become(request, files)
    for name, value in imports.set_by_modules.items():
        os.environ.setdefault(name, value)
    if request["more files"]:
        run_code(request["words"], request["more files"])
    util.spawnv_passfds = ForkedServers(imports)
    runpy._run_module_as_main("evenstep")  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
