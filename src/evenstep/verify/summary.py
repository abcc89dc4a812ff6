"""Many differences in a few numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from evenstep.verify.differences import Difference, Limit
from evenstep.verify.limits import UNJUDGED
from evenstep.verify.of_task import BATCH_DEPENDENT
from evenstep.verify.verdict import PARTS, Part, Verdict, Way


def has_steps(found: Sequence[Difference]) -> bool:
    """Whether there is a step that both of them took."""
    return any(one.part in ("weights", "optimizer") for one in found)


def most(found: Sequence[Difference]) -> float:
    """The largest difference of loss and gradients."""
    return max((one.size for one in found if one.part in ("loss", "gradients")), default=0.0)


def by_rounding(noise: Sequence[Difference]) -> str:
    """What one device in its own precision and in float64 are apart, in words."""
    known = [one for one in noise if math.isfinite(one.size)]
    if not any(one.part == "gradients" for one in known):
        return "what rounding alone makes could not be seen"
    return f"rounding alone makes {most(known):.1e} on one device"


def tensor_of(first: Difference, found: Sequence[Difference], limit: Limit) -> Difference:
    """The first tensor that differs in that step: it says more than a loss does."""
    of_step = (one for one in found if one.step == first.step and one.part not in ("loss", "samples"))
    return first if first.part == "samples" else next((one for one in of_step if one.size > limit(one)), first)


def parts_of(found: Sequence[Difference], limit: Limit) -> dict[str, Part]:
    """The row of a way: of each part the largest difference; what is not judged is left out."""
    parts = {}
    for name in PARTS:
        of_part = [one for one in found if one.part == name and (limit(one) < UNJUDGED or math.isinf(one.size))]
        is_same = all(one.size <= limit(one) for one in of_part)
        parts[name] = Part(max((one.size for one in of_part), default=None), is_same)
    return parts


def settled(verdicts: Mapping[Way, Verdict]) -> dict[Way, Verdict]:
    """All verdicts, once all are known: who cannot see the whole batch is sent to a way that can, if one passed.

    A loss that gathers from all ranks agrees under ddp and fsdp, and cannot under dp or in micro-batches.
    """
    passed = [way.label for way, verdict in verdicts.items() if verdict.is_same and len(way.devices) > 1]
    if not passed:
        return dict(verdicts)
    advice = f"Use {' or '.join(passed)}: there the loss sees the whole batch, and learns what single learns."
    return {
        way: replace(verdict, advice=advice) if verdict.cause == BATCH_DEPENDENT else verdict
        for way, verdict in verdicts.items()
    }
