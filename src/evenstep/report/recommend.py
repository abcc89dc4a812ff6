"""Which configuration to use and why; and its bottleneck, with the most that removing it could gain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from evenstep.report.comparison import Comparison, Row
from evenstep.strategy_facts import REFERENCE

CLEAR = 1.05
"""Configurations within this factor of the fastest, or within its range, count as equally fast."""
EVEN = 1.25
"""Devices whose peaks differ by less hold the same."""
WORTH_NAMING = 1.10
NOTICED = 0.05
"""A smaller part of a step than this is noise."""
STEADY = 1.5
"""Measurements of the same thing that differ by a larger factor are unreliable."""
SMALL_BATCH = 1.5
"""Samples a second with a larger batch over those now: from here on, the batch is too small for its overhead."""


def advise(comparison: Comparison) -> list[str]:
    """Doubts about the times, if any; two sentences that recommend a configuration, and one about its bottleneck."""
    row, doubts = best(comparison), unsteady(comparison)
    first = "Recommended" if not doubts else "Recommended, if these times hold"
    sentences = [f"{first}: {_recommendation(comparison, row)}", _others(comparison, row), bottleneck(comparison, row)]
    if _is_too_fast(comparison, row):
        sentences = [f"Nothing is recommended: {row.label} cannot be {comparison.speedup(row):.2f}x as fast."]
    return [*doubts, *sentences, *_costs_of_replicas(comparison), *_gains_of_shares(comparison)]


def _gains_of_shares(comparison: Comparison) -> list[str]:
    """What uneven shares give each configuration, if they were measured."""
    gains = [
        f"{before.label} {row.samples_per_second.middle / before.samples_per_second.middle:.2f}x the speed of equal"
        for row, before in _pairs(comparison, lambda row: replace(row, shares=None))
    ]
    return [f"Uneven shares give: {', '.join(gains)}."] if gains else []


def _costs_of_replicas(comparison: Comparison) -> list[str]:
    """What virtual replicas cost each configuration, if they were measured."""
    costs = [
        f"{before.label} {row.step_seconds.middle / before.step_seconds.middle:.2f}x the step"
        for row, before in _pairs(comparison, lambda row: replace(row, virtual_replicas=None))
    ]
    return (
        [f"Bit-identical results on any number of devices (--virtual-replicas) cost: {', '.join(costs)}."]
        if costs
        else []
    )


def _pairs(comparison: Comparison, without: Callable[[Row], Row]) -> list[tuple[Row, Row]]:
    """Rows that have something, each with the row that differs in having it not."""
    rows = {row.label: row for row in comparison.rows}
    pairs = [(row, rows.get(without(row).label)) for row in comparison.rows]
    return [(row, before) for row, before in pairs if before is not None and before is not row]


def unsteady(comparison: Comparison) -> list[str]:
    """A warning about configurations whose times contradict each other, if there are any."""
    found = {
        "rounds differ too much": [_rounds_differ(row) for row in comparison.rows],
        "parts of a step do not add up to the step": [not _parts_add_up(row) for row in comparison.rows],
        "speed is more than the number of devices allows": [_is_too_fast(comparison, row) for row in comparison.rows],
    }
    reasons = [
        f"{', '.join(row.label for row, one in zip(comparison.rows, is_so, strict=True) if one)}: {what}"
        for what, is_so in found.items()
        if any(is_so)
    ]
    if not reasons:
        return []
    return [
        f"Do not rely on these times ({'; '.join(reasons)}): something else ran on this machine, or the measurements "
        "are too short. Measure again when it is quiet, or with more --rounds and --steps."
    ]


def _is_too_fast(comparison: Comparison, row: Row) -> bool:
    """Whether this row or the first one was slowed down."""
    return comparison.speedup(row) > STEADY * len(row.devices) / len(comparison.rows[0].devices)


def _rounds_differ(row: Row) -> bool:
    return row.samples_per_second.high > STEADY * row.samples_per_second.low


def _parts_add_up(row: Row) -> bool:
    whole = row.step_seconds.middle
    return whole / STEADY < sum(row.parts.values()) < whole * STEADY


def best(comparison: Comparison) -> Row:
    """The fastest that matches single; of those about as fast, the one with even memory and fewer devices."""
    # Virtual replicas are there for their bits.
    sound = [row for row in comparison.rows if row.is_sound and row.virtual_replicas is None]
    fastest = max(sound, key=lambda row: row.samples_per_second.middle)
    rate = fastest.samples_per_second
    close = [
        row
        for row in sound
        if row.samples_per_second.middle * CLEAR >= rate.middle or row.samples_per_second.high >= rate.low
    ]
    return min(close, key=_preference)


def _preference(row: Row) -> tuple[bool, int, bool, float]:
    return imbalance(row) > EVEN, len(row.devices), row.strategy != REFERENCE, -row.samples_per_second.middle


def imbalance(row: Row) -> float:
    """How many times as much the fullest device holds as the emptiest."""
    peaks = [peak for peak in row.peak_bytes.values() if peak > 0]
    return max(peaks) / min(peaks) if peaks else 1.0


def _recommendation(comparison: Comparison, row: Row) -> str:
    if len(row.devices) == len(comparison.rows[0].devices):
        why = (
            "no other strategy that matches single is clearly faster"
            if len(comparison.rows) > 1
            else "nothing else ran"
        )
        return f"{row.label}, with {_rate(row)}; {why}{_doubt(row)}."
    of = comparison.rows[0].label
    return (
        f"{row.label}, {comparison.speedup(row):.2f}x as fast as {of} on {len(row.devices)} devices, "
        f"{comparison.efficiency(row):.0%} efficiency, {_rate(row)}; {_memory(row)}{_doubt(row)}."
    )


def _doubt(row: Row) -> str:
    return f"; whether it matches single was not checked ({row.why})" if row.parity == "unknown" else ""


def _others(comparison: Comparison, chosen: Row) -> str:
    parts = [_other(comparison, row) for row in comparison.rows if row is not chosen]
    parts += [f"{label} could not run" for label in comparison.left_out]
    return f"Other configurations: {'; '.join(parts)}." if parts else "There is nothing to compare it with."


def _other(comparison: Comparison, row: Row) -> str:
    text = f"{row.label} {comparison.speedup(row):.2f}x"
    communication = _communication(row)
    if communication is not None:
        text += f" ({communication.gain * comparison.speedup(row):.2f}x with free communication)"
    if len(row.devices) > 1 and imbalance(row) > EVEN:
        text += f" and {_memory(row)}"
    return text if row.is_sound else f"{text}, but it does not match single"


def _memory(row: Row) -> str:
    """Whether devices use the same memory; one process on the CPU has one number for all its devices."""
    if len(row.peak_bytes) < 2:
        return "its devices share one memory" if len(row.devices) > 1 else "one device"
    ratio = imbalance(row)
    if ratio <= EVEN:
        return "all devices use about the same memory"
    fullest = max(row.peak_bytes, key=lambda name: row.peak_bytes[name])
    return f"{fullest} uses {ratio:.1f}x the memory of the device that uses least"


def _rate(row: Row) -> str:
    rate = row.samples_per_second
    return f"{rate.middle:,.0f} samples/s (range {rate.low:,.0f} to {rate.high:,.0f})"


@dataclass(frozen=True)
class Bottleneck:
    """What limits a step, and how many times as fast it could be at most without that."""

    gain: float
    sentence: str


def bottleneck(comparison: Comparison, row: Row) -> str:
    """What limits the chosen configuration, from the measurements without it."""
    crowded = _threads(comparison, row)
    if crowded is not None:
        return crowded
    named = (_input(row), _communication(row), _bubble(row), _batch(comparison, row))
    found = [one for one in named if one is not None]
    if not found:
        share = (row.parts.get("forward", 0.0) + row.parts.get("backward", 0.0)) / (sum(row.parts.values()) or 1.0)
        return (
            f"Bottleneck: none stands out; forward and backward take {share:.0%} of the step. "
            "Try a faster device, or --precision bf16 if the task allows it."
        )
    return f"Bottleneck: {max(found, key=lambda one: one.gain).sentence}"


def _input(row: Row) -> Bottleneck | None:
    gain = row.step_seconds.middle / row.without_input_seconds.middle
    waited = row.parts["input"]
    if gain < WORTH_NAMING or waited < NOTICED * row.step_seconds.middle:
        return None
    return Bottleneck(
        gain,
        f"input. A step waits {_ms(waited)} of {_ms(row.step_seconds.middle)} for its batch; with the batch already "
        f"loaded it takes {_ms(row.without_input_seconds.middle)}, at most {gain:.1f}x as fast. More "
        "--workers, --resident, or tensors instead of a dataset that reads sample by sample.",
    )


def _communication(row: Row) -> Bottleneck | None:
    if row.without_communication_seconds is None or row.parts["communication"] < NOTICED * row.step_seconds.middle:
        return None
    gain = row.step_seconds.middle / row.without_communication_seconds.middle
    if gain < WORTH_NAMING:
        return None
    return Bottleneck(
        gain,
        f"communication. {_ms(row.parts['communication'])} of {_ms(row.step_seconds.middle)} do not overlap with "
        f"backward; without communication, a step takes {_ms(row.without_communication_seconds.middle)}, at most "
        f"{gain:.1f}x as fast. A larger --batch communicates less often.",
    )


def _bubble(row: Row) -> Bottleneck | None:
    whole, waited = sum(row.parts.values()), row.parts.get("bubble", 0.0)
    gain = whole / ((whole - waited) or 1.0)
    if gain < WORTH_NAMING:
        return None
    return Bottleneck(
        gain,
        f"the bubble of the pipeline. A rank waits {_ms(waited)} of {_ms(whole)} until others have computed; without "
        f"that, a step is at most {gain:.1f}x as fast. More micro-batches (--accumulate) make it smaller, and so do "
        "--pipeline-schedule interleaved and zero-bubble.",
    )


def _batch(comparison: Comparison, row: Row) -> Bottleneck | None:
    larger = comparison.larger_batch
    if larger is None or larger.label != row.label:
        return None
    gain = larger.samples_per_second / row.samples_per_second.middle
    if gain < SMALL_BATCH:
        return None
    return Bottleneck(
        gain,
        f"the batch, which is small for this model: --batch {larger.times * comparison.batch} gives {gain:.1f}x as "
        f"many samples/s ({larger.samples_per_second:,.0f}). A larger batch changes the result of training.",
    )


def _threads(comparison: Comparison, row: Row) -> str | None:
    """More threads than cores, on the CPU."""
    cores, num = comparison.machine.get("cores", 0), row.devices.count("cpu")
    used = num * max(1, row.threads)
    if not cores or used <= cores:
        return None
    each = f"{row.threads} thread{'s' * (row.threads > 1)}"
    return (
        f"Bottleneck: threads. {num} CPU device{'s' * (num > 1)} x {each} share {cores} cores and wait for each other; "
        f"use --devices {max(1, cores // max(1, row.threads))}, or fewer --threads."
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.2f} ms" if seconds < 0.1 else f"{seconds * 1000:.0f} ms"
