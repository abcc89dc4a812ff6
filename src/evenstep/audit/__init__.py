"""Counts which samples each step used, from one line per step, and reports samples that were repeated or missed.

The folders of a run that was interrupted and resumed are read as one training; steps that were lost in a crash and
repeated count once. Memory: one byte for each sample of the data, for at most 2**32 samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from evenstep.audit.coverage import Audit, Judge
from evenstep.audit.sample_log import FILE, SamplesWriter, read_chain, read_lines

__all__ = ["FILE", "Audit", "SamplesWriter", "audit"]


def audit(runs: Sequence[str | Path]) -> Audit:
    """Count the repeated and missed samples of one run, or of all runs of a training that was interrupted."""
    chain = read_chain(runs)
    judge = Judge(chain)
    for run, following in zip(chain, [*chain[1:], None], strict=True):
        judge.begin(run)
        for lost in run.lost_files:
            judge.redone += sum(len(line.ids) for line in read_lines(lost, judge.problems))
        for line in read_lines(run.file, judge.problems):
            if following is not None and line.step > following.step:
                judge.redone += len(line.ids)
            else:
                judge.add(line, run)
    return judge.finish(chain[-1])
