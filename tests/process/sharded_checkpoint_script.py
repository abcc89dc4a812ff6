"""Two ranks of fsdp save: at once, in the background, where only rank 0 sees the folder, and where a write fails."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor

import evenstep
from evenstep.checkpoint import atomic_write, files, integrity
from evenstep.errors import SaveFailed


def failing(message: str) -> Any:
    def raises(*given: Any, **named: Any) -> None:
        raise OSError(message)

    return raises


def failure(save: Any) -> str:
    try:
        save()
    except SaveFailed as error:
        return str(error)
    return ""


def main(folder: Path) -> None:
    team = evenstep.join("fsdp")
    main_rank = team.world.is_main
    model = team.wrap(nn.Sequential(nn.Linear(33, 65), nn.Tanh(), nn.Linear(65, 5)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = evenstep.Run(team, model, optimizer)
    seen: dict[str, Any] = {}

    gathers = []
    full_tensor = DTensor.full_tensor
    DTensor.full_tensor = lambda self, **more: gathers.append(1) or full_tensor(self, **more)  # type: ignore
    first = run.save(folder / "direct")
    seen["whole_tensors"] = sum(team.world.gather(len(gathers)))
    DTensor.full_tensor = full_tensor

    is_dir = Path.is_dir
    if not main_rank:
        Path.is_dir = lambda self: False  # type: ignore[method-assign, assignment]
    second = run.save(folder / "gathered")
    Path.is_dir = is_dir  # type: ignore[method-assign]
    if main_rank:
        ours, theirs = (load_file(one / files.WEIGHTS) for one in (first, second))
        seen["gathered_is_same"] = all(torch.equal(ours[name], theirs[name]) for name in ours)

    atomic_write.LARGE_BYTES = 1
    finish = atomic_write.finish
    atomic_write.finish = lambda *given: (time.sleep(1), finish(*given))[1]
    third = run.save(folder / "later", in_background=True)
    seen["is_there_at_once"] = third.exists()
    run.settle()
    seen["is_there_after_settle"] = third.exists()

    shadow = next(iter(model.parameters()))
    seen["shadow_is_whole"] = torch.equal(
        run.load(run.save(folder / "added", shadow=shadow))["shadow"], shadow.detach().full_tensor()
    )
    odd = torch.zeros(2, dtype=torch.complex128)
    seen["odd"] = team.world.gather(failure(lambda: run.save(folder / "odd", odd=odd)))
    kept = []
    for step in range(4):
        run.loader.num_finished = 100 + step
        written = run.save(folder / "kept", keep=1, in_background=True)
        run.settle()
        kept.append(os.stat(written / files.OPTIMIZER).st_ino)
    seen["written_over"] = kept[2:] == kept[:2]
    if main_rank:
        integrity.verify(written)
        moments = load_file(written / files.OPTIMIZER)
        first_moments = load_file(first / files.OPTIMIZER)
        seen["written_over_is_same"] = all(torch.equal(moments[name], first_moments[name]) for name in first_moments)
    run.close()
    team.world.barrier()
    seen["spares"] = [str(one) for one in folder.rglob(".spare")]
    run.loader.num_finished = 0

    fourth = run.save(folder / "read", in_background=True, note="read")
    seen["loaded"] = team.world.gather(run.load(folder / "read").get("note"))

    atomic_write.finish = failing("disk full")
    run.save(folder / "failed", in_background=True)
    seen["failures"] = team.world.gather(failure(lambda: run.save(folder / "failed")))
    seen["saved_before"] = run._saved == fourth
    atomic_write.finish = finish

    pwrite = os.pwrite
    if not main_rank:
        os.pwrite = failing("no space")
    seen["stopped"] = team.world.gather(failure(lambda: run.save(folder / "stopped")))
    os.pwrite = pwrite
    seen["left"] = [one.name for one in (folder / "stopped").iterdir()]
    if main_rank:
        (folder / "seen.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
