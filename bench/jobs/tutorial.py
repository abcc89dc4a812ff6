"""The tutorials' script as most people write it: mp.spawn, DistributedSampler, a DataLoader that reads one by one.

python bench/jobs/tutorial.py FOLDER [EPOCHS] [--one-thread]
"""

import os
import socket
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from pictures import BATCH_A_RANK, RANKS, Pictures, SimpleNet
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler


def train(rank, world_size, port, folder, epochs, one_thread):
    if one_thread:
        torch.set_num_threads(1)
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = port
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    dataset = Pictures(folder, "train")
    sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank)
    loader = DataLoader(dataset, batch_size=BATCH_A_RANK, sampler=sampler)
    model = DDP(SimpleNet())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for data, target in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data), target)
            loss.backward()
            optimizer.step()
    if rank == 0:
        correct = 0
        with torch.no_grad():
            for data, target in DataLoader(Pictures(folder, "t10k"), batch_size=1000):
                correct += (model.module(data).argmax(1) == target).sum().item()
        print(f"accuracy {correct / len(Pictures(folder, 't10k')):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        free = str(listener.getsockname()[1])
    one_thread = "--one-thread" in sys.argv
    folder, epochs = sys.argv[1], int(sys.argv[2])
    mp.spawn(train, args=(RANKS, free, folder, epochs, one_thread), nprocs=RANKS)
