"""The first cause of a failed run, in at most 15 lines."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evenstep import checkpoint
from evenstep.errors import BadInput, EvenstepError, WorkerFailed
from evenstep.record import FILE

MOST_MESSAGE_LINES = 5
_OURS = (0, -signal.SIGTERM)
"""Exit codes of ranks that did nothing wrong: done, or stopped by the launcher."""


def failure(run_folder: Path, exit_codes: Mapping[int, int], num_ranks: int) -> EvenstepError:
    """The error to raise when workers ended with these exit codes."""
    reports = _reports(run_folder)
    spoke = {report["rank"] for report in reports}
    # A rank that was killed could not speak; those that lost their connection to it could.
    killed = {rank: code for rank, code in exit_codes.items() if rank not in spoke and code not in _OURS}
    if killed or not reports:
        return WorkerFailed(_silent_end(run_folder, killed or exit_codes))
    first = min(reports, key=lambda report: int(report["nanoseconds"]))
    if first["exit_code"] == BadInput.exit_code:
        return BadInput(first["message"])
    if first["is_plain"]:
        return WorkerFailed("\n".join([first["message"], _where_to_look(run_folder)]))
    others = sorted(set(range(num_ranks)) - {first["rank"]})
    lines = [
        f"rank {first['rank']} failed {' '.join(first['where']) or 'before the first step'}",
        *(f"  {line}" for line in first["lines"]),
        *_shortened(f"{first['type']}: {first['message']}"),
    ]
    if others:
        what = f"ranks {', '.join(map(str, others))} were" if len(others) > 1 else f"rank {others[0]} was"
        lines.append(f"{what} stopped")
    return WorkerFailed("\n".join([*lines, _where_to_look(run_folder)]))


def _reports(run_folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((run_folder / "logs").glob("rank*.error.json"))]


def _shortened(message: str) -> list[str]:
    lines = message.strip().splitlines()
    return lines if len(lines) <= MOST_MESSAGE_LINES else [*lines[: MOST_MESSAGE_LINES - 1], "..."]


def _silent_end(run_folder: Path, exit_codes: Mapping[int, int]) -> str:
    """No rank could say why: it was killed, or ended from outside Python."""
    rank, code = next(iter(sorted(exit_codes.items())), (0, 1))
    how = f"exit code {code}"
    if code < 0:
        how = f"signal {signal.Signals(-code).name}"
        how += " (often the kernel, when memory runs out)" if -code == signal.SIGKILL else ""
    return "\n".join([f"rank {rank} ended by {how} and left no report", _where_to_look(run_folder)])


def _where_to_look(run_folder: Path) -> str:
    look = f"full logs: {run_folder / 'logs'}"
    saved = checkpoint.whole(run_folder / checkpoint.FOLDER)
    return f"{look}\ngo on from {saved[-1].name}: add --resume {run_folder}" if saved else look


def stopped_where(run_folder: Path) -> str:
    """The last line of a run that was stopped by hand."""
    saved = checkpoint.whole(run_folder / checkpoint.FOLDER)
    if not (run_folder / FILE).exists():
        return "stopped before anything was done"
    if not saved:
        return f"stopped before the first checkpoint; what was done is in {run_folder}"
    return f"stopped; go on from {saved[-1].name} with --resume {run_folder}"
