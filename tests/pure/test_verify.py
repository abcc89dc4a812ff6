"""The parts of verify that need no training: cutting up, noise, limits, words, and what is seen of the user's code."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.utils.data import DataLoader

from evenstep.errors import PlanError
from evenstep.plan import Plan
from evenstep.record import FILE
from evenstep.verify.by_rank import by_rank
from evenstep.verify.differences import FINE, Differ, Difference
from evenstep.verify.evidence import Evidence, Failure
from evenstep.verify.limits import Yardstick
from evenstep.verify.of_task import loss
from evenstep.verify.page import table
from evenstep.verify.verdict import Part, Verdict, Way
from evenstep.verify.ways import ways_of
from evenstep.verify.words import differs
from evenstep.worker.cuts import CutUp, cut_up
from evenstep.worker.draws_seen import DrawsSeen
from evenstep.worker.narrow import NarrowSeen
from evenstep.worker.witness import MOST_ELEMENTS, fewer, sampled

VALUES = [torch.tensor([1.0, 2.0, 4.0]), torch.tensor([3.0, 3.5]), torch.tensor([0.5, 9.0, 2.0, 7.0])]
TOKENS = [torch.tensor([5.0, 1.0, 1.0]), torch.tensor([2.0, 2.0]), torch.tensor([1.0, 3.0, 1.0, 4.0])]


def joined(parts: list[torch.Tensor], chosen: Sequence[int]) -> torch.Tensor:
    return torch.cat([parts[part] for part in chosen]).double()


def cut(value: object) -> CutUp:
    return cut_up(value, [3, 2, 4], 1e-9)  # type: ignore[arg-type]


# Cutting up


def test_a_mean_over_samples_is_sound() -> None:
    assert cut(lambda chosen: float(joined(VALUES, chosen).mean())).kind == "sound"


def test_a_sum_over_samples_is_found() -> None:
    assert cut(lambda chosen: float(joined(VALUES, chosen).sum())).kind == "sum"


def test_a_mean_over_tokens_is_found_with_its_factor() -> None:
    def mean(chosen: Sequence[int]) -> float:
        tokens = joined(TOKENS, chosen)
        return float((joined(VALUES, chosen) * tokens).sum() / tokens.sum())

    found = cut(mean)
    assert found.kind == "weighted"
    # 7, 4 and 9 of 20 tokens, in 3, 2 and 4 of 9 samples: the second part is furthest off.
    assert found.factor == pytest.approx((4 / 20) / (2 / 9))


def test_samples_that_depend_on_each_other_are_found() -> None:
    assert cut(lambda chosen: float(joined(VALUES, chosen).var())).kind == "mixed"


# Noise


def write_run(folder: Path, gradient: torch.Tensor, weight: torch.Tensor, loss_value: float = 1.0) -> Evidence:
    (folder / "witness").mkdir(parents=True)
    save_file({"gradient/w": gradient, "weight/w": weight}, folder / "witness" / "step-00000001.safetensors")
    facts = {"dropout": False, "narrow": None, "parameters": ["w"]}
    (folder / "witness" / "facts.json").write_text(json.dumps(facts))
    step = {"step": 1, "epoch": 0, "loss": loss_value, "samples": 2, "count": 2, "seconds": 1, "input_seconds": 0}
    plan = Plan(batch=2, steps=1).to_json()
    rows = [{"kind": "start", "plan": plan, "machine": {}}, {"kind": "step", "lr": 0.1, "peak_bytes": {}, **step}]
    (folder / FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Evidence(folder)


def test_a_weight_whose_gradient_is_noise_is_not_judged() -> None:
    """Adam makes full steps of it, in whichever direction the noise pointed."""
    one = write_run(Path("one"), torch.tensor([1.0, 1e-18]), torch.tensor([2.0, 0.001]))
    other = write_run(Path("other"), torch.tensor([1.0, -1e-18]), torch.tensor([2.0, -0.001]))
    differ = Differ(FINE)
    assert max(found.size for found in differ.all(one, other)) < 1e-9
    assert differ.silent == []


def test_a_weight_with_a_gradient_is_judged() -> None:
    one = write_run(Path("one"), torch.tensor([1.0, 0.5]), torch.tensor([2.0, 0.001]))
    other = write_run(Path("other"), torch.tensor([1.0, 0.5]), torch.tensor([2.0, -0.001]))
    found = {(one.part, one.name): one.size for one in Differ(FINE).all(one, other)}
    assert found["weights", "w"] == pytest.approx(0.001)
    assert found["gradients", "w"] == found["loss", "loss"] == 0


def test_a_gradient_that_is_missing_is_as_good_as_zeros_and_nothing_else() -> None:
    one = write_run(Path("one"), torch.zeros(2), torch.ones(2))
    other = write_run(Path("other"), torch.ones(2), torch.ones(2))
    for run in (one, other):
        path = run.folder / "witness" / "step-00000001.safetensors"
        bare = write_run(run.folder / "bare", torch.zeros(2), torch.ones(2))
        save_file({"weight/w": torch.ones(2)}, bare.folder / "witness" / path.name)
    sizes = [max(d.size for d in Differ(FINE).all(run, Evidence(run.folder / "bare"))) for run in (one, other)]
    assert sizes == [0.0, math.inf]


def test_rounding_of_the_task_itself_is_the_yardstick() -> None:
    noise = [Difference("gradients", 1, "a", 1e-4), Difference("gradients", 1, "b", 1e-6)]
    limit = Yardstick(noise, "fp32")
    assert limit("gradients", "a") == pytest.approx(3e-3)
    assert limit("gradients", "b") == pytest.approx(1e-3)
    assert limit("weights", "a") == 1e-5
    assert limit("samples", "samples") == 0
    assert limit("checkpoint", "a") == pytest.approx(3e-3)
    assert limit("evaluation", "accuracy") == math.inf


# What is seen


def test_sees_who_draws_and_where() -> None:
    seen = DrawsSeen()
    with seen.watching():
        torch.rand(2)
        random.random()
    assert seen.generators == ["Python's", "torch's"]
    assert len(seen.places) == 2
    assert seen.places[0].endswith("torch.rand(2)")
    with seen.watching():
        torch.ones(2).sum()
        np.random.rand()
    assert seen.generators == ["NumPy's"]


def test_sees_a_float64_made_narrower_and_no_other_cast() -> None:
    seen = NarrowSeen()
    with seen:
        torch.zeros(2).double() + torch.arange(2).float()
    assert seen.place is None
    with seen:
        torch.zeros(2, dtype=torch.float64).float()
    assert seen.place is not None
    assert seen.place.endswith("torch.zeros(2, dtype=torch.float64).float()")


def test_keeps_a_part_of_a_large_tensor_and_its_norm() -> None:
    small, large = torch.ones(3), torch.ones(3 * MOST_ELEMENTS)
    assert sampled("a", small).keys() == {"a"}
    kept = sampled("a", large)
    assert kept["a"].numel() == MOST_ELEMENTS
    assert float(kept["norm/a"]) == pytest.approx(math.sqrt(3 * MOST_ELEMENTS))


@pytest.mark.parametrize(
    "data",
    [
        (torch.arange(9), np.arange(9)),
        {"x": torch.arange(9)},
        torch.arange(9),
        DataLoader(torch.utils.data.TensorDataset(torch.arange(9)), 3),
    ],
    ids=["tuple", "dict", "tensor", "loader"],
)
def test_evaluates_on_the_first_samples_alone(data: object) -> None:
    few = fewer(data, 4)
    if isinstance(few, DataLoader):
        assert len(few.dataset) == 4
        return
    columns = list(few.values()) if isinstance(few, dict) else list(few) if isinstance(few, tuple) else [few]
    assert [len(column) for column in columns] == [4] * len(columns)


# Words


def test_a_mean_of_means_is_explained_with_its_factor() -> None:
    found = {"cut": {"kind": "weighted", "whole": 1.0, "by_parts": 1.2, "factor": 1.31, "sizes": [5, 4, 7]}}
    cause = loss(found)
    assert cause is not None
    assert "one part of the batch weighs 1.31 times as much as its samples do" in cause.sentence
    assert cause.evidence == ("of one batch in parts of 5 + 4 + 7: loss 1 as a whole, 1.2 by its parts",)


def test_ranks_that_compute_the_same_are_no_cause() -> None:
    found = {"settings": [{"lr": 0.1}], "batch": {"data": "a", "loss": 1.0, "gradients": {"w": 2.0}}}
    assert by_rank(found, [found, found], "ddp x 2", is_rough=False) is None
    assert by_rank(found, [], "dp x 2", is_rough=False) is None
    assert by_rank({}, [found], "ddp x 2", is_rough=False) is None


def test_says_step_tensor_and_size() -> None:
    sentence = differs("ddp x 2", Difference("gradients", 3, "head.bias", 0.125), "fp64")
    assert sentence == (
        "ddp x 2 does not learn what single learns: at step 3 the gradient of head.bias differs by 12.5 % of its size "
        "(fp64)"
    )


def test_a_failure_is_told_without_its_logs() -> None:
    assert Failure("no gradient\nuse it\nfull logs: runs/x/logs").first_lines == "no gradient\nuse it"


def test_markup_in_names_stays_text() -> None:
    verdict = Verdict(is_same=False, sentence="", parts={"loss": Part(math.inf, False)})
    (label, *_), *_ = [
        [cell.plain for cell in column.cells] for column in table({Way("[red]", ("cpu",)): verdict}).columns
    ]
    assert "[red]" in label
    assert verdict.to_json()["parts"]["loss"]["difference"] is None


def test_ways_are_every_strategy_on_every_number_of_devices() -> None:
    assert [way.label for way in ways_of("ddp, fsdp", "2,3", 1)] == ["ddp x 2", "fsdp x 2", "ddp x 3", "fsdp x 3"]
    assert ways_of("single,dp", "cpu,cpu", 2) == [Way("single", ("cpu",), 2), Way("dp", ("cpu", "cpu"), 2)]
    with pytest.raises(PlanError, match="unknown strategies"):
        ways_of("", None, 1)
    with pytest.raises(PlanError, match="give --accumulate 2, or --strategies ddp"):
        ways_of("single", "2", 1)
