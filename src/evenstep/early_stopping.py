"""The best evaluation of a run (`--best`), and when evaluations that are no better end it (`--stop-after`)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from evenstep.best_metric import find_metric, parse_best
from evenstep.errors import BadInput, shorten
from evenstep.plan import Plan
from evenstep.record import Best, Evaluation
from evenstep.typed_values import Natural


@dataclass
class BestSoFar:
    """The best evaluation so far, and how many came after it; saved in checkpoints."""

    by: str
    """What `--best` was given as, such as accuracy:max."""
    best: Best | None = None
    num_since: Natural = 0
    """Evaluations since the best one."""

    @classmethod
    def of(cls, plan: Plan) -> BestSoFar:
        return cls(":".join(parse_best(plan.best)))

    def add(self, evaluation: Evaluation, checkpoint: str) -> bool:
        """Whether this one is better than all before it; `checkpoint` is the one that it would be saved in."""
        given, direction = parse_best(self.by)
        metric = find_metric(given, evaluation.values)
        if metric is None:
            raise BadInput(f"no metric {shorten(given)} for --best; there are {', '.join(evaluation.values)}")
        value = evaluation.values[metric]
        sign = 1 if direction == "min" else -1
        # NaN is never better.
        if not math.isnan(value) and (self.best is None or sign * value < sign * self.best.value):
            self.num_since = 0
            self.best = Best(
                metric=metric, value=value, step=evaluation.step, values=evaluation.values, checkpoint=checkpoint
            )
            return True
        self.num_since += 1
        return False

    def why_stop(self, plan: Plan) -> str | None:
        """Why the plan's `--stop-after` ends the run here, if it does."""
        if plan.stop_after is None or self.num_since < plan.stop_after:
            return None
        metric = self.best.metric if self.best is not None else parse_best(self.by)[0]
        best = (
            f"best {self.best.value:.4f} at step {self.best.step}" if self.best is not None else "it was never a number"
        )
        num = "the last evaluation" if plan.stop_after == 1 else f"{plan.stop_after} evaluations"
        return f"no better {metric} in {num} ({best})"
