"""Memory as lines in the micro-batch: which one is the highest, what a strategy makes of it, and what fits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from evenstep.errors import BadInput
from evenstep.fit.fake_tensor_parts import memory_of_ranks
from evenstep.fit.fake_tensor_pass import step_memory
from evenstep.fit.memory_model import (
    ACCUMULATED,
    COUNTED,
    STEP,
    UPDATE,
    Cut,
    Division,
    Moment,
    Placement,
    StepMemory,
    cuts,
    cuts_to_correct_by,
    fewest_devices,
    largest_fitting,
    needs,
    parse_bytes,
    peak,
)
from evenstep.plan import Plan
from evenstep.strategy_facts import STRATEGIES
from tests.small_tasks import small_task

MB = 10**6


def moment(per_sample: float = 0.0, **fixed: float) -> Moment:
    held = {"weights": 100.0 * MB, "optimizer": 200.0 * MB, **fixed}
    return Moment(
        {kind: held.get(kind, 0.0) for kind in COUNTED}, dict.fromkeys(COUNTED, 0.0) | {"activations": per_sample}
    )


MEMORY = StepMemory(
    held={"weights": 100 * MB, "buffers": 0, "gradients": 100 * MB, "optimizer": 200 * MB},
    phases={
        STEP: [moment(10 * MB)],
        ACCUMULATED: [moment(10 * MB, gradients=100 * MB)],
        UPDATE: [moment(gradients=100 * MB)],
    },
    input_bytes=0,
    unit_bytes=[20 * MB] * 4 + [20 * MB],
    framework_bytes=0,
)


def place(name: str = "single", devices: int = 1, kind: str = "cuda", share: int = 64) -> Placement:
    return Placement(facts=STRATEGIES[name], devices=devices, kind=kind, share=share)


def test_the_peak_is_the_update_at_small_micro_batches_and_backward_at_large_ones() -> None:
    assert peak(MEMORY, place(share=4), 4).phase == UPDATE
    assert peak(MEMORY, place(share=64), 64).phase == STEP
    assert peak(MEMORY, place(share=64), 64).total == 940 * MB


def test_gaps_of_an_allocator_take_room_as_far_as_the_margin_does_not_cover_them() -> None:
    assert needs(MEMORY, place(), 64) == needs(replace(MEMORY, gaps=0.05), place(), 64) == 940 * MB
    assert needs(replace(MEMORY, gaps=0.25), place(), 64) == pytest.approx(1.2 * 940 * MB)
    assert largest_fitting(replace(MEMORY, gaps=0.25), place(), 1000 * MB) == Cut(2, 32)


def test_gradients_of_earlier_micro_batches_are_there_while_the_next_is_computed() -> None:
    assert peak(MEMORY, place(share=64), 32).total == 720 * MB


def test_strategies_hold_what_they_share_or_shard() -> None:
    whole = peak(MEMORY, place("ddp", 4), 64)
    assert whole.kinds["gradients"] == 100 * MB
    assert whole.kinds["optimizer"] == 200 * MB
    sharded = peak(MEMORY, place("fsdp", 4), 64)
    assert sharded.kinds["weights"] == 25 * MB
    assert sharded.kinds["optimizer"] == 50 * MB
    assert sharded.kinds["communication"] == (20 + 3 * 20 + 2 * 20) * MB
    assert sharded.total < whole.total
    # On the CPU, one process holds all replicas.
    assert peak(MEMORY, place("dp", 2, "cpu"), 64).kinds["activations"] == 2 * 640 * MB


def test_copies_of_fewer_shards_hold_more_and_offloaded_shards_nothing() -> None:
    copies = peak(MEMORY, replace(place("fsdp", 4), num_shards=2), 64)
    assert (copies.kinds["weights"], copies.kinds["optimizer"]) == (50 * MB, 100 * MB)
    for devices in (1, 4):
        kinds = peak(MEMORY, replace(place("fsdp", devices), is_offloaded=True), 64).kinds
        assert kinds["weights"] == kinds["optimizer"] == kinds["gradients"] == 0
        assert kinds["communication"] == (20 + 3 * 20 + 2 * 20) * MB


def test_the_fewest_micro_batches_that_fit_are_chosen() -> None:
    assert largest_fitting(MEMORY, place(), 1000 * MB) == Cut(1, 64)
    assert largest_fitting(MEMORY, place(), 900 * MB) == Cut(2, 32)
    assert largest_fitting(MEMORY, place(), 450 * MB) == Cut(13, 5)
    assert largest_fitting(MEMORY, place(), 300 * MB) is None
    assert [cut.size for cut in cuts(10)] == [10, 5, 4, 3, 2, 1]
    assert [cut.size for cut in cuts(10, least=2)] == [10, 5, 4, 3, 2]


def test_sharding_finds_a_number_of_devices() -> None:
    assert fewest_devices(MEMORY, place("fsdp", 2, share=32), 300 * MB) == 8


def test_real_steps_of_a_strategy_correct_its_forecast() -> None:
    corrected = replace(MEMORY, beyond=[(16, 40 * MB), (32, 80 * MB), (64, -20 * MB)])
    assert [peak(corrected, place(), size).total for size in (8, 16, 32, 64)] == [
        peak(MEMORY, place(), size).total + more * MB for size, more in ((8, 40), (16, 40), (32, 80), (64, -20))
    ]


def test_a_forecast_is_corrected_by_steps_that_take_half_of_the_limit() -> None:
    assert cuts_to_correct_by(MEMORY, place(), 2000 * MB) == [Cut(4, 16), Cut(2, 32), Cut(1, 64)]
    assert cuts_to_correct_by(MEMORY, place(), 1000 * MB) == [Cut(32, 2), Cut(13, 5), Cut(7, 10)]
    assert cuts_to_correct_by(replace(MEMORY, has_batchnorm=True), place(share=3), 2000 * MB) == [Cut(1, 3)]
    assert cuts_to_correct_by(MEMORY, place(), 300 * MB) == []


@pytest.mark.parametrize("text", ["", "much", "24 apples", "-3GB", "0", "12"])
def test_a_size_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="such as 24GB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("division", "key"),
    [
        (Division("pipeline", 2, "1f1b"), "deep/adamw/mean"),
        (Division("tensor", 2, "1f1b"), "mlp/adamw/mean"),
        pytest.param(Division("pipeline", 2, "interleaved"), "gpt4/adamw/pair", marks=pytest.mark.slow),
        pytest.param(Division("tensor", 2, "1f1b"), "encoder/adamw/pair", marks=pytest.mark.slow),
    ],
)
def test_ranks_that_divide_a_model_hold_their_parts(division: Division, key: str) -> None:
    plan, task = Plan(strategy="single", devices=("cpu",), batch=16, steps=1), small_task(key)
    whole = step_memory(plan, task, 16, 0.0)
    ranks = memory_of_ranks(plan, task, division, 16, whole)
    weights = [one.held["weights"] for one in ranks]
    state = sum(one.held["optimizer"] for one in ranks) / whole.held["optimizer"]
    if division.strategy == "pipeline":
        # Each parameter is on one rank, and so is its state.
        assert sum(weights) == whole.held["weights"]
        assert state == pytest.approx(1, rel=0.01)
        assert ranks[1].received_bytes == (20 * 4 if key.startswith("deep") else 2 * 8 * 16 * 4)
        assert all(one.waiting[1] > 0 for one in ranks)
    else:
        assert weights[0] == weights[1] < whole.held["weights"] < sum(weights)
    # Less than on one device, though each rank builds the whole model.
    place = Placement(facts=STRATEGIES[division.strategy], devices=2, kind="cpu", share=16, division=division)
    alone = Placement(facts=STRATEGIES["single"], devices=1, kind="cpu", share=16)
    own, one = (peak(replace(whole, ranks=ranks), where, 16).total for where in (place, alone))
    assert 0.3 * one < own < one


def test_micro_batches_that_wait_are_counted() -> None:
    sizes = dict.fromkeys(COUNTED, 0.0)
    step = [Moment({**sizes, "weights": 100.0}, {**sizes, "activations": 10.0})]
    own = StepMemory(
        held=sizes,
        phases={STEP: step, ACCUMULATED: step, UPDATE: step},
        input_bytes=0.0,
        unit_bytes=[0.0],
        framework_bytes=0.0,
        waiting=(0.0, 8.0),
        received_bytes=1.0,
    )
    memory = replace(own, held={**sizes, "weights": 20.0}, ranks=[own, own])

    def activations(schedule: str) -> float:
        division = Division("pipeline", 2, schedule)
        place = Placement(facts=STRATEGIES["pipeline"], devices=2, kind="cpu", share=32, division=division)
        found = peak(memory, place, 4)
        assert found.kinds["communication"] == 32
        return found.kinds["activations"]

    # One that is computed, and those that wait: of 8 micro-batches, one, 1.5 of two halves, or seven.
    assert activations("1f1b") == 4 * (10 + 8)
    assert activations("interleaved") == 4 * (10 + 1.5 * 8)
    assert activations("gpipe") == 4 * (10 + 7 * 8)
    built = replace(memory, held={**sizes, "weights": 1000.0})
    division = Division("pipeline", 2, "1f1b")
    place = Placement(facts=STRATEGIES["pipeline"], devices=2, kind="cpu", share=32, division=division)
    assert peak(built, place, 4).kinds["weights"] == 2000
