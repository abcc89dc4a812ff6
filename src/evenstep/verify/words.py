"""Sentences about differences."""

from __future__ import annotations

import math

from evenstep.verify.differences import STEP, Difference
from evenstep.verify.evidence import Failure
from evenstep.worker.disturbed import STRENGTH

_THINGS = {
    "gradients": "the gradient of {name}",
    "weights": "{name}",
    "optimizer": "the optimizer's {name}",
    "evaluation": "the evaluation's {name}",
    "checkpoint": "{name} of the run that goes on from its checkpoint",
    "loss": "the loss",
    "samples": "the set of samples",
}


def same(label: str, largest: float) -> str:
    """For a way that passes."""
    return f"{label} learns what single learns: nothing is off by more than {largest:.0e} of its size"


def differs(label: str, first: Difference, precision: str) -> str:
    """Where a way first differs, and by how much."""
    if first.name == STEP:
        return (
            f"{label} does not learn what single learns: step {first.step} was taken in one of them alone ({precision})"
        )
    thing = _THINGS[first.part].format(name=first.name)
    when = f"at step {first.step}" if first.step else "before the first step"
    by = f" by {in_percent(first.size)} of its size" if math.isfinite(first.size) else ""
    return f"{label} does not learn what single learns: {when} {thing} differs{by} ({precision})"


def jumps(first: Difference, moved: float, precision: str) -> str:
    """For a way that is off by more than rounding, where one device is too as soon as it is disturbed."""
    thing = _THINGS[first.part].format(name=first.name)
    return (
        f"in {precision}, from step {first.step} on, {thing} is off by {in_percent(first.size)}: rounding jumps there, "
        f"as where a ReLU or a max-pool decides; one device by itself is off by up to {in_percent(moved)} when its "
        f"first weights are disturbed by {STRENGTH:.0e} of their size"
    )


def still(moved: float, num_tried: int) -> str:
    """For a way that is off by more than that."""
    return (
        f"single, its first weights disturbed by {STRENGTH:.0e} of their size in {num_tried} ways, is off by "
        f"{moved:.1e} at most there"
    )


def fails(label: str, failure: Failure) -> str:
    """For a way that does not come to its end."""
    what = "learns nothing" if "nothing is learned" in failure.message else "does not run, and single does"
    return f"{label} {what}"


def in_percent(size: float) -> str:
    """A relative difference as people say it."""
    return f"{100 * size:.3g} %" if size >= 1e-4 else f"{size:.1e}"
