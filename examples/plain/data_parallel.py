"""One process, several GPUs, plain torch: nn.DataParallel. Model and data are those of single.py.

python examples/plain/data_parallel.py
python examples/plain/data_parallel.py --devices 0,1
python examples/plain/data_parallel.py --devices 0,0    # one GPU twice: to try it, not to gain from it
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from single import SimpleNet, evaluate, load_data
from torch import nn
from torch.utils.data import DataLoader


def wrap(model, devices):
    """The model on its first device, and the wrapper that copies it to all of them in every step."""
    if not torch.cuda.is_available():
        print("no CUDA device: on the CPU nn.DataParallel just runs the module")
        return nn.DataParallel(model), torch.device("cpu")
    ids = [int(index) for index in devices.split(",")] if devices else list(range(torch.cuda.device_count()))
    # The weights must lie on the first device listed, wherever that is: the others are filled from there.
    device = torch.device("cuda", ids[0])
    return nn.DataParallel(model.to(device), device_ids=ids), device


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, help="folder of MNIST's four .gz files")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=64, help="over all devices: the wrapper cuts it up")
    parser.add_argument("--devices", help="CUDA indices, such as 0,1; all GPUs if not given")
    parser.add_argument("--save", type=Path, default="simple_net.pt")
    options = parser.parse_args()

    torch.manual_seed(0)
    train_set, test_set = load_data(options.data)
    train_loader = DataLoader(train_set, batch_size=options.batch, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=1000)
    model, device = wrap(SimpleNet(), options.devices)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    for epoch in range(options.epochs):
        loss_sum = torch.zeros((), device=device)
        for images, labels in train_loader:
            # To the first device only: the wrapper scatters the pictures, and gathers the outputs there again.
            images, labels = images.to(device), labels.to(device)
            # So this line, the whole loss, runs on the first GPU alone, and that GPU is full first.
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss_sum += loss.detach() * len(labels)
        print(f"epoch {epoch + 1}  loss {loss_sum.item() / len(train_set):.4f}")

    # .module: the wrapper's own state_dict has "module." before every name, and SimpleNet would not load it.
    torch.save(model.module.state_dict(), options.save)
    print(f"accuracy {evaluate(model, test_loader, device):.4f}")


if __name__ == "__main__":
    main()
