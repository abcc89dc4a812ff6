"""What is compared: strategies, each on some devices."""

from __future__ import annotations

from evenstep.errors import PlanError
from evenstep.verify import Way
from evenstep.verify.ways import device_sets, named_strategies, usual_on

ONE_DEVICE_ONLY = ("single",)
SEVERAL_ONLY = ("dp", "dp-torch")


def find_ways(strategies: str | None, devices: str) -> list[Way]:
    """Each strategy on each set of devices on which it makes sense; `single` first, with which others are compared.

    `devices` are counts (`1,2`), or lists with a slash between them (`cuda:0/cuda:0,cuda:1`).
    """
    sets = device_sets(devices)
    if len({len(one) for one in sets}) < len(sets):
        raise PlanError(f"{devices!r} names two lists of as many devices; compare those in two commands")
    named = named_strategies(strategies) if strategies is not None else None
    ways = [Way("single", (sets[0][0],))]
    for one in sets:
        ways += [way for way in (Way(name, one) for name in _on(one, named)) if way not in ways]
    return ways


def _on(devices: tuple[str, ...], named: list[str] | None) -> list[str]:
    """Strategies for these devices; on one device alone `single` will do, unless others are named."""
    if len(devices) == 1:
        return [name for name in named or ONE_DEVICE_ONLY if name not in SEVERAL_ONLY]
    cards = ("dp-torch",) if all(name.startswith("cuda") for name in devices) else ()
    return [name for name in named or (*usual_on(devices), *cards) if name not in ONE_DEVICE_ONLY]
