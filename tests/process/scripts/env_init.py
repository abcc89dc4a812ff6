"""Train with DDP as the torchrun tutorials do: the group and the local rank come from the environment."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--save", required=True)
    args = parser.parse_args()

    dist.init_process_group("gloo", init_method="env://")
    local_rank = int(os.environ["LOCAL_RANK"])
    rank, world_size = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    inputs = torch.randn(64, 10)
    dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    model = DDP(nn.Linear(10, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()

    local_ranks = [None] * world_size
    dist.all_gather_object(local_ranks, local_rank)
    if rank == 0:
        torch.save({"model": model.module.state_dict(), "local_ranks": local_ranks}, args.save)
    print(f"rank {rank} of {world_size} done, loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
