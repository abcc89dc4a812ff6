"""All benchmarks of the CPU, one after another, each into a file of its own; then the page.

python bench/suite.py [--quick] [--only C1 C4 ...] [--data FOLDER] [--folder bench/results] [--no-page]

One that fails does not lose the others: it is named at the end, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Part:
    """One file of this folder."""

    file: str
    name: str
    """In the names of results."""
    most_seconds: int = 1200

    @property
    def path(self) -> Path:
        return HERE / self.file


PARTS = {
    "C1": Part("c1_step.py", "step"),
    "C2": Part("c2_input.py", "input"),
    "C3": Part("c3_allreduce.py", "allreduce"),
    "C4": Part("c4_ddp.py", "ddp"),
    "C5": Part("c5_fsdp.py", "fsdp"),
    "C6": Part("c6_start.py", "start"),
    "C7": Part("c7_job.py", "job", 2400),
    "C8": Part("c8_predict.py", "predict", 2400),
    "scaling": Part("scaling.py", "scaling"),
    "growth": Part("growth.py", "growth", 2400),
}
RACES = ("C1", "C2", "C3", "C4", "C5", "C6", "C7", "C8")


def run(key: str, out: Path, *more: str, most_seconds: float | None = None) -> str | None:
    """One benchmark in a process of its own; what went wrong, if something did. Its tables go to stderr."""
    part = PARTS[key]
    if not part.path.exists():
        return f"there is no {part.path.relative_to(HERE.parent)} yet"
    out.unlink(missing_ok=True)
    command = [sys.executable, str(part.path), "--out", str(out.resolve()), *more]
    process = psutil.Popen(command, stdout=sys.stderr)
    try:
        code = process.wait(most_seconds or part.most_seconds)
    except psutil.TimeoutExpired:
        # Its racers live in sessions of their own, and would outlive it.
        for one in [*process.children(recursive=True), process]:
            one.kill()
        process.wait()
        return f"not done after {most_seconds or part.most_seconds:.0f} s, and stopped"
    return None if code == 0 and out.exists() else f"exit code {code}"


def headline(out: Path) -> dict[str, Any]:
    """What one line of JSON says of a result: its headline, or, of another shape, whatever figures stand on top."""
    results = json.loads(out.read_text())["results"]
    found = results.get("headline") or {key: one for key, one in results.items() if isinstance(one, int | float)}
    return {key: round(one, 4) if one == one else None for key, one in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--data", metavar="FOLDER", help="MNIST's four files, for C7")
    parser.add_argument("--folder", type=Path, default=HERE / "results")
    parser.add_argument("--no-page", action="store_true", help="leave docs/performance.md and the README alone")
    given = parser.parse_args()
    today = datetime.date.today().isoformat()
    failed = {}
    for key in given.only:
        more = [*(["--quick"] if given.quick else []), *(["--data", given.data] if given.data and key == "C7" else [])]
        prefix = f"{key.lower()}-" if key in RACES else ""
        started = time.monotonic()
        wrong = run(key, given.folder / f"{today}-{prefix}{PARTS[key].name}-cpu.json", *more)
        print(f"{key}: {wrong or 'done'} ({time.monotonic() - started:.0f} s)", file=sys.stderr, flush=True)
        if wrong:
            failed[key] = wrong
    if not given.no_page:
        subprocess.run([sys.executable, str(HERE / "table.py"), "--results", str(given.folder)], check=True)
    for key, wrong in failed.items():
        print(f"{key} has no new result: {wrong}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
