"""The first cause of a failed run, reported in at most 15 lines."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from evenstep.checkpoint import files, integrity
from evenstep.distributed.heartbeat import HeartbeatState
from evenstep.distributed.worker_process import signal_name
from evenstep.errors import BadInput, EvenstepError, Stalled, WorkerFailed, shorten
from evenstep.launcher.fork_server import server_lost
from evenstep.launcher.hang import crashed_thread
from evenstep.launcher.logs import end_of, ranks_in_words
from evenstep.record import FILE
from evenstep.task import is_user_code

MOST_LINES = 15
MAX_MESSAGE_LINES = 4
MAX_LINE_CHARS = 1000
KILLED = "was ended by SIGKILL"
"""Of a rank or the fork server, from outside; not for want of memory."""
KILLED_HINT = "It was killed from outside: by a user, the cluster, or the OOM killer."


@dataclass(frozen=True)
class Cause:
    """Why an attempt ended."""

    headline: str
    """`rank 1 failed at step 7, in forward`."""
    details: tuple[str, ...]
    """The user's own lines, the exception, and advice."""
    step: int
    """The step at which it happened; 0 before the first step."""
    others: str = ""
    """What the other ranks were doing."""
    is_final: bool = False
    """Whether it would happen again: bad input, a loss that is not finite."""
    error: type[EvenstepError] = WorkerFailed
    machine: str = ""
    is_loss: bool = False
    """Whether a machine was lost; --restarts does not count that."""
    is_victim: bool = False
    """Whether these ranks failed only because they lost other ranks, which have the real cause."""
    is_outside: bool = False
    """Whether it is unrelated to the step at which it happened."""

    def lines(self) -> list[str]:
        """All lines except the path of the logs and how to resume."""
        where = f" on {self.machine}" if self.machine else ""
        return [line for line in (self.headline + where, *self.details, self.others) if line]

    def to_json(self) -> dict[str, Any]:
        """The form sent to the launchers of other machines."""
        return {**vars(self), "details": list(self.details), "error": self.error.__name__}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Cause:
        """Read what another launcher sent; unknown keys are ignored."""
        known = {one.name for one in fields(cls)}
        kinds = {kind.__name__: kind for kind in (WorkerFailed, BadInput, Stalled)}
        taken = {name: value for name, value in values.items() if name in known}
        return cls(**{**taken, "details": tuple(taken["details"]), "error": kinds[taken["error"]]})


def cause(
    logs: Path,
    failed: Mapping[int, int],
    heartbeats: Mapping[int, HeartbeatState],
    evidence: str = "",
    spare: Path | None = None,
) -> Cause:
    """The first cause, from the ranks' reports, exit codes and heartbeats.

    `failed` and `heartbeats` are by global rank; `evidence` is what the kernel says about memory;
    `spare` holds reports that could not be written to `logs`.
    """
    found = [*_reports(logs), *(_reports(spare) if spare is not None else ())]
    # In a folder that machines share, other machines' reports lie beside ours.
    reports = [report for report in found if not heartbeats or report["rank"] in heartbeats]
    reported = {report["rank"] for report in reports}
    # A killed rank could not report; ranks that lost their connection to it could.
    killed = {rank: code for rank, code in failed.items() if rank not in reported}
    if killed:
        return _unreported(logs, killed, heartbeats, evidence)
    if not reports:
        return _unreported(logs, failed or {0: 1}, heartbeats, evidence)
    first = min(reports, key=lambda report: (report["is_victim"], int(report["nanoseconds"])))
    rank = first["rank"]
    if first["is_plain"]:
        kind = BadInput if first["exit_code"] == BadInput.exit_code else WorkerFailed
        return Cause(first["message"], (), _step(heartbeats, rank), is_final=first["is_final"], error=kind)
    details = (
        *(f"  {line}" for line in first["lines"]),
        *_shortened(": ".join(filter(None, (first["type"], first["message"])))),
        *(first["answer"] or "").splitlines()[:3],
    )
    step = _step(heartbeats, rank) or first["step"]
    # A custom loop is anywhere between two calls; the last one says nothing of where it failed.
    where = _where(heartbeats, rank, step) if not first.get("is_between_calls") else f" at step {step}" * bool(step)
    headline = f"rank {rank} failed{where}"
    return Cause(headline, details, step, _others(heartbeats, {rank}), is_victim=first["is_victim"])


def server_cause(exit_code: int, heartbeats: Mapping[int, HeartbeatState], evidence: str = "") -> Cause:
    """The cause when the fork server ended, and all ranks with it."""
    details = (evidence or KILLED_HINT,) if exit_code == -signal.SIGKILL else ()
    step = max((heartbeat.step for heartbeat in heartbeats.values()), default=0)
    return Cause(server_lost(exit_code), details, step, _others(heartbeats, set()), is_outside=True)


def _unreported(logs: Path, ended: Mapping[int, int], heartbeats: Mapping[int, HeartbeatState], evidence: str) -> Cause:
    """The cause when the failed rank wrote no report: it was killed, or ended from outside Python."""
    rank, code = next(iter(sorted(ended.items())))
    where = _where(heartbeats, rank, 0)
    details: tuple[str, ...] = ()
    if code < 0:
        name = signal_name(-code)
        headline = f"rank {rank} was ended by {name}{where}"
        if -code == signal.SIGKILL:
            headline = f"rank {rank} {'ran out of memory' if evidence else KILLED}{where}"
            details = (evidence or KILLED_HINT,)
        else:
            details = tuple(_crash_frames(logs, rank))
        if -code == signal.SIGBUS:
            details = (*details, "Often /dev/shm is too small for loader processes; try --workers 0.")
    else:
        headline = f"rank {rank} exited with code {code}{where} and left no report"
        # Other codes are legitimate: a script may call sys.exit.
        details = ("Something in the task, or in what it imports, calls os._exit.",) if code == 0 else ()
    return Cause(headline, details, _step(heartbeats, rank), _others(heartbeats, {rank}))


def _crash_frames(logs: Path, rank: int) -> list[str]:
    """The stack at a fatal signal, the user's own lines first."""
    file = logs / f"rank{rank}.crash"
    frames = crashed_thread(file.read_text(errors="replace")) if file.exists() else []
    own = [frame for frame in frames if is_user_code(frame.file)][:2]
    log = end_of(logs / f"rank{rank}.err")
    # C++ prints the uncaught exception before it aborts.
    what = [line.strip() for line in log.splitlines() if "what():" in line or "terminate called" in line][-2:]
    differ = "--check-collectives names the line of every rank." if "collective mismatch" in log else ""
    return [*(f"  {frame}" for frame in own or frames[:2]), *what, *filter(None, [differ])]


def _where(heartbeats: Mapping[int, HeartbeatState], rank: int, step: int) -> str:
    """Where a rank was, if known; programs that do not train send no heartbeats."""
    if rank in heartbeats and heartbeats[rank].count:
        return f" {heartbeats[rank].where}"
    return f" at step {step}" if step else "" if heartbeats else " before the first step"


def _step(heartbeats: Mapping[int, HeartbeatState], rank: int) -> int:
    return heartbeats[rank].step if rank in heartbeats else 0


def _others(heartbeats: Mapping[int, HeartbeatState], failed: set[int]) -> str:
    """What the other ranks were doing, in one line."""
    groups: dict[str, list[int]] = {}
    for rank, heartbeat in heartbeats.items():
        if rank not in failed:
            groups.setdefault(heartbeat.where if heartbeat.count else "still running", []).append(rank)
    parts = [
        f"{ranks_in_words(ranks)} {'was' if len(ranks) == 1 else 'were'} {where}" for where, ranks in groups.items()
    ]
    were = "was" if sum(map(len, groups.values())) == 1 else "were"
    return f"{'; '.join(parts[:3])}{'; ...' if len(parts) > 3 else ''}, and {were} stopped" if parts else ""


def _reports(logs: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(logs.glob("rank*.error.json"))]


def _shortened(message: str) -> list[str]:
    lines = [shorten(line, MAX_LINE_CHARS) for line in message.strip().splitlines()]
    return lines if len(lines) <= MAX_MESSAGE_LINES else [*lines[: MAX_MESSAGE_LINES - 1], "..."]


def report(causes: Sequence[Cause], run_folder: Path, why_no_more: str = "") -> EvenstepError:
    """The error to raise: the last cause in full, and one line for each earlier attempt."""
    *earlier, last = causes
    if last.error is BadInput:
        return BadInput(last.headline)
    before = [f"attempt {number}: {one.headline}{_exception(one)}" for number, one in enumerate(earlier, 1)]
    ending = [line for line in (why_no_more, *where_to_look(run_folder).splitlines()) if line]
    own = last.lines()[: MOST_LINES - len(ending) - min(1, len(before))]
    num_left = MOST_LINES - len(ending) - len(own)
    return last.error("\n".join([*own, *before[max(0, len(before) - num_left) :], *ending]))


def _exception(cause: Cause) -> str:
    plain = [line for line in cause.details if not line.startswith("  ")]
    return f" ({plain[0]})" if plain else ""


def where_to_look(run_folder: Path) -> str:
    """The last lines of every report."""
    logs = f"full logs: {run_folder / 'logs'}"
    saved = integrity.whole(run_folder / files.FOLDER)
    return f"{logs}\ncontinue from {saved[-1].name}: add --resume {run_folder}" if saved else logs


def stopped_where(run_folder: Path) -> str:
    """The last line of a run that was stopped with Ctrl-C."""
    saved = integrity.whole(run_folder / files.FOLDER)
    if not (run_folder / FILE).exists():
        return "stopped before the first step"
    if not saved:
        return f"stopped before the first checkpoint; the rows so far are in {run_folder}"
    return f"stopped; continue from {saved[-1].name} with --resume {run_folder}"
