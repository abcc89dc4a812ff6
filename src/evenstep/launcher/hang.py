"""Detect a hang and explain it: which ranks are waiting for which rank, at which line, and what every rank was doing.

No setup is needed. Every rank writes its step and phase to shared memory, and faulthandler's C handler dumps its stacks
when STACKS_SIGNAL arrives; so this also works for a stopped process, and for one that holds the GIL. A training in the
launcher's own process is watched by a thread (`exit_on_stall`).
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

import psutil

from evenstep.distributed.heartbeat import BACKWARD, EVALUATING, INPUT, Heartbeats, HeartbeatState, make_heartbeats
from evenstep.distributed.heartbeat import UNTIMED as UNTIMED_PHASES
from evenstep.distributed.temporary_folders import live_folder, remove_own_folders
from evenstep.distributed.worker_process import STACKS_SIGNAL, WorkerSpec, dump_stacks_to, set_spec, worker_spec
from evenstep.errors import Stalled
from evenstep.launcher.logs import ranks_in_words
from evenstep.launcher.processes import send, send_to_main_thread
from evenstep.record import RunEnd, write_end
from evenstep.task import is_user_code
from evenstep.worker import main as worker_main

LEAST_SECONDS = 120.0
FIRST_SECONDS = 600.0
UNTIMED_SECONDS = 1800.0
LONGEST_PAUSE_FACTOR = 20
POLL_SECONDS = 0.2
STACKS = "stacks"
HEARTBEATS = "heartbeats"
SHOWN_FRAMES = 6
SAMPLES = 5
MAX_LOADER_WORKERS = 8
"""Loader workers per rank whose stacks are dumped; each takes a tenth of a second."""
MAX_POLL_SECONDS = 1.0
_DUMP_SECONDS = 1.0
OWN_CALLERS = re.compile("/evenstep/(data|strategies|training|distributed|worker)/")
"""Where evenstep's own threads come from that call the user's code: dp's replicas, and prefetching."""
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)')


class StallWatch:
    """Detects that no rank has made progress for too long.

    The default limit is 20 times the longest pause so far and at least two minutes, so that slow steps do not count.
    """

    def __init__(
        self,
        heartbeats: Heartbeats,
        limit: float | None,
        stacks: Callable[[], str | None] | None = None,
        least: float = LEAST_SECONDS,
    ) -> None:
        self._heartbeats = heartbeats
        self._limit = limit
        self._stacks = stacks
        self._least = least
        self._first_step = 0
        """The step at which this attempt began."""
        self._sampled = time.monotonic()
        self._seen: str | None = None
        self._counts: list[int] = []
        self._moved = self._watched = time.monotonic()
        self._longest = 0.0

    def stalled_seconds(self) -> float | None:
        """Seconds without progress if they exceed the limit, else None."""
        heartbeats = self._heartbeats.read()
        counts = [heartbeat.count for heartbeat in heartbeats]
        now = time.monotonic()
        # Time in which the launcher itself was stopped, by Ctrl-Z or with the whole machine, does not count.
        self._moved += max(0.0, now - self._watched - MAX_POLL_SECONDS)
        self._watched = now
        if counts != self._counts:
            self._first_step = self._first_step or max(heartbeat.step for heartbeat in heartbeats)
            if self._is_under_way(heartbeats):
                self._longest = max(self._longest, now - self._moved)
            self._counts, self._moved = counts, now
            return None
        if not any(counts):
            self._compare_stacks(now, self.limit(heartbeats))
        still = now - self._moved
        return still if still > self.limit(heartbeats) else None

    def restart_clock(self) -> None:
        """Count from now on, so that a reported stall is not reported again at every poll."""
        self._moved = time.monotonic()

    def _is_under_way(self, heartbeats: Sequence[HeartbeatState]) -> bool:
        """Whether the first step, which sets up compilers and connections, is done."""
        return 0 < self._first_step < max(heartbeat.step for heartbeat in heartbeats)

    def _compare_stacks(self, now: float, limit: float) -> None:
        """Programs that do not train send no heartbeats; a change in their stacks counts as progress instead."""
        if self._stacks is None or now - self._sampled < limit / SAMPLES:
            return
        self._sampled = now
        seen = self._stacks()
        if seen is None or seen != self._seen:
            self._moved = now
        self._seen = seen

    def limit(self, heartbeats: Sequence[HeartbeatState]) -> float:
        """Seconds without progress that count as a stall in the current phases."""
        if not any(heartbeat.count for heartbeat in heartbeats):
            return self._limit or FIRST_SECONDS
        is_untimed = any(heartbeat.phase in UNTIMED_PHASES for heartbeat in heartbeats)
        if self._limit is not None:
            return max(10 * self._limit, 60.0) if is_untimed else self._limit
        if is_untimed:
            return UNTIMED_SECONDS
        least = self._least if self._is_under_way(heartbeats) else FIRST_SECONDS
        return max(least, LONGEST_PAUSE_FACTOR * self._longest)


@dataclass(frozen=True)
class Frame:
    """One line of a stack."""

    file: str
    line: int
    name: str

    def __str__(self) -> str:
        return f"{_short(self.file)}:{self.line} in {self.name}"

    @property
    def is_collective(self) -> bool:
        """Whether it belongs to a collective, rather than to torch's process launcher or call logger."""
        is_other = "torch/distributed/elastic/" in self.file or self.file.endswith("c10d_logger.py")
        return "torch/distributed/" in self.file and not is_other


@dataclass(frozen=True)
class Stack:
    """The stack of another thread of a rank, or of one of its loader workers."""

    label: str
    frames: list[Frame]
    """Innermost first."""
    is_loader_worker: bool = False
    """Whether it belongs to a DataLoader worker process."""

    @property
    def users_frame(self) -> Frame | None:
        return _users_frame(self.frames)


@dataclass(frozen=True)
class RankSnapshot:
    """What one rank was doing when its stacks were dumped."""

    rank: int
    heartbeat: HeartbeatState
    state: str = "S"
    """Linux's process state: T is stopped, D is uninterruptible sleep in the kernel."""
    frames: list[Frame] = field(default_factory=list)
    """Of its main thread, innermost first."""
    others: list[Stack] = field(default_factory=list)
    """evenstep's own threads that run the user's code, and loader workers."""

    @property
    def users_frame(self) -> Frame | None:
        """The innermost frame of the main thread in the user's code."""
        return _users_frame(self.frames)

    @property
    def users_location(self) -> str:
        """The user's line that this rank runs, or waits for in one of its threads or loader workers."""
        if self.users_frame is not None:
            return str(self.users_frame)
        # Loader workers prefetch at any time: their line matters only while this rank waits for input.
        reads = not self.heartbeat.count or self.heartbeat.phase in (INPUT, EVALUATING)
        own = [] if self.is_waiting else [one for one in self.others if reads or not one.is_loader_worker]
        return next((f"{one.users_frame}, in {one.label}" for one in own if one.users_frame is not None), "")

    @property
    def collective(self) -> str | None:
        """The collective as the user's code calls it; engines such as FSDP nest several."""
        inner = list(takewhile(lambda frame: not is_user_code(frame.file), self.frames))
        calls = [frame.name for frame in inner if frame.is_collective]
        named = [frame.name for frame in inner if frame.is_collective and frame.file.endswith("distributed_c10d.py")]
        return next(iter([*reversed(named), *reversed(calls)]), None)

    @property
    def is_waiting(self) -> bool:
        """Whether its stack shows that it waits for other ranks."""
        if self.frames and is_user_code(self.frames[0].file):
            return False
        is_in_engine = bool(self.frames) and "torch/autograd/" in self.frames[0].file
        return self.collective is not None or self.heartbeat.phase == BACKWARD or is_in_engine

    @property
    def is_exiting(self) -> bool:
        """Whether the user's program has returned, and its process waits for threads or exit handlers."""
        exit_frame = (worker_main.__file__, worker_main.exit_program.__name__)
        return exit_frame in [(frame.file, frame.name) for frame in self.frames]

    def where(self) -> str:
        """`at step 7, in forward, my_task.py:12 in loss`; without heartbeats, its line alone."""
        line = self.users_location or str(self.frames[0] if self.frames and not self.heartbeat.count else "")
        parts = (self.heartbeat.where if self.heartbeat.count else "", "exiting" if self.is_exiting else "", line)
        return ", ".join(part for part in parts if part) or "at an unknown line"


def explain(snapshots: Sequence[RankSnapshot], seconds: float, ended: Sequence[int] = ()) -> str:
    """One line: which rank is late and where it is, where the other ranks wait, and which ranks have ended."""
    gone = f"; {ranks_in_words([*ended])} {'has' if len(ended) == 1 else 'have'} ended" if ended else ""
    return f"{_explain(snapshots, seconds)}{gone}"


def _explain(snapshots: Sequence[RankSnapshot], seconds: float) -> str:
    late = late_ranks(snapshots)
    others = [snapshot for snapshot in snapshots if snapshot not in late]
    still = f"no progress for {seconds:.0f} s"
    if not late:
        return f"{still}, and all ranks are waiting: {'; '.join(f'rank {one.rank} {one.where()}' for one in snapshots)}"
    culprit = late[0]
    how = {"T": "is stopped (SIGSTOP)", "D": "waits in the kernel, for a disk or a device"}.get(culprit.state)
    if not others and len(late) == 1:
        return f"{still}: rank {culprit.rank} {how or 'was last seen'} {culprit.where()}"
    who = ranks_in_words([snapshot.rank for snapshot in late])
    waits = f"; {_waiting(others)}" if others else ""
    if culprit.collective is not None and others:
        absent = ranks_in_words([snapshot.rank for snapshot in others])
        return (
            f"{still}: {who} waits in {culprit.collective}, {culprit.where()}, which {absent} did not call"
            f"{waits}. Is it called under a condition that differs between ranks?"
        )
    if not others:
        return f"{still}: {who} do not progress; rank {culprit.rank} {how or 'was last seen'} {culprit.where()}"
    waiting = _with_verb([snapshot.rank for snapshot in others], "is waiting", "are waiting")
    return f"{still}: {waiting} for {who}, which {how or 'was last seen'} {culprit.where()}{waits}"


def late_ranks(snapshots: Sequence[RankSnapshot]) -> list[RankSnapshot]:
    """The ranks that hold up the run: stopped, or with the least progress, or busy while the rest wait."""
    stopped = [snapshot for snapshot in snapshots if snapshot.state in "TtD"]
    if stopped:
        return stopped
    least, most = (choose(snapshot.heartbeat.progress for snapshot in snapshots) for choose in (min, max))
    if least != most:
        return [snapshot for snapshot in snapshots if snapshot.heartbeat.progress == least]
    busy = [snapshot for snapshot in snapshots if not snapshot.is_waiting]
    return busy if len(busy) < len(snapshots) or len(snapshots) == 1 else []


def _waiting(others: Sequence[RankSnapshot]) -> str:
    groups: dict[str, list[int]] = {}
    for snapshot in others:
        groups.setdefault(snapshot.where(), []).append(snapshot.rank)
    return "; ".join(f"{_with_verb(ranks, 'waits', 'wait')} {where}" for where, ranks in groups.items())


def _with_verb(ranks: list[int], singular: str, plural: str) -> str:
    return f"{ranks_in_words(ranks)} {singular if len(ranks) == 1 else plural}"


def take_snapshots(
    pids: Mapping[int, int], heartbeats: Sequence[HeartbeatState], files: Mapping[int, Path], first_rank: int
) -> list[RankSnapshot]:
    """Have every process dump its stacks, and read them; the files keep the latest dump."""
    states = {local: _state(pid) for local, pid in pids.items()}
    files = {local: _where_open(pid, files[local]) for local, pid in pids.items()}
    # The processes append: without this, a long run's files would grow with every dump.
    for local in pids:
        _empty(files[local])
    stopped = [local for local in pids if states[local] in "Tt"]
    awake = [local for local in pids if local not in stopped]
    for local, pid in pids.items():
        if handles_stacks_signal(pid):
            send_to_main_thread(pids[local], STACKS_SIGNAL)
    _wait_for_dumps({files[local]: 0 for local in awake})
    if stopped:
        # A stopped main thread wakes up in the handler, before it does anything else; another thread would write while
        # the main one runs. The other ranks are stopped meanwhile, so that no step is trained.
        _send_all(pids, awake, signal.SIGSTOP)
        _send_all(pids, stopped, signal.SIGCONT)
        _wait_for_dumps({files[local]: 0 for local in stopped})
        _send_all(pids, stopped, signal.SIGSTOP)
        _send_all(pids, awake, signal.SIGCONT)
    dumps = {local: _text(files[local]) for local in pids}
    return [
        RankSnapshot(first_rank + local, heartbeats[local], states[local], main_thread(dumps[local]), others)
        for local, pid in pids.items()
        for others in [[*_busy_threads(dumps[local]), *_loader_workers(pid, files[local])]]
    ]


def _busy_threads(dump: str) -> list[Stack]:
    """evenstep's own threads that run the user's code: dp's replicas, and prefetching."""
    others = [_frames(text) for text in _threads(dump)[:-1]]
    return [
        Stack("a thread", frames)
        for frames in others
        if _users_frame(frames) and any(OWN_CALLERS.search(frame.file) for frame in frames)
    ]


def _loader_workers(pid: int, file: Path) -> list[Stack]:
    """Processes forked by a rank; each in turn dumps its stacks to the rank's file."""
    found = []
    copies = [child.pid for child in _children(pid) if handles_stacks_signal(child.pid) and _has_open(child.pid, file)]
    for number, copy in enumerate(copies[:MAX_LOADER_WORKERS]):
        label, is_stopped = f"loader worker {number} (process {copy})", _state(copy) in "Tt"
        size = _size(file)
        if not is_stopped:
            send_to_main_thread(copy, STACKS_SIGNAL)
            _wait_for_dumps({file: size})
        frames = main_thread(_text(file)[size:])
        found.append(Stack(f"{label}, which is stopped" if is_stopped else label, frames, is_loader_worker=True))
    return found


def _children(pid: int) -> list[psutil.Process]:
    try:
        children: list[psutil.Process] = psutil.Process(pid).children()
    except psutil.Error:
        return []
    return children


def _has_open(pid: int, file: Path) -> bool:
    """Whether a process has inherited this file; its process id may have been reused since."""
    try:
        return any(one.samefile(file) for one in Path(f"/proc/{pid}/fd").iterdir() if one.exists())
    except OSError:
        return False


def _where_open(pid: int, file: Path) -> Path:
    """The path under which a process's file can be read, even after its folder was deleted."""
    if not file.exists():
        with suppress(OSError):
            descriptors = Path(f"/proc/{pid}/fd").iterdir()
            return next((one for one in descriptors if os.readlink(one) == f"{file} (deleted)"), file)
    return file


def _send_all(pids: Mapping[int, int], who: Iterable[int], number: int) -> None:
    for local in who:
        send(pids[local], number)


def _wait_for_dumps(sizes: Mapping[Path, int]) -> None:
    """Wait until every file has grown and stopped growing, within a limit: a process may be unable to dump."""
    deadline = time.monotonic() + _DUMP_SECONDS
    before: dict[Path, int] = {}
    while time.monotonic() < deadline:
        time.sleep(0.05)
        now = {file: _size(file) for file in sizes}
        if now == before and all(now[file] > size for file, size in sizes.items()):
            return
        before = now


def main_thread(dump: str) -> list[Frame]:
    """The frames of the thread that a dump of faulthandler lists last, which is the main one."""
    return _frames(_threads(dump)[-1])


def _threads(dump: str) -> list[str]:
    return re.split(r"^(?:Current t|T)hread .*$", dump, flags=re.MULTILINE)


def crashed_thread(dump: str) -> list[Frame]:
    """The frames of the thread that a signal ended; of one that runs no Python, those of the main one."""
    _, _, current = dump.partition("Current thread ")
    return _frames(re.split(r"^Thread .*$", current, flags=re.MULTILINE)[0]) or main_thread(dump)


def _users_frame(frames: Sequence[Frame]) -> Frame | None:
    return next((frame for frame in frames if is_user_code(frame.file)), None)


def _frames(text: str) -> list[Frame]:
    return [Frame(match["file"], int(match["line"]), match["name"]) for match in _FRAME.finditer(text)]


def stacks(snapshots: Sequence[RankSnapshot]) -> list[str]:
    """The innermost lines of every rank's stack and the user's own line; the log has the whole stacks."""
    lines = []
    for snapshot in snapshots:
        after = f", after {snapshot.heartbeat.collectives} collectives" if snapshot.heartbeat.collectives else ""
        lines.append(f"rank {snapshot.rank} {snapshot.where()}{after}:")
        lines += _shown(snapshot.frames) or ["    (no stack: the process did not respond)"]
        for other in snapshot.others:
            # Idle loader workers are in the log alone.
            if other.users_frame is not None or not other.frames:
                lines += [f"    {other.label}:", *(f"    {line}" for line in _shown(other.frames))]
    return lines


def _shown(frames: Sequence[Frame]) -> list[str]:
    own = _users_frame(frames)
    shown = list(frames[:SHOWN_FRAMES])
    if own is not None and own not in shown:
        shown[-1] = own
    return [f"    {frame}" for frame in shown]


def _short(file: str) -> str:
    for installed in ("/site-packages/", "/src/evenstep/"):
        before, found, rest = file.rpartition(installed)
        if found and before:
            return rest if installed == "/site-packages/" else f"evenstep/{rest}"
    near = os.path.relpath(file)
    return near if len(near) < len(file) else file


def handles_stacks_signal(pid: int) -> bool:
    """Whether a process has a handler for the signal; after an exec it has none, and would be killed."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return not Path("/proc/self").exists()
    caught = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")), 0)
    return bool(caught >> (STACKS_SIGNAL - 1) & 1)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "?"


def _empty(path: Path) -> None:
    with suppress(OSError):
        os.truncate(path, 0)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


@contextmanager
def exit_on_stall(logs: Path, limit: float | None) -> Iterator[None]:
    """Exit with code 124, after printing the stacks, if the block makes no progress.

    A thread watches; it cannot run while C code holds the GIL.
    """
    with live_folder() as folder, dump_stacks_to(folder / STACKS):
        heartbeats = make_heartbeats(folder / HEARTBEATS, 1)
        before = worker_spec()
        set_spec(WorkerSpec(logs=str(logs), heartbeats=str(folder / HEARTBEATS)))
        done = threading.Event()
        thread = threading.Thread(target=_watch_single, args=(heartbeats, limit, folder, logs, done), daemon=True)
        thread.start()
        try:
            yield
        finally:
            set_spec(before)
            done.set()
            thread.join()
            heartbeats.close()


def _watch_single(heartbeats: Heartbeats, limit: float | None, folder: Path, logs: Path, done: threading.Event) -> None:
    watch = StallWatch(heartbeats, limit)
    while not done.wait(POLL_SECONDS):
        still = watch.stalled_seconds()
        if still is not None and not _is_debugged():
            _explain_single(heartbeats, still, folder, logs)


def _is_debugged() -> bool:
    """Whether the main thread is at a debugger's prompt."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if Path(frame.f_code.co_filename).name in ("pdb.py", "bdb.py"):
            return True
        frame = frame.f_back
    return False


def _explain_single(heartbeats: Heartbeats, seconds: float, folder: Path, logs: Path) -> None:
    file = folder / STACKS
    (snapshot,) = take_snapshots({0: os.getpid()}, heartbeats.read(), {0: file}, 0)
    logs.mkdir(parents=True, exist_ok=True)
    shutil.copy(file, logs / f"rank0.{STACKS}")
    sentence = explain([snapshot], seconds)
    lines = [*stacks([snapshot]), f"error: {sentence}", f"full logs: {logs}"]
    print("\n".join(lines), file=sys.stderr, flush=True)
    write_end(logs.parent, RunEnd(state="failed", why=sentence))
    remove_own_folders()
    os._exit(Stalled.exit_code)
