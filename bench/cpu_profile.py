"""Where C1's `evenstep train` and C7's job spend their time: what docs/performance.md says of them.

python bench/cpu_profile.py [--data FOLDER]

The worker of `evenstep train` for 2,000 steps of C1's MLP under cProfile, the functions with the most time of their
own first (a profiler makes Python slower and C not: shares of Python are too large). Then C7's command, three times:
when its first step began, what it did until its summary, and how long it took to end.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import harness
import torch
from c1_step import whole_loop
from c7_job import JOBS, OURS, jobs
from models import MLP

from evenstep.record import FILE, Record

sys.path.insert(0, str(JOBS))

from pictures import make, unpack

STEPS, WARM_UP, SHOWN = 2000, 200, 16


def profile_steps() -> None:
    """C1's worker."""
    torch.set_num_threads(1)
    with harness.in_scratch():
        steps = whole_loop(MLP, True)
        steps.run(WARM_UP)
        profiler = cProfile.Profile()
        profiler.enable()
        steps.run(STEPS)
        profiler.disable()
    stats = pstats.Stats(profiler)
    print(f"C1, evenstep train, {MLP.name}: microseconds a step, own and with all that it calls")
    rows = sorted(stats.stats.items(), key=lambda item: -item[1][2])[:SHOWN]  # type: ignore[attr-defined]
    wanted = [item for item in stats.stats.items() if item[0][2] == "append" and "record" in item[0][0]]  # type: ignore[attr-defined]
    for (file, _, name), (_, _, own, whole, _) in [*rows, *wanted]:
        print(f"    {own / STEPS * 1e6:7.1f} {whole / STEPS * 1e6:7.1f}  {Path(file).name} {name}")


def time_job(folder: str) -> None:
    """C7's command, from start to end."""
    job = jobs(folder, 2)[0][OURS]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    print("\nC7, evenstep train: seconds")
    for _ in range(3):
        with harness.in_scratch() as scratch:
            started = time.time()
            subprocess.run(job.command, env=environment, capture_output=True, check=True)
            ended = time.time()
            (run,) = (scratch / "runs").iterdir()
            written = (run / FILE).stat().st_mtime
            record = Record.read(run)
        assert record.summary is not None
        whole = record.summary.seconds
        steps, evaluations = (sum(one.seconds for one in many) for many in (record.steps, record.evaluations))
        print(f"    {written - started - whole:.2f} before the first step, {whole:.2f} until the summary", end=" ")
        print(f"({steps:.2f} of them steps, {evaluations:.2f} evaluations), {ended - written:.2f} to end")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", metavar="FOLDER", help="MNIST's four files, as for C7")
    given = parser.parse_args()
    profile_steps()
    with tempfile.TemporaryDirectory(prefix="evenstep-pictures-") as made:
        if given.data:
            unpack(given.data, Path(made))
        else:
            make(Path(made), 60_000, 10_000)
        time_job(made)


if __name__ == "__main__":
    main()
