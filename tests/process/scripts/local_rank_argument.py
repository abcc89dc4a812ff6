"""Train with DDP in the old style: the launcher gives each process its local rank on the command line.

The tests also run it with one of the two spellings taken out, and with none.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", "--local-rank", type=int)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--save", required=True)
    args = parser.parse_args()
    local_rank = args.local_rank if hasattr(args, "local_rank") else int(os.environ["LOCAL_RANK"])

    dist.init_process_group(backend="gloo", init_method="env://")
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    for _ in range(5):
        optimizer.zero_grad()
        x = torch.randn(16, 4)
        loss = nn.functional.cross_entropy(model(x), (x.sum(1) > 0).long())
        loss.backward()
        optimizer.step()

    local_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(local_ranks, local_rank)
    if dist.get_rank() == 0:
        torch.save({"model": model.module.state_dict(), "local_ranks": local_ranks}, args.save)
    print(f"rank {dist.get_rank()} of {dist.get_world_size()} done, loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
