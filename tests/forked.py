"""Commands of tests without the import of torch: `python -m evenstep ...` is forked from a process that has done it.

A plugin, which `make test` uses: `pytest -p tests.forked`. Without it, and in tests marked `fresh`, every command is a
new Python. To the test it is the same: its child, with folder, variables, streams and signals of its own
(`tests/process/test_forked.py` compares the two). What a fork cannot have is a new Python: other options of Popen, or a
variable that is read while modules are imported. Commands that tests run in their own process share one parser.
"""

from __future__ import annotations

import ctypes
import inspect
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import util
from typing import Any

import pytest

from evenstep.distributed.huge_pages import huge_page_variables
from tests import forker
from tests.forker import Imports, receive, send

COMMAND = [sys.executable, "-m", "evenstep"]
PR_SET_CHILD_SUBREAPER = 36
NewPopen, new_process = subprocess.Popen, util.spawnv_passfds
PARAMETERS = list(inspect.signature(NewPopen._execute_child).parameters)[1:]  # type: ignore[attr-defined]
PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
PLAIN = {
    "preexec_fn": None,
    "close_fds": True,
    "pass_fds": (),
    "shell": False,
    "restore_signals": True,
    "gid": None,
    "gids": None,
    "uid": None,
    "umask": -1,
    "process_group": -1,
}
"""Options of Popen with which a command can be forked."""


@dataclass(frozen=True)
class Server:
    """A process to fork from."""

    process: subprocess.Popen[bytes]
    connection: socket.socket
    imports: Imports

    def fork(self, request: Mapping[str, Any], files: Sequence[int]) -> int:
        """Fork a command, which becomes a child of this process when the process between them ends."""
        prctl = ctypes.CDLL(None, use_errno=True).prctl
        prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            send(self.connection, request, files)
            answer, _ = receive(self.connection)
        finally:
            prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        return int(answer["pid"])

    def close(self) -> None:
        self.connection.close()
        self.process.wait()


_first_variables: dict[str, str] = {}
_servers: dict[str | None, Server] = {}
"""By OMP_NUM_THREADS, which libraries read when they are loaded."""


class ForkedPopen(subprocess.Popen):  # type: ignore[type-arg]
    """Popen, but for a command that can be forked."""

    def _execute_child(self, *arguments: Any) -> None:
        given = dict(zip(PARAMETERS, arguments, strict=True))
        server = server_for(given)
        if server is None:
            super()._execute_child(*arguments)  # type: ignore[misc]
            return
        request = {
            "words": list(map(os.fspath, given["args"])),
            "folder": os.path.abspath(given["cwd"] or "."),
            "variables": variables_of(given),
            "new session": bool(given["start_new_session"]),
            "ignores SIGINT": signal.getsignal(signal.SIGINT) is signal.SIG_IGN,
            "more files": [],
        }
        streams = (given["p2cread"], given["c2pwrite"], given["errwrite"])
        files = [number if stream == -1 else stream for number, stream in enumerate(streams)]
        self.pid = server.fork(request, files)
        self._child_created = True
        self._close_pipe_fds(*(given[name] for name in PIPES))  # type: ignore[attr-defined]


def spawnv_passfds(path: bytes, args: Sequence[bytes | str], passfds: Sequence[int]) -> int:
    """multiprocessing's: the fork server of this process, from which ranks of tests are forked, is a fork as well."""
    words = list(map(os.fsdecode, args))
    server = server_with(dict(os.environ)) if "multiprocessing.forkserver" in words[-1] else None
    if server is None:
        return int(new_process(path, args, passfds))
    request = {
        "words": words,
        "folder": os.getcwd(),
        "variables": dict(os.environ),
        "new session": False,
        "ignores SIGINT": False,
        "more files": sorted(passfds),
    }
    return server.fork(request, (0, 1, 2, *sorted(passfds)))


def server_for(given: Mapping[str, Any]) -> Server | None:
    """The process to fork this command from; None if it must be a new Python."""
    args = given["args"]
    if not isinstance(args, list) or args[:3] != COMMAND or given["executable"] not in (None, sys.executable):
        return None
    if not os.path.isdir(given["cwd"] or ".") or any(given.get(name, usual) != usual for name, usual in PLAIN.items()):
        return None
    variables = variables_of(given)
    threads = variables.get("OMP_NUM_THREADS")
    if args[3:4] == ["run"] and "--devices" in args and threads is None:
        # `run` sets it before it imports torch.
        variables["OMP_NUM_THREADS"] = "1"
    return server_with(variables)


def server_with(variables: Mapping[str, str]) -> Server | None:
    """The process that has imported what a new Python with these variables would import."""
    threads = variables.get("OMP_NUM_THREADS")
    if threads not in _servers:
        _servers[threads] = start_server(threads)
    return _servers[threads] if _servers[threads].imports.fit(variables) else None


def variables_of(given: Mapping[str, Any]) -> dict[str, str]:
    """Those of the command; malloc's too, with which a new Python may start itself again."""
    variables = dict(os.environ if given["env"] is None else given["env"])
    return {**variables, **huge_page_variables(variables)}


def start_server(threads: str | None) -> Server:
    first = _first_variables or os.environ
    variables = {name: value for name, value in first.items() if name != "OMP_NUM_THREADS"}
    variables |= huge_page_variables(variables)
    if threads is not None:
        variables["OMP_NUM_THREADS"] = threads
    ours, theirs = socket.socketpair()
    with theirs:
        process = NewPopen(
            [sys.executable, str(forker.__file__), str(theirs.fileno())],
            cwd="/",
            env=variables,
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
        )
    ready, _ = receive(ours)
    return Server(process, ours, Imports(variables, frozenset(ready["read"]), ready["set"]))


def pytest_sessionstart() -> None:
    _first_variables.update(os.environ)
    forker.keep_parser()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fork the commands of every test that is not marked `fresh`."""
    can_fork = sys.platform == "linux" and item.get_closest_marker("fresh") is None
    subprocess.Popen = ForkedPopen if can_fork else NewPopen  # type: ignore[misc]
    util.spawnv_passfds = spawnv_passfds if can_fork else new_process


def pytest_sessionfinish() -> None:
    subprocess.Popen = NewPopen  # type: ignore[misc]
    util.spawnv_passfds = new_process
    for server in _servers.values():
        server.close()
