"""An evenstep task as a trial of Ray Tune: `python examples/ray_tune.py my_task.py` searches for its best option `lr`.

Each trial is an ordinary run in the trial's folder. Every evaluation is reported with the checkpoint of its step, so
that schedulers may stop a trial, and Tune may restore it, on another node too.
"""

import ctypes
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from ray import tune

from evenstep import Record


def trainable(task: str, *options: str) -> Callable[[dict[str, Any]], None]:
    """What `tune.Tuner` takes: it trains the task with a trial's values as its options."""

    def trial(config: dict[str, Any]) -> None:
        out = Path(tune.get_context().get_trial_dir())
        saved, name = tune.get_checkpoint(), f"run-{time.time_ns()}"
        words = ["train", task, *(f"{key}={value}" for key, value in config.items()), *options]
        words += ["--out", str(out), "--name", name, *(["--resume", saved.path] if saved else [])]
        # Tune stops a trial by ending its process: have Linux send SIGTERM (1: PR_SET_PDEATHSIG) to the run then.
        ends = partial(ctypes.CDLL(None).prctl, 1, signal.SIGTERM)
        run = subprocess.Popen([sys.executable, "-m", "evenstep", *words], preexec_fn=ends)
        try:
            for one in evaluations(out / name, run):
                here = out / name / "checkpoints" / f"step-{one.step:08d}"
                checkpoint = tune.Checkpoint.from_directory(here) if here.exists() else None
                tune.report({"epoch": one.epoch + 1, "step": one.step, **one.values}, checkpoint=checkpoint)
        finally:
            run.terminate()
        if run.wait() != 0:
            raise RuntimeError(f"evenstep train ended with exit code {run.returncode}; see {out / name}")

    return trial


def evaluations(folder: Path, run: subprocess.Popen[bytes]) -> Iterator[Any]:
    """Those of a run, as they are recorded, until it ends."""
    num, code = 0, None
    while code is None:
        code = run.poll()
        found = Record.read(folder, kinds=("evaluation",)).evaluations if (folder / "record.jsonl").exists() else []
        yield from found[num:]
        num = len(found)
        time.sleep(0.2)


if __name__ == "__main__":
    search = tune.TuneConfig(metric="loss", mode="min", num_samples=4, scheduler=tune.schedulers.ASHAScheduler())
    tuner = tune.Tuner(trainable(sys.argv[1]), param_space={"lr": tune.loguniform(1e-3, 1e-1)}, tune_config=search)
    print(tuner.fit().get_best_result().config)
