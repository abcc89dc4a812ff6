"""Measures strategies on the user's task and machine, and whether each matches training on one device.

Blocks of steps of each configuration run in alternating order, so that a change in machine load affects all of them.
"""

from __future__ import annotations

import datetime
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

from evenstep.compare.measure import Block, measure, usual
from evenstep.errors import EvenstepError, PlanError, Preempted
from evenstep.launcher.launch import run_in_processes, variant
from evenstep.launcher.prepare import Prepared, free_name, label_of, load_strategies, prepare
from evenstep.plan import RUNS
from evenstep.predict.forecast import expectation
from evenstep.record import PARTS, Measurement, Record
from evenstep.report.comparison import Comparison, LargerBatch, Parity, Range, Row, marking_stop
from evenstep.report.recommend import advise, best
from evenstep.strategy_facts import REFERENCE, STRATEGIES
from evenstep.verify import Configuration, Depth, check
from evenstep.verify.configurations import find_configs, plan_of, with_accumulation, with_mesh, with_schedules

__all__ = ["CompareRequest", "Comparison", "Row", "compare"]

TIMES = 4
"""The larger batch that is tried."""
SHORT_STEP_SECONDS = 0.02
"""A larger batch is tried only where steps are shorter than this."""
PARITY_STEPS = 3
BIT_FOR_BIT = "evenstep verify --exact compares virtual replicas bit for bit"
TRIAL = Block(warm_up=3, steps=4, special=2)
BLOCK_SECONDS = 0.8
"""About the seconds of a block's steps in the slowest configuration; special steps and warm-up come on top."""
LEAST_STEPS, MOST_STEPS = 6, 200


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
    virtual_replicas: int | None = None
    """Virtual replicas: each configuration is then measured with and without."""
    shares: str | None = None
    """Of devices in a global batch: each configuration that they fit is then measured with and without."""
    mesh: str | None = None
    """How ranks are arranged under strategies that split models."""
    accumulate: int = 1
    """Micro-batches of a step, in all rows but the first."""
    schedules: str | None = None
    """Of pipelines, with commas: a row for each."""
    choices: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the Plan: batch, precision, workers ..."""
    command: str = ""


def compare(request: CompareRequest, log: Callable[[str], None] = lambda line: None) -> tuple[Comparison, Path]:
    """Measure every configuration, and write the comparison beside its Records; returns it and its folder."""
    load_strategies(request.strategies, request.source, request.choices.get("seed"))
    configs = find_configs(request.strategies, request.devices, request.virtual_replicas, request.shares)
    configs = with_schedules(with_mesh(configs, request.mesh), request.schedules)
    configs = with_accumulation(configs, request.accumulate)
    label = label_of(request.source, request.choices.get("options", {}))
    name = request.choices.get("name") or free_name(label, "compare", request.choices.get("out") or RUNS)
    first = {"strategy": REFERENCE, "devices": list(configs[0].devices), "name": name}
    base = prepare(request.source, {**request.choices, **first})
    try:
        for config in configs:
            plan_of(base.plan, config)
    except PlanError:
        shutil.rmtree(base.folder)
        raise
    with marking_stop(base.folder):
        return _measured(base, configs, request, log), base.folder


def _measured(
    base: Prepared, configs: Sequence[Configuration], request: CompareRequest, log: Callable[[str], None]
) -> Comparison:
    runner = BlockRunner(base, configs[0], log, sync_batchnorm=request.sync_batchnorm)
    block = runner.block_for(configs, request.steps)
    configs = [config for config in configs if config.label not in runner.left_out]
    parities = _parities(base, configs, request.sync_batchnorm, log)
    runner.run_rounds(configs, block, request.rounds)
    rows = runner.rows(configs, parities)
    comparison = Comparison(
        task=str(request.source),
        batch=base.plan.batch,
        precision=base.plan.precision,
        steps=block.steps,
        rounds=request.rounds,
        rows=rows,
        left_out=runner.left_out,
        machine=runner.taken[0].record.machine,
        command=request.command,
        created=datetime.datetime.now().isoformat(timespec="minutes"),
    )
    # Written now, so that a failure with the larger batch does not lose it.
    replace(comparison, advice=advise(comparison)).write(base.folder)
    comparison = replace(comparison, larger_batch=_larger_batch(runner, comparison, configs, block))
    expected = expectation([taken.record for taken in runner.taken if taken.config.virtual_replicas is None])
    comparison = replace(comparison, advice=[*advise(comparison), *expected])
    comparison.write(base.folder)
    return comparison


def _parities(
    base: Prepared, configs: Sequence[Configuration], sync_batchnorm: bool, log: Callable[[str], None]
) -> dict[Configuration, tuple[Parity, str]]:
    """Whether each configuration matches `single`, or why that is unknown."""
    found: dict[Configuration, tuple[Parity, str]] = {configs[0]: ("reference", "the reference for the other rows")}
    found |= {config: ("unknown", BIT_FOR_BIT) for config in configs if config.virtual_replicas is not None}
    configs = [config for config in configs if config.virtual_replicas is None]
    log("checking that every strategy matches single")
    folder = base.folder / "verify"
    try:
        depth = Depth(steps=PARITY_STEPS, own_precision=False, sync_batchnorm=sync_batchnorm)
        verdicts = check(base, configs[1:], folder, depth) if configs[1:] else {}
    except Preempted:
        raise
    except EvenstepError as error:
        return found | {config: ("unknown", str(error).splitlines()[0]) for config in configs[1:]}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for config, verdict in verdicts.items():
        why = ". ".join(part.rstrip(".") for part in (verdict.sentence, verdict.why, verdict.advice) if part)
        found[config] = ("same" if verdict.is_same else "differs", why)
    return found


def _larger_batch(
    runner: BlockRunner, comparison: Comparison, configs: Sequence[Configuration], block: Block
) -> LargerBatch | None:
    """The speed of the fastest configuration with a larger batch, if its steps are short."""
    row = best(comparison)
    num_samples = runner.base.lengths.rest
    is_too_large = num_samples is not None and TIMES * comparison.batch > num_samples
    if is_too_large or row.step_seconds.middle > SHORT_STEP_SECONDS:
        return None
    config = [one for one in configs if one.label not in runner.left_out][comparison.rows.index(row)]
    runner.log(f"measuring {config.label} with a batch {TIMES} times as large")
    taken = runner.run(config, f"batch-x{TIMES}", block, batch=TIMES * comparison.batch)
    if taken is None:
        del runner.left_out[config.label]
        return None
    shutil.rmtree(taken.folder)
    rate = taken.measurement.samples / taken.measurement.seconds
    return LargerBatch(times=TIMES, label=row.label, samples_per_second=rate)


@dataclass(frozen=True)
class MeasuredBlock:
    config: Configuration
    folder: Path
    record: Record
    measurement: Measurement
    start_seconds: float


@dataclass
class BlockRunner:
    """The blocks of all configurations, and why some could not run."""

    base: Prepared
    reference: Configuration
    """The baseline; if it fails, the comparison fails."""
    log: Callable[[str], None]
    taken: list[MeasuredBlock] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    sync_batchnorm: bool = False

    def block_for(self, configs: Sequence[Configuration], steps: int | None) -> Block:
        """Try every configuration briefly: whether it runs, and how many steps make a block of about a second."""
        slowest = 0.0
        for config in configs:
            self.log(f"trying {config.label}")
            trial = self.run(config, "trial", TRIAL)
            if trial is not None:
                shutil.rmtree(trial.folder)
                slowest = max(slowest, median(trial.measurement.step_seconds))
        steps = steps or min(MOST_STEPS, max(LEAST_STEPS, int(BLOCK_SECONDS / max(slowest, 1e-6))))
        return Block(warm_up=max(3, steps // 5), steps=steps, special=max(4, steps // 2))

    def run_rounds(self, configs: Sequence[Configuration], block: Block, rounds: int) -> None:
        """Run every configuration once per round, in alternating order."""
        for number in range(1, rounds + 1):
            for config in configs if number % 2 else reversed(configs):
                if config.label not in self.left_out:
                    self.log(f"round {number} of {rounds}: {config.label}")
                    taken = self.run(config, f"round-{number}", block)
                    self.taken += [taken] if taken is not None else []

    def run(self, config: Configuration, name: str, block: Block, batch: int | None = None) -> MeasuredBlock | None:
        """One block in new processes; None if it failed, and the configuration is then left out."""
        cut = f"-v{config.virtual_replicas}" if config.virtual_replicas is not None else ""
        cut += f"-shares-{config.shares}" if config.shares is not None else ""
        cut += f"-{config.schedule}" if config.schedule is not None else ""
        folder = self.base.folder / f"{config.strategy}-{len(config.devices)}{cut}-{name}"
        try:
            prepared = variant(
                self.base,
                folder,
                strategy=config.strategy,
                devices=config.devices,
                steps=block.plan_steps,
                sync_batchnorm=self._synchronises(config),
                virtual_replicas=config.virtual_replicas,
                shares=config.shares,
                mesh=config.mesh,
                accumulate=config.accumulate,
                pipeline_schedule=config.schedule or self.base.plan.pipeline_schedule,
                batch=batch or self.base.plan.batch,
            )
            began = time.time()
            for _ in run_in_processes(prepared, partial(measure, block=block)):
                pass
            record = Record.read(folder)
        except Preempted:
            raise
        except EvenstepError as error:
            if config == self.reference and batch is None:
                raise
            self.left_out[config.label] = str(error).splitlines()[0]
            return None
        assert record.measurement is not None
        return MeasuredBlock(config, folder, record, record.measurement, record.measurement.first_step_at - began)

    def _synchronises(self, config: Configuration) -> bool:
        can = STRATEGIES[config.strategy].processes_per_device and config.virtual_replicas is None
        return self.sync_batchnorm and can

    def rows(self, configs: Sequence[Configuration], parities: Mapping[Configuration, tuple[Parity, str]]) -> list[Row]:
        return [self._row(config, *parities[config]) for config in configs if config.label not in self.left_out]

    def _row(self, config: Configuration, parity: Parity, why: str) -> Row:
        taken = [one for one in self.taken if one.config == config]
        measured = [one.measurement for one in taken]
        bare = [one.without_communication_seconds for one in measured]
        peaks = [one.peak_bytes for one in measured]
        kind = config.devices[0].partition(":")[0]
        return Row(
            strategy=config.strategy,
            devices=list(config.devices),
            virtual_replicas=config.virtual_replicas,
            shares=config.shares,
            accumulate=config.accumulate,
            mesh=config.mesh,
            schedule=config.schedule,
            samples_per_second=Range.of([one.samples / one.seconds for one in measured]),
            step_seconds=Range.of([usual(one.step_seconds, kind) for one in measured]),
            parts={name: fmean(one.parts[name] for one in measured) for name in PARTS},
            without_input_seconds=Range.of([one.without_input_seconds for one in measured]),
            without_communication_seconds=Range.of([one for one in bare if one is not None]) if bare[0] else None,
            sent_bytes=max(one.sent_bytes for one in measured),
            peak_bytes={name: max(peak.get(name, 0) for peak in peaks) for name in peaks[0]},
            start_seconds=Range.of([one.start_seconds for one in taken]),
            parity=parity,
            why=why,
            threads=int(taken[0].record.machine.get("threads", 0)),
            runs=[one.folder.name for one in taken],
        )
