"""Train with Lightning Fabric on two processes; a launcher may have started them already."""

import sys

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(0, verbose=False)

    inputs = torch.randn(64, 10)
    dataset = TensorDataset(inputs, (inputs.sum(1) > 0).long())
    model = nn.Linear(10, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(dataset, batch_size=8, shuffle=True))

    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            fabric.backward(loss)
            optimizer.step()

    mean_loss = fabric.all_reduce(loss.detach(), reduce_op="mean")
    fabric.save(sys.argv[1], {"model": model, "num_processes": fabric.world_size})
    print(f"rank {fabric.global_rank} of {fabric.world_size} done, loss {mean_loss.item():.3f}")


if __name__ == "__main__":
    main()
