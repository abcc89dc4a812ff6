"""Two ranks, one of which ends in mid-backward; the other says how it ended. `python lost_rank_script.py OUT HOW`."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import nn

import evenstep
from evenstep.distributed.worker_process import WorkerSpec, set_spec

STEP = 5


def work(rank: int, out: Path, how: str) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    set_spec(WorkerSpec(store=str(out.with_name("store"))))
    torch.set_num_threads(1)
    team = evenstep.join("ddp", ("cpu", "cpu"))
    model = team.wrap(nn.Sequential(nn.Linear(8, 2000), nn.Tanh(), nn.Linear(2000, 500), nn.Linear(500, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = 0

    def end(gradient: torch.Tensor) -> None:
        if step == STEP and rank == 1:
            out.with_name("ended").write_text(repr(time.time()))
            os.kill(os.getpid(), signal.SIGKILL) if how == "kill" else os._exit(3)

    def loss(model: nn.Module, batch: tuple[torch.Tensor]) -> torch.Tensor:
        hidden = model[1](model[0](batch[0]))
        hidden.register_hook(end)
        return model[3](model[2](hidden)).square().mean()

    try:
        for batch in team.loader((torch.randn(200, 8),), batch=20):
            step += 1
            team.backward(loss, model, batch)
            team.step(optimizer)
    except Exception as error:
        seconds = time.time() - float(out.with_name("ended").read_text())
        said = {"type": type(error).__name__, "message": str(error), "step": step, "seconds": seconds}
        out.write_text(json.dumps(said))
        os._exit(1)


if __name__ == "__main__":
    # Forked: torch is imported once for both.
    out, how = Path(sys.argv[1]), sys.argv[2]
    ranks = [get_context("fork").Process(target=work, args=(rank, out, how)) for rank in range(2)]
    for one in ranks:
        one.start()
    # The first of them is not waited for before the other: the killed one stays a zombie meanwhile.
    ranks[0].join()
    ranks[1].join()
