"""What every job of C7 trains on: MNIST's four files, packed or not, or made-up ones of the same form."""

import gzip
import struct
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
MEAN, DEVIATION = 0.1307, 0.3081
RANKS, BATCH_A_RANK = 2, 64


def read(folder, part):
    """The pictures of `train` or `t10k` as bytes, and their labels."""
    images, labels = (_content(Path(folder) / name) for name in NAMES if name.startswith(part))
    pixels = torch.frombuffer(images, dtype=torch.uint8, offset=16).view(-1, 28, 28)
    return pixels, torch.frombuffer(labels, dtype=torch.uint8, offset=8).long()


def _content(path):
    if path.exists():
        return bytearray(path.read_bytes())
    return bytearray(gzip.decompress(path.with_name(path.name + ".gz").read_bytes()))


def unpack(folder, target):
    """The four files, as they are without gzip."""
    for name in NAMES:
        (target / name).write_bytes(_content(Path(folder) / name))


def make(folder, num_train, num_test, noise=4.5):
    """Ten fixed pictures under much noise, in MNIST's own format: learnable beyond 96.5 % in two epochs of 60,000, or,
    with a noise of 2, in one epoch of 6,400."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randn(10, 784, generator=generator)
    for num, (images, labels) in zip((num_train, num_test), (NAMES[:2], NAMES[2:]), strict=True):
        classes = torch.randint(10, (num,), generator=generator)
        pixels = 128 + 12 * (patterns[classes] + noise * torch.randn(num, 784, generator=generator))
        content = pixels.clamp(0, 255).to(torch.uint8).numpy().tobytes()
        (folder / images).write_bytes(struct.pack(">IIII", 0x803, num, 28, 28) + content)
        (folder / labels).write_bytes(struct.pack(">II", 0x801, num) + classes.to(torch.uint8).numpy().tobytes())


class Pictures(Dataset):
    """One sample at a time, made a normalised tensor when it is read, as torchvision's MNIST does (by way of PIL)."""

    def __init__(self, folder, part):
        self.pixels, self.labels = read(folder, part)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = self.pixels[index].float().div(255).sub(MEAN).div(DEVIATION)
        return image, int(self.labels[index])


class SimpleNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(784, 256)
        self.fc2 = nn.Linear(256, 10)

    def forward(self, x):
        return self.fc2(torch.relu(self.fc1(x.flatten(1))))
