"""Strategies measured side by side on the user's own task and machine, with what each of them learns beside it."""

from __future__ import annotations

import datetime
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from evenstep.compare.blocks import Race, Taken
from evenstep.compare.ways import find_ways
from evenstep.errors import EvenstepError, PlanError
from evenstep.launcher.prepare import Prepared, free_name, label_of, prepare
from evenstep.report.advice import advise, best
from evenstep.report.comparison import Comparison, LargerBatch, Parity, Row
from evenstep.verify import Depth, Way, check
from evenstep.verify.ways import plan_of
from evenstep.worker.measure import Block

TIMES = 4
"""The larger batch that is tried."""
SHORT_STEP_SECONDS = 0.02
"""Only of steps shorter than this it is asked whether they are too small."""
PARITY_STEPS = 3


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What to compare, and with how much care."""

    source: str
    strategies: str | None = None
    devices: str = "1,2"
    rounds: int = 3
    steps: int | None = None
    """Of a block; as many as take about a second, if not given."""
    sync_batchnorm: bool = False
    """Under ddp and fsdp, which can."""
    choices: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the Plan: batch, precision, workers ..."""
    command: str = ""


def compare(asked: Asked, say: Callable[[str], None] = lambda line: None) -> tuple[Comparison, Path]:
    """Measure every way, and write the comparison beside the Records that it is made from; and its folder."""
    ways = find_ways(asked.strategies, asked.devices)
    name = asked.choices.get("name") or free_name(label_of(asked.source), "compare")
    first = {"strategy": "single", "devices": list(ways[0].devices), "name": name}
    base = prepare(asked.source, {**asked.choices, **first})
    try:
        for way in ways:
            plan_of(base.plan, way)
    except PlanError:
        shutil.rmtree(base.folder)
        raise
    race = Race(base, base.folder, ways[0], say, sync_batchnorm=asked.sync_batchnorm)
    block = race.block_for(ways, asked.steps)
    ways = [way for way in ways if way.label not in race.left_out]
    parities = _parities(base, ways, asked.sync_batchnorm, say)
    race.run_rounds(ways, block, asked.rounds)
    rows = race.rows(ways, parities)
    comparison = Comparison(
        task=str(asked.source),
        batch=base.plan.batch,
        precision=base.plan.precision,
        steps=block.steps,
        rounds=asked.rounds,
        rows=rows,
        left_out=race.left_out,
        machine=race.taken[0].record.machine,
        command=asked.command,
        created=datetime.datetime.now().isoformat(timespec="minutes"),
    )
    # Now: whatever comes of the larger batch, this was measured.
    replace(comparison, advice=advise(comparison)).write(base.folder)
    comparison = replace(comparison, larger_batch=_larger_batch(race, comparison, ways, block))
    comparison = replace(comparison, advice=advise(comparison))
    comparison.write(base.folder)
    return comparison, base.folder


def _parities(
    base: Prepared, ways: Sequence[Way], sync_batchnorm: bool, say: Callable[[str], None]
) -> dict[Way, tuple[Parity, str]]:
    """Whether each way learns what `single` learns; a check that cannot be made says so."""
    found: dict[Way, tuple[Parity, str]] = {ways[0]: ("reference", "what the others are compared with")}
    say("does every way learn the same?")
    folder = base.folder / "verify"
    try:
        depth = Depth(steps=PARITY_STEPS, own_precision=False, sync_batchnorm=sync_batchnorm)
        verdicts = check(base, ways[1:], folder, depth) if ways[1:] else {}
    except EvenstepError as error:
        return found | {way: ("unknown", str(error).splitlines()[0]) for way in ways[1:]}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for way, verdict in verdicts.items():
        why = ". ".join(part.rstrip(".") for part in (verdict.sentence, verdict.why, verdict.advice) if part)
        found[way] = ("same" if verdict.is_same else "differs", why)
    return found


def _larger_batch(race: Race, comparison: Comparison, ways: Sequence[Way], block: Block) -> LargerBatch | None:
    """Whether the fastest way would make more of a larger batch; asked of short steps only."""
    row = best(comparison)
    num_samples = race.base.lengths.rest
    is_too_large = num_samples is not None and TIMES * comparison.batch > num_samples
    if is_too_large or row.step_seconds.middle > SHORT_STEP_SECONDS:
        return None
    way = next(way for way in ways if way.label == row.label)
    race.say(f"a batch {TIMES} times as large: {way.label}")
    taken = race.run(way, f"batch-x{TIMES}", block, batch=TIMES * comparison.batch)
    if taken is None:
        del race.left_out[way.label]
        return None
    shutil.rmtree(taken.folder)
    return LargerBatch(times=TIMES, label=row.label, samples_per_second=_rate(taken))


def _rate(taken: Taken) -> float:
    return taken.measurement.samples / taken.measurement.seconds


__all__ = ["Asked", "Comparison", "Row", "compare"]
