"""Four ranks, two copies of a model of two shards each: what each rank holds, and what is seen where copies differ."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import evenstep
from evenstep.checkpoint.shards import own_rows, rows_like, with_rows
from evenstep.errors import TrainingError
from evenstep.monitor.replica_check import ReplicaCheck
from evenstep.private_apis import tensor_of_shards


def difference(check: ReplicaCheck) -> str:
    try:
        check.compare(7)
    except TrainingError as error:
        return str(error)
    return ""


def main(folder: Path) -> None:
    team = evenstep.join("fsdp", mesh="data=2,fsdp=2")
    model = team.wrap(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(24, 6, generator=torch.Generator().manual_seed(0))
    for batch in team.loader((data,), batch=8):
        team.backward(lambda model, batch: model(batch[0]).square().mean(), model, batch)
        team.step(optimizer)
    weight: Any = dict(model.module.named_parameters())["0.weight"]
    rows = own_rows(weight)
    assert rows is not None
    seen: dict[str, Any] = {"rows": team.world.gather([rows.start, len(rows.values), rows.is_first])}

    again = with_rows(rows_like(weight.full_tensor(), weight), weight)
    made = tensor_of_shards(rows.values, weight.device_mesh, weight.placements, weight.shape, weight.stride())
    seen["is_same"] = all(torch.equal(one.full_tensor(), weight.full_tensor()) for one in (again, made))

    check = ReplicaCheck(team.world, model.module)
    seen["equal"] = difference(check)
    if team.world.rank == 3:
        with torch.no_grad():
            weight.to_local()[0, 0] += 1e-6
    seen["drifted"] = difference(check)
    if team.world.is_main:
        (folder / "seen.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
