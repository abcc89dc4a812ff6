"""What is compared: strategies, each on some devices."""

from __future__ import annotations

import re
from collections.abc import Sequence

from evenstep.errors import PlanError
from evenstep.plan import STRATEGY_NAMES
from evenstep.verify import Way
from evenstep.worker.machine import check_devices, choose_devices

USUAL = ("single", "dp", "ddp", "fsdp")
ONE_DEVICE_ONLY = ("single",)
SEVERAL_ONLY = ("dp", "dp-torch")


def find_ways(strategies: str | None, devices: str) -> list[Way]:
    """Each strategy on each set of devices on which it makes sense; `single` first, with which others are compared.

    `devices` are counts (`1,2`), or lists with a slash between them (`cuda:0/cuda:0,cuda:1`).
    """
    sets = device_sets(devices)
    if len({len(one) for one in sets}) < len(sets):
        raise PlanError(f"{devices!r} names two lists of as many devices; compare those in two commands")
    named = tuple(part.strip() for part in strategies.split(",")) if strategies else None
    for name in named or ():
        if name not in STRATEGY_NAMES:
            raise PlanError(f"unknown strategy {name!r}; allowed are {', '.join(STRATEGY_NAMES)}")
    ways = [Way("single", (sets[0][0],))]
    for one in sets:
        ways += [way for way in (Way(name, one) for name in _on(one, named)) if way not in ways]
    return ways


def device_sets(text: str) -> list[tuple[str, ...]]:
    """The sets of devices that `--devices` names."""
    parts = [part.strip() for part in text.split("/" if "/" in text else ",")]
    if all(re.fullmatch(r"-?\d+", part) for part in parts):
        return [choose_devices(int(part)) for part in parts]
    if "/" not in text:
        parts = [text]
    sets = [tuple(name.strip() for name in part.split(",")) for part in parts]
    for one in sets:
        check_devices(one)
    return sets


def _on(devices: Sequence[str], named: tuple[str, ...] | None) -> list[str]:
    """Strategies for these devices; on one device alone `single` will do, unless others are named."""
    if len(devices) == 1:
        return [name for name in named or ONE_DEVICE_ONLY if name not in SEVERAL_ONLY]
    cards = ("dp-torch",) if all(name.startswith("cuda") for name in devices) else ()
    return [name for name in named or (*USUAL, *cards) if name not in ONE_DEVICE_ONLY]
