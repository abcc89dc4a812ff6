"""How much a configuration may differ from single, for each tensor: by rounding, by --link, by perturbed weights."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

from evenstep.link_method import LinkMethod
from evenstep.verify.differences import Difference, Limit, is_loss
from evenstep.verify.recorder import LEAST
from evenstep.verify.verdict_table import PARTS, PartVerdict

TOLERANCE = 1e-8
"""In float64. Rounding makes 1e-15 to 1e-12 over a few steps; mistakes make 1e-5 and more."""

FALLBACK_TOLERANCE = {"fp64": 1e-4, "fp32": 1e-4, "tf32": 1e-2, "bf16": 5e-2, "fp16": 5e-2}
"""In the task's own precision, where the task does not run in float64, so that rounding cannot be measured."""

TIMES_NOISE = 30.0
"""How many times its own rounding noise a tensor may differ."""

TIMES_MOVED = 2.0
"""How many times as far as perturbed weights move one device a tensor may differ."""

NOT_COMPARED = sys.float_info.max
"""The limit of what is not judged; one that is missing is infinitely far off, and beyond it."""


def exact(one: Difference) -> float:
    return TOLERANCE


LINK_TOLERANCE = {"bf16": 0.05, "powersgd": 0.5, "topk": 0.5}
"""Of losses in the first steps, where gradients are sent with fewer digits (`--link`)."""

HALF_TOLERANCE = 0.25
"""Of gradients that were summed in bfloat16, relative to the largest of a tensor."""


class LinkLimit:
    """For a `--link` that is not exact: samples are the same, losses near; PowerSGD and top-k send other gradients."""

    def __init__(self, method: LinkMethod) -> None:
        self._loss = LINK_TOLERANCE[method.name]
        self._tensors = HALF_TOLERANCE if method.name == "bf16" else NOT_COMPARED

    def __call__(self, one: Difference) -> float:
        if one.part == "samples":
            return 0.0
        if one.part == "loss":
            return self._loss
        return self._tensors if one.part == "gradients" else NOT_COMPARED


class RoundingLimit:
    """The effect of rounding on each tensor of this task, times a factor; without `noise`, a fixed tolerance."""

    def __init__(self, noise: Sequence[Difference], precision: str) -> None:
        is_known = any(math.isfinite(one.size) and one.part == "gradients" for one in noise)
        self._least = (LEAST if is_known else FALLBACK_TOLERANCE).get(precision, LEAST["fp32"])
        self._of_tensor: dict[tuple[str, str], float] = {}
        self._of_part: dict[str, float] = {}
        for one in noise:
            if math.isfinite(one.size):
                for part in _judged_as(one):
                    key = (part, one.name)
                    self._of_tensor[key] = max(one.size, self._of_tensor.get(key, 0.0))
                    self._of_part[part] = max(one.size, self._of_part.get(part, 0.0))

    def __call__(self, one: Difference) -> float:
        if one.part == "samples":
            return 0.0
        if one.part == "evaluation" and not is_loss(one.name):
            # Counts jump: rounding moves a sample from right to wrong. Float64 judges them.
            return NOT_COMPARED
        by_tensor = TIMES_NOISE * self._of_tensor.get((one.part, one.name), 0.0)
        return max(self._least, by_tensor, TIMES_NOISE / 3 * self._of_part.get(one.part, 0.0))


class PerturbedLimit:
    """The `usual` limit, or how far perturbations moved one device up to that step, times a factor.

    By step: lower precision shows from the first step on, where perturbations move almost nothing.
    """

    def __init__(self, usual: Limit) -> None:
        self.num_tried = 0
        self._usual = usual
        self._moved: dict[tuple[str, str], list[Difference]] = {}

    def add(self, found: Sequence[Difference]) -> None:
        self.num_tried += 1
        for one in found:
            if math.isfinite(one.size):
                for part in _judged_as(one):
                    self._moved.setdefault((part, one.name), []).append(one)

    def __call__(self, one: Difference) -> float:
        return max(self._usual(one), TIMES_MOVED * self.moved(one))

    def moved(self, one: Difference) -> float:
        """How far the same tensor was moved at most, until that step."""
        of_tensor = self._moved.get((one.part, one.name), ())
        return max((moved.size for moved in of_tensor if moved.step <= one.step), default=0.0)


def _judged_as(one: Difference) -> tuple[str, ...]:
    """A resumed run is judged by everything it trains."""
    return (one.part,) if one.part in ("samples", "evaluation") else (one.part, "checkpoint")


def parts_of(found: Sequence[Difference], limit: Limit) -> dict[str, PartVerdict]:
    """The row of a configuration: the largest difference of each part that is compared."""
    parts = {}
    for name in PARTS:
        of_part = [one for one in found if one.part == name and (limit(one) < NOT_COMPARED or math.isinf(one.size))]
        is_same = all(one.size <= limit(one) for one in of_part)
        parts[name] = PartVerdict(max((one.size for one in of_part), default=None), is_same)
    return parts
