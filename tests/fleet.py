"""Many trainings in one start of a few real processes, so that the whole matrix fits into minutes.

`python fleet.py JOBS_FILE` is one rank; `run_jobs` starts all of them through evenstep's own launcher.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from evenstep.launcher.fork_server import start_server
from evenstep.launcher.processes import RankLogs, workers
from evenstep.launcher.rendezvous.rank_assignment import LocalRendezvous
from evenstep.plan import Plan
from evenstep.record import Record
from evenstep.strategy_facts import STRATEGIES
from evenstep.worker.main import ProgramSpec, run_program

PRELOADS = (*STRATEGIES["fsdp"].preloads, "torch._dynamo.eval_frame", "torch.utils.checkpoint", "tests.small_tasks")
"""Imported once, by the fork server of this process: otherwise every rank that needs them spends seconds on it."""


@dataclass(frozen=True)
class Result:
    """How one training ended."""

    record: Record
    weights: dict[str, torch.Tensor]


def run_jobs(folder: Path, size: int, jobs: Iterable[tuple[str, Plan, str]], device: str = "cpu") -> None:
    """Run (name, plan, task key) one after another in a world of `size` processes."""
    file = folder / f"jobs-{size}.json"
    file.write_text(json.dumps([[name, plan.to_json(), key] for name, plan, key in jobs]))
    run_processes(Path(__file__), [str(file)], size, folder / f"logs-{file.stem}")


def run_processes(script: Path, arguments: Sequence[str], size: int, logs_folder: Path, **more: str) -> None:
    """Run a script as `size` processes that meet as those of a training do; what they said, if one of them fails."""
    start_server(PRELOADS)
    rendezvous = LocalRendezvous()
    logs, path = RankLogs(logs_folder), tuple(sys.path)
    program = ProgramSpec(
        logs=str(logs_folder),
        name=str(script),
        arguments=tuple(arguments),
        search_path=path,
        environment={"OMP_NUM_THREADS": "1", **more},
    )
    specs = rendezvous.next_round(size, 1).specs(program, size)
    try:
        with workers(run_program, specs, logs) as started:
            while started.poll():
                pass
            said = [path.read_text() for path in sorted(logs.folder.glob("*.traceback"))]
            assert started.failed == {}, "".join(said)[-6000:]
    finally:
        rendezvous.close()


def result(folder: Path, name: str) -> Result:
    """What a job left behind."""
    return Result(Record.read(folder / name), newest_weights(folder / name))


def newest_weights(run: Path) -> dict[str, torch.Tensor]:
    """Those of the latest checkpoint."""
    return load_file(run / "checkpoints" / "latest" / "weights.safetensors")


def furthest(weights: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> float:
    """The largest difference between two models, relative to the largest weight of its tensor."""
    assert weights.keys() == reference.keys()
    pairs = [(weights[name].detach(), reference[name].detach()) for name in reference]
    return max(float((ours - theirs).abs().max() / theirs.abs().max()) for ours, theirs in pairs)


def bits_of(run: Path) -> dict[str, Any]:
    """All that a run left: weights, optimizer state, losses and evaluations."""
    checkpoint, record = run / "checkpoints" / "latest", Record.read(run)
    tensors = {
        f"{name}/{key}": value.numpy().tobytes()
        for name in ("weights", "optimizer")
        for key, value in load_file(checkpoint / f"{name}.safetensors").items()
    }
    return {**tensors, "losses": record.losses, "valid": [one.values for one in record.evaluations]}


def main(file: Path) -> None:
    from evenstep.training.trainer import perform
    from tests.small_tasks import small_task

    for name, values, key in json.loads(file.read_text()):
        folder = file.parent / name
        folder.mkdir(parents=True, exist_ok=True)
        for _ in perform(Plan.from_json(values), small_task(key), folder):
            pass


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))
    main(Path(sys.argv[1]))
