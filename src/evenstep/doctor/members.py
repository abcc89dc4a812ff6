"""What machines that are to train together say of themselves, and where they differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evenstep.doctor.finding import MOST_NAME, MOST_SAID, Finding, finite
from evenstep.doctor.judging import Reference
from evenstep.worker.pace import SLOW

FAR_APART_SECONDS = 5.0


@dataclass(frozen=True)
class Member:
    """What a machine says of itself."""

    name: str
    torch: str
    evenstep: str
    python: str
    cards: int
    interface: str
    interface_bits_per_second: float
    seconds_behind: float | None
    """Of the first machine's clock; None: not known."""
    set_names: str
    """Variables that are set there and may disturb, with spaces between."""

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Member:
        """What another machine sent, each value of the kind that it should be."""
        behind = values["seconds_behind"]
        names = ("name", "torch", "evenstep", "python", "interface")
        return cls(
            **{name: str(values[name])[:MOST_NAME] for name in names},
            cards=int(values["cards"]),
            interface_bits_per_second=finite(values["interface_bits_per_second"]),
            seconds_behind=None if behind is None else finite(behind),
            set_names=str(values["set_names"])[:MOST_SAID],
        )


def compare(members: Sequence[Member | None]) -> list[Finding]:
    """Versions and clocks of machines that are to train together."""
    there = [one for one in members if one is not None]
    return [
        _same("torch of all", {one.name: one.torch for one in there}, "install the same torch on all machines"),
        _same("evenstep of all", {one.name: one.evenstep for one in there}, "install the same evenstep everywhere"),
        _same("Python of all", {one.name: one.python.rpartition(".")[0] for one in there}, "use the same Python"),
        _clocks(there),
    ]


def _same(name: str, versions: Mapping[str, str], advice: str) -> Finding:
    if len(set(versions.values())) == 1:
        return Finding(name, "good", f"{next(iter(versions.values()))} on {len(versions)} machines", numbers=versions)
    said = ", ".join(f"{machine} {version}" for machine, version in versions.items())
    return Finding(name, "warn", said, advice, versions)


def _clocks(members: Sequence[Member]) -> Finding:
    behind = {one.name: one.seconds_behind for one in members if one.seconds_behind is not None}
    unknown = [one.name for one in members if one.seconds_behind is None]
    apart = max(behind.values(), default=0.0) - min(behind.values(), default=0.0)
    said = f"{apart:.1f} s apart"
    if apart > FAR_APART_SECONDS:
        late = max(behind, key=lambda name: abs(behind[name]))
        advice = (
            f"set {late}'s clock (NTP, chrony): runs do not mind, but nobody can tell what came first in their logs"
        )
        return Finding("clocks", "warn", said, advice, behind)
    if unknown:
        said = f"not known of {', '.join(unknown)}: the first machine did not answer"
        return Finding("clocks", "warn", said, "run it again, or compare what date says there", behind)
    return Finding("clocks", "good", said, numbers=behind)


def reference(first: Member, second: Member) -> Reference:
    """What the slower of two interfaces says of itself; a link below what trainings warn of is slow in any case."""
    slower = min(first, second, key=lambda one: one.interface_bits_per_second)
    bits = slower.interface_bits_per_second
    words = (
        f"{slower.interface} of {slower.name} says {bits / 1e9:g} Gbit/s" if bits else "nobody says what it could be"
    )
    advice = "is it the right network? GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME choose another; --rendezvous, too"
    return Reference(words, bits / 8 or None, slow_bytes_per_second=SLOW / 8, slow_advice=advice)
