"""Examines tasks in this process; `python experiments_script.py NAME:PRECISION ...` prints the findings of each.

A separate process, since dropout stays disabled in it. A precision with a star counts as lower than float64.
"""

from __future__ import annotations

import json
import sys

import torch

from evenstep.plan import Plan
from evenstep.sampling.rng import seed_everything
from evenstep.training.team import join
from evenstep.verify.one_batch import Workbench
from evenstep.verify.recorder import DropoutOff
from evenstep.verify.task_experiments import examine
from tests.process.mistakes import planted, sound

TESTS = ("draws", "metrics", "cut", "buffers")
torch.set_num_threads(1)
dropout = DropoutOff()
for case in sys.argv[1:]:
    name, _, precision = case.partition(":")
    seed_everything(0)
    task = getattr(planted if hasattr(planted, name) else sound, name)()
    plan = Plan(batch=task.batch, steps=1, precision=precision.rstrip("*"))  # type: ignore[arg-type]
    team = join("single", ("cpu",), plan.precision, plan.seed)
    bench = Workbench(plan, task, team, dropout, is_rough=precision.endswith("*"))
    print(json.dumps([case, examine(bench, TESTS)]))
