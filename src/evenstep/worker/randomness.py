"""What dropout draws from, on every device that this process drives."""

from __future__ import annotations

import torch


def seed_devices(seeds: list[int], devices: tuple[torch.device, ...]) -> None:
    """Seed what dropout draws from, on each device that this process drives."""
    torch.default_generator.manual_seed(seeds[0])
    for seed, device in zip(seeds, devices, strict=True):
        if device.type == "cuda":
            torch.cuda.default_generators[device.index].manual_seed(seed)
        elif device.type == "mps":
            torch.mps.manual_seed(seed)
