"""Random numbers: pure functions of (seed, purpose, position), and the global generators of Python, NumPy and torch.

Orders and augmentation use the pure functions, which have no state that other code could change. The global
generators, from which the user's code and dropout draw, are seeded, saved and restored together. torch is imported
only when it is used.
"""

from __future__ import annotations

import base64
import hashlib
import random
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from evenstep.private_apis import NORMAL_BYTES, memory_at, numpy_normal, python_state, seed_python, set_python_state

if TYPE_CHECKING:
    import torch

Words = NDArray[np.uint64]
Ids = NDArray[np.int64]

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MIX = np.uint64(0xD6E8FEB86659FD93)
HALF = np.uint64(32)
_ALL_BITS = (1 << 64) - 1


def derive_seed(seed: int, name: str, *where: int) -> int:
    """A 63-bit seed for one purpose: `derive_seed(0, "augment", epoch, sample)`."""
    text = ":".join([str(seed), name, *map(str, where)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def replica_seed(key: int, position: int, number: int) -> int:
    """A 63-bit seed for one backward pass at a position of the epoch; ten times as fast as `derive_seed`."""
    return _mixed_seed(first_word(key, number) + position * 0x9E3779B97F4A7C15)


def first_word(key: int, number: int) -> int:
    """What `replica_seeds` begins with, the same at all positions."""
    return (key + number * 0xD6E8FEB86659FD93) & _ALL_BITS


def replica_seeds(first_words: Iterable[int], position: int) -> list[int]:
    """`replica_seed` at one position, of several keys and numbers."""
    added = position * 0x9E3779B97F4A7C15
    return [_mixed_seed(word + added) for word in first_words]


def _mixed_seed(word: int) -> int:
    word &= _ALL_BITS
    word = ((word ^ (word >> 32)) * 0xD6E8FEB86659FD93) & _ALL_BITS
    return (word ^ (word >> 32)) >> 1


def uniforms(key: tuple[int, int], start: int, stop: int) -> NDArray[np.float64]:
    """Numbers in [0, 1): elements `start` to `stop` of the endless sequence of `key`."""
    # NumPy keeps raw Philox words the same in every release, unlike a Generator's numbers. They come in fours.
    generator = np.random.Philox(key=np.array(key, dtype=np.uint64), counter=start // 4)
    words = generator.random_raw(stop - start // 4 * 4)[start % 4 :]
    return _as_fractions(words)


def sample_uniforms(ids: Ids, num: int, key: int) -> NDArray[np.float64]:
    """`num` numbers in [0, 1) for each id, which depend only on the key and the id."""
    firsts: Words = ids.astype(np.uint64) * np.uint64(num)
    counters: Words = np.add.outer(firsts, np.arange(num, dtype=np.uint64))
    words = _mixed(_mixed(counters, np.uint64(key)), np.uint64(key >> 1))
    return _as_fractions(words)


class Draws:
    """Random numbers for the samples of a batch, on its device; each depends only on (seed, epoch, sample).

    def flip(batch, draws):
        images, labels = batch
        return torch.where(draws.uniform()[:, None, None, None] < 0.5, images.flip(-1), images), labels
    """

    def __init__(self, ids: Ids, seed: int, epoch: int, device: torch.device) -> None:
        self._ids = ids
        self._where = (seed, epoch)
        self._device = device
        self._num_calls = 0

    def uniform(self, num: int | None = None) -> torch.Tensor:
        """A number in [0, 1) for each sample, or `num` numbers; each call draws new ones."""
        import torch

        seed, epoch = self._where
        drawn = sample_uniforms(self._ids, num or 1, derive_seed(seed, "augment batch", epoch, self._num_calls))
        self._num_calls += 1
        numbers = torch.from_numpy(drawn.astype(np.float32)).to(self._device, non_blocking=True)
        return numbers if num is not None else numbers[:, 0]

    def integers(self, low: int, high: int) -> torch.Tensor:
        """An integer from `low` to `high - 1` for each sample."""
        return low + (self.uniform() * (high - low)).long().clamp_(max=high - low - 1)


def _as_fractions(words: Words) -> NDArray[np.float64]:
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mixed(values: Words, key: np.uint64) -> Words:
    with np.errstate(over="ignore"):  # wrapping around is intended
        words = (values + key) * GOLDEN
        words ^= words >> HALF
        words *= MIX
        words ^= words >> HALF
    return words


States: TypeAlias = tuple[Any, Any, Any]


def seed_everything(seed: int) -> None:
    import torch

    seed_host(seed)
    torch.manual_seed(seed)


def seed_host(seed: int) -> None:
    """Seed Python, NumPy and torch on the CPU only: fast enough to call for every sample."""
    import torch

    seed_python(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


def host_state() -> dict[str, Any]:
    """The states of Python's and NumPy's generators as JSON values."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {"python": [version, list(words), gauss], "numpy": [kind, keys.tolist(), position, has_gauss, cached]}  # type: ignore[union-attr]


def restore_host_state(state: Mapping[str, Any]) -> None:
    """Restore the generators of Python and NumPy to what `host_state` returned."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))


def device_state(devices: tuple[torch.device, ...]) -> dict[str, Any]:
    """The states of torch's generators, on the CPU and on these devices, as JSON values.

    A step seeds them again; a custom loop may draw between two steps.
    """
    import torch

    on_gpus = [torch.cuda.get_rng_state(device) for device in devices if device.type == "cuda"]
    return {"torch": _as_text(torch.get_rng_state()), "cuda": [_as_text(state) for state in on_gpus]}


def restore_device_state(state: Mapping[str, Any], devices: tuple[torch.device, ...]) -> None:
    """Restore torch's generators to what `device_state` returned; earlier checkpoints have none."""
    import torch

    if "torch" in state:
        torch.set_rng_state(_from_text(state["torch"]))
    on_gpus = [device for device in devices if device.type == "cuda"]
    for device, of_device in zip(on_gpus, state.get("cuda", ()), strict=False):
        torch.cuda.set_rng_state(_from_text(of_device), device)


def _as_text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _from_text(text: str) -> torch.Tensor:
    import torch

    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


@contextmanager
def fork_rng() -> Iterator[None]:
    """Restore the generators of Python, NumPy and torch (CPU) on exit; see torch.random.fork_rng."""
    states = rng_states()
    try:
        yield
    finally:
        restore_rng_states(states)


class IsolatedRng:
    """A separate state of the generators of Python, NumPy and torch (CPU), in use inside a `with` block.

    Each block continues where the last one ended; code outside is not affected.
    """

    def __init__(self, seed: int) -> None:
        outside = rng_states()
        seed_host(seed)
        self._inside = rng_states()
        restore_rng_states(outside)

    def __enter__(self) -> None:
        self._outside = rng_states()
        restore_rng_states(self._inside)

    def __exit__(self, *error: object) -> None:
        self._inside = rng_states()
        restore_rng_states(self._outside)


def rng_states() -> States:
    """The states of Python's, NumPy's and torch's (CPU) generators."""
    import torch

    return python_state(), numpy_state(), torch.get_rng_state()


def host_states() -> tuple[Any, Any]:
    """Those of Python's and NumPy's alone, as `restore_host_states` takes them."""
    return python_state(), numpy_state()


def restore_host_states(states: tuple[Any, Any]) -> None:
    set_python_state(states[0])
    set_numpy_state(states[1])


STATE_BYTES = 624 * 4 + 4
"""The words of an MT19937, and the index of the next one."""


class NumpyMemory(NamedTuple):
    """NumPy's generator, where it lies: `np.random.get_state` takes 0.1 ms, and `set_state` as long."""

    words: memoryview
    normal: memoryview
    """Whether a normal number is kept for the next call, and that number."""


class NumpyState(NamedTuple):
    """A copy of that memory."""

    words: bytes
    normal: bytes

    def public(self) -> tuple[Any, ...]:
        """As `np.random.set_state` takes it."""
        words = np.frombuffer(self.words, dtype=np.uint32)
        return "MT19937", words[:-1], int(words[-1]), *struct.unpack("i4xd", self.normal)


_NO_NORMAL = bytes(NORMAL_BYTES)
_in_place: tuple[object, NumpyMemory | None] = (None, None)
"""NumPy's generator, and its memory."""


def _numpy_memory() -> NumpyMemory | None:
    """That of NumPy's generator, if it is an MT19937."""
    global _in_place
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if _in_place[0] is not generator:
        _in_place = generator, _memory_of(generator)
    return _in_place[1]


def _memory_of(generator: Any) -> NumpyMemory | None:
    if not isinstance(generator, np.random.MT19937):
        return None
    normal = numpy_normal()
    return None if normal is None else NumpyMemory(memory_at(generator.ctypes.state_address, STATE_BYTES), normal)


def numpy_state() -> Any:
    """What `set_numpy_state` takes: a copy of memory, or what `np.random.get_state` returns."""
    memory = _numpy_memory()
    return np.random.get_state() if memory is None else NumpyState(bytes(memory[0]), bytes(memory[1]))


def set_numpy_state(state: Any) -> None:
    memory = _numpy_memory()
    if memory is not None and type(state) is NumpyState:
        memory[0][:], memory[1][:] = state
    else:
        np.random.set_state(state.public() if type(state) is NumpyState else state)


def is_same_numpy(one: Any, other: Any) -> bool:
    """Whether nothing was drawn from NumPy's generator between two of its states."""
    if type(one) is NumpyState or type(other) is NumpyState:
        return bool(one == other)
    # The last two of five values are a cached normal number.
    return bool(one[2:] == other[2:] and np.array_equal(one[1], other[1]))


def set_words(python: memoryview, numpy: memoryview) -> bool:
    """Set Python's and NumPy's generators to what `seed_host` makes of them; False if NumPy's is no MT19937.

    Those of Python are as `python_state` has them.
    """
    memory = _numpy_memory()
    if memory is None:
        return False
    set_python_state((python, None))
    memory[0][:], memory[1][:] = numpy, _NO_NORMAL
    return True


def restore_rng_states(states: States) -> None:
    import torch

    python, numpy, own = states
    restore_host_states((python, numpy))
    torch.set_rng_state(own)


def is_same_state(one: States, other: States) -> bool:
    """Whether nothing was drawn between the two."""
    return bool(one[0] == other[0] and is_same_numpy(one[1], other[1]) and one[2].equal(other[2]))


def seed_devices(seeds: list[int], devices: tuple[torch.device, ...]) -> None:
    """Seed the generator of each device, from which dropout draws."""
    import torch

    torch.default_generator.manual_seed(seeds[0])
    for seed, device in zip(seeds, devices, strict=True):
        if device.type != "cpu":
            seed_device(seed, device)


def seed_device(seed: int, device: torch.device) -> None:
    """Seed the generator of a GPU; that of the CPU is left as it is."""
    import torch

    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(seed)
    elif device.type == "mps":
        torch.mps.manual_seed(seed)
