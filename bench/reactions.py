"""How soon evenstep reacts to a fault: the seconds that tests must not assert.

python bench/reactions.py [OUT.json]      on the CPU, 2 ranks, a few minutes
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import harness

HERE = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(HERE))

from tests.faults import runs  # noqa: E402  (the tests' own faults)
from tests.process.test_doctor import Hanging  # noqa: E402

from evenstep.doctor.bandwidth import try_pairs  # noqa: E402
from evenstep.doctor.remedies import TimeBudget  # noqa: E402

ROUNDS = 5


def rank_lost(how: str) -> float:
    """From the end of a rank in backward until the other one raises."""
    subprocess.run(
        [sys.executable, HERE / "tests/process/lost_rank_script.py", "out.json", how], timeout=60, check=True
    )
    return float(json.loads(Path("out.json").read_text())["seconds"])


def stall(kind: str) -> float:
    """From a rank that hangs until the restarted ranks write, with --stall-after 3."""
    options = ("--stall-after", "3", "--checkpoint-every", "3", "--restarts", "1")
    ended = runs.train(*options, fault=runs.fail(kind, rank=1, step=8, once=True))
    assert ended.code == 0, ended.err
    restarted = runs.FOLDER / "logs" / "restart1" / "rank0.out"
    return restarted.stat().st_mtime - Path("happened").stat().st_mtime


def hanging_pairs(num: int) -> float:
    """From the first to the last of as many pairs of devices that never answer."""
    started, budget = time.monotonic(), TimeBudget()
    for _ in range(num):
        try_pairs([Hanging(("cpu", "cpu"))], ["GLOO_SOCKET_IFNAME"], budget)
    return time.monotonic() - started


ROWS: dict[str, tuple[int, Callable[[], float]]] = {
    "a rank is killed in backward; the other one raises": (ROUNDS, lambda: rank_lost("kill")),
    "a rank exits in backward; the other one raises": (ROUNDS, lambda: rank_lost("exit")),
    "a rank is stopped; restarted (--stall-after 3)": (ROUNDS, lambda: stall("stop")),
    "a rank holds the interpreter; restarted (--stall-after 3)": (ROUNDS, lambda: stall("hold")),
    "doctor ends though 6 pairs of devices hang": (1, lambda: hanging_pairs(6)),
}


def main() -> None:
    results = {}
    for name, (rounds, react) in ROWS.items():
        seconds = []
        for _ in range(rounds):
            with harness.in_scratch():
                seconds.append(react())
        results[name] = seconds
        print(f"{name:<60} {median(seconds):6.2f} s  ({min(seconds):.2f} to {max(seconds):.2f}, {rounds}x)", flush=True)
    if len(sys.argv) > 1:
        harness.write(sys.argv[1], "python bench/reactions.py", results)


if __name__ == "__main__":
    main()
