"""Does `verify` ever cry wolf? Sound tasks, each with ten seeds; prints a table, and ends with 1 if it does.

python bench/verify_repeats.py                       # all of them, ten times
python bench/verify_repeats.py --repeats 2 mlp gpt2  # some of them
python bench/verify_repeats.py --out OUT.json        # written anew after every task
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import harness

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.process.test_verify import MORE, SOUND, verify  # noqa: E402


@dataclass(frozen=True)
class Repeat:
    """One verification of one task."""

    seed: int
    is_passed: bool
    has_jump: bool = False
    """Whether rounding turned a decision, which was seen as such."""
    said: str = ""
    """What was said against it."""


@dataclass(frozen=True)
class Row:
    """All repeats of one task."""

    task: str
    passed: int
    false_alarms: int
    jumps: int
    seconds_each: float
    alarms: tuple[str, ...]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(SOUND))
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--out", help="a file for the table, with the machine that it was made on")
    given = parser.parse_args()
    if given.repeats < 1:
        parser.error(f"--repeats is {given.repeats}; at least 1 is needed to say anything")
    command = f"python bench/verify_repeats.py --repeats {given.repeats} {' '.join(given.names)}"
    rows: list[Row] = []
    for name in given.names:
        rows.append(row_of(name, given.repeats))
        print(f"{name}: {rows[-1].passed} of {given.repeats} passed", file=sys.stderr, flush=True)
        if given.out:
            harness.write(given.out, command, [asdict(row) for row in rows])
    show(rows)
    sys.exit(1 if any(row.false_alarms for row in rows) else 0)


def row_of(name: str, num_repeats: int) -> Row:
    """A task with so many seeds."""
    started = time.monotonic()
    repeats = [repeat(name, seed) for seed in range(num_repeats)]
    seconds = (time.monotonic() - started) / num_repeats
    alarms = tuple(f"seed {one.seed}: {one.said}" for one in repeats if not one.is_passed)
    jumps = sum(one.has_jump for one in repeats)
    return Row(name, num_repeats - len(alarms), len(alarms), jumps, round(seconds, 1), alarms)


def repeat(name: str, seed: int) -> Repeat:
    """With another seed: another model, another order, another rounding."""
    try:
        done = verify(SOUND[name], "--devices", "2", "--seed", str(seed), "--json", *MORE.get(name, ()))
    except subprocess.TimeoutExpired as error:
        said = f"no verdict in {error.timeout:.0f} s"
        print(f"{name}, seed {seed}: {said}", file=sys.stderr, flush=True)
        return Repeat(seed, is_passed=False, said=said)
    configs = json.loads(done.stdout.splitlines()[-1])["ways"] if done.stdout.strip() else []
    has_jump = any("rounding flips a decision there" in note for config in configs for note in config["notes"])
    if done.returncode == 0:
        return Repeat(seed, is_passed=True, has_jump=has_jump)
    said = (
        "\n".join(f"{config['sentence']}: {config['why']}" for config in configs if not config["is_same"])
        or done.stderr[-2000:]
    )
    print(f"{name}, seed {seed}: {said}", file=sys.stderr, flush=True)
    return Repeat(seed, is_passed=False, has_jump=has_jump, said=said)


def show(rows: Sequence[Row]) -> None:
    heads = ("task", "passed", "false alarms", "rounding jumped", "seconds each")
    cells = [
        (row.task, str(row.passed), str(row.false_alarms), str(row.jumps), f"{row.seconds_each:.1f}") for row in rows
    ]
    harness.show("sound tasks, verified with one seed after the other", heads, cells)


if __name__ == "__main__":
    main()
