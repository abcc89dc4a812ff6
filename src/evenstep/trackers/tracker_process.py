"""The process that feeds a tracker: it follows the Record of a run, and nothing that happens to it reaches the run.

`python -m evenstep.trackers.tracker_process NAME RUN PID NICENESS` sends new rows until its standard input ends or
process PID is gone; then it sends the rest and exits. Its memory is RUN/trackers/NAME.json; what libraries print is in
NAME.log.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from evenstep.errors import BREAKS_LINES, BadInput, EvenstepError, Preempted, shorten
from evenstep.plan import Plan
from evenstep.record import FILE, Record, Start, is_written, rows
from evenstep.trackers import how_to_look
from evenstep.trackers.clients import CLIENTS, Client, TrackedRun
from evenstep.trackers.once_per_step import Outcome, PointReader
from evenstep.typed_values import Schema

FOLDER = "trackers"
POLL_SECONDS = 1.0
MOST_PAUSE_SECONDS = 30.0
PATIENCE_SECONDS = 30.0
"""How long a run waits at its end for a follower that does not get on."""
SENDING_SECONDS = 120.0
"""The same for `evenstep report --to`, which does nothing else: a library may take long to import."""
HURRIED_SECONDS = 3.0
"""The same for a run after a stop signal: a scheduler kills soon after it."""
MOST_SECONDS = 300.0
SOON_SECONDS = 3.0
NICENESS = 19
AUTOGROUP_TRIES = 20
AUTOGROUP_SECONDS = 0.1
"""Linux takes one change in that time from all users but root."""


@dataclass
class TrackerState:
    """What is kept of a tracker in the run folder."""

    id: str | None = None
    """Of the tracker's run."""
    destination: str | None = None
    began: float = field(default_factory=time.time)
    continues: list[str] = field(default_factory=list)
    """Folders of the runs whose tracker run this one continues, the first one first."""
    continued_by: str | None = None
    """The folder of a run that was resumed from this one, and has its tracker run now."""
    view: str | None = None
    error: str | None = None
    """Why the tracker does not have all rows."""


_STATE: Schema[TrackerState] = Schema(
    TrackerState, "state of a tracker", advice="delete it, to log the run as a new one"
)


def _path(run: Path, name: str, ending: str) -> Path:
    return run / FOLDER / f"{name}.{ending}"


def read_state(run: Path, name: str) -> TrackerState:
    path = _path(run, name, "json")
    return _STATE.read(path) if path.is_file() else TrackerState()


def write_state(run: Path, name: str, state: TrackerState) -> None:
    path = _path(run, name, "json")
    path.parent.mkdir(exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(asdict(state), indent=1))
    new.replace(path)


@contextmanager
def _locked(run: Path, name: str) -> Iterator[None]:
    """One process at a time sends a run to a tracker."""
    (run / FOLDER).mkdir(exist_ok=True)
    with _path(run, name, "log").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def is_followed(run: Path, name: str) -> bool:
    """Whether a process sends this run to the tracker now."""
    path = _path(run, name, "log")
    if not path.exists():
        return False
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


class Feed:
    """One run on its way to one tracker."""

    def __init__(self, name: str, run: Path) -> None:
        self._name = name
        self._run = run
        self._open_feed: tuple[Client, PointReader] | None = None
        self._pause = POLL_SECONDS
        self._not_before = 0.0

    def send(self) -> None:
        """Send new rows; after an error, try again later, from the first row: the tracker knows what it has."""
        if time.monotonic() < self._not_before:
            return
        try:
            self._send()
            self._pause = POLL_SECONDS
        # No error of a tracker may end this process before the run has ended.
        except Exception:
            traceback.print_exc()
            self.close()
            self._not_before = time.monotonic() + self._pause
            self._pause = min(2 * self._pause, MOST_PAUSE_SECONDS)

    def finish(self) -> bool:
        """Send the rest, and how the run ended; whether the tracker has all of it."""
        error, view = None, None
        try:
            self._send()
            if self._open_feed is not None:
                client, reader = self._open_feed
                with _page(self._run) as page:
                    client.finish(_outcome(reader, self._run), page)
                view = client.view
        except Exception as wrong:
            traceback.print_exc()
            error = _in_one_line(wrong)
        finally:
            self.close()
        state = read_state(self._run, self._name)
        state.error, state.view = error, view or state.view
        write_state(self._run, self._name, state)
        return error is None

    def close(self) -> None:
        if self._open_feed is not None:
            self._open_feed[1].close()
        self._open_feed = None

    def _send(self) -> None:
        if self._open_feed is None and (starts := _starts(self._run)):
            self._open_feed = self._open(starts[0], starts[-1])
        if self._open_feed is not None:
            client, reader = self._open_feed
            client.add(reader.new())

    def _open(self, first: Start, last: Start) -> tuple[Client, PointReader]:
        plan, kind = Plan.from_json(first.plan), CLIENTS[self._name]
        destination = kind.destination(plan)
        state = read_state(self._run, self._name)
        if state.destination != destination:
            state = TrackerState(destination=destination)
            if kind.continues_runs:
                _continue(self._name, self._run, plan, state)
        folders = [*map(Path, state.continues), self._run]
        alive = _path(self._run, self._name, "log").touch
        client = kind(TrackedRun(folders, last, state.id, state.began, alive))
        state.id, state.view = client.id, client.view
        write_state(self._run, self._name, state)
        return client, PointReader(folders)


def _starts(run: Path) -> list[Start]:
    """Of the run and of its restarts; none before the first row of the Record."""
    if not (run / FILE).is_file():
        return []
    with (run / FILE).open("rb") as file:
        return [row for row in rows(file, ()) if isinstance(row, Start)]


def _outcome(reader: PointReader, run: Path) -> Outcome:
    if reader.summary is not None:
        return "done"
    if reader.end is not None:
        return reader.end.state
    return "running" if is_written(run / FILE) else "killed"


def _continue(name: str, run: Path, plan: Plan, state: TrackerState) -> None:
    """Take over the tracker's run of the run that was resumed, unless another one has."""
    before = Path(plan.resume).resolve().parent.parent if plan.resume is not None else run
    if before == run.resolve() or not _path(before, name, "json").is_file():
        return
    with _locked(before, name):
        earlier = read_state(before, name)
        if earlier.destination != state.destination or earlier.continued_by not in (None, str(run)):
            return
        earlier.continued_by = str(run)
        write_state(before, name, earlier)
    state.id, state.began = earlier.id, earlier.began
    state.continues = [*earlier.continues, str(before)]


@contextmanager
def _page(run: Path) -> Iterator[Path | None]:
    """The page of a run; None where it cannot be made."""
    with TemporaryDirectory() as folder:
        path: Path | None = None
        if find_spec("bokeh") is not None:
            from evenstep.report.html.page import write_page_of_runs

            try:
                path = write_page_of_runs([Record.read(run)], Path(folder) / "page.html")
            # The numbers are worth more than the page.
            except Exception:
                traceback.print_exc()
        yield path


def _in_one_line(error: Exception) -> str:
    """The error without what would break a line of a terminal."""
    return shorten(re.sub(rf"[{BREAKS_LINES}]+", " ", f"{type(error).__name__}: {error}"))


def main(arguments: Sequence[str]) -> int:
    name, run, parent, niceness = arguments[0], Path(arguments[1]), int(arguments[2]), int(arguments[3])
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    if niceness:
        _set_niceness(os.getpid(), niceness, of_session=niceness)
    with _locked(run, name):
        feed = Feed(name, run)
        while not _has_ended(parent, POLL_SECONDS):
            feed.send()
        # The run may have ended before the niceness was set here.
        _set_niceness(os.getpid(), usual, of_session=0)
        return 0 if feed.finish() else 1


def _set_niceness(leader: int, niceness: int, of_session: int) -> None:
    """Of a process that leads a session, and of those that it started there."""
    with suppress(OSError):
        _set_autogroup(Path(f"/proc/{leader}/autogroup"), of_session)
    # Only root may lower it again.
    with suppress(OSError):
        os.setpriority(os.PRIO_PGRP, leader, niceness)


def _set_autogroup(path: Path, niceness: int) -> None:
    """Linux with autogroups shares cores evenly among sessions; niceness alone counts inside of one only."""
    for _ in range(AUTOGROUP_TRIES):
        # "/autogroup-157 nice 0", or nothing in a session that has no group.
        if path.read_text().split()[-1:] == [str(niceness)]:
            return
        with suppress(BlockingIOError):
            path.write_text(str(niceness))
            return
        time.sleep(AUTOGROUP_SECONDS)


def _has_ended(parent: int, seconds: float) -> bool:
    """Whether the run has ended, after waiting for that."""
    readable, _, _ = select.select([sys.stdin], [], [], seconds)
    # A fork of the parent may hold the other end of the pipe.
    return bool(readable) or os.getppid() != parent


@dataclass(frozen=True)
class Follower:
    """A follower, as the process that started it sees it."""

    name: str
    run: Path
    process: subprocess.Popen[bytes]

    def end(self) -> None:
        """Let it send the rest, and exit: the run has ended."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        # It may be at the import of a library, which lasts for minutes where others need the cores.
        if self.process.poll() is None:
            _set_niceness(self.process.pid, os.getpriority(os.PRIO_PROCESS, 0), of_session=0)

    def exits_soon(self) -> bool:
        """Whether it exits within a moment."""
        with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            self.process.wait(SOON_SECONDS)
        return self.process.poll() is not None

    def wait(self, patience: float) -> str | None:
        """Wait until it exits; returns why the tracker does not have all rows."""
        try:
            if not self._wait(patience):
                return f"it did not answer for {patience:.0f} s"
        except KeyboardInterrupt:
            # The run has ended: its exit code stands.
            return "stopped by Ctrl-C"
        finally:
            self._kill()
        if self.process.returncode == 0:
            return None
        return read_state(self.run, self.name).error or f"its process ended with code {self.process.returncode}"

    def _wait(self, patience: float) -> bool:
        """Whether it exits, as long as it gets on with its work."""
        log, begun = _path(self.run, self.name, "log"), time.time()
        active = begun
        while self.process.poll() is None:
            with suppress(OSError):
                active = max(active, log.stat().st_mtime)
            if time.time() - active > patience or time.time() - begun > MOST_SECONDS:
                return False
            time.sleep(0.05)
        return True

    def _kill(self) -> None:
        """With the processes that the tracker's library has started."""
        if self.process.poll() is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def start_follower(name: str, run: Path, niceness: int = NICENESS) -> Follower:
    """Start to feed a tracker, on cores that nobody else needs."""
    where = run.absolute()
    (where / FOLDER).mkdir(exist_ok=True)
    command = [sys.executable, "-P", "-m", __name__, name, str(where), str(os.getpid()), str(niceness)]
    # Threads of BLAS would be as many as cores, for nothing.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with _path(where, name, "log").open("ab") as log:
        # In a session of its own: Ctrl-C is for the training.
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Follower(name, where, process)


class Followers:
    """The followers of one run; one that fails is one line at the end."""

    def __init__(self, names: Iterable[str], run: Path) -> None:
        self._run = run
        self._started: list[Follower] = []
        self._lines: list[str] = []
        for name in names:
            try:
                self._started.append(start_follower(name, run))
            except OSError as error:
                self._lines.append(self._line(name, error.strerror or str(error)))

    def end(self) -> None:
        """Let them send the rest."""
        for follower in self._started:
            follower.end()

    def wait(self, patience: float = PATIENCE_SECONDS) -> Iterator[str]:
        """Wait until all have sent the rest; yields how to look at the run in each, or a warning."""
        self.end()
        lines, self._lines = self._lines, []
        yield from lines
        while self._started:
            follower = self._started.pop(0)
            if not follower.exits_soon():
                yield f"waiting for {follower.name} to take the last rows; press Ctrl-C to send them later"
            if why := follower.wait(patience):
                yield self._line(follower.name, why)
            elif view := _view(follower.name, self._run):
                yield f"{self._run} is in {follower.name}: {view}"

    def _line(self, name: str, why: str) -> str:
        again = f"evenstep report --to {name} {self._run}"
        return f"warning: {name} may lack rows of this run ({why}); send them with {again}"


@contextmanager
def following(names: Iterable[str], run: Path, log: Callable[[str], None]) -> Iterator[None]:
    """Feed trackers while a run goes on; at its end, logs for each how to look at the run, or what it lacks."""
    followers, patience = Followers(names, run), PATIENCE_SECONDS
    try:
        yield
    except Preempted:
        patience = HURRIED_SECONDS
        raise
    finally:
        for line in followers.wait(patience):
            log(line)


def send_run(name: str, run: Path) -> str:
    """Send a run that has ended; returns how to look at it."""
    if is_followed(run, name):
        raise BadInput(f"another process is sending {run} to {name}; wait until it has ended")
    try:
        follower = start_follower(name, run, niceness=0)
    except OSError as error:
        raise BadInput(f"{run} cannot be written ({error.strerror}), and what {name} has is noted there") from error
    follower.end()
    if why := follower.wait(SENDING_SECONDS):
        log = _path(run, name, "log")
        raise EvenstepError(f"{name} may lack rows of {run}: {why}\nSee {log}; the same command sends what is missing")
    return _view(name, run)


def _view(name: str, run: Path) -> str:
    """How to look at a run in a tracker; nothing if that has none of it."""
    return how_to_look(name, read_state(run, name).view or "")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
