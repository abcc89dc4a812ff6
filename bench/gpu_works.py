"""What the GPU benchmarks train: networks, data that lies on the card and can be learned, and its order of batches."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from evenstep.data.adapt import adapt
from evenstep.sampling.order import Span
from evenstep.tasks.networks import GPT, Net, Normalize, ResNet18

EPOCHS_AT_HAND = 8
"""Whose order is computed before any clock; then they come again."""
BYTES = ([125.307, 122.950, 113.865], [62.993, 62.089, 66.705])

Data = tuple[Tensor, ...]


@dataclass(frozen=True)
class Work:
    """A network and what it learns from; every racer of a race gets the same."""

    name: str
    make: Callable[[], nn.Module]
    data: Data
    batch: int
    precision: Literal["fp32", "bf16"]
    lr: float = 1e-3
    check_steps: int = 50
    """Steps after which losses are compared; they are the warm-up, too."""
    flops_a_step: float = 0.0
    tokens_a_step: int = 0

    @property
    def device(self) -> torch.device:
        return self.data[0].device

    def network(self) -> nn.Module:
        """With the same weights every time."""
        torch.manual_seed(0)
        return self.make()

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16")

    @torch.no_grad()
    def probe(self, module: nn.Module) -> float:
        """The loss of a fixed batch."""
        with self.autocast():
            return loss(module, tuple(column[: self.batch] for column in self.data)).item()

    def adamw(self, parameters: Any, fused: bool | None = True, capturable: bool = False) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=self.lr, fused=fused, capturable=capturable)


def loss(model: nn.Module, batch: Data) -> Tensor:
    """Cross-entropy; for tokens, over all positions."""
    logits = model(batch[0])
    return F.cross_entropy(logits.flatten(0, -2), batch[1].flatten())


class Learner(nn.Module):
    """A network that returns its loss, as most training scripts have it: peers get autocast, compiling and hooks
    around all of forward."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, *batch: Tensor) -> Tensor:
        return loss(self.network, batch)


class Feed:
    """Batches in the order of evenstep's own loader (seed 0), taken by index on the card."""

    def __init__(self, work: Work) -> None:
        self._data = work.data
        self._ids = ids_of(work)
        self.place = 0

    def ids(self) -> Tensor:
        self.place += 1
        return self._ids[(self.place - 1) % len(self._ids)]

    def next(self) -> Data:
        ids = self.ids()
        return tuple(column.index_select(0, ids) for column in self._data)


_ORDERS: dict[tuple[int, int, torch.device], list[Tensor]] = {}


def ids_of(work: Work) -> list[Tensor]:
    """The ids of each step, on the card."""
    num = len(work.data[0])
    key = (num, work.batch, work.device)
    if key not in _ORDERS:
        order = adapt(work.data).order(0, work.batch)
        assert order is not None
        whole = [torch.from_numpy(order.ids(Span(epoch, 0, num)).copy()) for epoch in range(EPOCHS_AT_HAND)]
        _ORDERS[key] = [part for ids in whole for part in ids.to(work.device).split(work.batch)]
    return _ORDERS[key]


class ChannelsLast(nn.Module):
    """A network with contiguous weights, which `fully_shard` asks for, that computes channels last all the same."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.network(images.contiguous(memory_format=torch.channels_last))
        return logits


def mlp(device: torch.device, tiny: bool = False) -> Work:
    num, batch = (256, 32) if tiny else (512 * 117, 512)
    generator = torch.Generator(device).manual_seed(0)
    classes = torch.randint(0, 10, (num,), device=device, generator=generator)
    centres = torch.randn(10, 784, device=device, generator=generator)
    x = torch.randn(num, 784, device=device, generator=generator) + 0.2 * centres[classes]
    return Work(
        f"MLP 784-256-10, batch {batch}, fp32",
        lambda: nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10)),
        (x, classes),
        batch,
        "fp32",
    )


def _pictures(num: int, device: torch.device) -> Data:
    """Bytes as in CIFAR-10: noise, and a pattern for each class, so that 50 steps learn it whatever the rounding."""
    generator = torch.Generator(device).manual_seed(0)
    classes = torch.randint(0, 10, (num,), device=device, generator=generator)
    patterns = torch.randint(0, 128, (10, 3, 32, 32), dtype=torch.uint8, device=device, generator=generator)
    noise = torch.randint(0, 128, (num, 3, 32, 32), dtype=torch.uint8, device=device, generator=generator)
    return noise + patterns[classes], classes


def cifar_net(device: torch.device, tiny: bool = False) -> Work:
    num, batch = (128, 16) if tiny else (256 * 195, 256)
    return Work(
        f"small CIFAR net, batch {batch}, fp32", lambda: Net(Normalize(*BYTES)), _pictures(num, device), batch, "fp32"
    )


def resnet18(device: torch.device, tiny: bool = False, contiguous: bool = False) -> Work:
    num, batch = (32, 4) if tiny else (256 * 195, 256)

    def make() -> nn.Module:
        network = ResNet18(Normalize(*BYTES))
        return ChannelsLast(network) if contiguous else network.to(memory_format=torch.channels_last)

    how = "channels last by its input" if contiguous else "channels last"
    name = f"ResNet-18, 32 px, batch {batch}, {how}, bf16"
    return Work(name, make, _pictures(num, device), batch, "bf16", check_steps=5 if tiny else 50)


def _texts(num: int, length: int, symbols: Tensor) -> Data:
    """Sequences in which most symbols decide the next one."""
    device, size = symbols.device, len(symbols)
    generator = torch.Generator(device).manual_seed(0)
    following = torch.randperm(size, device=device, generator=generator)
    drawn = torch.randint(0, size, (num, length + 1), device=device, generator=generator)
    is_free = torch.rand(num, length + 1, device=device, generator=generator) < 0.2
    for place in range(1, length + 1):
        drawn[:, place] = torch.where(is_free[:, place], drawn[:, place], following[drawn[:, place - 1]])
    tokens = symbols[drawn]
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def small_gpt(device: torch.device, tiny: bool = False) -> Work:
    num, batch, length, layers, width = (32, 4, 16, 1, 24) if tiny else (4096, 8, 256, 6, 384)
    return Work(
        f"GPT {layers} x {width}, {length} tokens, batch {batch}, bf16",
        lambda: GPT(65, length, layers, 6, width),
        _texts(num, length, torch.arange(65, device=device)),
        batch,
        "bf16",
        tokens_a_step=batch * length,
    )


def gpt2(device: torch.device, tiny: bool = False) -> Work:
    """124M parameters: the output shares its weight with the embedding of the tokens."""
    num, batch, length, layers, heads, width, vocabulary = (
        (16, 2, 16, 2, 2, 16, 320) if tiny else (512, 16, 1024, 12, 12, 768, 50304)
    )

    def make() -> nn.Module:
        network = GPT(vocabulary, length, layers, heads, width)
        network.output.weight = network.token_embedding.weight
        return network

    num_weights = sum(weight.numel() for weight in make().parameters()) - length * width
    # As in PaLM's appendix B: six for every weight and token, and attention's products, without halving the causal one.
    flops_a_token = 6 * num_weights + 12 * layers * width * length
    return Work(
        f"GPT-2 {num_weights / 1e6:.0f}M, {length} tokens, batch {batch}, bf16",
        make,
        _texts(num, length, torch.arange(64, device=device) * (vocabulary // 64)),
        batch,
        "bf16",
        lr=3e-4,
        check_steps=30,
        flops_a_step=float(flops_a_token * batch * length),
        tokens_a_step=batch * length,
    )
