"""Whether a replayed step ended where the plain one did."""

from __future__ import annotations

import pytest
import torch

from evenstep.training.cuda_graphs.capture_checks import Kinds, are_equal, copied, first_apart, put

TOLERANCE = 1e-3


def start() -> Kinds:
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(40, 30, generator=generator), torch.randn(30, generator=generator)]
    return {"the weights": weights, "the optimizer's step": [torch.tensor(7.0), torch.tensor(7.0)]}


def stepped(kinds: Kinds, rate: float = 1e-3) -> Kinds:
    generator = torch.Generator().manual_seed(1)
    moved = [one - rate * torch.randn(one.shape, generator=generator).sign() for one in kinds["the weights"]]
    return {"the weights": moved, "the optimizer's step": [one + 1 for one in kinds["the optimizer's step"]]}


def test_the_same_step_is_alike_and_equal() -> None:
    before = start()
    assert first_apart(before, stepped(before), stepped(before), TOLERANCE) is None
    assert are_equal(stepped(before), stepped(before))


def test_rounding_is_alike_and_not_equal() -> None:
    before = start()
    now = stepped(before)
    now["the weights"][0] += 1e-7
    assert first_apart(before, stepped(before), now, TOLERANCE) is None
    assert not are_equal(now, stepped(before))


def test_the_last_digit_of_a_weight_is_no_matter_however_short_the_step() -> None:
    before = start()
    after, now = stepped(before, 1e-8), stepped(before, 1e-8)
    now["the weights"] = [torch.nextafter(one, torch.tensor(9.0)) for one in now["the weights"]]
    assert first_apart(before, after, now, TOLERANCE) is None


def test_a_few_numbers_may_have_gone_the_other_way() -> None:
    before = start()
    now = stepped(before)
    now["the weights"][1][:20] += 2e-3
    assert first_apart(before, stepped(before), now, TOLERANCE) is None


@pytest.mark.parametrize("rate", [0.0, 0.99e-3, 1.01e-3, -1e-3, float("nan")])
def test_another_learning_rate_is_seen_though_the_counts_agree(rate: float) -> None:
    before = start()
    assert first_apart(before, stepped(before), stepped(before, rate), TOLERANCE) == "the weights"


def test_a_step_that_was_not_counted_is_seen() -> None:
    before = start()
    now = {**stepped(before), "the optimizer's step": before["the optimizer's step"]}
    assert first_apart(before, stepped(before), now, TOLERANCE) == "the optimizer's step"


def test_what_must_not_move_is_seen_to_move() -> None:
    before = {"the buffers": [torch.zeros(10)]}
    assert first_apart(before, before, {"the buffers": [torch.full((10,), 1e-9)]}, TOLERANCE) == "the buffers"


def test_copies_are_put_back() -> None:
    live = start()
    kept = copied(live)
    live["the weights"][0].zero_()
    put(live, kept)
    assert are_equal(live, start())
