"""Named streams of random numbers: each is a pure function of the seed and of what it is for."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch


def stream(seed: int, name: str, *where: int) -> int:
    """A 63-bit seed for one purpose at one place: `stream(0, "augment", epoch, sample)`."""
    text = ":".join([str(seed), name, *map(str, where)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch, on every device."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def seed_devices(seeds: list[int], devices: tuple[torch.device, ...]) -> None:
    """Seed what dropout draws from, on each device that this process drives."""
    torch.default_generator.manual_seed(seeds[0])
    for seed, device in zip(seeds, devices, strict=True):
        if device.type == "cuda":
            torch.cuda.default_generators[device.index].manual_seed(seed)
        elif device.type == "mps":
            torch.mps.manual_seed(seed)


def host_state() -> dict[str, Any]:
    """Python's and NumPy's generators as JSON values. Torch's need no saving: they are seeded anew each step."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {"python": [version, list(words), gauss], "numpy": [kind, keys.tolist(), position, has_gauss, cached]}  # type: ignore[union-attr]


def restore_host_state(state: dict[str, Any]) -> None:
    """Put Python's and NumPy's generators back to where `host_state` found them."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
