"""Custom loops are first-class: they leave a Record, which pages and trackers read, and resume where they were."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import evenstep
from evenstep.errors import TaskError
from evenstep.plan import CUSTOM_LOOP
from evenstep.record import Record
from evenstep.strategy_facts import STRATEGIES
from tests.fleet import furthest, newest_weights
from tests.process import recorded_loop_script
from tests.process.test_scripts import no_ranks
from tests.process.test_trackers import events, steps_of

SCRIPT = Path(recorded_loop_script.__file__)
SLOW = pytest.mark.slow


def start(strategy: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The loop in as many processes as the strategy has devices."""
    command = [sys.executable, "-m", "evenstep", "run", "--devices", "2", str(SCRIPT), strategy, *arguments]
    if not STRATEGIES[strategy].processes_per_device:
        command = [sys.executable, str(SCRIPT), strategy, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=no_ranks(), timeout=100)


def report(folder: str) -> str:
    """The page of a run, by the command."""
    command = [sys.executable, "-m", "evenstep", "report", folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip()).read_text()


@pytest.mark.parametrize("strategy", [pytest.param("dp", marks=SLOW), "ddp", pytest.param("fsdp", marks=SLOW)])
def test_a_loop_leaves_the_record_that_one_device_leaves_and_resumes_on_another_strategy(strategy: str) -> None:
    recorded_loop_script.train("single", "runs/alone", 3)
    failed = start(strategy, "runs/mine", "3", "9")
    assert failed.returncode == 1
    assert "RuntimeError: lost" in failed.stderr
    done = start(strategy, "runs/mine", "3")
    assert done.returncode == 0, done.stderr
    alone, mine = Record.read("runs/alone"), Record.read("runs/mine")
    assert [step.step for step in mine.steps] == list(range(1, 19))
    assert mine.losses == pytest.approx(alone.losses, rel=1e-9)
    assert [step.lr for step in mine.steps] == pytest.approx([step.lr for step in alone.steps], rel=1e-12)
    assert [step.samples for step in mine.steps] == [8, 8, 8, 8, 8, 1] * 3
    for ours, theirs in zip(mine.evaluations, alone.evaluations, strict=True):
        assert (ours.step, ours.epoch, ours.samples) == (theirs.step, theirs.epoch, 12)
        assert ours.values == pytest.approx(theirs.values, rel=1e-9)
    assert furthest(newest_weights(Path("runs/mine")), newest_weights(Path("runs/alone"))) < 1e-9
    assert mine.plan.task == CUSTOM_LOOP
    assert (mine.plan.strategy, len(mine.plan.devices), mine.plan.batch) == (strategy, 2, 8)
    assert mine.summary is not None
    assert alone.summary is not None
    assert (mine.summary.steps, mine.summary.samples) == (18, 3 * 41)
    assert mine.summary.train_loss == pytest.approx(alone.summary.train_loss, rel=1e-9)
    assert mine.summary.checkpoint == "runs/mine/checkpoints/step-00000018"
    page = report("runs/mine")
    assert CUSTOM_LOOP in page
    assert "train --plan" not in page
    assert steps_of(events(Path("runs/mine")), "train/loss") == list(range(1, 19))


def small_run(folder: str | None = "runs/small") -> evenstep.Run:
    team = evenstep.join("single", devices=("cpu",))
    model = team.wrap(nn.Linear(6, 2))
    loader = team.loader(torch.ones(20, 6), batch=10)
    return evenstep.Run(team, model, torch.optim.SGD(model.parameters(), lr=0.1), loader, folder=folder)


def take_step(run: evenstep.Run) -> float:
    (model,), (optimizer,) = run.models.values(), run.optimizers.values()
    loss = run.team.backward(lambda model, batch: model(batch).square().mean(), model, next(iter(run.loader)))
    run.team.step(optimizer)
    return loss


def test_a_folder_with_an_earlier_run_is_not_written_over() -> None:
    first = small_run()
    first.log(take_step(first))
    again = small_run()
    loss = take_step(again)
    with pytest.raises(TaskError, match=r"runs/small holds an earlier run; call run\.load\(\) before the loop"):
        again.log(loss)
    # It ended before its first checkpoint: there is nothing to load, and the Record begins again.
    assert again.load() == {}
    again.log(loss)
    again.finish()
    assert len(Record.read("runs/small").steps) == 1


def test_what_a_loop_gets_wrong_about_its_record_is_said() -> None:
    run = small_run()
    with pytest.raises(TaskError, match=r"call it after team\.backward"):
        run.log(1.0)
    run.log(take_step(run))
    with pytest.raises(TaskError, match="step 1 was logged before"):
        run.log(1.0)
    with pytest.raises(TaskError, match="a checkpoint has a 'step' of its own; save yours under another name"):
        run.save(step=3)
    with pytest.raises(TaskError, match=r'Run\(\.\.\., folder="runs/mine"\)'):
        small_run(None).log(1.0)
    with pytest.raises(TaskError, match=r"run\.save needs a folder"):
        small_run(None).save()
