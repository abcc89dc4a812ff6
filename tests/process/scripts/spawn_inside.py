"""Train with DDP as the mp.spawn tutorials do: the script starts its own processes and names its own address."""

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def setup(rank, world_size, port):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = port
    dist.init_process_group("gloo", rank=rank, world_size=world_size)


def train(rank, world_size, path, port):
    setup(rank, world_size, port)
    torch.manual_seed(rank)
    model = DDP(nn.Linear(10, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(5):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(torch.randn(20, 10)), torch.randn(20, 5))
        loss.backward()
        optimizer.step()
    if rank == 0:
        torch.save(model.module.state_dict(), path)
    print(f"rank {rank} of {world_size} done, loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    world_size, path = int(sys.argv[1]), sys.argv[2]
    port = sys.argv[3] if len(sys.argv) > 3 else "12355"
    mp.spawn(train, args=(world_size, path, port), nprocs=world_size, join=True)
