"""`pytest -p tests.parallel --processes N`: files are collected once and run by N forks of the process that did it.

The processes of pytest-xdist each import torch and collect every file, which is a tenth of the work of `make test`. A
file is run by one process, and the next file goes to whoever is free. A process that dies fails its test, and another
continues with its file.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import traceback
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import groupby
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--processes", type=int, default=1, help="how many processes run the tests (tests/parallel.py)")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    options = session.config.option
    if options.processes < 2 or options.collectonly or session.testsfailed:
        return None
    numbers = range(len(session.items))
    files = [list(group) for _, group in groupby(numbers, key=lambda number: session.items[number].path)]
    processes = Processes(session, files)
    try:
        for _ in range(min(options.processes, len(files))):
            processes.start()
        while processes.running:
            processes.attend()
    finally:
        processes.end()
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if session.shouldstop:
        raise session.Interrupted(session.shouldstop)
    return True


class Processes:
    """The parent's side: which process runs which file. Items are numbers to both sides, since a fork has them all."""

    def __init__(self, session: pytest.Session, files: Iterable[list[int]]) -> None:
        self.session = session
        self.files = [*files][::-1]
        self.running: dict[Connection, Process] = {}
        self._num_started = 0

    def start(self) -> None:
        ours, theirs = multiprocessing.Pipe()
        folder = self.session.config._tmp_path_factory.getbasetemp() / f"p{self._num_started}"  # type: ignore[attr-defined]
        self._num_started += 1
        pid = os.fork()
        if pid == 0:
            for other in (ours, *self.running):
                other.close()
            run_as_child(self.session, theirs, folder)
        theirs.close()
        self.running[ours] = Process(pid)

    def attend(self) -> None:
        """Wait for messages of the processes, and act on them."""
        for connection in wait([*self.running]):
            assert isinstance(connection, Connection)
            try:
                kind, content = connection.recv()
            except (EOFError, ConnectionError):
                self._bury(connection)
            else:
                getattr(self, f"_on_{kind}")(connection, content)

    def end(self) -> None:
        """After an interruption: let all processes end the test that they run."""
        for connection, process in self.running.items():
            connection.close()
            os.waitpid(process.pid, 0)

    def _on_next(self, connection: Connection, _: None) -> None:
        numbers = self.files.pop() if self.files and not self._is_over else []
        self.running[connection].numbers += numbers
        connection.send(numbers)

    def _on_report(self, _: Connection, content: dict[str, Any]) -> None:
        hook = self.session.config.hook
        report = hook.pytest_report_from_serializable(config=self.session.config, data=content)
        hook.pytest_runtest_logreport(report=report)
        for connection in self.running if self._is_over else ():
            with suppress(ConnectionError):
                connection.send([])

    def _on_done(self, connection: Connection, number: int) -> None:
        self.running[connection].numbers.remove(number)
        item = self.session.items[number]
        self.session.config.hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)

    @property
    def _is_over(self) -> bool:
        return bool(self.session.shouldfail or self.session.shouldstop)

    def _bury(self, connection: Connection) -> None:
        """A process has ended: with nothing left to do, or in the middle of a test."""
        process = self.running.pop(connection)
        connection.close()
        _, status = os.waitpid(process.pid, 0)
        if process.numbers and not self._is_over:
            died_in, *left = process.numbers
            report = died(self.session.items[died_in], os.waitstatus_to_exitcode(status))
            self.session.config.hook.pytest_runtest_logreport(report=report)
            self.files += [left] if left else []
            self.start()


class Process:
    """A fork, and the items that it was given and has not run to their ends."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.numbers: list[int] = []


def died(item: pytest.Item, code: int) -> pytest.TestReport:
    how = f"the process that ran it ended with exit code {code}"
    return pytest.TestReport(item.nodeid, item.location, {}, "failed", how, "call")


def run_as_child(session: pytest.Session, connection: Connection, folder: Path) -> None:
    """Run what the parent hands out, and report; never returns."""
    code = 1
    try:
        become_worker(session.config, connection, folder)
        run_items(session, connection)
        session.config.hook.pytest_sessionfinish(session=session, exitstatus=0)
        code = 0
    except (KeyboardInterrupt, ConnectionError):
        session._setupstate.teardown_exact(None)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(BaseException):
            atexit._run_exitfuncs()
        os._exit(code)


def become_worker(config: pytest.Config, connection: Connection, folder: Path) -> None:
    """Folders and captured streams of its own; reports go to the parent instead of the terminal."""
    folder.mkdir()
    config._tmp_path_factory._basetemp = folder  # type: ignore[attr-defined]
    # By this, plugins know the workers of pytest-xdist: they write no files of the session.
    config.workerinput = {"workerid": folder.name}  # type: ignore[attr-defined]
    plugins = config.pluginmanager
    if capture := plugins.getplugin("capturemanager"):
        capture.stop_global_capturing()
        capture.start_global_capturing()
    plugins.unregister(name="terminalreporter")
    plugins.register(Reports(config, connection))


class Reports:
    """Sends what becomes of every test to the parent."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self._config, self._connection = config, connection

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        content = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._connection.send(("report", content))


def run_items(session: pytest.Session, connection: Connection) -> None:
    """One after another; fixtures end when the next item, maybe of another file, does not need them."""
    numbers = next_numbers(connection)
    number = next(numbers, None)
    while number is not None:
        # A message without a request is the one to stop.
        following = None if connection.poll() else next(numbers, None)
        next_item = None if following is None else session.items[following]
        session.config.hook.pytest_runtest_protocol(item=session.items[number], nextitem=next_item)
        connection.send(("done", number))
        number = following


def next_numbers(connection: Connection) -> Iterator[int]:
    """Those of file after file, until there is none."""
    while True:
        connection.send(("next", None))
        numbers = connection.recv()
        if not numbers:
            return
        yield from numbers
