"""What to say of a trial: right or wrong, fast or slow, beside what the hardware should give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from evenstep.doctor.finding import Finding, Number, Status
from evenstep.doctor.remedies import in_words
from evenstep.doctor.trial import Trial, is_sound, wrong_bytes
from evenstep.doctor.trying import Ended
from evenstep.report.table import size

SLOW_PART = 0.1
SLOW_LATENCY_SECONDS = 10e-3


@dataclass(frozen=True)
class Reference:
    """What the hardware should give, and where that number comes from."""

    words: str = ""
    bytes_per_second: float | None = None
    latency_seconds: float | None = None
    slow_bytes_per_second: float | None = None
    """What is too slow, where that is known better."""
    slow_advice: str = "is something else running here? run it again when the machine is quiet"


def judge(trial: Trial, reference: Reference) -> Finding:
    """What to say of a pair."""
    if trial.is_left_out:
        advice = "heal what is bad or slow above, then run it again"
        return Finding(trial.name, "warn", "not tried: what came before took all the time there was", advice)
    if not is_sound(trial.ended):
        return _judge_failed(trial)
    numbers = numbers_of(trial.ended, reference)
    status, why = _judge_speed(numbers, reference)
    said = f"sums right; {speed_in_words(numbers, reference)}{why}"
    return Finding(trial.name, status, said, reference.slow_advice if why else "", numbers)


def _judge_failed(trial: Trial) -> Finding:
    if trial.helped_by is not None and trial.healed is not None:
        advice = f"{in_words(trial.helped_by)}   (found by trying: with that it works)"
        return Finding(trial.name, "bad", _failure(trial.ended), advice, numbers_of(trial.healed))
    tried = ", ".join(map(in_words, trial.tried))
    left = ", ".join(map(in_words, trial.not_tried))
    advice = f"tried, and it did not help: {tried}" * bool(tried)
    advice += f"{'; ' * bool(tried)}no time was left to try: {left}" * bool(left)
    return Finding(trial.name, "bad", _failure(trial.ended), advice, numbers_of(trial.ended))


def _failure(ended: Ended) -> str:
    wrong = wrong_bytes(ended)
    if wrong is not None:
        return f"the sum of {size_in_words(wrong)} is WRONG, as gradients would be: do not train with this"
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
    """Latency of the smallest size, bandwidth of the largest, seconds of each, and what stands beside them."""
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
    """Latency and bandwidth, each beside what the hardware should give."""
    latency = f"latency {float(numbers['latency_seconds'] or 0) * 1e6:.0f} us"
    if reference.latency_seconds:
        latency += f" (a plain socket: {reference.latency_seconds * 1e6:.0f} us)"
    if "bytes_per_second" not in numbers:
        return latency
    amount, rate = int(numbers["num_bytes"] or 0), float(numbers["bytes_per_second"] or 0)
    beside = f" ({reference.words})" if reference.words else ""
    return f"{size_in_words(amount)} at {rate_in_words(rate)}{beside}, {latency}"


def rate_in_words(bytes_per_second: float) -> str:
    """`1.5 GB/s`, or `80 MB/s`."""
    giga = bytes_per_second / 1e9
    return f"{giga:.{0 if giga >= 20 else 1}f} GB/s" if giga >= 0.95 else f"{bytes_per_second / 1e6:.3g} MB/s"


def size_in_words(num_bytes: int) -> str:
    """`64 MiB`, or `4 KiB`."""
    return size(num_bytes) if num_bytes >= 2**20 else f"{num_bytes // 2**10} KiB"
