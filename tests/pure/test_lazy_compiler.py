"""torch's compiler is put off, and is all there when it is needed."""

from __future__ import annotations

import subprocess
import sys

import pytest

FIRST_STEP = """
import sys, torch
from evenstep.worker.lazy_compiler import Stub, put_off_compiler
put_off_compiler()
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
optimizer = torch.optim.AdamW(model.parameters())
def step():
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
step()
optimizer.load_state_dict(optimizer.state_dict())
assert isinstance(sys.modules["torch._dynamo"], Stub), "something asked for more"
assert "sympy" not in sys.modules
"""
NEEDS = {
    "a compiled model": "print(torch.compile(torch.nn.Linear(3, 2), backend='eager')(torch.ones(4, 3)).shape)",
    "a part of it": "import torch._dynamo.utils as part; print(part.counters)",
    "a name from it": "from torch._dynamo import config, reset; reset()",
    "an attribute": "print(torch._dynamo.config.suppress_errors)",
}


@pytest.mark.parametrize(
    "need", [pytest.param(need, marks=() if need == "a compiled model" else pytest.mark.slow) for need in NEEDS]
)
def test_a_first_step_does_not_load_it_and_a_real_need_does(need: str) -> None:
    after = 'assert sys.modules["torch._dynamo"].__file__\nassert torch._dynamo is sys.modules["torch._dynamo"]\nstep()'
    code = "\n".join([FIRST_STEP, NEEDS[need], after])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


BEFORE_THE_START = """
import sys
from evenstep.launcher.prepare import prepare
prepare("digits", {"name": "tried"})
assert "sympy" not in sys.modules
"""


def test_the_check_before_the_start_does_not_load_it() -> None:
    done = subprocess.run([sys.executable, "-c", BEFORE_THE_START], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
