"""Measures strategies on the user's task and machine, and whether each matches training on one device."""

from __future__ import annotations

import datetime
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from evenstep.compare.blocks import MeasuredBlock, Race
from evenstep.compare.measure import Block
from evenstep.errors import EvenstepError, PlanError
from evenstep.launcher.prepare import Prepared, free_name, label_of, load_strategies, prepare
from evenstep.report.comparison import Comparison, LargerBatch, Parity, Row
from evenstep.report.recommend import advise, best
from evenstep.strategy_facts import REFERENCE
from evenstep.verify import Configuration, Depth, check
from evenstep.verify.configurations import find_configs, plan_of

TIMES = 4
"""The larger batch that is tried."""
SHORT_STEP_SECONDS = 0.02
"""A larger batch is tried only where steps are shorter than this."""
PARITY_STEPS = 3


@dataclass(frozen=True, kw_only=True)
class CompareRequest:
    """What to compare, and how thoroughly."""

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


def compare(request: CompareRequest, log: Callable[[str], None] = lambda line: None) -> tuple[Comparison, Path]:
    """Measure every configuration, and write the comparison beside its Records; returns it and its folder."""
    load_strategies(request.strategies, request.source, request.choices.get("seed"))
    configs = find_configs(request.strategies, request.devices)
    name = request.choices.get("name") or free_name(label_of(request.source), "compare")
    first = {"strategy": REFERENCE, "devices": list(configs[0].devices), "name": name}
    base = prepare(request.source, {**request.choices, **first})
    try:
        for config in configs:
            plan_of(base.plan, config)
    except PlanError:
        shutil.rmtree(base.folder)
        raise
    race = Race(base, base.folder, configs[0], log, sync_batchnorm=request.sync_batchnorm)
    block = race.block_for(configs, request.steps)
    configs = [config for config in configs if config.label not in race.left_out]
    parities = _parities(base, configs, request.sync_batchnorm, log)
    race.run_rounds(configs, block, request.rounds)
    rows = race.rows(configs, parities)
    comparison = Comparison(
        task=str(request.source),
        batch=base.plan.batch,
        precision=base.plan.precision,
        steps=block.steps,
        rounds=request.rounds,
        rows=rows,
        left_out=race.left_out,
        machine=race.taken[0].record.machine,
        command=request.command,
        created=datetime.datetime.now().isoformat(timespec="minutes"),
    )
    # Written now, so that a failure with the larger batch does not lose it.
    replace(comparison, advice=advise(comparison)).write(base.folder)
    comparison = replace(comparison, larger_batch=_larger_batch(race, comparison, configs, block))
    comparison = replace(comparison, advice=advise(comparison))
    comparison.write(base.folder)
    return comparison, base.folder


def _parities(
    base: Prepared, configs: Sequence[Configuration], sync_batchnorm: bool, log: Callable[[str], None]
) -> dict[Configuration, tuple[Parity, str]]:
    """Whether each configuration matches `single`, or why that is unknown."""
    found: dict[Configuration, tuple[Parity, str]] = {configs[0]: ("reference", "the reference for the other rows")}
    log("checking that every strategy matches single")
    folder = base.folder / "verify"
    try:
        depth = Depth(steps=PARITY_STEPS, own_precision=False, sync_batchnorm=sync_batchnorm)
        verdicts = check(base, configs[1:], folder, depth) if configs[1:] else {}
    except EvenstepError as error:
        return found | {config: ("unknown", str(error).splitlines()[0]) for config in configs[1:]}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for config, verdict in verdicts.items():
        why = ". ".join(part.rstrip(".") for part in (verdict.sentence, verdict.why, verdict.advice) if part)
        found[config] = ("same" if verdict.is_same else "differs", why)
    return found


def _larger_batch(
    race: Race, comparison: Comparison, configs: Sequence[Configuration], block: Block
) -> LargerBatch | None:
    """The speed of the fastest configuration with a larger batch, if its steps are short."""
    row = best(comparison)
    num_samples = race.base.lengths.rest
    is_too_large = num_samples is not None and TIMES * comparison.batch > num_samples
    if is_too_large or row.step_seconds.middle > SHORT_STEP_SECONDS:
        return None
    config = next(config for config in configs if config.label == row.label)
    race.log(f"measuring {config.label} with a batch {TIMES} times as large")
    taken = race.run(config, f"batch-x{TIMES}", block, batch=TIMES * comparison.batch)
    if taken is None:
        del race.left_out[config.label]
        return None
    shutil.rmtree(taken.folder)
    return LargerBatch(times=TIMES, label=row.label, samples_per_second=_rate(taken))


def _rate(taken: MeasuredBlock) -> float:
    return taken.measurement.samples / taken.measurement.seconds


__all__ = ["CompareRequest", "Comparison", "Row", "compare"]
