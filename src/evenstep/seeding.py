"""Python's, NumPy's and torch's own generators: seeded together, kept and put back. torch is imported when used."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np

States: TypeAlias = tuple[Any, Any, Any]


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch, on every device."""
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def seed_host(seed: int) -> None:
    """Seed Python, NumPy and torch on the CPU alone: cheap enough to be done for every sample."""
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


def host_state() -> dict[str, Any]:
    """Python's and NumPy's generators as JSON values. Torch's need no saving: they are seeded anew each step."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {"python": [version, list(words), gauss], "numpy": [kind, keys.tolist(), position, has_gauss, cached]}  # type: ignore[union-attr]


def restore_host_state(state: Mapping[str, Any]) -> None:
    """Put Python's and NumPy's generators back to where `host_state` found them."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    _set_numpy_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))


@contextmanager
def left_alone() -> Iterator[None]:
    """Whatever is drawn or seeded inside, everything outside goes on as if nothing had been."""
    states = generator_states()
    try:
        yield
    finally:
        restore_generators(states)


class OwnDraws:
    """Generators of one's own: inside a `with`, Python, NumPy and torch (on the CPU) draw from these and go on from
    where the last `with` left them; outside, everything draws as if nothing had happened."""

    def __init__(self, seed: int) -> None:
        outside = generator_states()
        seed_host(seed)
        self._kept = generator_states()
        restore_generators(outside)

    def __enter__(self) -> None:
        self._outside = generator_states()
        restore_generators(self._kept)

    def __exit__(self, *error: object) -> None:
        self._kept = generator_states()
        restore_generators(self._outside)


def generator_states() -> States:
    """Python's, NumPy's and torch's (on the CPU)."""
    import torch

    return random.getstate(), _numpy_state(), torch.get_rng_state()


_MT19937_BYTES = 624 * 4 + 4
"""Its words, and how many of them are used up."""
_last_look: tuple[bytes, Any] | None = None


def _numpy_state() -> Any:
    """`np.random.get_state()`, which takes 0.1 ms: where nothing was drawn since the last look, what it gave then."""
    global _last_look
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if not isinstance(generator, np.random.MT19937):
        return np.random.get_state()
    words = ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
    # A normal number that was drawn in advance comes later without a word being used: then it is looked at in full.
    if _last_look is None or _last_look[0] != words or _last_look[1][3]:
        _last_look = words, np.random.get_state()
    return _last_look[1]


def _set_numpy_state(state: Any) -> None:
    """Forgets the last look: the same words may come with another number drawn in advance."""
    global _last_look
    _last_look = None
    np.random.set_state(state)


def restore_generators(states: States) -> None:
    """Put them back."""
    import torch

    python, numpy, own = states
    random.setstate(python)
    _set_numpy_state(numpy)
    torch.set_rng_state(own)


def is_same_state(one: States, other: States) -> bool:
    """Whether nothing was drawn in between."""
    # Of NumPy's five, the last two are a normal number that was drawn in advance.
    same_numpy = one[1] is other[1] or (one[1][2:] == other[1][2:] and np.array_equal(one[1][1], other[1][1]))
    return bool(one[0] == other[0] and same_numpy and one[2].equal(other[2]))
