"""The ways that a command line asks for."""

from __future__ import annotations

import re

import torch

from evenstep.errors import PlanError
from evenstep.plan import STRATEGY_NAMES, parse_devices
from evenstep.verify.verdict import Way
from evenstep.worker.machine import check_devices, choose_devices


def ways_of(strategies: str, devices: str | None, accumulate: int) -> list[Way]:
    """Every strategy on every number of devices; one device with nothing cut up is what they are compared with."""
    names = [name.strip() for name in strategies.split(",") if name.strip()]
    unknown = [name for name in names if name not in STRATEGY_NAMES]
    if unknown or not names:
        raise PlanError(f"unknown strategies {strategies!r}; allowed are {', '.join(STRATEGY_NAMES)}, such as dp,ddp")
    ways = [_way(name, chosen, accumulate) for chosen in _devices(devices) for name in dict.fromkeys(names)]
    ways = [way for way in dict.fromkeys(ways) if (way.strategy, way.accumulate) != ("single", 1)]
    if not ways:
        raise PlanError(
            "single with nothing cut up is what others are compared with; give --accumulate 2, or --strategies ddp"
        )
    return ways


def _way(strategy: str, devices: tuple[str, ...], accumulate: int) -> Way:
    return Way(strategy, devices[:1] if strategy == "single" else devices, accumulate)


def _devices(text: str | None) -> list[tuple[str, ...]]:
    if text is None:
        num_cards = torch.cuda.device_count()
        return [choose_devices(num_cards if num_cards > 1 else 2)] if num_cards != 1 else [("cuda:0", "cuda:0")]
    if re.fullmatch(r"\s*\d+(\s*,\s*\d+)*\s*", text):
        return [choose_devices(int(part)) for part in text.split(",")]
    given = parse_devices(text)
    devices = choose_devices(given) if isinstance(given, int) else given
    check_devices(devices)
    return [devices]
