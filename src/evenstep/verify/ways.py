"""The ways that a command line asks for; `compare` reads its own by the same rules."""

from __future__ import annotations

import torch

from evenstep.errors import PlanError
from evenstep.plan import STRATEGY_NAMES, Plan, parse_devices
from evenstep.verify.verdict import Way
from evenstep.worker.machine import check_devices, choose_devices

USUAL = ("dp", "ddp", "fsdp")


def ways_of(strategies: str | None, devices: str | None, accumulate: int) -> list[Way]:
    """Every strategy on every set of devices; one device with nothing cut up is what they are compared with."""
    sets = device_sets(devices) if devices is not None else [_all_devices()]
    names = named_strategies(strategies) if strategies is not None else None
    ways = [_way(name, chosen, accumulate) for chosen in sets for name in names or usual_on(chosen)]
    ways = [way for way in dict.fromkeys(ways) if (way.strategy, way.accumulate) != ("single", 1)]
    if not ways:
        raise PlanError(
            "single with nothing cut up is what others are compared with; give --accumulate 2, or --strategies ddp"
        )
    return ways


def named_strategies(text: str) -> list[str]:
    """Those of a list such as `dp,ddp`."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if name not in STRATEGY_NAMES]
    if unknown or not names:
        raise PlanError(f"unknown strategies {text!r}; allowed are {', '.join(STRATEGY_NAMES)}, such as dp,ddp")
    return names


def usual_on(devices: tuple[str, ...]) -> list[str]:
    """Strategies that are looked at on several devices if none is named; fsdp needs a card for each process."""
    shares_card = devices[0].startswith("cuda") and len(set(devices)) < len(devices)
    return [name for name in USUAL if name != "fsdp" or not shares_card]


def device_sets(text: str) -> list[tuple[str, ...]]:
    """The sets that `--devices` names: counts (`1,2`), or lists with a slash between them (`cuda:0/cuda:0,cuda:1`)."""
    parts = [part.strip() for part in text.split("/" if "/" in text else ",")]
    counts = [parse_devices(part) for part in parts]
    if all(isinstance(count, int) for count in counts):
        return [choose_devices(count) for count in counts if isinstance(count, int)]
    lists = parts if "/" in text else [text]
    sets = [tuple(name.strip() for name in part.split(",")) for part in lists]
    for one in sets:
        check_devices(one)
    return sets


def plan_of(plan: Plan, way: Way) -> Plan:
    """The plan of a way; raises what a plan refuses, before anything is started."""
    return Plan.from_json(
        {**plan.to_json(), "strategy": way.strategy, "devices": way.devices, "accumulate": way.accumulate}
    )


def _way(strategy: str, devices: tuple[str, ...], accumulate: int) -> Way:
    return Way(strategy, devices[:1] if strategy == "single" else devices, accumulate)


def _all_devices() -> tuple[str, ...]:
    num_cards = torch.cuda.device_count()
    return ("cuda:0", "cuda:0") if num_cards == 1 else choose_devices(max(2, num_cards))
