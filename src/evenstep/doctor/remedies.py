"""Judge a trial all-reduce (correct or wrong, fast or slow), and try settings that may fix a failed one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from evenstep.doctor import Finding, Number, Status
from evenstep.doctor.sandbox import Ended, Settings
from evenstep.report.terminal import size_in_short

INTERFACE = "(the interface that leads to the other machines)"
"""A placeholder for each machine's own interface name."""
SUSPECTS: Mapping[str, tuple[str, ...]] = {
    "gloo": ("GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT", "TORCH_DISTRIBUTED_DEBUG", "LD_PRELOAD"),
    "nccl": (
        "NCCL_SOCKET_IFNAME",
        "GLOO_SOCKET_IFNAME",
        "NCCL_IB_HCA",
        "NCCL_NET",
        "NCCL_NET_PLUGIN",
        "NCCL_P2P_LEVEL",
        "NCCL_P2P_DISABLE",
        "NCCL_SHM_DISABLE",
        "NCCL_ALGO",
        "NCCL_PROTO",
        "NCCL_TOPO_FILE",
        "NCCL_CUMEM_ENABLE",
        "TORCH_DISTRIBUTED_DEBUG",
    ),
}
"""Variables that may break a backend, the likeliest first."""
CURES: Mapping[str, tuple[tuple[str, str], ...]] = {
    "gloo": (("GLOO_SOCKET_IFNAME", INTERFACE),),
    "nccl": (
        ("NCCL_P2P_DISABLE", "1"),
        ("NCCL_SHM_DISABLE", "1"),
        ("NCCL_CUMEM_ENABLE", "0"),
        ("NCCL_NVLS_ENABLE", "0"),
        ("NCCL_IB_DISABLE", "1"),
        ("NCCL_SOCKET_IFNAME", INTERFACE),
        ("GLOO_SOCKET_IFNAME", INTERFACE),
    ),
}

CURES_BETWEEN: Mapping[str, tuple[tuple[str, str], ...]] = {
    "gloo": (("GLOO_SOCKET_IFNAME", INTERFACE),),
    "nccl": (("NCCL_SOCKET_IFNAME", INTERFACE), ("NCCL_IB_DISABLE", "1"), ("GLOO_SOCKET_IFNAME", INTERFACE)),
}
"""Settings that may help between machines."""


def remedies(back_end: str, set_names: Iterable[str], is_between_machines: bool = False) -> list[Settings]:
    """Settings to try in order: without each suspect variable, then with each known remedy."""
    given = set(set_names)
    without: list[Settings] = [{name: None} for name in SUSPECTS[back_end] if name in given]
    cures = CURES_BETWEEN if is_between_machines else CURES
    return [*without, *({name: value} for name, value in cures[back_end])]


def in_words(settings: Settings) -> str:
    """The shell commands for these settings."""
    return "; ".join(f"unset {name}" if value is None else f"export {name}={value}" for name, value in settings.items())


def with_interface(settings: Settings, interface: str) -> Settings:
    """The settings with the placeholder replaced by this machine's interface."""
    return {name: interface if value == INTERFACE else value for name, value in settings.items()}


TRYING_SECONDS = 25.0
"""For all remedies of all pairs together."""
VISIT_SECONDS = 50.0
"""For all trials: the doctor takes about a minute, even if some of them hang."""
LEAST_SECONDS = 6.0
"""Ranks take some seconds to start: with less than this, a working pair would seem to hang."""


@dataclass(frozen=True)
class Trial:
    """The result of a pair, and of the remedies tried on it."""

    name: str
    ended: Ended
    helped_by: Settings | None = None
    fixed: Ended | None = None
    """The result with the remedy that helped."""
    tried: tuple[Settings, ...] = ()
    not_tried: tuple[Settings, ...] = ()
    is_left_out: bool = False
    """Whether no time was left to try it at all."""


@dataclass
class TimeBudget:
    """The time left for remedies, and for all trials."""

    seconds: float = TRYING_SECONDS
    deadline: float = field(default_factory=lambda: time.monotonic() + VISIT_SECONDS)

    def allowed(self, seconds: float) -> float:
        """These seconds, or as many as are left; 0 if too few are left for a trial."""
        left = self.deadline - time.monotonic()
        return min(seconds, left) if left >= LEAST_SECONDS else 0.0

    def spend(self, attempt: Callable[[Settings], Ended], settings: Settings) -> Ended:
        began = time.monotonic()
        try:
            return attempt(settings)
        finally:
            self.seconds -= time.monotonic() - began


def search(
    failed: Trial, to_try: Sequence[Settings], attempt: Callable[[Settings], Ended], budget: TimeBudget
) -> Trial:
    """Try the remedies in order until one helps or no time is left."""
    for number, settings in enumerate(to_try):
        if budget.allowed(budget.seconds) <= 0:
            return replace(failed, tried=tuple(to_try[:number]), not_tried=tuple(to_try[number:]))
        again = budget.spend(attempt, settings)
        if is_sound(again):
            return replace(failed, helped_by=settings, fixed=again, tried=tuple(to_try[: number + 1]))
    return replace(failed, tried=tuple(to_try))


def is_sound(ended: Ended) -> bool:
    """Whether it finished with every sum correct."""
    return ended.is_well and wrong_bytes(ended) is None


def wrong_bytes(ended: Ended) -> int | None:
    """The smallest tensor, in bytes, whose sum was wrong on any rank."""
    wrong = [int(row["num_bytes"]) for one in ended.returned for row in one["rows"] if not row["is_right"]]
    return min(wrong, default=None)


SLOW_PART = 0.1
SLOW_LATENCY_SECONDS = 10e-3


@dataclass(frozen=True)
class Reference:
    """The expected speed of the hardware, and its source."""

    words: str = ""
    bytes_per_second: float | None = None
    latency_seconds: float | None = None
    slow_bytes_per_second: float | None = None
    """A better limit for what is slow, if known."""
    slow_advice: str = "is something else running here? run it again when the machine is quiet"


def judge(trial: Trial, reference: Reference) -> Finding:
    if trial.is_left_out:
        advice = "fix what is bad or slow above, then run it again"
        return Finding(trial.name, "warn", "not tried: the checks before it took all the time", advice)
    if not is_sound(trial.ended):
        return _judge_failed(trial)
    numbers = numbers_of(trial.ended, reference)
    status, why = _judge_speed(numbers, reference)
    said = f"all-reduce is correct; {speed_in_words(numbers, reference)}{why}"
    return Finding(trial.name, status, said, reference.slow_advice if why else "", numbers)


def _judge_failed(trial: Trial) -> Finding:
    if trial.helped_by is not None and trial.fixed is not None:
        advice = f"{in_words(trial.helped_by)}   (found by trying: with that it works)"
        return Finding(trial.name, "bad", _failure(trial.ended), advice, numbers_of(trial.fixed))
    tried = ", ".join(map(in_words, trial.tried))
    left = ", ".join(map(in_words, trial.not_tried))
    advice = f"tried, and it did not help: {tried}" * bool(tried)
    advice += f"{'; ' * bool(tried)}no time was left to try: {left}" * bool(left)
    return Finding(trial.name, "bad", _failure(trial.ended), advice, numbers_of(trial.ended))


def _failure(ended: Ended) -> str:
    wrong = wrong_bytes(ended)
    if wrong is not None:
        return f"the sum of {size_in_short(wrong)} is WRONG, as gradients would be: do not train with this"
    return f"{'hangs' if ended.is_late else 'fails'}: {ended.why}"


def _judge_speed(numbers: Mapping[str, Number], reference: Reference) -> tuple[Status, str]:
    rate, latency = numbers.get("bytes_per_second"), numbers["latency_seconds"]
    slow = max(reference.slow_bytes_per_second or 0.0, SLOW_PART * (reference.bytes_per_second or 0.0))
    if isinstance(rate, float) and rate < slow:
        return "warn", "; that is slow"
    if isinstance(latency, float) and latency > SLOW_LATENCY_SECONDS:
        return "warn", "; every small message takes long"
    return "good", ""


def numbers_of(ended: Ended, reference: Reference | None = None) -> dict[str, Number]:
    """Latency of the smallest size, bandwidth of the largest, seconds of each, and the references."""
    if not ended.returned:
        return {}
    rows = ended.returned[0]["rows"]
    numbers: dict[str, Number] = {"latency_seconds": float(rows[0]["median_seconds"])}
    for row in rows:
        numbers[f"seconds_of_{row['num_bytes']}_bytes"] = float(row["best_seconds"])
    if len(rows) > 1:
        numbers["num_bytes"] = int(rows[-1]["num_bytes"])
        # Of two ranks, each sends the whole tensor once and receives it once.
        numbers["bytes_per_second"] = int(rows[-1]["num_bytes"]) / float(rows[-1]["best_seconds"])
    numbers["copy_bytes_per_second"] = float(ended.returned[0]["copy_bytes_per_second"])
    if reference is not None:
        numbers["expected_bytes_per_second"] = reference.bytes_per_second
        numbers["expected_latency_seconds"] = reference.latency_seconds
    return numbers


def speed_in_words(numbers: Mapping[str, Number], reference: Reference) -> str:
    """Latency and bandwidth, each with its reference."""
    latency = f"latency {float(numbers['latency_seconds'] or 0) * 1e6:.0f} us"
    if reference.latency_seconds:
        latency += f" (a plain socket: {reference.latency_seconds * 1e6:.0f} us)"
    if "bytes_per_second" not in numbers:
        return latency
    amount, rate = int(numbers["num_bytes"] or 0), float(numbers["bytes_per_second"] or 0)
    beside = f" ({reference.words})" if reference.words else ""
    return f"{size_in_short(amount)} at {rate_in_words(rate)}{beside}, {latency}"


def rate_in_words(bytes_per_second: float) -> str:
    giga = bytes_per_second / 1e9
    return f"{giga:.{0 if giga >= 20 else 1}f} GB/s" if giga >= 0.95 else f"{bytes_per_second / 1e6:.3g} MB/s"
