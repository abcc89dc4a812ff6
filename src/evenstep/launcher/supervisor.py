"""A run in processes of its own: started, watched, explained, and started again where that helps.

Signals that ask the launcher to stop.

The Record, read while another process writes it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any

from evenstep.checkpoint import files
from evenstep.distributed.cgroups import MemoryWatch
from evenstep.distributed.devices import share_threads
from evenstep.distributed.heartbeat import ENDING, Heartbeats, HeartbeatState, make_heartbeats
from evenstep.distributed.preemption import SIGNALS, taken_by
from evenstep.distributed.temporary import live_folder
from evenstep.distributed.world import HEARTBEATS
from evenstep.errors import CheckpointError, Preempted, Stalled, WorkerFailed
from evenstep.launcher.failure import Cause, cause, report, server_cause
from evenstep.launcher.hang import (
    FIRST_SECONDS,
    LEAST_SECONDS,
    Sight,
    StallWatch,
    explain,
    look,
    stacks,
    takes_stacks_signal,
    waited_for,
)
from evenstep.launcher.logs import Voices
from evenstep.launcher.prepare import Prepared
from evenstep.launcher.processes import How, RankLogs, Start, Workers, seconds_computed, workers
from evenstep.launcher.rendezvous.local import Meeting, Place
from evenstep.record import FILE, end_of_rows, rows
from evenstep.record import Start as StartRow
from evenstep.strategy_facts import STRATEGIES
from evenstep.training.trainer import Event
from evenstep.worker.main import Instead, Orders, work


class Heeded(Exception):
    """A signal came while there was nothing to finish."""


class Asked:
    """Signals that ask the launcher to stop; a second one is not waited with."""

    def __init__(self) -> None:
        self.number: int | None = None
        self._is_idle = False

    def listening(self) -> AbstractContextManager[None]:
        """Take them, for as long as a run goes on."""
        return taken_by(self._take, (signal.SIGINT, *SIGNALS))

    def _take(self, number: int, frame: FrameType | None) -> None:
        # Not so a second SIGTERM: Slurm sends two of them within a tenth of a second.
        if self.number is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.number = number
        if self._is_idle:
            raise Heeded

    @contextmanager
    def heeded_at_once(self) -> Iterator[None]:
        """Raise Heeded when a signal comes, or has come."""
        self._is_idle = True
        try:
            if self.number is not None:
                raise Heeded
            yield
        finally:
            self._is_idle = False


class RecordTail:
    """The new rows of a record file that another process writes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None
        self._at = 0
        if path.is_file():
            with path.open("rb") as file:
                # Rows of an attempt before this one were shown then; one that it left half written will be cut off.
                self._at = end_of_rows(file)

    def new(self) -> Iterator[Event]:
        """Rows that were written since the last call."""
        if self._file is None and self._path.exists():
            self._file = self._path.open("rb")
            self._file.seek(self._at)
        for row in rows(self._file) if self._file is not None else ():
            if not isinstance(row, StartRow):
                yield row

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            self._file.close()


LONGEST_PAUSE_SECONDS = 60.0


@dataclass(frozen=True)
class Launch:
    """What to run in `num` processes on this machine, and how much trouble to take over it."""

    folder: Path
    num: int
    entry: str | Callable[..., Any]
    arguments: Callable[[Orders], tuple[Any, ...]]
    """What the entry is called with, given the orders of one attempt."""
    how: How = "server"
    resume: str | None = None
    """A checkpoint of the folder's own, from which the first attempt goes on."""
    restarts: int = 0
    stall_after: float | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    devices: tuple[str, ...] | None = None
    """This machine's, if they are not those of the plan."""
    least_seconds: float = LEAST_SECONDS
    """How long nothing may move at the least, where the user set no limit."""
    instead: Instead | None = None
    """What the workers of a plan do, if they do not train."""
    cwd: str | None = None
    """The working folder that a task of this very process has chosen; one from a file chooses it again."""
    is_program: bool = False
    """Whether it is the user's own: what rank 0 prints is its output, and signals are its to understand."""


def of_plan(prepared: Prepared, instead: Instead | None = None) -> Launch:
    """The processes of a training, or of something else that is done with its plan."""
    plan = prepared.plan
    devices = prepared.devices or plan.devices
    is_found = prepared.spec is not None
    return Launch(
        prepared.folder,
        len(devices) if STRATEGIES[plan.strategy].processes_per_device else 1,
        work,
        (lambda orders: (orders,)) if is_found else (lambda orders: (orders, prepared.task)),
        "server" if is_found else "fork",
        prepared.resume,
        plan.restarts,
        plan.stall_after,
        {"OMP_NUM_THREADS": str(share_threads(plan.threads, devices))},
        prepared.devices,
        # A compiler may be called again in any step: for the short last batch, for evaluation.
        FIRST_SECONDS if plan.compile else LEAST_SECONDS,
        instead,
        None if is_found else prepared.cwd,
    )


@dataclass
class Supervisor:
    """One run, over as many attempts as it takes."""

    launch: Launch
    meeting: Meeting
    asked: Asked = field(default_factory=Asked)
    causes: list[Cause] = field(default_factory=list)

    def events(self) -> Iterator[Event]:
        """What rank 0 does and says, until the run is done; raises what ends it."""
        with self.asked.listening():
            try:
                yield from self._attempts()
            finally:
                self.meeting.close()

    def _attempts(self) -> Iterator[Event]:
        resume = self.launch.resume
        number = 0
        while True:
            number += 1
            expected = self.meeting.expects()
            if expected:
                yield expected
            place = self._gather(number, resume)
            if place is None:
                yield "the run has ended without this machine"
                return
            if place.num_machines > 1:
                yield f"{place.num_machines} machines, {place.size} processes; this is machine {place.machine + 1}"
            with Attempt(self, place, number) as attempt:
                yield from attempt.events()
            if attempt.cause is None and not attempt.was_preempted:
                return
            if attempt.was_preempted:
                if self.asked.number is not None or not self.meeting.is_wanted(is_certain=True):
                    self._stop()
                yield "another machine has come: going on together"
            else:
                assert attempt.cause is not None
                self.causes.append(attempt.cause)
                resume, said = self._find()
                yield from self._before_restart(_from_where(resume, place), said)
                continue
            resume = self._newest()

    def _gather(self, number: int, resume: str | None) -> Place | None:
        """Waiting for others may take long, and has nothing to save: who asks to stop is not kept waiting."""
        try:
            with self.asked.heeded_at_once():
                return self.meeting.gather(self.launch.num, number, resume)
        except Heeded:
            self._stop()
            raise

    def _stop(self) -> None:
        if self.asked.number == signal.SIGINT:
            raise KeyboardInterrupt
        newest = self._newest()
        raise Preempted(f"asked to stop: saved {Path(newest).name}" if newest else "asked to stop")

    def _before_restart(self, where: str, said: Sequence[str]) -> Iterator[str]:
        """Say why and wait; raise if another attempt would not help."""
        allowed = self.launch.restarts
        last = self.causes[-1]
        counted = [one for one in self.causes if not one.is_loss]
        why = ""
        if last.is_final or (not allowed and not last.is_loss):
            raise report(self.causes, self.launch.folder)
        same = [one for one in counted if one.step == last.step and not one.is_outside]
        if last.step and not last.is_outside and len(same) > 1:
            why = f"step {last.step} has failed twice: it would fail again"
        elif len(counted) > allowed:
            why = f"it was started again {allowed} time{'s' * (allowed > 1)}, as allowed by --restarts {allowed}"
        if why:
            raise report(counted, self.launch.folder, why)
        pause = 0.0 if last.is_loss else self._pause(counted)
        yield from last.lines()
        yield from said
        wait = f", in {pause:.0f} s" if pause else ""
        yield f"going on{where}" if last.is_loss else f"restart {len(counted)} of {allowed},{where}{wait}"
        deadline = time.monotonic() + pause
        while time.monotonic() < deadline and self.asked.number is None:
            time.sleep(0.05)
        if self.asked.number is not None:
            self._stop()

    def _pause(self, causes: Sequence[Cause]) -> float:
        """Nothing after the first failure, then 1, 2, 4 ... seconds for as long as there is no progress."""
        steps = [one.step for one in causes]
        without = 0
        while without + 1 < len(steps) and steps[-1 - without] <= steps[-2 - without]:
            without += 1
        return min(LONGEST_PAUSE_SECONDS, 2.0 ** (without - 1)) if without else 0.0

    def _newest(self) -> str | None:
        """The checkpoint to go on from: the newest whole one of this run."""
        return self._find()[0]

    def _find(self) -> tuple[str | None, list[str]]:
        """That checkpoint, and what is to be said about newer ones."""
        folder = self.launch.folder
        try:
            path, said = files.find(str(folder))
        except CheckpointError as error:
            return None, [str(error)] if files.whole(folder / files.FOLDER) else []
        return str(path), said


class Attempt:
    """One start of all processes, to their end."""

    def __init__(self, of: Supervisor, place: Place, number: int) -> None:
        self.of = of
        self.place = place
        self.cause: Cause | None = None
        self.was_preempted = False
        self._launch = of.launch
        self._num = of.launch.num
        # The user's code may go to another folder; what ranks leave stays here.
        run_folder = of.launch.folder.absolute()
        folder = _free_logs(run_folder / "logs", place.first_rank)
        self._logs = RankLogs(folder, place.first_rank)
        self._orders = Orders(
            str(run_folder), str(folder), place.resume, of.launch.devices, of.launch.instead, of.launch.cwd
        )
        self._more = {"TORCHELASTIC_RESTART_COUNT": str(number - 1), **place.environment}
        self._stack = ExitStack()
        self._is_told = False
        self._is_shown = False

    def __enter__(self) -> Attempt:
        self._live = self._stack.enter_context(live_folder())
        file = self._live / "beats"
        self._heartbeats: Heartbeats = make_heartbeats(file, self._num)
        self._stack.callback(self._heartbeats.close)
        environments = self.place.environments(self._num, {**self._launch.environment, **self._more})
        for local, one in enumerate(environments):
            one[HEARTBEATS] = f"{file}:{local}"
            one["TORCHELASTIC_ERROR_FILE"] = str(self._logs.path(local, "engine.json").absolute())
        launch = self._launch
        self._start = Start(launch.entry, launch.arguments(self._orders), environments, self._logs, launch.how)
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def events(self) -> Iterator[Event]:
        """Start all processes; rank 0's rows and all ranks' lines as they are written, until all have ended."""
        try:
            self._workers: Workers = self._stack.enter_context(workers(self._start))
        except WorkerFailed as error:
            self.cause = self.of.meeting.tell(Cause(str(error), (), 0, is_outside=True))
            return
        yield from self._watched()

    def _watched(self) -> Iterator[Event]:
        # The first machine writes the Record, and tells of it.
        record = RecordTail(self._launch.folder / FILE if self.place.machine == 0 else Path(os.devnull))
        self._stack.callback(record.close)
        voices = Voices(self._logs, self._num, passes_rank_0_on=self._launch.is_program)
        stall = StallWatch(self._heartbeats, self._launch.stall_after, self._signs_of_life, self._launch.least_seconds)
        memory = MemoryWatch(self._workers.pids)
        working = True
        while working:
            working = self._workers.poll()
            memory.look()
            yield from voices.new(is_end=not working)
            yield from record.new()
            if working:
                yield from self._listen(stall)
                working = self.cause is None
        yield from voices.new(is_end=True)
        is_ended = self._launch.is_program and self._is_told
        if self.cause is None and (self._workers.failed or self._left_early()) and not is_ended:
            self.cause = self.of.meeting.tell(self._explained(memory))
        is_saved = Preempted.exit_code in self._workers.exit_codes().values()
        self.was_preempted = self.cause is None and (is_saved or (is_ended and bool(self._workers.failed)))

    def _listen(self, stall: StallWatch) -> Iterator[str]:
        """To the user, to other machines, and to the silence of the workers."""
        if not self._is_told and (self.of.asked.number is not None or self.of.meeting.is_wanted()):
            self._is_told = True
            yield from self._ask_to_stop(self.of.asked.number)
        self.cause = self.of.meeting.heard()
        if self.cause is None and self._left_early():
            self._workers.end_others()
            return
        still = stall.seconds_still()
        if still is not None and self.cause is None:
            yield from self._stalled(still)
            stall.watch_again()

    def _left_early(self) -> dict[int, int]:
        """Ranks that ended as if they were done, and were not: os._exit(0) in the user's code."""
        if self._launch.is_program:
            return {}
        heartbeats = self._heartbeats.read()
        codes = self._workers.exit_codes()
        return {local: code for local, code in codes.items() if not code and heartbeats[local].phase != ENDING}

    def _ask_to_stop(self, number: int | None) -> Iterator[str]:
        if self._launch.is_program and number is not None:
            # It knows what its signals mean.
            self._workers.send(number)
            return
        if number is not None:
            more = "; once more to stop at once" if number == signal.SIGINT else ""
            yield f"stopping after this step, with a checkpoint{more}"
        self._workers.send(signal.SIGUSR1)

    def _look(self) -> list[Sight]:
        """At the ranks that have not ended."""
        files = {local: self._logs.path(local, "stacks") for local in range(self._num)}
        return look(self._workers.running(), self._heartbeats.read(), files, self.place.first_rank)

    def _signs_of_life(self) -> str | None:
        """Where the ranks of a program are that leaves no beats, and what they computed; None before they begin."""
        running = self._workers.running()
        # The folder with the stacks may have been deleted since.
        begun = (self._logs.path(local, "stacks").exists() or takes_stacks_signal(running[local]) for local in running)
        if not all(begun):
            return None
        used = [f"{seconds_computed(pid):.0f}" for pid in running.values()]
        return "\n".join([*used, *stacks(self._look())])

    def _stalled(self, seconds: float) -> Iterator[str]:
        sights = self._look()
        if not sights:
            return
        ended = [self.place.first_rank + local for local in self._workers.exit_codes()]
        sentence = explain(sights, seconds, ended)
        is_done = bool(ended) and all(sight.is_exiting for sight in sights)
        if self._launch.is_program and self._launch.stall_after is None and not is_done:
            # Nobody knows what a program of the user's may wait for; it is told of once, and ended if that was asked.
            if not self._is_shown:
                self._is_shown = True
                yield from (sentence, *stacks(sights), "it is left alone; --stall-after SECONDS would end it")
            return
        yield sentence
        yield from stacks(sights)
        late = waited_for(sights)
        step = min(sight.beat.step for sight in late or sights)
        # Where all ranks wait, those of another machine may be the ones that they wait for.
        self.cause = self.of.meeting.tell(Cause(sentence, (), step, error=Stalled, is_victim=not late))
        self._workers.kill()

    def _explained(self, memory: MemoryWatch) -> Cause:
        first = self.place.first_rank
        heartbeats: Mapping[int, HeartbeatState] = {
            first + local: beat for local, beat in enumerate(self._heartbeats.read())
        }
        server_end = self._workers.server_end()
        if server_end is not None:
            return server_cause(server_end, heartbeats, memory.evidence())
        ended = {**self._left_early(), **self._workers.failed}
        failed = {first + local: code for local, code in ended.items()}
        return cause(self._logs.folder, failed, heartbeats, memory.evidence(), self._live)


def _from_where(newest: str | None, place: Place) -> str:
    """The checkpoints are the first machine's; the others are told when they meet again."""
    if place.machine:
        return " from where the first machine says"
    return f" from {Path(newest).name}" if newest else " from the beginning"


def _free_logs(folder: Path, first_rank: int) -> Path:
    """The folder for the logs of an attempt; those of earlier ones are kept."""
    attempts = [folder, *(folder / f"restart{number}" for number in range(1, 10_000))]
    return next(one for one in attempts if not (one / f"rank{first_rank}.out").exists())
