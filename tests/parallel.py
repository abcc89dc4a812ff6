"""`pytest -p tests.parallel --processes N`: files are collected once, and run by N forks of the process that did it.

The processes of pytest-xdist each import torch and collect every file, which is a tenth of the work of `make test`. The
next test goes to whoever is free; tests that share fixtures or slow imports stay together, by file. A process that dies
fails its test, and another continues in its place.
"""

from __future__ import annotations

import atexit
import io
import multiprocessing
import os
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import groupby, zip_longest
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
from _pytest._io import TerminalWriter

from tests.lazy import Lazy


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--processes", type=int, default=1, help="how many processes run the tests (tests/parallel.py)")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    options = session.config.option
    if options.processes < 2 or options.collectonly or session.testsfailed:
        return None
    if any(item.get_closest_marker("gpu") for item in session.items):
        raise pytest.UsageError("forks cannot use CUDA: run tests/gpu with one process, or with pytest-xdist (-n 8)")
    units = list(units_of(session.items))
    processes = Processes(session, units)
    try:
        for _ in range(min(options.processes, len(units))):
            processes.start()
        while processes.running:
            processes.attend()
    finally:
        processes.end()
    if processes.units and not (session.shouldfail or session.shouldstop):
        raise RuntimeError(f"all processes have ended, and {len(processes.units)} units of tests have not run")
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if session.shouldstop:
        raise session.Interrupted(session.shouldstop)
    return True


def units_of(items: Sequence[pytest.Item]) -> Iterator[list[int]]:
    """Numbers of the items that one process runs: those of a file, or a single one that shares nothing with others."""
    for _, group in groupby(range(len(items)), key=lambda number: items[number].path):
        numbers = list(group)
        if any(shares(items[number]) for number in numbers):
            yield numbers
        else:
            yield from ([number] for number in numbers)


def shares(item: pytest.Item) -> bool:
    """Whether a test has something in common with others of its file: a fixture, or an import that takes seconds."""
    if item.path.parent.name == "pure" or not isinstance(item, pytest.Function):
        return True
    fixtures = (fixture for every in item._fixtureinfo.name2fixturedefs.values() for fixture in every)
    is_shared = any(fixture.scope != "function" and fixture.baseid for fixture in fixtures)
    return is_shared or any(isinstance(value, Lazy) for value in vars(item.module).values())


class Processes:
    """The parent's side: which process runs what. Items are numbers to both sides, since a fork has them all."""

    def __init__(self, session: pytest.Session, units: Iterable[list[int]]) -> None:
        self.session = session
        self.units = [*units][::-1]
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
        numbers = self.units.pop() if self.units and not self._is_over else []
        try:
            connection.send(numbers)
        except ConnectionError:
            # The process has ended, by the message to stop that crossed this request or by itself; _bury comes next.
            self.units += [numbers] if numbers else []
        else:
            self.running[connection].numbers += numbers

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

    def _on_error(self, _: Connection, content: str) -> None:
        raise RuntimeError(content)

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
            self.units += [left] if left else []
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
        session._setupstate.teardown_exact(None)
        session.config.hook.pytest_sessionfinish(session=session, exitstatus=0)
        code = 0
    except (KeyboardInterrupt, ConnectionError):
        session._setupstate.teardown_exact(None)
    except BaseException:
        connection.send(("error", traceback.format_exc()))
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
    # pytest-timeout writes the stacks of all threads to it, which the report has too.
    config.get_terminal_writer = lambda: TerminalWriter(io.StringIO())  # type: ignore[method-assign]
    plugins.register(Reports(config, connection))


class Reports:
    """Sends what becomes of every test to the parent."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self._config, self._connection = config, connection

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        content = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._connection.send(("report", content))


def run_items(session: pytest.Session, connection: Connection) -> None:
    """Unit after unit, as the parent hands them out."""
    while True:
        connection.send(("next", None))
        numbers = connection.recv()
        for number, following in zip_longest(numbers, numbers[1:]):
            # A message without a request is the one to stop.
            if connection.poll():
                return
            next_item = AnyItem(session) if following is None else session.items[following]
            session.config.hook.pytest_runtest_protocol(item=session.items[number], nextitem=next_item)
            connection.send(("done", number))
        if not numbers:
            return


class AnyItem:
    """In place of a next item that is not known yet: fixtures of the session go on, all others end."""

    def __init__(self, session: pytest.Session) -> None:
        self._session = session

    def listchain(self) -> list[pytest.Session]:
        return [self._session]
