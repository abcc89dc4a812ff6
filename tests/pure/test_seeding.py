"""Whether something was drawn is seen, however it was drawn, and put back."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from evenstep.sampling.rng import generator_states, is_same_state, restore_generators, seed_everything

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
        before = generator_states()
        assert is_same_state(before, generator_states())
        first = draw()
        # Every other normal number was drawn together with the one before it.
        assert not is_same_state(before, generator_states())
        restore_generators(before)
        assert is_same_state(before, generator_states())
        assert draw() == first
