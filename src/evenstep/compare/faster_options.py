"""`train --suggest`: options that may be faster but change the arithmetic, measured on the task."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from torch import nn

from evenstep.compare.measure import trial
from evenstep.errors import EvenstepError, Preempted
from evenstep.launcher.launch import run_in_processes, variant
from evenstep.launcher.prepare import Prepared, prepare
from evenstep.record import Record
from evenstep.strategy_facts import STRATEGIES

STEPS = {"cpu": 30, "cuda": 120}
"""Steps of each trial; on a GPU, CUDA graphs are captured in the first few dozen."""


@dataclass(frozen=True)
class Change:
    """Something to try, and what it changes."""

    flag: str
    changes: Mapping[str, Any]
    means: str


TRIED = (
    Change("", {}, "the plan as given"),
    Change("--precision tf32", {"precision": "tf32"}, "matrix products with 10 mantissa bits"),
    Change("--precision bf16", {"precision": "bf16"}, "bfloat16 (7 mantissa bits) with float32 weights"),
    Change("--channels-last", {"channels_last": True}, "NHWC memory format: other kernels, other rounding"),
    Change("--compile", {"compile": True}, "torch.compile: fused kernels, other rounding"),
)


@dataclass(frozen=True)
class Suggestion:
    """What one change did."""

    flag: str
    means: str
    rounds: tuple[float, ...] = ()
    """Seconds of a usual step, once things have settled, in each round."""
    start_seconds: float = 0.0
    """The first step, in which compilers and libraries are set up."""
    loss: float = 0.0
    """Of the last step of the trial: the same samples for all."""
    problem: str = ""

    @property
    def step_seconds(self) -> float:
        return median(self.rounds)

    def pays_after(self, plain: Suggestion) -> int | None:
        """Steps after which it has made up for its start; None if it never does."""
        saved = plain.step_seconds - self.step_seconds
        return max(0, round((self.start_seconds - plain.start_seconds) / saved)) if saved > 0 else None


def suggest(source: Any, choices: Mapping[str, Any], log: Callable[[str], None]) -> list[Suggestion]:
    """The plan as it is first, then each change that makes sense for it; nothing is kept."""
    base = prepare(source, choices)
    changes = [change for change in TRIED if _makes_sense(base, change)]
    try:
        found = {change.flag: _tried(base, change, log) for change in changes}
        # Again in reverse order, so that a change in machine load affects all of them.
        for change in reversed(changes):
            first = found[change.flag]
            again = first if first.problem else _tried(base, change, log)
            if not again.problem:
                found[change.flag] = replace(first, rounds=(*first.rounds, *again.rounds))
        return list(found.values())
    finally:
        shutil.rmtree(base.folder, ignore_errors=True)


def _makes_sense(base: Prepared, change: Change) -> bool:
    plan, facts = base.plan, STRATEGIES[base.plan.strategy]
    if any(getattr(plan, name) == value for name, value in change.changes.items()):
        return False
    if change.flag == "--precision tf32":
        return plan.precision == "fp32" and plan.devices[0].startswith("cuda")
    if change.flag == "--precision bf16":
        return plan.precision in ("fp32", "tf32")
    if change.flag == "--channels-last":
        return "channels_last" not in facts.refusals and any(
            isinstance(one, nn.Conv2d) for one in base.task.model().modules()
        )
    return change.flag != "--compile" or facts.compiles


def _tried(base: Prepared, change: Change, log: Callable[[str], None]) -> Suggestion:
    log(f"trying {change.flag or 'the plan as given'}")
    folder = base.folder / f"trial-{TRIED.index(change)}"
    steps = STEPS.get(base.plan.devices[0].partition(":")[0], STEPS["cpu"])
    shutil.rmtree(folder, ignore_errors=True)
    try:
        prepared = variant(base, folder, steps=steps, **change.changes)
        for _ in run_in_processes(prepared, trial):
            pass
    except Preempted:
        raise
    except EvenstepError as error:
        if not change.flag:
            raise
        return Suggestion(change.flag, change.means, problem=str(error).splitlines()[0])
    taken = Record.read(folder).steps
    usual = median(step.seconds for step in taken[len(taken) // 2 :])
    return Suggestion(change.flag, change.means, (usual,), taken[0].seconds, taken[-1].loss)
