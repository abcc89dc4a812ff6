"""One process per device, plain torch: DistributedDataParallel under mp.spawn. Model and data are those of single.py.

python examples/plain/distributed.py --world-size 2
"""

import argparse
import os
import socket
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from single import SimpleNet, load_data
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset


def evaluate(model, test_set, device):
    """Accuracy over all ranks, every sample once."""
    # Every n-th sample, not DistributedSampler: that one pads the ranks to equal length with repeated samples.
    own = Subset(test_set, range(dist.get_rank(), len(test_set), dist.get_world_size()))
    totals = torch.zeros(2, dtype=torch.int64, device=device)
    model.eval()
    with torch.no_grad():
        for images, labels in DataLoader(own, batch_size=1000):
            totals[0] += (model(images.to(device)).argmax(1) == labels.to(device)).sum()
            totals[1] += len(labels)
    model.train()
    dist.all_reduce(totals)  # every rank must come here: one that does not leaves the others waiting
    return (totals[0] / totals[1]).item()


def train(rank, world_size, port, options):
    on_gpus = world_size <= torch.cuda.device_count()  # NCCL refuses two ranks on one GPU
    device = torch.device("cuda", rank) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(rank)  # before NCCL starts: otherwise every rank also takes memory on GPU 0
    # Without this every process starts a thread for each core, and they fight for the same cores.
    torch.set_num_threads(max(1, torch.get_num_threads() // world_size))
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("nccl" if on_gpus else "gloo", rank=rank, world_size=world_size)

    torch.manual_seed(0)
    train_set, test_set = load_data(options.data, quiet=rank > 0)
    # Pads the epoch: where the ranks do not divide the data, a few samples come twice.
    sampler = DistributedSampler(train_set, shuffle=True, seed=0)
    # Per rank: undivided, a step would hold world_size times the samples at an unchanged learning rate.
    train_loader = DataLoader(train_set, batch_size=options.batch // world_size, sampler=sampler)
    model = DistributedDataParallel(SimpleNet().to(device), device_ids=[rank] if on_gpus else None)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)  # forgotten, every epoch has the order of the first, and nothing says so
        totals = torch.zeros(2, device=device)
        for images, labels in train_loader:
            images, labels = images.to(device), labels.to(device)
            # model(...), never model.module(...): gradients are averaged by hooks of the wrapper's own forward.
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            totals += torch.stack([loss.detach() * len(labels), loss.new_tensor(len(labels))])
        # Outside `if rank == 0`: a collective that only rank 0 enters never ends.
        dist.all_reduce(totals)
        if rank == 0:
            print(f"epoch {epoch + 1}  loss {(totals[0] / totals[1]).item():.4f}")

    # .module twice: evaluation runs unequal numbers of batches, and must not wait in the wrapper's broadcasts;
    # and the wrapper's own state_dict has "module." before every name.
    accuracy = evaluate(model.module, test_set, device)
    if rank == 0:
        torch.save(model.module.state_dict(), options.save)
        print(f"accuracy {accuracy:.4f}")
    dist.destroy_process_group()


def free_port():
    """A fixed port works until two runs share a machine."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, help="folder of MNIST's four .gz files")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=64, help="over all processes")
    parser.add_argument("--world-size", type=int, default=torch.cuda.device_count() or 2)
    parser.add_argument("--save", type=Path, default="simple_net.pt")
    options = parser.parse_args()
    if options.batch % options.world_size:
        parser.error(f"a batch of {options.batch} does not split over {options.world_size} processes")
    mp.spawn(train, args=(options.world_size, free_port(), options), nprocs=options.world_size)


# mp.spawn imports this file again in every process: what stands outside this `if` would run in all of them.
if __name__ == "__main__":
    main()
