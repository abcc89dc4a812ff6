"""Every pair of this machine's devices, and how they are tried out in about a minute."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations

from evenstep.doctor.inside import LARGE_BYTES, SMALL_BYTES, add_up
from evenstep.doctor.remedies import remedies, with_interface
from evenstep.doctor.trial import Patience, Trial, is_sound, search
from evenstep.doctor.trying import Ended, Job, Settings, try_out, try_together
from evenstep.worker.world import backend_for

ALL_BYTES = (SMALL_BYTES, *LARGE_BYTES)
FEW_CARDS = 4
"""Up to so many, each pair is measured alone; above, all are checked, and neighbours are measured."""
CPU_SECONDS, CARD_SECONDS = 20.0, 25.0
AGAIN_CPU_SECONDS, AGAIN_CARD_SECONDS = 15.0, 12.0
LOOPBACK_NAME = "lo0" if sys.platform == "darwin" else "lo"


@dataclass(frozen=True)
class Pair:
    """Devices whose ranks add numbers up: two, one twice, or a card alone with its back end."""

    devices: tuple[str, ...]
    sizes: tuple[int, ...] = ALL_BYTES

    @property
    def back_end(self) -> str:
        return "nccl" if "nccl" in backend_for(self.devices) else "gloo"

    @property
    def name(self) -> str:
        first, *rest = self.devices
        who = first if not rest else f"2 x {first}" if rest == [first] else f"{first} + {rest[0]}"
        return f"{who}, {self.back_end}"

    @property
    def is_on_cpu(self) -> bool:
        return self.devices[0] == "cpu"

    def job(self) -> Job:
        """Its trial, in the user's own environment."""
        seconds = CPU_SECONDS if self.is_on_cpu else CARD_SECONDS
        return Job(add_up, (self.devices, self.sizes), len(self.devices), seconds)

    def again(self, patience: Patience, settings: Settings) -> Ended:
        """Try it once more, with these settings."""
        seconds = patience.allowed(AGAIN_CPU_SECONDS if self.is_on_cpu else AGAIN_CARD_SECONDS)
        return try_out(replace(self.job(), seconds=seconds, settings=settings))

    def remedies(self, set_names: Iterable[str]) -> list[Settings]:
        """What may help it, if it fails."""
        return [with_interface(settings, LOOPBACK_NAME) for settings in remedies(self.back_end, set_names)]


def try_pairs(pairs: Sequence[Pair], set_names: Iterable[str], patience: Patience) -> list[Trial]:
    """Try pairs at the same time; those that fail again, one by one, with what may help.

    `set_names` are the variables of the user's environment.
    """
    names = list(set_names)
    jobs = [pair.job() for pair in pairs]
    jobs = [replace(job, seconds=patience.allowed(job.seconds)) for job in jobs]
    if not all(job.seconds for job in jobs):
        return [Trial(pair.name, Ended(), is_left_out=True) for pair in pairs]
    first = try_together(jobs)
    return [
        Trial(pair.name, ended)
        if is_sound(ended)
        else search(Trial(pair.name, ended), pair.remedies(names), partial(pair.again, patience), patience)
        for pair, ended in zip(pairs, first, strict=True)
    ]


def schedule(num_cards: int) -> list[list[Pair]]:
    """The pairs of this machine; those of one list are tried at the same time."""
    alone = [[Pair(("cpu", "cpu"))]]
    if num_cards:
        alone.append([Pair(("cuda:0", "cuda:0"))])
    if num_cards == 1:
        # Nothing travels: that it starts is all there is to see.
        return [*alone, [Pair(("cuda:0",), (SMALL_BYTES,))]]
    if num_cards <= FEW_CARDS:
        return [*alone, *([_cards(pair)] for pair in combinations(range(num_cards), 2))]
    neighbours = [[(first, first + 1) for first in range(start, num_cards - 1, 2)] for start in (0, 1)]
    others = [[pair for pair in one if pair[1] - pair[0] > 1] for one in rounds(num_cards)]
    return [
        *alone,
        *([_cards(pair) for pair in one] for one in neighbours),
        *([replace(_cards(pair), sizes=(SMALL_BYTES,)) for pair in one] for one in others if one),
    ]


def _cards(pair: tuple[int, int]) -> Pair:
    return Pair((f"cuda:{pair[0]}", f"cuda:{pair[1]}"))


def rounds(num: int) -> list[list[tuple[int, int]]]:
    """Every pair of `num` players once, in rounds in which nobody plays twice."""
    players: list[int | None] = [*range(num), *([None] if num % 2 else [])]
    half = len(players) // 2
    found = []
    for _ in range(len(players) - 1):
        matches = zip(players[:half], reversed(players[half:]), strict=True)
        found.append(sorted((min(a, b), max(a, b)) for a, b in matches if a is not None and b is not None))
        # One stays, all others move on by a seat.
        players = [players[0], players[-1], *players[1:-1]]
    return found
