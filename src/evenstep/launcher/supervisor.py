"""One run as a series of attempts: start the processes, watch them, explain a failure, and restart where that helps."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from types import FrameType
from typing import IO, Any

from evenstep.checkpoint import files, integrity
from evenstep.distributed.cgroups import MemoryWatch
from evenstep.distributed.heartbeat import ENDING, Heartbeats, HeartbeatState, make_heartbeats
from evenstep.distributed.preemption import SIGNALS, handling_signals
from evenstep.distributed.temporary_folders import live_folder
from evenstep.distributed.worker_process import WorkerSpec
from evenstep.errors import CheckpointError, Preempted, Stalled, WorkerFailed
from evenstep.launcher.failure import Cause, cause, server_cause
from evenstep.launcher.hang import (
    HEARTBEATS,
    LEAST_SECONDS,
    RankSnapshot,
    StallWatch,
    explain,
    handles_stacks_signal,
    late_ranks,
    stacks,
    take_snapshots,
)
from evenstep.launcher.logs import MergedLogs
from evenstep.launcher.processes import Computed, RankLogs, StartMethod, Workers, workers
from evenstep.launcher.rendezvous.rank_assignment import RankAssignment, Rendezvous
from evenstep.launcher.restart_policy import next_restart
from evenstep.record import FILE, Start, end_of_rows, rows
from evenstep.training.trainer import Event
from evenstep.worker.main import TrainingSpec

WAITING = ""
"""The event of a launch that is one of several, when nothing has happened."""


class StopRequested(Exception):
    """A stop signal arrived while the launcher was only waiting."""


class StopSignals:
    """Signals that request a stop; a second Ctrl-C stops at once."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.is_urgent = False
        """Whether Ctrl-C was pressed twice."""
        self._is_idle = False

    def listening(self) -> AbstractContextManager[None]:
        return handling_signals(self._take, (signal.SIGINT, *SIGNALS))

    def _take(self, number: int, frame: FrameType | None) -> None:
        # A second SIGTERM is ignored: Slurm sends two of them within a tenth of a second.
        if self.number is not None and number == signal.SIGINT:
            self.is_urgent = True
            raise KeyboardInterrupt
        self.number = number
        if self._is_idle:
            raise StopRequested

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Raise StopRequested when a signal arrives, or has arrived."""
        self._is_idle = True
        try:
            if self.number is not None:
                raise StopRequested
            yield
        finally:
            self._is_idle = False


class RecordTail:
    """Follows a record file that another process writes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None
        self._at = 0
        if path.is_file():
            with path.open("rb") as file:
                # Rows of earlier attempts have been shown; a half-written last row will be truncated.
                self._at = end_of_rows(file)

    def new(self) -> Iterator[Event]:
        if self._file is None and self._path.exists():
            self._file = self._path.open("rb")
            self._file.seek(self._at)
        for row in rows(self._file) if self._file is not None else ():
            if not isinstance(row, Start):
                yield row

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


@dataclass(frozen=True)
class Launch:
    """What to run in `num` processes on this machine, and when to restart or give up."""

    folder: Path
    num: int
    entry: Callable[..., None]
    """Called in each process with its spec and `more`."""
    spec: WorkerSpec
    """What all processes of all attempts are given."""
    more: tuple[Any, ...] = ()
    how: StartMethod = "server"
    restarts: int = 0
    stall_after: float | None = None
    least_seconds: float = LEAST_SECONDS
    """The shortest default stall limit."""
    saves: bool = True
    """Whether there is something to save at a stop signal; if not, it ends all processes, and what called them."""
    is_one_of_several: bool = False
    """Whether its caller watches several at once: it handles signals itself, and gets WAITING at every poll."""

    @property
    def is_program(self) -> bool:
        """Whether it is the user's own program: rank 0's output is passed through, and signals are forwarded to it."""
        return not isinstance(self.spec, TrainingSpec)


@dataclass
class Supervisor:
    """Carries out one run, over as many attempts as it takes."""

    launch: Launch
    rendezvous: Rendezvous
    stop: StopSignals = field(default_factory=StopSignals)
    causes: list[Cause] = field(default_factory=list)

    def events(self) -> Generator[Event, None, None]:
        """Rows and lines to show, until the run is done; raises what ends it."""
        with nullcontext() if self.launch.is_one_of_several else self.stop.listening():
            try:
                yield from self._attempts()
            finally:
                self.rendezvous.close()
            if self.stop.number is not None and not self.launch.saves:
                # It came too late for this run; the command has others.
                self._stop()

    def _attempts(self) -> Iterator[Event]:
        resume: str | None = None
        for number in count(1):
            if expected := self.rendezvous.waiting_message():
                yield expected
            assignment = self._gather(number, resume)
            if assignment is None:
                yield "the run ended without this machine"
                return
            if assignment.num_machines > 1:
                yield assignment.describe()
            attempt = Attempt(self, assignment, number)
            yield from attempt.events()
            if attempt.cause is None and not attempt.was_preempted:
                return
            resume, notes = self._newest()
            if attempt.cause is not None:
                self.causes.append(attempt.cause)
                yield from self._before_restart(_from_where(resume, assignment), notes)
            elif self.stop.number is not None or not self.rendezvous.has_waiting_machine(asks_store=True):
                self._stop()
            else:
                yield "another machine joined: restarting with it"

    def _gather(self, number: int, resume: str | None) -> RankAssignment | None:
        """Wait for the other machines; a stop signal ends the wait at once, since there is nothing to save."""
        try:
            with self.stop.raising():
                return self.rendezvous.next_round(self.launch.num, number, resume)
        except StopRequested:
            self._stop()
            raise

    def _stop(self) -> None:
        if self.stop.number == signal.SIGINT:
            raise KeyboardInterrupt
        raise Preempted("stopped")

    def _before_restart(self, where: str, notes: Sequence[str]) -> Iterator[str]:
        """Report the cause and wait; raise if another attempt would not help."""
        restart = next_restart(self.causes, self.launch.restarts, self.launch.folder)
        yield from (*self.causes[-1].lines(), *notes)
        yield restart.describe(where)
        deadline = time.monotonic() + restart.pause
        while time.monotonic() < deadline and self.stop.number is None:
            time.sleep(0.05)
        if self.stop.number is not None:
            self._stop()

    def _newest(self) -> tuple[str | None, list[str]]:
        """The newest complete checkpoint of this run, and notes about newer ones that cannot be used."""
        folder = self.launch.folder
        try:
            path, notes = integrity.find(str(folder))
        except CheckpointError as error:
            return None, [str(error)] if integrity.whole(folder / files.FOLDER) else []
        return str(path), notes


class Attempt:
    """One start of all processes, until all have ended."""

    def __init__(self, of: Supervisor, assignment: RankAssignment, number: int) -> None:
        self.of = of
        self.assignment = assignment
        self.cause: Cause | None = None
        self.was_preempted = False
        self._launch = of.launch
        self._num = of.launch.num
        folder = _free_logs(of.launch.folder.absolute() / "logs", assignment.first_rank)
        self._logs = RankLogs(folder, assignment.first_rank)
        self._number = number
        self._stop_sent = False
        self._stall_shown = False
        self._computed = Computed()

    def _specs(self) -> list[WorkerSpec]:
        logs, heartbeats = str(self._logs.folder), str(self._live / HEARTBEATS)
        environment = {**self._launch.spec.environment, "TORCHELASTIC_RESTART_COUNT": str(self._number - 1)}
        spec = replace(self._launch.spec, logs=logs, heartbeats=heartbeats, environment=environment)
        return self.assignment.specs(spec, self._num)

    def events(self) -> Iterator[Event]:
        """Start all processes; yield rank 0's rows and all ranks' lines as they are written."""
        launch = self._launch
        with ExitStack() as stack:
            self._live = stack.enter_context(live_folder())
            self._heartbeats: Heartbeats = make_heartbeats(self._live / HEARTBEATS, self._num)
            stack.callback(self._heartbeats.close)
            # Only the first machine has the Record. Before the ranks start: what they write is new.
            record = RecordTail(launch.folder / FILE if self.assignment.machine == 0 else Path(os.devnull))
            stack.callback(record.close)
            try:
                started = workers(launch.entry, self._specs(), self._logs, launch.how, launch.more)
                self._workers: Workers = stack.enter_context(started)
            except WorkerFailed as error:
                self.cause = self.of.rendezvous.report_failure(Cause(str(error), (), 0, is_outside=True))
                return
            yield from self._watched(record)

    def _watched(self, record: RecordTail) -> Iterator[Event]:
        logs = MergedLogs(self._logs, self._num, passes_rank_0_on=self._launch.is_program)
        stall = StallWatch(self._heartbeats, self._launch.stall_after, self._activity, self._launch.least_seconds)
        memory = MemoryWatch(self._workers.pids)
        working = True
        while working:
            working = self._workers.poll()
            memory.update()
            yield from logs.new(is_end=not working)
            yield from record.new()
            if working:
                yield from self._check(stall)
                working = self.cause is None
                if self._launch.is_one_of_several:
                    yield WAITING
        yield from logs.new(is_end=True)
        is_ended = (self._launch.is_program or not self._launch.saves) and self._stop_sent
        if self.cause is None and (self._workers.failed or self._exited_early()) and not is_ended:
            self.cause = self.of.rendezvous.report_failure(self._explained(memory))
        is_saved = Preempted.exit_code in self._workers.exit_codes().values()
        self.was_preempted = self.cause is None and (is_saved or (is_ended and bool(self._workers.failed)))

    def _check(self, stall: StallWatch) -> Iterator[str]:
        """Check for stop signals, failures on other machines, early exits and stalls."""
        if not self._stop_sent and (self.of.stop.number is not None or self.of.rendezvous.has_waiting_machine()):
            self._stop_sent = True
            yield from self._request_stop(self.of.stop.number)
        self.cause = self.of.rendezvous.remote_failure()
        if self.cause is None and self._exited_early():
            self._workers.end_others()
            return
        stalled = stall.stalled_seconds()
        if stalled is not None and self.cause is None:
            yield from self._stalled(stalled)
            stall.restart_clock()

    def _exited_early(self) -> dict[int, int]:
        """Ranks that exited with code 0 before they were done: os._exit(0) in the user's code."""
        if self._launch.is_program:
            return {}
        heartbeats = self._heartbeats.read()
        codes = self._workers.exit_codes()
        return {local: code for local, code in codes.items() if not code and heartbeats[local].phase != ENDING}

    def _request_stop(self, number: int | None) -> Iterator[str]:
        if self._launch.is_program and number is not None:
            # The program has its own handlers.
            self._workers.send(number)
            if number == signal.SIGINT:
                yield "stopping the script; press Ctrl-C again to stop at once"
            else:
                yield f"sent {signal.Signals(number).name} to the script; waiting until it ends"
            return
        if not self._launch.saves:
            self._workers.kill()
            return
        if number is not None:
            more = "; press Ctrl-C again to stop at once" if number == signal.SIGINT else ""
            yield f"stopping after this step, with a checkpoint{more}"
        self._workers.send(signal.SIGUSR1)

    def _snapshots(self) -> list[RankSnapshot]:
        """Of the ranks that have not ended."""
        files = {local: self._logs.path(local, "stacks") for local in range(self._num)}
        return take_snapshots(self._workers.running(), self._heartbeats.read(), files, self.assignment.first_rank)

    def _activity(self) -> str | None:
        """Stacks and CPU seconds of a program without heartbeats; None before all ranks have begun."""
        running = self._workers.running()
        # The folder with the stacks may have been deleted.
        begun = (
            self._logs.path(local, "stacks").exists() or handles_stacks_signal(running[local]) for local in running
        )
        if not all(begun):
            return None
        used = [f"{self._computed.seconds(pid):.2f}" for pid in running.values()]
        return "\n".join([*used, *stacks(self._snapshots())])

    def _stalled(self, seconds: float) -> Iterator[str]:
        snapshots = self._snapshots()
        if not snapshots:
            return
        ended = [self.assignment.first_rank + local for local in self._workers.exit_codes()]
        sentence = explain(snapshots, seconds, ended)
        is_done = bool(ended) and all(snapshot.is_exiting for snapshot in snapshots)
        if self._launch.is_program and self._launch.stall_after is None and not is_done:
            # A user's program may wait for anything: report it once, and end it only if --stall-after is set.
            if not self._stall_shown:
                self._stall_shown = True
                yield from (sentence, *stacks(snapshots), "it keeps running; --stall-after SECONDS would end it")
            return
        yield sentence
        yield from stacks(snapshots)
        late = late_ranks(snapshots)
        step = min(snapshot.heartbeat.step for snapshot in late or snapshots)
        # If all ranks here wait, the late one may be on another machine.
        self.cause = self.of.rendezvous.report_failure(Cause(sentence, (), step, error=Stalled, is_victim=not late))
        self._workers.kill()

    def _explained(self, memory: MemoryWatch) -> Cause:
        first = self.assignment.first_rank
        heartbeats: Mapping[int, HeartbeatState] = {
            first + local: heartbeat for local, heartbeat in enumerate(self._heartbeats.read())
        }
        server_exit_code = self._workers.server_exit_code()
        if server_exit_code is not None:
            return server_cause(server_exit_code, heartbeats, memory.evidence())
        ended = {**self._exited_early(), **self._workers.failed}
        failed = {first + local: code for local, code in ended.items()}
        return cause(self._logs.folder, failed, heartbeats, memory.evidence(), self._live)


def _from_where(newest: str | None, assignment: RankAssignment) -> str:
    """Only the first machine has checkpoints; the next round tells the other machines which one."""
    if assignment.machine:
        return " from the first machine's checkpoint"
    return f" from {Path(newest).name}" if newest else " from the beginning"


def _free_logs(folder: Path, first_rank: int) -> Path:
    """The log folder of a new attempt; those of earlier attempts are kept."""
    attempts = [folder, *(folder / f"restart{number}" for number in range(1, 10_000))]
    return next(one for one in attempts if not (one / f"rank{first_rank}.out").exists())
