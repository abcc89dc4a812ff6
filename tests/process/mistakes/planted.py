"""Planted mistakes: the same small task, spoilt in one place each, in ways that people really do it."""

from __future__ import annotations

import os
import random
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from evenstep import Task

Loss = Callable[[nn.Module, Any], Any]
COLUMNS = 8


def sound() -> Task:
    """Nothing is wrong with this one."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(96, COLUMNS, generator=generator)
    y = torch.randint(0, 4, (96,), generator=generator)
    return Task(
        model=lambda: nn.Sequential(nn.Linear(COLUMNS, 12), nn.Tanh(), nn.Linear(12, 4)),
        train=(x[:64], y[:64]),
        valid=(x[64:], y[64:]),
        loss=cross_entropy,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
        batch=16,
    )


def float_metric() -> Task:
    """Sound; its accuracy is a float32, as most people write it."""
    task = sound()
    return replace(
        task,
        valid=tuple(tensor[:-1] for tensor in task.valid),
        metrics=lambda model, batch: {"accuracy": (model(batch[0]).argmax(1) == batch[1]).float().mean()},
    )


def overflowing() -> Task:
    """Sound; but fp16 cannot hold its gradients until the scaler has come down."""
    return with_loss(lambda model, batch: 200 * cross_entropy(model, batch))


class Deciding(nn.Module):
    """The last digit of each weight decides how much it counts, and float64 cannot be used."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(COLUMNS, 400)
        self.head = nn.Linear(400, 4)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.layer.weight
        decided = torch.sin(weight.detach() * 2**26) > 0
        return self.head(F.linear(x.float(), weight * (1 + 0.5 * decided), self.layer.bias))


def deciding() -> Task:
    """Sound; but rounding turns decisions, and gradients jump."""
    return replace(sound(), model=Deciding)


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def with_loss(loss: Loss) -> Task:
    return replace(sound(), loss=loss)


def with_middle(make: Callable[[], nn.Module]) -> Task:
    """The model with another layer in it."""
    return replace(sound(), model=lambda: nn.Sequential(nn.Linear(COLUMNS, 12), make(), nn.Tanh(), nn.Linear(12, 4)))


# What depends on the part of the batch that a device sees


def batch_norm() -> Task:
    return with_middle(lambda: nn.BatchNorm1d(12))


class Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


def centred() -> Task:
    return with_middle(Centred)


def contrastive() -> Task:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        near, far = model(batch[0]), model(batch[0] + 0.1)
        return F.cross_entropy(near @ far.T, torch.arange(len(near)))

    return with_loss(loss)


def token_mean() -> Task:
    """A mean over all tokens of the batch: a sentence of 7 weighs more than one of 2."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        is_token = torch.arange(COLUMNS) <= y[:, None] * 2
        return (model(x).logsumexp(1, keepdim=True) * x * is_token).sum() / is_token.sum()

    return with_loss(loss)


PADDING = 0


def language_model(model: Callable[[], nn.Module], lengths: Tensor | int) -> Task:
    """Next tokens of texts of these lengths; the loss is the model's own, as Hugging Face's examples have it."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(1, 50, (48, 12), generator=generator)
    tokens = tokens.masked_fill(torch.arange(12) >= lengths, PADDING)

    def loss(model: Any, batch: Tensor) -> Tensor:
        return model(batch, labels=batch.masked_fill(batch == PADDING, -100)).loss

    return Task(
        model=model,
        train=tokens[:32],
        valid=tokens[32:],
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        batch=8,
    )


def padded_gpt2() -> Task:
    """A mean over the tokens that are no padding; at first every token has nearly the same loss."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=50, n_positions=12, n_embd=16, n_layer=2, n_head=2)
    lengths = torch.randint(2, 13, (48, 1), generator=torch.Generator().manual_seed(1))
    return language_model(lambda: GPT2LMHeadModel(config), lengths)


def mixtral() -> Task:
    """The loss that balances its router is a product of means over the batch, and a thousandth of all."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        max_position_embeddings=12,
        output_router_logits=True,
    )
    return language_model(lambda: MixtralForCausalLM(config), 12)


def gathering(with_gradient: bool) -> Task:
    """In-batch negatives from all ranks."""

    def gathered(x: Tensor) -> Tensor:
        from torch.distributed.nn.functional import all_gather

        if not dist.is_initialized():
            return x
        parts = list(all_gather(x if with_gradient else x.detach()))
        parts[dist.get_rank()] = x if not with_gradient else parts[dist.get_rank()]
        return torch.cat(parts)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        near, far = model(batch[0]), gathered(model(batch[0] + 0.1))
        first = dist.get_rank() * len(near) if dist.is_initialized() else 0
        return F.cross_entropy(near @ far.T, first + torch.arange(len(near)))

    return with_loss(loss)


def gathered_without_gradient() -> Task:
    """As torch.distributed.all_gather gives it: the other ranks' rows are constants."""
    return gathering(with_gradient=False)


def summed() -> Task:
    return with_loss(lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="sum"))


def worst_metric() -> Task:
    def metrics(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        return {"worst": F.cross_entropy(model(batch[0]), batch[1], reduction="none").max()}

    return replace(sound(), metrics=metrics)


# What draws


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        # Twice: by chance, threads of dp may draw one after the other what a whole batch draws at once.
        x = x + 0.1 * torch.randn_like(x)
        return x + 0.1 * torch.randn_like(x)


def noise() -> Task:
    return with_middle(Noise)


def python_noise() -> Task:
    return with_loss(lambda model, batch: cross_entropy(model, (batch[0] * (1 + random.random()), batch[1])))


def opt() -> Task:
    """LayerDrop: every forward draws which layers it leaves out."""
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(
        vocab_size=50,
        hidden_size=16,
        word_embed_proj_dim=16,
        ffn_dim=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=12,
        layerdrop=0.1,
        pad_token_id=PADDING,
    )
    return language_model(lambda: OPTForCausalLM(config), 12)


def unseeded() -> Task:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return cross_entropy(model, batch) * (1 + np.random.default_rng().random())

    return with_loss(loss)


def unseeded_start() -> Task:
    def model() -> nn.Module:
        made = sound().model()
        with torch.no_grad():
            made[0].weight += torch.from_numpy(np.random.default_rng().normal(size=(12, COLUMNS))).float()
        return made

    return replace(sound(), model=model)


def clocked() -> Task:
    """Looks at the clock as soon as there are several processes."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        noise = time.time_ns() % 1000 / 1000 if world_size() > 1 else 0.0
        return cross_entropy(model, batch) * (1 + noise)

    return with_loss(loss)


def drawing_batch() -> Task:
    def flipped(batch: tuple[Tensor, Tensor], draws: Any) -> tuple[Tensor, Tensor]:
        return batch[0] * torch.where(torch.rand(len(batch[0]), 1) < 0.5, -1.0, 1.0), batch[1]

    return replace(sound(), augment_batch=flipped)


# What depends on the rank


def divided() -> Task:
    return with_loss(lambda model, batch: cross_entropy(model, batch) / world_size())


def by_rank() -> Task:
    return with_loss(lambda model, batch: cross_entropy(model, batch) * (1 + int(os.environ.get("RANK", "0"))))


def scaled_rate() -> Task:
    return replace(sound(), optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1 * world_size()))


def other_data() -> Task:
    generator = torch.Generator().manual_seed(int(os.environ.get("RANK", "0")))
    return replace(sound(), train=(torch.randn(64, COLUMNS, generator=generator), sound().train[1]))


def few_digits() -> Task:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=world_size() > 1):
            return cross_entropy(model, batch)

    return with_loss(loss)


def few_digits_and_jumps() -> Task:
    """The same where rounding turns decisions, too."""
    return replace(few_digits(), model=lambda: nn.Sequential(nn.Linear(COLUMNS, 512), nn.ReLU(), nn.Linear(512, 4)))


def reducing_hook() -> Task:
    def reduced(gradient: Tensor) -> Tensor:
        total = gradient.clone()
        if dist.is_initialized():
            dist.all_reduce(total)
        return total

    def model() -> nn.Module:
        made = sound().model()
        made[2].weight.register_hook(reduced)
        return made

    return replace(sound(), model=model)


# What goes around evenstep


def clipping_hook() -> Task:
    def model() -> nn.Module:
        made = sound().model()
        made[2].weight.register_hook(lambda gradient: gradient / gradient.norm())
        return made

    return replace(sound(), model=model)


def around() -> Task:
    """The loss has a model of its own."""
    net = sound().model()
    return with_loss(lambda model, batch: cross_entropy(net, batch))


class ByItself(Dataset[Any]):
    """Gives the next sample, whichever is asked for."""

    def __init__(self, columns: tuple[Tensor, Tensor]) -> None:
        self._columns = columns
        self._next: Iterator[int] = iter(())

    def __len__(self) -> int:
        return len(self._columns[0])

    def __getitem__(self, id_: int) -> tuple[Tensor, Tensor]:
        place = next(self._next, None)
        if place is None:
            self._next = iter(range(1, len(self)))
            place = 0
        return self._columns[0][place], self._columns[1][place]


def same_data() -> Task:
    return replace(sound(), train=ByItself(sound().train))


class Queue(nn.Module):
    """Keeps what it has seen, and looks at it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(12))

    def forward(self, x: Tensor) -> Tensor:
        result = x - self.seen
        if self.training:
            with torch.no_grad():
                self.seen.mul_(0.9).add_(0.1 * x.mean(0))
        return result


def queue() -> Task:
    return with_middle(Queue)


def quantized() -> Task:
    """Quantization-aware training: observers keep the least and the largest of what they saw."""

    def model() -> nn.Module:
        from torch.ao.quantization import get_default_qat_qconfig, prepare_qat

        made = sound().model()
        with warnings.catch_warnings():
            # Deprecated, and what people have.
            warnings.simplefilter("ignore")
            made.qconfig = get_default_qat_qconfig("x86")
            return prepare_qat(made.train())

    return replace(sound(), model=model)


class Samples(nn.Module):
    """Counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x) * self.training
        return x


def counted_samples() -> Task:
    """Of 8 samples, two of the three parts into which a batch is cut hold the same number."""
    return replace(with_middle(Samples), batch=8)


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("forwards", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += self.training
        return x


def counter() -> Task:
    """Sound on any number of devices, and not with micro-batches."""
    return with_middle(Counter)


class Forgetful(nn.Module):
    """Cools down with every call, and counts in a plain number."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return x / (1 + self.calls)


def forgetful() -> Task:
    return with_middle(Forgetful)
