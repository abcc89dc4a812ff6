"""A real all-reduce between every pair of devices: is the sum right, how fast is it, and what helps if it fails?"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

from evenstep.doctor.finding import Finding, Number, Status
from evenstep.doctor.inside import LARGE_BYTES, SMALL_BYTES, add_up
from evenstep.doctor.remedies import in_words, remedies, with_interface
from evenstep.doctor.trying import Ended, Job, Settings, try_out, try_together
from evenstep.report.table import size
from evenstep.worker.world import backend_for

ALL_BYTES = (SMALL_BYTES, *LARGE_BYTES)
FEW_CARDS = 4
"""Up to so many, each pair is measured alone; above, all are checked, and neighbours are measured."""
CPU_SECONDS = 15.0
CARD_SECONDS = 25.0
AGAIN_SECONDS = 8.0
TRYING_SECONDS = 25.0
"""For all remedies of all pairs together: the whole visit is to take less than a minute."""
SLOW_PART = 0.1
SLOW_LATENCY_SECONDS = 5e-3
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
        who = first if not rest else f"{first} twice" if rest == [first] else f"{first} + {rest[0]}"
        return f"{who}, {self.back_end}"

    def job(self, settings: Settings, seconds: float) -> Job:
        """Its trial, with these settings; GLOO_SOCKET_IFNAME and the like are otherwise the user's."""
        given = with_interface(settings, LOOPBACK_NAME)
        return Job(add_up, (self.devices, self.sizes), len(self.devices), seconds, given)

    @property
    def seconds(self) -> float:
        return CPU_SECONDS if self.devices[0] == "cpu" else CARD_SECONDS


@dataclass(frozen=True)
class Trial:
    """What came of a pair, and of the remedies that were tried on it."""

    name: str
    ended: Ended
    helped_by: Settings | None = None
    tried: tuple[Settings, ...] = ()
    not_tried: tuple[Settings, ...] = ()


@dataclass(frozen=True)
class Reference:
    """What the hardware should give, and where that number comes from."""

    words: str = ""
    bytes_per_second: float | None = None
    latency_seconds: float | None = None
    latency_words: str = ""


@dataclass
class Patience:
    """The time that may still be spent on remedies."""

    seconds: float = TRYING_SECONDS
    _began: float = field(default_factory=time.monotonic)

    def begin(self) -> None:
        self._began = time.monotonic()

    def is_left(self) -> bool:
        return time.monotonic() - self._began < self.seconds


def rounds(num: int) -> list[list[tuple[int, int]]]:
    """Every pair of `num` players once, in rounds in which nobody plays twice."""
    players: list[int | None] = [*range(num), *([None] if num % 2 else [])]
    found = []
    for _ in range(len(players) - 1):
        half = len(players) // 2
        matches = zip(players[:half], reversed(players[half:]), strict=True)
        found.append([(min(a, b), max(a, b)) for a, b in matches if a is not None and b is not None])
        players = [players[0], players[-1], *players[1:-1]]
    return [sorted(one) for one in found if one]


def schedule(num_cards: int) -> list[list[Pair]]:
    """The pairs of this machine; those of one list are tried at the same time."""
    alone = [[Pair(("cpu", "cpu"))]]
    if num_cards:
        alone.append([Pair(("cuda:0", "cuda:0"))])
    if num_cards == 1:
        return [*alone, [Pair(("cuda:0",))]]
    if num_cards <= FEW_CARDS:
        return [*alone, *([_cards(pair)] for pair in combinations(range(num_cards), 2))]
    neighbours = [[(a, a + 1) for a in range(start, num_cards - 1, 2)] for start in (0, 1)]
    others = [[pair for pair in one if pair[1] - pair[0] > 1] for one in rounds(num_cards)]
    return [
        *alone,
        *([_cards(pair) for pair in one] for one in neighbours),
        *([replace(_cards(pair), sizes=(SMALL_BYTES,)) for pair in one] for one in others if one),
    ]


def _cards(pair: tuple[int, int]) -> Pair:
    return Pair((f"cuda:{pair[0]}", f"cuda:{pair[1]}"))


def try_pairs(pairs: Sequence[Pair], set_names: Iterable[str], patience: Patience) -> list[Trial]:
    """Try pairs at the same time; those that fail again, one by one, with what may help."""
    names = list(set_names)
    first = try_together([pair.job({}, pair.seconds) for pair in pairs])
    return [
        Trial(pair.name, ended)
        if ended.is_well
        else search(
            pair.name,
            ended,
            remedies(pair.back_end, names),
            lambda settings, pair=pair: try_out(pair.job(settings, AGAIN_SECONDS if names else pair.seconds)),  # type: ignore[misc]
            patience,
        )
        for pair, ended in zip(pairs, first, strict=True)
    ]


def search(
    name: str, ended: Ended, to_try: Sequence[Settings], attempt: Callable[[Settings], Ended], patience: Patience
) -> Trial:
    """Try one remedy after the other until one helps."""
    patience.begin()
    for number, settings in enumerate(to_try):
        if not patience.is_left():
            return Trial(name, ended, None, tuple(to_try[:number]), tuple(to_try[number:]))
        if is_sound(again := attempt(settings)):
            return Trial(name, replace(ended, returned=again.returned), settings, tuple(to_try[: number + 1]))
    return Trial(name, ended, None, tuple(to_try))


def is_sound(ended: Ended) -> bool:
    """Whether it ran to its end with every sum right."""
    return ended.is_well and all(row["is_right"] for one in ended.returned for row in one["rows"])


def judge(trial: Trial, reference: Reference) -> Finding:
    """What to say of a pair."""
    ended = trial.ended
    if not ended.is_well:
        return _judge_failed(trial)
    if not is_sound(ended):
        wrong = next(row["num_bytes"] for one in ended.returned for row in one["rows"] if not row["is_right"])
        said = f"the sum of {size_in_words(wrong)} is WRONG: gradients would be too"
        advice = "do not train on it: look at memory and card (dmesg, nvidia-smi -q, memtest)"
        return Finding(trial.name, "bad", said, advice, numbers_of(ended))
    numbers = numbers_of(ended)
    status, advice = _judge_speed(numbers, reference)
    return Finding(trial.name, status, f"sums right; {speed_in_words(numbers, reference)}", advice, numbers)


def _judge_failed(trial: Trial) -> Finding:
    what = "hangs" if trial.ended.is_late else "fails"
    said = f"{what}: {trial.ended.why}"
    if trial.helped_by is not None:
        advice = f"{in_words(trial.helped_by)}   (found by trying: with that it works)"
        return Finding(trial.name, "bad", said, advice, numbers_of(trial.ended))
    tried = ", ".join(map(in_words, trial.tried)) or "nothing"
    advice = f"none of these helped: {tried}"
    if trial.not_tried:
        advice += f"; no time was left for: {', '.join(map(in_words, trial.not_tried))}"
    return Finding(trial.name, "bad", said, advice)


def _judge_speed(numbers: Mapping[str, Number], reference: Reference) -> tuple[Status, str]:
    rate, latency = numbers.get("bytes_per_second"), numbers["latency_seconds"]
    if isinstance(rate, float) and reference.bytes_per_second and rate < SLOW_PART * reference.bytes_per_second:
        return "warn", "less than a tenth of what the hardware gives: is something else running here?"
    if isinstance(latency, float) and latency > SLOW_LATENCY_SECONDS:
        return "warn", "every small message takes long: is something else running here?"
    return "good", ""


def numbers_of(ended: Ended) -> dict[str, Number]:
    """Latency of the smallest size, bandwidth of the largest, and the best seconds of each."""
    if not ended.returned:
        return {}
    rows = ended.returned[0]["rows"]
    numbers: dict[str, Number] = {"latency_seconds": float(rows[0]["median_seconds"])}
    for row in rows:
        numbers[f"seconds_of_{row['num_bytes']}_bytes"] = float(row["best_seconds"])
    if len(rows) > 1:
        numbers["num_bytes"] = rows[-1]["num_bytes"]
        # Of two ranks, each sends the whole tensor once and receives it once.
        numbers["bytes_per_second"] = rows[-1]["num_bytes"] / float(rows[-1]["best_seconds"])
    numbers["copy_bytes_per_second"] = ended.returned[0]["copy_bytes_per_second"]
    return numbers


def speed_in_words(numbers: Mapping[str, Number], reference: Reference) -> str:
    """Latency and bandwidth, each beside what the hardware should give."""
    latency = f"latency {float(numbers['latency_seconds'] or 0) * 1e6:.0f} us"
    if reference.latency_seconds:
        latency += f" ({reference.latency_words} {reference.latency_seconds * 1e6:.0f} us)"
    if "bytes_per_second" not in numbers:
        return latency
    rate = f"{size_in_words(int(numbers['num_bytes'] or 0))} at {in_gigabytes(float(numbers['bytes_per_second'] or 0))}"
    beside = f" ({reference.words})" if reference.words else ""
    return f"{rate}{beside}, {latency}"


def in_gigabytes(bytes_per_second: float) -> str:
    """`1.5 GB/s`, with as many digits as mean something."""
    gigabytes = bytes_per_second / 1e9
    return f"{gigabytes:.{0 if gigabytes >= 20 else 1 if gigabytes >= 0.95 else 3}f} GB/s"


def size_in_words(num_bytes: int) -> str:
    return size(num_bytes) if num_bytes >= 2**20 else f"{num_bytes // 2**10} KiB"
