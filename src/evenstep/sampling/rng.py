"""Random numbers as pure functions of where they are used: no state, so nothing can disturb them.

Python's, NumPy's and torch's own generators: seeded together, kept and put back. torch is imported when used.

What dropout draws from, on every device that this process drives.
"""

from __future__ import annotations

import ctypes
import hashlib
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

Words = NDArray[np.uint64]
Ids = NDArray[np.int64]

SORTED_UP_TO = 1 << 16
"""Orders of up to this length are sorted; longer ones are computed place by place, and need no memory."""
_ROUNDS = 8
_WORD = 64
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xD6E8FEB86659FD93)
_HALF = np.uint64(32)
_ALL_BITS = (1 << 64) - 1
_PLACE = np.uint64(SORTED_UP_TO - 1)


def derive_seed(seed: int, name: str, *where: int) -> int:
    """A 63-bit seed for one purpose at one place: `derive_seed(0, "augment", epoch, sample)`."""
    text = ":".join([str(seed), name, *map(str, where)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def replica_seed(key: int, place: int, number: int) -> int:
    """A 63-bit seed for one place of a stream: what `derive_seed` would give, at a tenth of its price."""
    word = (key + place * 0x9E3779B97F4A7C15 + number * 0xD6E8FEB86659FD93) & _ALL_BITS
    word = ((word ^ (word >> 32)) * 0xD6E8FEB86659FD93) & _ALL_BITS
    return (word ^ (word >> 32)) >> 1


def uniforms(key: tuple[int, int], start: int, stop: int) -> NDArray[np.float64]:
    """Numbers from 0 to 1, the places `start` to `stop` of an endless row that belongs to `key`."""
    # Raw Philox words are the same in every NumPy release; a Generator's are not promised to be. They come in fours.
    generator = np.random.Philox(key=np.array(key, dtype=np.uint64), counter=start // 4)
    words = generator.random_raw(stop - start // 4 * 4)[start % 4 :]
    return _as_fractions(words)


def sample_uniforms(ids: Ids, num: int, key: int) -> NDArray[np.float64]:
    """`num` numbers from 0 to 1 for each id, which depend on the key and the id alone."""
    firsts: Words = ids.astype(np.uint64) * np.uint64(num)
    counters: Words = np.add.outer(firsts, np.arange(num, dtype=np.uint64))
    words = _mixed(_mixed(counters, np.uint64(key)), np.uint64(key >> 1))
    return _as_fractions(words)


class Draws:
    """Random numbers for the samples of a batch, on its device; each depends on (seed, epoch, sample) alone.

    def flip(batch, draws):
        images, labels = batch
        return torch.where(draws.uniform()[:, None, None, None] < 0.5, images.flip(-1), images), labels
    """

    def __init__(self, ids: Ids, seed: int, epoch: int, device: torch.device) -> None:
        self._ids = ids
        self._where = (seed, epoch)
        self._device = device
        self._asked = 0

    def uniform(self, num: int | None = None) -> torch.Tensor:
        """A number from 0 to 1 for each sample, or `num` of them; new ones at every call."""
        import torch

        seed, epoch = self._where
        drawn = sample_uniforms(self._ids, num or 1, derive_seed(seed, "augment batch", epoch, self._asked))
        self._asked += 1
        numbers = torch.from_numpy(drawn.astype(np.float32)).to(self._device, non_blocking=True)
        return numbers if num is not None else numbers[:, 0]

    def integers(self, low: int, high: int) -> torch.Tensor:
        """A whole number from `low` to `high - 1` for each sample."""
        return low + (self.uniform() * (high - low)).long().clamp_(max=high - low - 1)


def permuted(places: Ids, num: int, key: tuple[int, int]) -> Ids:
    """What stands at `places` of a random order of 0 to num - 1 that belongs to `key`."""
    if num <= SORTED_UP_TO:
        words = np.random.Philox(key=np.array(key, dtype=np.uint64)).random_raw(num)
        # The place stands in the low bits: no two words are equal, and a plain sort is six times as fast as argsort.
        words &= ~_PLACE
        words |= np.arange(num, dtype=np.uint64)
        words.sort()
        words &= _PLACE
        return words.astype(np.int64)[places]
    # A Feistel network permutes the numbers below a power of two; what falls outside is sent through it again.
    rounds = np.random.Philox(key=np.array(key, dtype=np.uint64)).random_raw(_ROUNDS)
    bits = (num - 1).bit_length()
    ids = _feistel(places.astype(np.uint64), bits, rounds)
    outside = np.flatnonzero(ids >= num)
    while len(outside):
        ids[outside] = again = _feistel(ids[outside], bits, rounds)
        outside = outside[again >= num]
    return ids.astype(np.int64)


def _as_fractions(words: Words) -> NDArray[np.float64]:
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _feistel(values: Words, bits: int, rounds: Words) -> Words:
    right_bits = bits // 2
    left_bits = bits - right_bits
    left = values >> np.uint64(right_bits)
    right = values & np.uint64((1 << right_bits) - 1)
    words, high = np.empty_like(values), np.empty_like(values)
    for number, key in enumerate(rounds):
        into, by, bits_ = (left, right, left_bits) if number % 2 == 0 else (right, left, right_bits)
        # `_mixed` without new arrays; its last line leaves the upper half as it is, and no more than that is used.
        np.add(by, key, out=words)
        words *= _GOLDEN
        words ^= np.right_shift(words, _HALF, out=high)
        words *= _MIX
        words >>= np.uint64(_WORD - bits_)
        into ^= words
    return (left << np.uint64(right_bits)) | right


def _mixed(values: Words, key: np.uint64) -> Words:
    with np.errstate(over="ignore"):  # the numbers wrap around, as they should
        words = (values + key) * _GOLDEN
        words ^= words >> _HALF
        words *= _MIX
        words ^= words >> _HALF
    return words


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
def fork_rng() -> Iterator[None]:
    """Whatever is drawn or seeded inside, everything outside goes on as if nothing had been."""
    states = rng_states()
    try:
        yield
    finally:
        restore_rng_states(states)


class IsolatedRng:
    """Generators of one's own: inside a `with`, Python, NumPy and torch (on the CPU) draw from these and go on from
    where the last `with` left them; outside, everything draws as if nothing had happened."""

    def __init__(self, seed: int) -> None:
        outside = rng_states()
        seed_host(seed)
        self._kept = rng_states()
        restore_rng_states(outside)

    def __enter__(self) -> None:
        self._outside = rng_states()
        restore_rng_states(self._kept)

    def __exit__(self, *error: object) -> None:
        self._kept = rng_states()
        restore_rng_states(self._outside)


def rng_states() -> States:
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


def restore_rng_states(states: States) -> None:
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


def seed_devices(seeds: list[int], devices: tuple[torch.device, ...]) -> None:
    """Seed what dropout draws from, on each device that this process drives."""
    import torch

    torch.default_generator.manual_seed(seeds[0])
    for seed, device in zip(seeds, devices, strict=True):
        if device.type == "cuda":
            torch.cuda.default_generators[device.index].manual_seed(seed)
        elif device.type == "mps":
            torch.mps.manual_seed(seed)
