"""Train with accelerate, following the pattern of its quick tour."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", required=True)
    args = parser.parse_args()

    accelerator = Accelerator(cpu=True)
    set_seed(0)
    inputs = torch.randn(70, 10)
    dataset = TensorDataset(inputs, (inputs.sum(1) > 0).long())
    model = nn.Linear(10, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loader, valid_loader = DataLoader(dataset, batch_size=8, shuffle=True), DataLoader(dataset, batch_size=8)
    model, optimizer, loader, valid_loader = accelerator.prepare(model, optimizer, loader, valid_loader)

    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()

    model.eval()
    right = []
    for x, y in valid_loader:
        with torch.no_grad():
            right.append(accelerator.gather_for_metrics(model(x).argmax(1) == y))
    right = torch.cat(right)

    weights = accelerator.unwrap_model(model).state_dict()
    accelerator.save({"model": weights, "right": int(right.sum()), "samples": len(right)}, args.save)
    print(f"rank {accelerator.process_index} of {accelerator.num_processes} done, loss {loss.item():.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
