"""One process, one device, plain torch: the program that the other two make parallel.

python examples/plain/single.py
python examples/plain/single.py --data ~/mnist --epochs 5
"""

import argparse
import gzip
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class SimpleNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(784, 256)
        self.output = nn.Linear(256, 10)

    def forward(self, images):
        return self.output(F.relu(self.hidden(images)))


def read_mnist(folder, part):
    images = gzip.decompress((folder / f"{part}-images-idx3-ubyte.gz").read_bytes())
    labels = gzip.decompress((folder / f"{part}-labels-idx1-ubyte.gz").read_bytes())
    # 16 and 8 bytes of header: magic number and sizes. bytearray, for torch wants memory that it may write to.
    pixels = torch.frombuffer(bytearray(images), dtype=torch.uint8, offset=16).view(-1, 784).float()
    classes = torch.frombuffer(bytearray(labels), dtype=torch.uint8, offset=8).long()
    return TensorDataset((pixels / 255 - 0.1307) / 0.3081, classes)


def make_pictures(num_train=5000, num_test=1000):
    """Ten fixed pictures under much noise: looks like MNIST to the program, and runs anywhere."""
    # A generator of its own: the data must not move with the seed of the weights.
    generator = torch.Generator().manual_seed(0)
    classes = torch.randint(10, (num_train + num_test,), generator=generator)
    pixels = torch.randn(10, 784, generator=generator)[classes]
    pixels += 6 * torch.randn(pixels.shape, generator=generator)
    train, test = slice(num_train), slice(num_train, None)
    return TensorDataset(pixels[train], classes[train]), TensorDataset(pixels[test], classes[test])


def load_data(folder, quiet=False):
    if folder is not None and (folder / "train-images-idx3-ubyte.gz").is_file():
        return read_mnist(folder, "train"), read_mnist(folder, "t10k")
    if not quiet:
        print(f"no MNIST files in {folder or 'sight'}: training on made-up pictures")
    return make_pictures()


def evaluate(model, loader, device):
    model.eval()
    correct = count = 0
    with torch.no_grad():
        for images, labels in loader:
            # Sums, divided once at the end: the last batch is shorter, and a mean of means would count it too much.
            correct += (model(images.to(device)).argmax(1) == labels.to(device)).sum().item()
            count += len(labels)
    model.train()
    return correct / count


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, help="folder of MNIST's four .gz files")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--save", type=Path, default="simple_net.pt")
    options = parser.parse_args()

    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_set, test_set = load_data(options.data)
    train_loader = DataLoader(train_set, batch_size=options.batch, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=1000)
    model = SimpleNet().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    for epoch in range(options.epochs):
        # Kept on the device: .item() in every step would make the host wait for the GPU.
        loss_sum = torch.zeros((), device=device)
        for images, labels in train_loader:
            images, labels = images.to(device), labels.to(device)
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss_sum += loss.detach() * len(labels)
        print(f"epoch {epoch + 1}  loss {loss_sum.item() / len(train_set):.4f}")

    torch.save(model.state_dict(), options.save)
    print(f"accuracy {evaluate(model, test_loader, device):.4f}")


if __name__ == "__main__":
    main()
