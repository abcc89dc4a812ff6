"""`evenstep.log` and `evenstep.progress` in a loss: the same values on any number of devices, in the Record."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

import evenstep
from evenstep import Record, Task
from evenstep.errors import EvenstepError
from evenstep.report.html.page import page_of_runs

x = torch.randn(37, 4, generator=torch.Generator().manual_seed(0))
EACH = [
    pytest.param("ddp", 3, id="ddp"),
    pytest.param("dp", 3, id="dp"),
    pytest.param("fsdp", 2, id="fsdp", marks=pytest.mark.slow),
]


def logging_loss(model: nn.Module, batch: tuple[torch.Tensor]) -> torch.Tensor:
    errors = (model(batch[0]) - 1).square()
    evenstep.log({"per sample": errors, "mean": errors.mean(), "pair": (errors.sum(), 2 * len(errors))})
    at = evenstep.progress()
    evenstep.log({"step": at.step, "epoch": at.epoch})
    if (first := batch[0][(batch[0] == x[0]).all(1)]).numel():
        # One device alone, in one step of each epoch.
        evenstep.log({"first": first.sum(1)})
    return errors.mean()


def trained(strategy: str, num: int, loss: Any = logging_loss, **choices: Any) -> Record:
    task = Task(
        model=lambda: nn.Linear(4, 1),
        train=(x,),
        valid=(x,),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch=9,
        epochs=2,
    )
    devices = ",".join(["cpu"] * num)
    usual: dict[str, Any] = {"precision": "fp64", "name": strategy, "progress": False}
    return evenstep.train(task, strategy=strategy, devices=devices, **{**usual, **choices})


@pytest.mark.parametrize(("strategy", "num"), EACH)
def test_values_are_those_of_one_device(strategy: str, num: int) -> None:
    one, several = trained("single", 1), trained(strategy, num)
    assert [sorted(step.logged) for step in one.steps] == [sorted(step.logged) for step in several.steps]
    for ours, theirs in zip(several.steps, one.steps, strict=True):
        assert ours.logged == pytest.approx(theirs.logged, rel=1e-9)
        assert ours.logged["mean"] == pytest.approx(ours.loss, rel=1e-9)
        assert ours.logged["per sample"] == pytest.approx(ours.loss, rel=1e-9)
        assert ours.logged["pair"] == pytest.approx(ours.loss / 2, rel=1e-9)
        assert ours.grad_norm is None
        assert (ours.logged["step"], ours.logged["epoch"]) == (ours.step, ours.epoch)
    assert sum("first" in step.logged for step in several.steps) == 2


@pytest.mark.parametrize(("strategy", "num"), EACH)
def test_the_norm_of_gradients_is_recorded_where_they_are_clipped(strategy: str, num: int) -> None:
    one, several = (trained(*how, clip=0.1) for how in (("single", 1), (strategy, num)))
    norms = [step.grad_norm or 0.0 for step in one.steps]
    assert [step.grad_norm for step in several.steps] == pytest.approx(norms, rel=1e-9)
    assert min(norms) > 0.1
    assert several.losses == pytest.approx(one.losses, rel=1e-9)


@pytest.mark.slow
def test_the_norm_can_be_measured_without_clipping() -> None:
    measured, plain = trained("single", 1, clip=float("inf"), name="measured"), trained("single", 1)
    assert measured.losses == plain.losses
    assert all(step.grad_norm for step in measured.steps)
    train = [sys.executable, "-m", "evenstep", "train", "digits", "--steps", "2", "--clip", "inf", "--name", "digits"]
    done = subprocess.run(train, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert all(step.grad_norm for step in Record.read("runs/digits").steps)


@pytest.mark.parametrize(("strategy", "num"), [("single", 1), ("ddp", 2)])
def test_micro_batches_are_counted_together(strategy: str, num: int) -> None:
    for step in trained(strategy, num, accumulate=2).steps:
        assert step.logged["per sample"] == pytest.approx(step.loss, rel=1e-9)


def many(model: nn.Module, batch: tuple[torch.Tensor]) -> torch.Tensor:
    loss = model(batch[0]).square().mean()
    evenstep.log({f"value {number}": number * loss for number in range(50)})
    return loss


def test_there_may_be_many_and_a_resumed_run_goes_on_with_them() -> None:
    record = trained("ddp", 2, many, epochs=1)
    assert all(step.logged["value 49"] == pytest.approx(49 * step.loss) for step in record.steps)
    again = trained("ddp", 2, many, resume="runs/ddp", name="again", epochs=2)
    assert [(step.step, len(step.logged)) for step in again.steps] == [(step, 50) for step in range(6, 11)]


def test_the_page_and_tensorboard_show_them() -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    record = trained("single", 1, clip=0.1, log="tensorboard")
    page = page_of_runs([record])
    assert all(title in page for title in ("Train per sample", "Train mean", "Gradient norm"))
    events = EventAccumulator("runs/single/tensorboard")
    events.Reload()
    shown = [one.value for one in events.Scalars("train/per sample")]
    assert shown == pytest.approx([step.logged["per sample"] for step in record.steps], rel=1e-6)
    assert len(events.Scalars("train/grad_norm")) == len(record.steps)


def not_finite(model: nn.Module, batch: tuple[torch.Tensor]) -> torch.Tensor:
    evenstep.log({"nothing": torch.tensor(torch.nan)})
    return model(batch[0]).square().mean()


def test_what_is_not_finite_is_read_back() -> None:
    assert all(step.logged["nothing"] != step.logged["nothing"] for step in trained("single", 1, not_finite).steps)


@pytest.mark.parametrize(
    ("values", "words"),
    [(1.0, "takes a dict of named values"), ({"a": "b"}, "takes numbers and tensors, and 'a' is a str")],
)
def test_anything_else_is_refused(values: Any, words: str) -> None:
    with pytest.raises(EvenstepError, match=words):
        evenstep.log(values)


def test_outside_of_a_training_they_do_nothing() -> None:
    evenstep.log({"a": torch.ones(3)})
    assert evenstep.progress().step == 0


def test_a_custom_loop_reads_them_from_its_loss() -> None:
    team = evenstep.join()
    model = team.wrap(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = team.loader((x,), batch=9)
    run = evenstep.Run(team, model, optimizer, loader, folder="runs/mine")
    for batch in loader:
        loss = team.backward(logging_loss, model, batch)
        team.step(optimizer)
        run.log(loss)
    run.finish()
    assert [step.logged["step"] for step in Record.read("runs/mine").steps] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("has_loader", [True, False])
def test_all_losses_of_a_step_of_a_custom_loop_see_its_number(has_loader: bool) -> None:
    team = evenstep.join("single", devices=("cpu",))
    models = [team.wrap(nn.Linear(4, 1)) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    seen: list[int] = []

    def loss(bare: Any, batch: torch.Tensor) -> torch.Tensor:
        seen.append(evenstep.progress().step)
        return bare[0](batch).square().mean()

    for batch in team.loader(x, batch=10) if has_loader else x.split(10):
        for first in (0, 1):
            team.backward(loss, (models[first], models[1 - first]), batch)
            team.step(optimizers[first])
    assert seen == [1, 1, 2, 2, 3, 3, 4, 4]
