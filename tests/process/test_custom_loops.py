"""Custom loops are first-class: they leave a Record, which pages and trackers read, and resume where they were."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import evenstep
from evenstep.errors import TaskError
from evenstep.plan import CUSTOM_LOOP
from evenstep.record import Record, Step
from evenstep.strategy_facts import STRATEGIES
from tests.fleet import furthest, newest_weights
from tests.process import own_tensors_script, recorded_loop_script, rollouts_script
from tests.process.test_scripts import no_ranks
from tests.process.test_trackers import events, steps_of

SLOW = pytest.mark.slow
STRATEGY = pytest.mark.parametrize(
    "strategy", [pytest.param("dp", marks=SLOW), "ddp", pytest.param("fsdp", marks=SLOW)]
)


def start(module: ModuleType, strategy: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A loop in as many processes as the strategy has devices."""
    command = [sys.executable, "-m", "evenstep", "run", "--devices", "2", str(module.__file__), strategy, *arguments]
    if not STRATEGIES[strategy].processes_per_device:
        command = [sys.executable, str(module.__file__), strategy, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=no_ranks(), timeout=100)


def report(folder: str) -> str:
    """The page of a run, by the command."""
    command = [sys.executable, "-m", "evenstep", "report", folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip()).read_text()


@STRATEGY
def test_a_loop_leaves_the_record_that_one_device_leaves_and_resumes_on_another_strategy(strategy: str) -> None:
    recorded_loop_script.train("single", "runs/alone", 3)
    failed = start(recorded_loop_script, strategy, "runs/mine", "3", "9")
    assert failed.returncode == 1
    assert "RuntimeError: lost" in failed.stderr
    done = start(recorded_loop_script, strategy, "runs/mine", "3")
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
    assert mine.summary.best is not None
    assert mine.summary.best.value == pytest.approx(min(one.values["error"] for one in alone.evaluations), rel=1e-9)
    assert Path("runs/mine/checkpoints/best").resolve().name == Path(mine.summary.best.checkpoint).name
    page = report("runs/mine")
    assert CUSTOM_LOOP in page
    assert "train --plan" not in page
    assert steps_of(events(Path("runs/mine")), "train/loss") == list(range(1, 19))


@pytest.mark.slow
@STRATEGY
def test_tensors_that_each_process_brings_are_parts_of_one_batch(strategy: str) -> None:
    alone = own_tensors_script.train("single", "runs/alone", 12)
    for steps in ("5", "12"):
        done = start(own_tensors_script, strategy, "runs/mine", steps)
        assert done.returncode == 0, done.stderr
    record = Record.read("runs/mine")
    assert [step.samples for step in record.steps] == [5, 6, 7, 8] * 3
    assert record.losses == pytest.approx(Record.read("runs/alone").losses, rel=1e-9)
    assert furthest(newest_weights(Path("runs/mine")), newest_weights(Path("runs/alone"))) < 1e-9
    # What model(x) returned, after each step.
    state = json.loads(Path("runs/mine/checkpoints/latest/state.json").read_text())
    assert state["outputs"] == pytest.approx(alone, rel=1e-9)


@pytest.mark.slow
@STRATEGY
def test_a_loop_with_two_optimizers_that_draws_its_samples_counts_iterations_and_resumes_exactly(strategy: str) -> None:
    for folder, steps in (("runs/whole", "9"), ("runs/halves", "4"), ("runs/halves", "9")):
        done = start(rollouts_script, strategy, folder, steps)
        assert done.returncode == 0, done.stderr
    whole, halves = ([_numbers(step) for step in Record.read(f"runs/{name}").steps] for name in ("whole", "halves"))
    assert [step for step, *_ in halves] == list(range(1, 10))
    assert halves == whole
    assert all(norm is not None and norm > 1e-3 for *_, norm in whole)
    assert furthest(newest_weights(Path("runs/halves")), newest_weights(Path("runs/whole"))) == 0


def _numbers(step: Step) -> tuple[int, float, float, float | None]:
    return step.step, step.loss, step.logged["c_loss"], step.grad_norm


def small_run(folder: str | None = "runs/small", best: str | None = None) -> evenstep.Run:
    team = evenstep.join("single", devices=("cpu",))
    model = team.wrap(nn.Linear(6, 2))
    loader = team.loader(torch.ones(20, 6), batch=10)
    return evenstep.Run(team, model, torch.optim.SGD(model.parameters(), lr=0.1), loader, folder=folder, best=best)


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
    again.log(loss, entropy=torch.tensor(0.5))
    again.finish()
    (step,) = Record.read("runs/small").steps
    assert step.logged == {"entropy": 0.5}


def test_a_loop_stops_when_no_evaluation_is_better() -> None:
    run = small_run(best="number:max")
    (model,) = run.models.values()
    values = iter([1.0, 3.0, 2.0, 2.5, 9.0])
    while run.evaluations_since_best < 2:
        run.log(take_step(run))
        now = torch.tensor([next(values)])
        run.evaluate(lambda model, batch, now=now: {"number": now.expand(len(batch))}, model, run.loader)
        run.save(keep=9)
    run.finish()
    summary = Record.read("runs/small").summary
    assert summary is not None
    assert summary.best is not None
    assert (summary.best.value, summary.best.step, summary.steps) == (3.0, 2, 4)
    assert Path("runs/small/checkpoints/best").resolve().name == "step-00000002"
    again = small_run(best="number:max")
    again.load()
    assert again.evaluations_since_best == 2
    with pytest.raises(TaskError, match=r'make it with Run\(\.\.\., best="accuracy"\)'):
        _ = small_run("runs/other").evaluations_since_best


def test_what_a_loop_gets_wrong_about_its_record_is_said() -> None:
    run = small_run()
    with pytest.raises(TaskError, match=r"call it after team\.backward"):
        run.log(1.0)
    run.log(take_step(run))
    with pytest.raises(TaskError, match="step 1 was logged before"):
        run.log(1.0)
    with pytest.raises(TaskError, match="'step' is a reserved checkpoint key; save yours under another name"):
        run.save(step=3)
    with pytest.raises(TaskError, match=r'Run\(\.\.\., folder="runs/mine"\)'):
        small_run(None).log(1.0)
    with pytest.raises(TaskError, match=r"run\.save needs a folder"):
        small_run(None).save()


def test_a_batch_is_plain_tensors_where_a_loop_wants_them() -> None:
    team = evenstep.join("dp", devices=("cpu", "cpu"))
    x, y = torch.randn(21, 6), torch.arange(21)
    met = []
    for batch in team.loader({"x": x, "y": y}, batch=8, accumulate=2):
        assert torch.equal(batch.data["x"], x[batch.ids])
        met += batch.data["y"].tolist()
    assert sorted(met) == list(range(21))
    for a, b in team.loader((x, y), batch=8):
        assert torch.equal(a, x[b])


def test_a_wrapped_model_can_be_called_and_computes_no_gradients() -> None:
    team = evenstep.join("dp", devices=("cpu", "cpu"))
    model = team.wrap(nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(5, 6)
    team.backward(lambda model, batch: model(batch).square().mean(), model, x)
    team.step(optimizer)
    output = model(x)
    assert not output.requires_grad
    assert torch.equal(output, torch.nn.functional.linear(x, model.module.weight, model.module.bias))
    with pytest.raises(TaskError, match="have 4 and 5 rows"):
        team.backward(lambda model, batch: model(batch).mean(), model, (x, x[:4]))
    with pytest.raises(TaskError, match="empty batches"):
        team.backward(lambda model, batch: model(batch).mean(), model, x[:0])


@pytest.mark.parametrize("num", [64, 65, 67, 3])
def test_what_an_evaluation_is_given_are_samples_and_never_one_that_stands_in(num: int) -> None:
    team = evenstep.join("dp", devices=("cpu", "cpu", "cpu"))
    model = team.wrap(nn.Linear(1, 1))
    met: list[float] = []

    def count(model: nn.Module, batch: torch.Tensor) -> dict[str, torch.Tensor]:
        met.extend(batch[:, 0].tolist())
        return {"number": batch[:, 0]}

    means = team.evaluate(count, model, team.loader(torch.arange(float(num))[:, None], batch=3 if num == 3 else 16))
    assert sorted(met) == list(range(num))
    assert means.num_samples == num
    assert means["number"] == pytest.approx((num - 1) / 2)


@pytest.mark.slow
def test_a_loop_that_stalls_is_reported_with_its_step() -> None:
    Path("stalls.py").write_text(
        """
import time, torch, evenstep
team = evenstep.join()
model = team.wrap(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = team.loader(torch.randn(40, 2), batch=4)
for batch in loader:
    if loader.num_finished == 3 and team.world.rank == 1:
        time.sleep(1000)
    team.backward(lambda model, batch: model(batch).mean(), model, batch)
    team.step(optimizer)
"""
    )
    command = [sys.executable, "-m", "evenstep", "run", "--devices", "2", "--stall-after", "4", "stalls.py"]
    ended = subprocess.run(command, capture_output=True, text=True, env=no_ranks(), timeout=100)
    assert ended.returncode == 124
    assert "rank 0 is waiting for rank 1, which was last seen at step 4" in ended.stderr
