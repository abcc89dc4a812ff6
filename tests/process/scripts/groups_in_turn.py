"""Make and destroy a process group and a DDP model, many times: destructors of torch may wait for each other."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def train() -> float:
    group = dist.new_group()
    model = DDP(nn.Linear(10, 1), process_group=group)
    loss = model(torch.ones(8, 10)).square().mean()
    loss.backward()
    ranks = [None] * dist.get_world_size()
    # What it receives is freed by a thread of the group, which needs the GIL for that.
    dist.all_gather_object(ranks, dist.get_rank(), group)
    dist.destroy_process_group(group)
    return loss.item()


dist.init_process_group("gloo")
for _ in range(40):
    loss = train()
    dist.barrier()
print(f"rank {dist.get_rank()} of {dist.get_world_size()} done, loss {loss:.3f}")
