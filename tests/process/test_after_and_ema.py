"""`Task(ema=...)` and `Task(after=...)`: the same on any number of devices, and after a resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import evenstep
from evenstep import Record, Task
from evenstep.errors import EvenstepError
from evenstep.launcher.fork_server import start_server
from tests.fleet import PRELOADS, furthest

generator = torch.Generator().manual_seed(0)
x, y = torch.randn(40, 4, generator=generator), torch.randn(40, 3, generator=generator)
EACH = [
    pytest.param("ddp", 2, id="ddp"),
    pytest.param("dp", 2, id="dp", marks=pytest.mark.slow),
    pytest.param("fsdp", 2, id="fsdp"),
]


class Net(nn.Module):
    """A layer that fsdp gathers by itself, and one that belongs to the root."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.Tanh())
        self.out = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.layers(x))


def error(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def trained(strategy: str, num: int, name: str, changes: dict[str, Any], **choices: Any) -> Record:
    usual: dict[str, Any] = {
        "model": Net,
        "train": (x[:30], y[:30]),
        "valid": (x[30:], y[30:]),
        "loss": error,
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=0.05),
        "batch": 8,
        "epochs": 4,
    }
    devices = ",".join(["cpu"] * num)
    options: dict[str, Any] = {"strategy": strategy, "devices": devices, "precision": "fp64", "name": name}
    start_server(PRELOADS)
    return evenstep.train(Task(**{**usual, **changes}), keep=99, **{"progress": False, **options, **choices})


def averages(name: str, step: int) -> dict[str, torch.Tensor]:
    return load_file(Path("runs") / name / f"checkpoints/step-{step:08d}/ema.safetensors")


def test_the_average_is_that_of_all_steps_and_it_is_evaluated() -> None:
    record = trained("single", 1, "one", {"ema": 0.9}, checkpoint_every=1)
    weights = [load_file(f"runs/one/checkpoints/step-{step:08d}/weights.safetensors") for step in range(1, 17)]
    torch.manual_seed(0)
    for step in range(2, 17):
        for name, value in averages("one", step).items():
            expected = 0.9 * averages("one", step - 1)[name] + 0.1 * weights[step - 1][name]
            torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
    model = Net().double()
    model.load_state_dict(averages("one", 16))
    with torch.no_grad():
        expected_loss = float(error(model, (x[30:].double(), y[30:].double())))
    assert record.evaluations[-1].values["loss"] == pytest.approx(expected_loss, rel=1e-9)
    assert furthest(averages("one", 16), weights[-1]) > 1e-3


@pytest.mark.parametrize(("strategy", "num"), EACH)
def test_it_is_the_same_on_several_devices_and_after_a_resume(strategy: str, num: int) -> None:
    one, several = (trained(*how, {"ema": 0.9}) for how in (("single", 1, "one"), (strategy, num, "several")))
    assert several.losses == pytest.approx(one.losses, rel=1e-9)
    assert furthest(averages("several", 16), averages("one", 16)) < 1e-9
    for ours, theirs in zip(several.evaluations, one.evaluations, strict=True):
        assert ours.values == pytest.approx(theirs.values, rel=1e-9)
    half = str(Path("runs/one/checkpoints/step-00000008").resolve())
    resumed = trained(strategy, num, "resumed", {"ema": 0.9}, resume=half)
    assert furthest(averages("resumed", 16), averages("one", 16)) < 1e-9
    assert resumed.evaluations[-1].values == pytest.approx(one.evaluations[-1].values, rel=1e-9)


def test_a_resume_says_where_an_average_begins_or_ends(capfd: pytest.CaptureFixture[str]) -> None:
    trained("single", 1, "without", {}, epochs=1)
    trained("single", 1, "with", {"ema": 0.9}, epochs=2, resume="runs/without", progress=True)
    trained("single", 1, "again", {}, epochs=3, resume="runs/with", progress=True)
    said = " ".join(capfd.readouterr().err.split())
    assert "has no average of the weights (ema): it begins with the weights of step 4" in said
    assert "has an average of the weights (ema), and the task has none any more" in said


def unfreeze(run: Any) -> None:
    """Trains the first layer from the second epoch on, with a smaller rate."""
    if run.epoch == 0:
        run.model.layers.requires_grad_(True)
    run.optimizer.param_groups[0]["lr"] *= 0.5
    seen = {"step": run.step, "epoch": run.epoch, "metrics": dict(run.metrics), "loss": run.loss}
    shown = run.infer(lambda model: float(model(x[:2].to(next(model.parameters()).dtype)).sum()))
    with (run.folder / f"rank{run.rank}.jsonl").open("a") as file:
        file.write(json.dumps({**seen, "shown": shown}) + "\n")


def frozen() -> nn.Module:
    model = Net()
    model.layers.requires_grad_(False)
    return model


def rows(name: str, rank: int = 0) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(f"runs/{name}/rank{rank}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("strategy", "num"), [EACH[0], pytest.param("dp", 2, id="dp")])
def test_a_function_after_each_epoch_can_unfreeze_and_changes_the_same_on_all_devices(strategy: str, num: int) -> None:
    changes = {"model": frozen, "after": unfreeze}
    one, several = (trained(*how, changes) for how in (("single", 1, "one"), (strategy, num, "several")))
    assert [(row["step"], row["epoch"]) for row in rows("one")] == [(4, 0), (8, 1), (12, 2), (16, 3)]
    assert [row["metrics"] for row in rows("one")] == [one.values for one in one.evaluations]
    assert [row["loss"] for row in rows("one")] == [one.losses[step - 1] for step in (4, 8, 12, 16)]
    assert [row["shown"] for row in rows("several")] == pytest.approx([row["shown"] for row in rows("one")], rel=1e-9)
    assert several.losses == pytest.approx(one.losses, rel=1e-9)
    if strategy == "ddp":
        assert rows("several", 1) == rows("several", 0)
    half = str(Path("runs/one/checkpoints/step-00000008").resolve())
    resumed = trained(strategy, num, "resumed", changes, resume=half)
    assert resumed.losses == pytest.approx(one.losses[8:], rel=1e-9)


def test_it_can_be_called_every_few_steps() -> None:
    trained("single", 1, "one", {"after": unfreeze, "after_every": 3})
    assert [row["step"] for row in rows("one")] == [3, 6, 9, 12, 15]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ema": 1.5}, r"ema is 1\.5; it is the decay of the average, between 0 and 1"),
        ({"after_every": 3}, "after_every says how often `after` is called, and there is none"),
        ({"after": print, "after_every": 0}, "after_every is 0; it is a number of steps from 1 up"),
    ],
)
def test_what_cannot_be_meant_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(EvenstepError, match=words):
        trained("single", 1, "one", changes)
