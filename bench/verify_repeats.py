"""Does `verify` ever cry wolf? Sound tasks, each with ten seeds; prints a table, and ends with 1 if it does.

python bench/verify_repeats.py                       # all of them, ten times
python bench/verify_repeats.py --repeats 2 mlp gpt2  # some of them
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.process.test_verify import MORE, SOUND, verify  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(SOUND))
    parser.add_argument("--repeats", type=int, default=10)
    given = parser.parse_args()
    if given.repeats < 1:
        parser.error(f"--repeats is {given.repeats}; at least 1 is needed to say anything")
    table = Table(box=None, header_style="bold")
    for column in ("task", "passed", "false alarms", "seconds each"):
        table.add_column(column, justify="left" if column == "task" else "right")
    alarms = 0
    for name in given.names:
        started = time.monotonic()
        ended = [repeat(name, seed) for seed in range(given.repeats)]
        seconds = (time.monotonic() - started) / given.repeats
        passed = sum(ended)
        alarms += given.repeats - passed
        table.add_row(name, str(passed), str(given.repeats - passed), f"{seconds:.1f}")
        print(f"{name}: {passed} of {given.repeats} passed, {seconds:.1f} s each", file=sys.stderr, flush=True)
    Console().print(table)
    sys.exit(1 if alarms else 0)


def repeat(name: str, seed: int) -> bool:
    """Whether it passes with another seed: another model, another order, another rounding."""
    try:
        done = verify(SOUND[name], "--devices", "2", "--seed", str(seed), "--json", *MORE.get(name, ()))
    except subprocess.TimeoutExpired as error:
        print(f"{name}, seed {seed}: no verdict in {error.timeout:.0f} s", file=sys.stderr, flush=True)
        return False
    if done.returncode != 0:
        said = done.stderr[-2000:]
        if done.stdout.strip():
            ways = json.loads(done.stdout.splitlines()[-1])["ways"]
            said = "\n".join(f"{way['sentence']}: {way['why']}" for way in ways if not way["is_same"]) or said
        print(f"{name}, seed {seed}: {said}", file=sys.stderr, flush=True)
    return done.returncode == 0


if __name__ == "__main__":
    main()
