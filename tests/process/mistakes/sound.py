"""Sound tasks, of many kinds: `verify` must have nothing against them."""

from __future__ import annotations

import math
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import evenstep
from evenstep import Task
from evenstep.tasks import cifar10 as cifar10_file
from evenstep.tasks import mnist as mnist_file
from evenstep.tasks import shakespeare as shakespeare_file
from tests.process.mistakes import planted
from tests.small_tasks import small_task

NUM_PICTURES = 150


def number(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(math.prod(shape)))


def whole_number(most: int, *shape: int) -> Tensor:
    return torch.randint(0, most, shape, generator=torch.Generator().manual_seed(math.prod(shape)))


# The built-in tasks, with files of their formats and a little noise in them


def _stands_in(module: Any, content: Any) -> None:
    module.find = lambda official, data=None: {name: Path(name) for name in official.md5}
    module.verified = lambda path, md5: content(path.name)


def _idx(name: str) -> bytes:
    shape = (NUM_PICTURES, 28, 28) if "images" in name else (NUM_PICTURES,)
    pixels = whole_number(256 if "images" in name else 10, *shape).to(torch.uint8)
    return bytes([0, 0, 8, len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + pixels.numpy().tobytes()


def mnist() -> Task:
    _stands_in(mnist_file, _idx)
    return mnist_file.mnist()


def fashion_mnist() -> Task:
    _stands_in(mnist_file, _idx)
    return mnist_file.fashion_mnist()


def _records(name: str) -> bytes:
    pictures = whole_number(256, 40, 3073)
    pictures[:, 0] %= 10
    return pictures.to(torch.uint8).numpy().tobytes()


def cifar10() -> Task:
    _stands_in(cifar10_file, _records)
    return cifar10_file.task()


def cifar10_resnet18() -> Task:
    _stands_in(cifar10_file, _records)
    return cifar10_file.resnet18()


def shakespeare() -> Task:
    text = "To be, or not to be, that is the question:\n" * 80
    _stands_in(shakespeare_file, lambda name: text.encode())
    return shakespeare_file.task()


# Transformers of others, with random weights


def gpt2() -> Task:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=50, n_positions=12, n_embd=16, n_layer=2, n_head=2)
    return planted.language_model(lambda: GPT2LMHeadModel(config), lengths=12)


def bert() -> Task:
    from transformers import BertConfig, BertForSequenceClassification

    tokens, labels = whole_number(50, 48, 12), whole_number(3, 48)
    mask = (torch.arange(12) < whole_number(10, 48, 1) + 3).long()
    config = BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=12,
        num_labels=3,
    )

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        return model(**batch).loss

    return Task(
        model=lambda: BertForSequenceClassification(config),
        train={"input_ids": tokens[:32], "attention_mask": mask[:32], "labels": labels[:32]},
        valid={"input_ids": tokens[32:], "attention_mask": mask[32:], "labels": labels[32:]},
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        batch=8,
    )


# Of many kinds


def mlp() -> Task:
    return replace(small_task("mlp/adamw/mean"), batch=10)


def cnn() -> Task:
    return replace(small_task("cnn/sgd/pair"), batch=10)


def gpt() -> Task:
    return replace(small_task("gpt/adamw/pair"), batch=10)


def tied() -> Task:
    return replace(small_task("tied/adamw/mean"), batch=10)


def weighted() -> Task:
    return replace(small_task("mlp/adamw/pair/weighted"), batch=10)


def stream() -> Task:
    return replace(small_task("mlp/sgd/mean/stream"), batch=10)


def rows() -> Task:
    return replace(small_task("mlp/adamw/mean/rows"), batch=10)


def augmented() -> Task:
    return replace(small_task("mlp/adamw/mean/augment"), batch=10)


def augmented_batch() -> Task:
    return replace(small_task("mlp/adamw/mean/augment_batch"), batch=10)


def uneven() -> Task:
    """Two devices get 4 and 3; the fifth step holds one sample."""
    task = small_task("mlp/adamw/mean")
    return replace(task, train=tuple(column[:22] for column in task.train), batch=7)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 12)
        self.lstm = nn.LSTM(12, 16, num_layers=2, dropout=0.3, batch_first=True)
        self.out = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(self.embedding(x))[0][:, -1])


def lstm() -> Task:
    return _classifier(Recurrent)


class Attentive(nn.Module):
    """Attention with dropout, activation checkpoints, and a part that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 12).requires_grad_(False)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(12, 2, 24, dropout=0.2, batch_first=True) for _ in range(2)
        )
        self.out = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.out(F.dropout(x.mean(1), 0.1, self.training))


def attentive() -> Task:
    return _classifier(Attentive)


def _classifier(model: type[nn.Module]) -> Task:
    tokens, labels = whole_number(20, 48, 7), whole_number(3, 48)
    return Task(
        model=model,
        train=(tokens[:32], labels[:32]),
        valid=(tokens[32:], labels[32:]),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        metrics=lambda model, batch: {"accuracy": model(batch[0]).argmax(1) == batch[1]},
        optimizer=lambda parameters: torch.optim.RMSprop([w for w in parameters if w.requires_grad], lr=1e-3),
        batch=8,
    )


def padded(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return pad_sequence([x for x, _ in samples], batch_first=True), torch.stack([y for _, y in samples])


def sentences() -> Task:
    """A DataLoader of texts of unequal length, padded to the longest of each batch."""
    lengths = whole_number(6, 40) + 2
    samples = [
        (whole_number(19, int(length), 1)[:, 0] + 1, whole_number(3, place + 1)[-1])
        for place, length in enumerate(lengths)
    ]

    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(20, 12, padding_idx=0)
            self.out = nn.Linear(12, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.embedding(x).sum(1) / (x > 0).sum(1, keepdim=True))

    return replace(
        _classifier(Bag),
        train=DataLoader(samples[:30], batch_size=6, shuffle=True, collate_fn=padded),
        valid=DataLoader(samples[30:], batch_size=6, collate_fn=padded),
        batch=None,
    )


class HardCoded(nn.Module):
    """Computes in float32, whatever it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(20, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.float())


def hard_coded() -> Task:
    return replace(mlp(), model=HardCoded)


# What is kept in a type of its own, or moved by noise alone


class Spectral(nn.Module):
    """A filter of frequencies: complex64, whatever the others are."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(7, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=12)


def complex_weights() -> Task:
    return planted.with_middle(Spectral)


def nadam() -> Task:
    """Keeps a product in float32 beside weights in float64."""
    return replace(planted.sound(), optimizer=lambda parameters: torch.optim.NAdam(parameters, lr=1e-2))


def asgd() -> Task:
    return replace(planted.sound(), optimizer=lambda parameters: torch.optim.ASGD(parameters, lr=1e-2))


def adafactor() -> Task:
    """Keeps the root mean square of each weight: that of a key's bias, whose gradient softmax cancels, is noise."""
    from transformers.optimization import Adafactor

    return replace(bert(), optimizer=lambda parameters: Adafactor(parameters, lr=1e-3, relative_step=False))


def gathered() -> Task:
    """Negatives from all ranks, which send gradients back."""
    return planted.gathering(with_gradient=True)


def gathered_by_evenstep() -> Task:
    """In-batch negatives as on one device, but for evenstep.gather."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        near, far = evenstep.gather(model(batch[0])), evenstep.gather(model(batch[0] + 0.1))
        return F.cross_entropy(near @ far.T, torch.arange(len(near), device=near.device))

    return planted.with_loss(loss)


def averaged() -> Task:
    """Evaluated with the average of the weights; the loss logs, and grows with the step."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        error = F.cross_entropy(model(batch[0]), batch[1])
        evenstep.log({"error": error})
        return error * evenstep.progress().step

    return replace(planted.with_loss(loss), ema=0.5)


class FrozenNorm(nn.BatchNorm1d):
    """As a pretrained part has it: in eval mode while the model around it trains."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            raise RuntimeError("a frozen BatchNorm is in training mode")
        return super().forward(x)


def frozen_norm() -> Task:
    return planted.with_middle(lambda: FrozenNorm(12).eval())


class Unused(nn.Module):
    """A layer that no loss uses."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(planted.COLUMNS, 4)
        self.forgotten = nn.Linear(planted.COLUMNS, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def unused() -> Task:
    return replace(planted.sound(), model=Unused)


def experts() -> Task:
    """Each rank uses other parameters in each step."""
    return small_task("experts/adamw/mean")
