"""At which steps replicas are compared, and whether a rank is slow is judged (`--check-every`)."""

from __future__ import annotations

import math

from evenstep.link_method import parse_link
from evenstep.plan import USUAL, Plan

FIRST_CHECKS = (10, 30)
"""Steps at which replicas are also compared: most mistakes show early."""


def is_check_due(step: int, plan: Plan) -> bool:
    every: int = plan.check_every or USUAL["check_every"]
    method = parse_link(plan.link)
    if method.is_streaming:
        # Wherever something else has made them equal: to do so for this alone would send all weights.
        return True
    if method.num_steps > 1:
        # Replicas are equal at the end of a round.
        return step % (math.ceil(every / method.num_steps) * method.num_steps) == 0
    return step % every == 0 or step in FIRST_CHECKS
