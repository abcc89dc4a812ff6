"""`--statistics STEPS`: parameters, gradients and outputs of layers, the same on any number of devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import evenstep
from evenstep import Record, Task
from evenstep.errors import EvenstepError
from evenstep.record import LayerStatistics
from evenstep.report.html.page import page_of_runs

x = torch.randn(37, 4, generator=torch.Generator().manual_seed(0))


def trained(strategy: str, num: int, **choices: Any) -> Record:
    task = Task(
        model=lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 1)),
        train=(x,),
        loss=lambda model, batch: (model(batch[0]) - 1).square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch=9,
        epochs=2,
    )
    usual: dict[str, Any] = {"precision": "fp64", "name": strategy, "progress": False, "statistics": 5}
    return evenstep.train(task, strategy=strategy, devices=",".join(["cpu"] * num), **{**usual, **choices})


def flat(row: LayerStatistics) -> dict[str, float]:
    kinds = {"parameters": row.parameters, "gradients": row.gradients, "outputs": row.outputs}
    return {
        f"{kind} {name} {what}": value
        for kind, layers in kinds.items()
        for name, values in layers.items()
        for what, value in vars(values).items()
    }


@pytest.mark.parametrize(
    ("strategy", "num", "accumulate"),
    [
        pytest.param("ddp", 3, 1, id="ddp"),
        pytest.param("ddp", 2, 2, id="ddp in micro-batches", marks=pytest.mark.slow),
        pytest.param("dp", 3, 1, id="dp"),
        pytest.param("fsdp", 2, 1, id="fsdp"),
    ],
)
def test_they_are_those_of_one_device(strategy: str, num: int, accumulate: int) -> None:
    # Step 5 is the last of an epoch, with one sample: some devices have none.
    one, several = trained("single", 1), trained(strategy, num, accumulate=accumulate)
    assert [row.step for row in several.statistics] == [5, 10]
    for ours, theirs in zip(several.statistics, one.statistics, strict=True):
        assert list(flat(ours)) == list(flat(theirs))
        # The largest value is kept in float32.
        assert flat(ours) == pytest.approx(flat(theirs), rel=1e-6)
    assert several.losses == pytest.approx(one.losses, rel=1e-9)


def test_they_are_what_torch_computes() -> None:
    record = trained("single", 1, clip=0.001, log="tensorboard", statistics=10)
    (row,) = record.statistics
    weights = load_file(Path("runs/single/checkpoints/latest/weights.safetensors"))
    for name, weight in weights.items():
        found = row.parameters[name]
        assert found.mean == pytest.approx(float(weight.mean()))
        assert found.std == pytest.approx(float(weight.std(correction=0)))
        assert found.norm == pytest.approx(float(weight.norm()))
        assert found.largest == pytest.approx(float(weight.abs().max()))
    # Before clipping.
    norm = sum(one.norm**2 for one in row.gradients.values()) ** 0.5
    assert norm == pytest.approx(record.steps[-1].grad_norm)
    assert list(row.outputs) == ["0", "1", "2"]
    assert 0 < row.outputs["1"].zeros < 1
    assert "Gradients by layer" in page_of_runs([record])


def test_tensorboard_has_them() -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    record = trained("single", 1, log="tensorboard")
    events = EventAccumulator("runs/single/tensorboard")
    events.Reload()
    shown = [one.value for one in events.Scalars("gradients/0.weight/norm")]
    assert shown == pytest.approx([row.gradients["0.weight"].norm for row in record.statistics])


def test_compiled_layers_cannot_be_looked_into() -> None:
    with pytest.raises(EvenstepError, match="--statistics looks at the output of every layer, which --compile merges"):
        trained("single", 1, compile=True)
