"""Blocks of steps of each configuration, in alternating order, so that a change in machine load affects all of them."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean, median

from evenstep.compare.measure import Block, measure, usual
from evenstep.errors import EvenstepError, Preempted
from evenstep.launcher.launch import run_in_processes, variant
from evenstep.launcher.prepare import Prepared
from evenstep.record import PARTS, Measurement, Record
from evenstep.report.comparison import Parity, Range, Row
from evenstep.strategy_facts import STRATEGIES
from evenstep.verify import Configuration

TRIAL = Block(warm_up=3, steps=4, special=2)
BLOCK_SECONDS = 0.8
"""About the seconds of a block's steps in the slowest configuration; special steps and warm-up come on top."""
LEAST_STEPS, MOST_STEPS = 6, 200


@dataclass(frozen=True)
class MeasuredBlock:
    """One block, as it was measured."""

    config: Configuration
    folder: Path
    record: Record
    measurement: Measurement
    start_seconds: float


@dataclass
class Race:
    """The blocks of all configurations, and why some could not run."""

    base: Prepared
    folder: Path
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
        folder = self.folder / f"{config.strategy}-{len(config.devices)}-{name}"
        try:
            prepared = variant(
                self.base,
                folder,
                strategy=config.strategy,
                devices=config.devices,
                steps=block.plan_steps,
                sync_batchnorm=self.sync_batchnorm and STRATEGIES[config.strategy].processes_per_device,
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

    def rows(self, configs: Sequence[Configuration], parities: Mapping[Configuration, tuple[Parity, str]]) -> list[Row]:
        """One row for each configuration that completed."""
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
