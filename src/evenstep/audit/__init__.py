"""Which samples every step used, one line a step, and whether any of them was repeated or missed.

A run that was interrupted and resumed, perhaps more than once, is a chain: its folders are read as one training. Work
that was lost in a crash and done again counts once. Memory is bounded by one epoch: a byte for each of its samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from evenstep.audit.judge import Audit, Judge, read_chain
from evenstep.audit.samples import FILE, SamplesWriter, read_lines

__all__ = ["FILE", "Audit", "SamplesWriter", "audit"]


def audit(runs: Sequence[str | Path]) -> Audit:
    """Read one run, or all runs of a training that was interrupted, and count what was repeated and missed."""
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
                judge.take(line, run)
    return judge.finish(chain[-1])
