"""Whether something was drawn is seen, however it was drawn, and put back."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from evenstep.distributed.shm.native import load
from evenstep.private_apis import has_python_words
from evenstep.sampling.rng import (
    derive_seed,
    is_same_state,
    replica_seed,
    restore_rng_states,
    rng_states,
    seed_everything,
    seed_host,
)
from evenstep.training.replica_seeds import SeededStates

DRAWS: dict[str, Callable[[], object]] = {
    "python": random.random,
    "python's normal": lambda: random.gauss(0, 1),
    "numpy": np.random.random,
    "numpy's normal": np.random.normal,
    "numpy's integers": lambda: np.random.randint(5),
    "torch": lambda: torch.rand(1),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_every_draw_is_seen_and_comes_again_after_it_was_put_back(draw: Callable[[], object]) -> None:
    seed_everything(3)
    for _ in range(5):
        before = rng_states()
        assert is_same_state(before, rng_states())
        first = draw()
        # Every other normal number was drawn together with the one before it.
        assert not is_same_state(before, rng_states())
        restore_rng_states(before)
        assert is_same_state(before, rng_states())
        assert draw() == first


def test_seeds_of_dropout_differ_by_replica_position_and_backward_and_are_always_the_same() -> None:
    keys = [derive_seed(0, "dropout", epoch, replica) for epoch in range(3) for replica in range(8)]
    seeds = [
        replica_seed(key, start, backward) for key in keys for start in range(0, 6400, 64) for backward in range(3)
    ]
    assert len(set(seeds)) == len(seeds) == 24 * 100 * 3
    assert all(0 <= seed < 2**63 for seed in seeds)
    # Resuming a checkpoint of an earlier version draws the same masks.
    assert replica_seed(derive_seed(0, "dropout", 1, 2), 128, 1) == 4983935207590170385
    bits = [seed >> bit & 1 for seed in seeds for bit in (0, 31, 62)]
    assert abs(sum(bits) / len(bits) - 0.5) < 0.01


SEEDS = (0, 1, 2**32 - 1, 2**32, 2**63 - 1, 2**63 - 2**32, 4983935207590170385)


@pytest.mark.parametrize("num", [1, 3, 4, 7])
@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_states_that_are_computed_at_once_are_those_of_seeding_one_by_one(num: int, draw: Callable[[], object]) -> None:
    library = load()
    if library is None:
        pytest.skip("no C compiler here")
    assert has_python_words()
    states = SeededStates(library)
    for seeds in (SEEDS[:num], SEEDS[-num:]):
        states.compute([*seeds])
        for index, seed in enumerate(seeds):
            seed_host(seed)
            own = rng_states()
            drawn = [random.gauss(0, 1), np.random.normal()]
            # Both have cached a normal number, or have drawn it.
            draw()
            assert states.set(index)
            assert is_same_state(rng_states(), own)
            assert torch.initial_seed() == seed
            assert [random.gauss(0, 1), np.random.normal()] == drawn


def test_a_process_without_samples_in_its_first_step_seeds_nothing() -> None:
    library = load()
    if library is None:
        pytest.skip("no C compiler here")
    SeededStates(library).compute([])
    assert rng_states()


def test_a_normal_number_that_the_user_sets_does_not_reach_a_virtual_replica() -> None:
    library = load()
    if library is None:
        pytest.skip("no C compiler here")
    np.random.seed(3)
    np.random.randn()
    with_a_number = np.random.get_state()
    np.random.randn()
    states = SeededStates(library)
    states.compute([5])
    rng_states()
    np.random.set_state(with_a_number)
    rng_states()
    assert states.set(0)
    found = np.random.randn()
    np.random.seed(3)
    seed_host(5)
    assert found == np.random.randn()
