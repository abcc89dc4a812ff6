"""How far apart is rounding, and how far is not."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

from evenstep.verify.differences import Difference

TOLERANCE = 1e-8
"""In float64. Rounding makes 1e-15 to 1e-12 over a few steps; mistakes make 1e-5 and more."""
WITHOUT_YARDSTICK = {"fp64": 1e-4, "fp32": 1e-4, "tf32": 1e-2, "bf16": 5e-2, "fp16": 5e-2}
"""In the task's own precision, where it cannot be run in float64 to see what rounding does."""
LEAST = {"fp64": 1e-5, "fp32": 1e-5, "tf32": 1e-3, "bf16": 1e-2, "fp16": 1e-2}
TIMES_NOISE = 30.0
"""How much more than its own rounding noise a tensor may be off."""
UNJUDGED = sys.float_info.max
"""The limit of what is not judged; one that is missing is infinitely far off, and beyond it."""


def exact(part: str, name: str) -> float:
    """For float64."""
    return TOLERANCE


class Yardstick:
    """How far rounding alone takes each tensor of this very task, times a factor; without `noise`, a rule of thumb."""

    def __init__(self, noise: Sequence[Difference], precision: str) -> None:
        is_known = any(math.isfinite(one.size) and one.part == "gradients" for one in noise)
        self._least = (LEAST if is_known else WITHOUT_YARDSTICK).get(precision, LEAST["fp32"])
        self._of_tensor: dict[tuple[str, str], float] = {}
        self._of_part: dict[str, float] = {}
        for one in noise:
            if math.isfinite(one.size):
                # A run that goes on from a checkpoint is judged by all that it trains.
                is_trained = one.part not in ("samples", "evaluation")
                for part in (one.part, "checkpoint") if is_trained else (one.part,):
                    key = (part, one.name)
                    self._of_tensor[key] = max(one.size, self._of_tensor.get(key, 0.0))
                    self._of_part[part] = max(one.size, self._of_part.get(part, 0.0))

    def __call__(self, part: str, name: str) -> float:
        if part == "samples":
            return 0.0
        if part == "evaluation" and name != "loss":
            # Counts jump: rounding moves a sample from right to wrong. Float64 judges them.
            return UNJUDGED
        by_tensor = TIMES_NOISE * self._of_tensor.get((part, name), 0.0)
        return max(self._least, by_tensor, TIMES_NOISE / 3 * self._of_part.get(part, 0.0))
