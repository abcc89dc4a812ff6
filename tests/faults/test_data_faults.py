"""Numbers that are none, and samples that do not come out even: nothing is spoilt, and every sample counts once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.faults.runs import CHECKPOINTS, audit, fail, said_by_ranks, samples, saved_step, steps, train, weights

pytestmark = pytest.mark.slow


def learned(name: str = "one") -> dict[str, torch.Tensor]:
    return load_file(Path("runs", name, "checkpoints", "latest", "weights.safetensors"))


def test_a_loss_that_is_nan_on_one_rank_stops_all_at_that_step() -> None:  # 16
    ended = train("--checkpoint-every", "1", "--audit", "--restarts", "2", fault=fail("nan loss", rank=1, step=8))
    assert ended.code == 1
    assert "restart " not in ended.err
    assert ended.report[0].startswith("the loss is nan at step 8 (epoch 1); rank 1 got nan for samples [")
    assert said_by_ranks() == ["\n".join(ended.report[:2])] * 2
    assert steps() == list(range(1, 8))
    assert saved_step() == 7
    assert all(torch.isfinite(weight).all() for weight in learned().values())
    # The samples are those that an undisturbed run takes at that step.
    named = {int(id_) for id_ in ended.report[0].partition("[")[2].partition("]")[0].split(",")}
    assert train("--audit", "--steps", "8", name="two").code == 0
    assert named < samples("two")[8]


def test_a_gradient_that_is_nan_on_one_rank_is_never_saved_and_its_parameter_named() -> None:  # 16
    ended = train("--checkpoint-every", "1", "--restarts", "2", fault=fail("nan gradient", rank=1, step=8))
    assert ended.code == 1
    assert "the checkpoint of step 8 could not be written" in ended.report[0]
    assert "0.weight holds NaN or infinity" in ended.report[0]
    assert said_by_ranks() == ["\n".join(ended.report[:2])] * 2
    assert saved_step() == 7
    assert not list(CHECKPOINTS.glob("step-00000008"))
    later = train("--restarts", "2", fault=fail("nan gradient", rank=1, step=8), name="two")
    assert later.code == 1
    assert later.report[0].startswith("the loss is nan at step 9")
    assert "0.weight is not finite: in an earlier step a gradient was not finite" in "\n".join(later.report)


@pytest.mark.parametrize("devices", [2, 3])
def test_samples_that_do_not_come_out_even_count_once_and_weigh_the_same(devices: int) -> None:  # 17
    """20 samples in batches of 9: the last batch has 2, which is less than 3 ranks."""
    uneven = ("--batch", "9", "--epochs", "1", "--audit")
    assert train(*uneven, task="of_gradients", devices=devices, SAMPLES="20").code == 0
    assert train(*uneven, task="of_gradients", devices=1, name="alone", SAMPLES="20").code == 0
    for name in ("one", "alone"):
        assert audit(name).startswith("20 samples, 0 repeated, 0 missed")
    assert {step: len(ids) for step, ids in samples("one").items()} == {1: 9, 2: 9, 3: 2}
    assert samples("one") == samples("alone")
    for key, weight in learned().items():
        assert (weight - learned("alone")[key]).abs().max() < 1e-6


def test_fewer_samples_than_ranks_are_refused_and_nothing_hangs() -> None:  # 17
    for batch in ("2", "3"):
        ended = train("--batch", batch, task="of_gradients", devices=3, SAMPLES="2")
        assert ended.code == 2
        assert len(ended.report) <= 2
    assert not Path("runs/one").exists()


@pytest.mark.timeout(300)
def test_stopped_on_2_killed_on_3_and_killed_on_1_every_sample_counts_once() -> None:  # 18
    options = ("--audit", "--checkpoint-every", "3")
    stopped = train(*options, fault=fail("term", rank=1, step=8), name="first", PACE="0.05")
    assert stopped.code == 75
    resumed = (*options, "--restarts", "1", "--resume")
    fault = fail("kill", rank=2, step=14, once=True)
    Path("happened").unlink()
    assert train(*resumed, "runs/first", "--steps", "17", fault=fault, devices=3, name="second").code == 0
    Path("happened").unlink()
    fault = fail("kill", rank=0, step=20, once=True)
    assert train(*resumed, "runs/second", "--epochs", "2", fault=fault, devices=1, name="third").code == 0
    assert train("--audit", devices=1, name="alone").code == 0
    assert audit("first", "second", "third").startswith("62 samples x 2 epochs, 0 repeated, 0 missed")
    assert samples("first", "second", "third") == samples("alone")


@pytest.mark.parametrize("workers", ["0", "2"])
def test_killed_in_mid_epoch_with_batches_read_ahead_it_ends_the_same(
    workers: str, undisturbed: Callable[..., bytes]
) -> None:  # 19
    options = ("--workers", workers, "--audit")
    again = ("--checkpoint-every", "3", "--restarts", "1")
    ended = train(*options, *again, fault=fail("kill", rank=1, step=8, once=True), task="of_samples")
    assert ended.code == 0, ended.err
    assert "restart 1 of 1, from step-00000006" in ended.err
    assert audit().startswith("62 samples x 2 epochs, 0 repeated, 0 missed")
    assert weights() == undisturbed(*options, task="of_samples")
