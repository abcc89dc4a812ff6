"""Small tasks without BatchNorm and dropout: every strategy must learn exactly the same from them."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset

from evenstep import Scaler, Task, samplers
from evenstep.sampling.rng import Draws
from evenstep.tasks.networks import GPT

NUM_SAMPLES = 103
NUM_VALID = 101
MODELS = ("mlp", "cnn", "gpt")
OPTIMIZERS = ("adamw", "sgd")
LOSSES = ("mean", "pair")


def small_task(key: str) -> Task:
    """`"cnn/adamw/mean"`: a model, an optimizer and the way the loss is given; `".../stream"`: how data comes."""
    model, optimizer, loss, *kind = key.split("/")
    generator = torch.Generator().manual_seed(7)
    columns = DATA[model](NUM_SAMPLES + NUM_VALID, generator)
    task = Task(
        model=BUILDERS[model],
        train=tuple(column[:NUM_SAMPLES] for column in columns),
        valid=tuple(column[NUM_SAMPLES:] for column in columns),
        loss=LOSS[model, loss],
        optimizer=OPTIMIZER[optimizer],
        metrics=None if DATA[model] is texts or model == "tied" else accuracy,
        scheduler=lambda optimizer, steps: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps),
    )
    return KINDS[kind[0]](task) if kind else task


class Rows(Dataset[Any]):
    """Samples one by one, with noise from every generator that a dataset may draw from."""

    def __init__(self, columns: tuple[torch.Tensor, ...]) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, id_: int) -> tuple[torch.Tensor, ...]:
        noise = random.random() + np.random.rand() + torch.rand(())
        return self.columns[0][id_] + 0.1 * noise, *(column[id_] for column in self.columns[1:])


class Flow(IterableDataset[Any]):
    """Samples one after the other, mixed by torch's own generator."""

    def __init__(self, columns: tuple[torch.Tensor, ...]) -> None:
        self.columns = columns

    def __iter__(self) -> Iterator[tuple[torch.Tensor, ...]]:
        for id_ in torch.randperm(len(self.columns[0])):
            yield tuple(column[id_] for column in self.columns)


def scaled(task: Task) -> Task:
    return replace(task, model=lambda: nn.Sequential(Scaler(20), *mlp()))


def with_complex(model: nn.Module) -> nn.Module:
    model.register_parameter("unused", nn.Parameter(torch.ones(3, dtype=torch.complex64)))
    return model


def shaken(sample: tuple[torch.Tensor, ...], generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    return sample[0] + 0.1 * torch.randn(sample[0].shape, generator=generator), *sample[1:]


def shaken_batch(batch: tuple[torch.Tensor, ...], draws: Draws) -> tuple[torch.Tensor, ...]:
    return batch[0] + 0.1 * draws.uniform(20), *batch[1:]


def with_dropout(model: nn.Module) -> nn.Module:
    """Dropout behind every normalization and activation."""
    for layer in list(model.modules()):
        for name, child in layer.named_children():
            if isinstance(child, nn.Tanh | nn.LayerNorm):
                setattr(layer, name, nn.Sequential(child, nn.Dropout(0.2)))
    return model


KINDS: dict[str, Callable[[Task], Task]] = {
    "rows": lambda task: replace(task, train=Rows(task.train)),
    "stream": lambda task: replace(task, train=Flow(task.train), valid=Flow(task.valid), scheduler=None),
    "augment": lambda task: replace(task, augment=shaken),
    "augment_batch": lambda task: replace(task, augment_batch=shaken_batch),
    "loader": lambda task: replace(
        task, train=DataLoader(Rows(task.train), 10, shuffle=True), valid=DataLoader(Rows(task.valid), 10)
    ),
    "weighted": lambda task: replace(task, sampler=samplers.Weighted(task.train[1] + 0.5)),
    "balanced": lambda task: replace(task, sampler=samplers.Balanced(task.train[1])),
    "curriculum": lambda task: replace(task, sampler=samplers.Curriculum(task.train[0][:, 0], pace=(0.2, 0.5))),
    # Which shared memory does not average: torch's DistributedDataParallel does.
    "complex": lambda task: replace(task, model=lambda: with_complex(task.model())),
    "dropout": lambda task: replace(task, model=lambda: with_dropout(task.model())),
    "ema": lambda task: replace(task, ema=0.9),
    "scaler": scaled,
    "scaler-of-some": lambda task: replace(scaled(task), sampler=samplers.Subset(range(40))),
}
DATA_KINDS = [kind for kind in KINDS if kind not in ("complex", "dropout", "ema")]
"""Of these, the ones that change the data and not the model."""


def vectors(num: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(num, 20, generator=generator), torch.randint(0, 5, (num,), generator=generator)


def pictures(num: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(num, 1, 8, 8, generator=generator), torch.randint(0, 5, (num,), generator=generator)


def texts(num: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, 11, (num, 9), generator=generator)
    # Sentences of unequal length: -1 is not counted.
    lengths = torch.randint(1, 9, (num, 1), generator=generator)
    targets = tokens[:, 1:].masked_fill(torch.arange(8) >= lengths, -1)
    return tokens[:, :-1], targets


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 5))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.Tanh(), nn.Conv2d(6, 8, 3, stride=2), nn.Tanh(), nn.Flatten(), nn.Linear(32, 5)
    )


def gpt() -> nn.Module:
    return GPT(vocabulary=11, context=8, layers=2, heads=2, width=16)


class Encoder(nn.Module):
    """An encoder of torch's own layers: attention, and a pair of Linears with dropout between them."""

    def __init__(self, dropout: float = 0.0, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        layer = nn.TransformerEncoderLayer(16, 4, 24, dropout=dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.output = nn.Linear(16, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        padding = torch.arange(tokens.shape[1]) >= 1 + tokens[:, :1] % 8
        scores: torch.Tensor = self.output(self.encoder(self.embedding(tokens), src_key_padding_mask=padding))
        return scores


class Unmasked(Encoder):
    """Without a mask, which each block would have to be given."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.encoder.layers:
            x = layer(x)
        scores: torch.Tensor = self.output(x)
        return scores


def deep(num: int = 5) -> nn.Module:
    layers = [nn.Sequential(nn.Linear(20, 20), nn.Tanh()) for _ in range(num)]
    return nn.Sequential(*layers, nn.Linear(20, 5))


def hooked() -> nn.Module:
    """Blocks whose hooks change what they give, and with weights that are tied inside of a block."""
    model = deep()
    for block in list(model)[:-1]:
        block.register_forward_hook(lambda _, __, out: 1.5 * out)
        again = nn.Linear(20, 20)
        again.weight = block[0].weight
        block.append(again)
    return model


class Gated(nn.Module):
    """A gated pair of Linears as attributes of a block, and a packed Linear that is cut up, which must stay whole."""

    def __init__(self) -> None:
        super().__init__()
        self.packed, self.out = nn.Linear(20, 60), nn.Linear(20, 20)
        self.gate, self.up, self.down = nn.Linear(20, 33, bias=False), nn.Linear(20, 33), nn.Linear(33, 5)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, two, three = self.packed(x).chunk(3, -1)
        x = x + self.out(one * torch.tanh(two) + three)
        scores: torch.Tensor = self.down(self.dropout(F.silu(self.gate(x)) * self.up(x)))
        return scores


class Tied(nn.Module):
    """Two layers that share one weight, and a method beside forward that the loss calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(20, 20), nn.Linear(20, 20)])
        self.layers[1].weight = self.layers[0].weight
        self.out = nn.Linear(20, 5)

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.out(x)


def tied_loss(model: Tied, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model.scores(batch[0]), batch[1])


class Averaged(nn.Module):
    """Keeps an average of a layer's weight, which it reads outside of that layer, in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()
        self.register_buffer("average", torch.zeros(32, 20))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.average.mul_(0.9).add_(self.layers[0].weight, alpha=0.1)
        scores: torch.Tensor = self.layers(x)
        return scores


class Later(nn.Module):
    """A head that is used from the eighth forward on, by all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(20, 5), nn.Linear(20, 5)
        self.register_buffer("num_forwards", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_forwards += self.training
        return self.one(x) + self.other(x) if self.num_forwards > 7 else self.one(x)


class Experts(nn.Module):
    """A mixture of experts, each for the samples that the router gives it; a batch is too small for all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(20, 6)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(20, 4), nn.Tanh(), nn.Linear(4, 5)) for _ in range(6))
        self.pooler = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        share, chosen = self.router(x).softmax(1).max(1)
        scores = x.new_zeros(len(x), 5)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().flatten()
            if len(rows):
                scores = scores.index_add(0, rows, share[rows, None] * expert(x[rows]))
        return scores


class TwoHeads(nn.Module):
    """A sample goes through one of two heads, and few go through the second."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(20, 8)
        self.usual, self.rare = nn.Linear(8, 5), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.body(x))
        is_rare = x[:, 0] > 1.2
        scores = x.new_zeros(len(x), 5)
        for mask, head in ((~is_rare, self.usual), (is_rare, self.rare)):
            if mask.any():
                rows = mask.nonzero().flatten()
                scores = scores.index_put((rows,), head(hidden[rows]))
        return scores


class Idle(TwoHeads):
    """In the first steps all samples go through both heads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("num_forwards", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_forwards += self.training
        if self.num_forwards > 7:
            return super().forward(x)
        hidden = torch.tanh(self.body(x))
        return self.usual(hidden) + self.rare(hidden)


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon for matrices of hidden layers, AdamW for the rest."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 0.02) -> None:
        every = list(parameters)
        hidden = [weight for weight in every if weight.ndim == 2]
        rest = [weight for weight in every if weight.ndim != 2]
        self.parts = [torch.optim.Muon(hidden, lr=lr), torch.optim.AdamW(rest, lr=lr / 10)]
        super().__init__([group for part in self.parts for group in part.param_groups], {})

    def step(self, closure: Any = None) -> None:
        for part, group in zip(self.parts, self.param_groups, strict=True):
            part.param_groups, part.state = [group], self.state
            part.step()


def hf_adafactor(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    from transformers.optimization import Adafactor

    return Adafactor(parameters, lr=0.01, relative_step=False, beta1=0.9)


class Scaled(nn.Module):
    """A residual branch with a scale, a parameter without dimensions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * torch.tanh(self.linear(x))


class Scales(nn.Module):
    """Parameters without dimensions: of a unit, tied between two units, outside of them, of few samples, and frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Scaled(20), Scaled(20), Scaled(20))
        self.layers[1].scale = self.layers[0].scale
        self.out = nn.Linear(20, 5)
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.rare = nn.Parameter(torch.tensor(1.0))
        self.frozen = nn.Parameter(torch.tensor(2.0), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.out(self.layers(x)) * self.temperature.exp() / self.frozen
        is_rare = x[:, 0] > 1.2
        return torch.where(is_rare[:, None], scores * self.rare, scores) if is_rare.any() else scores


def weight_normed() -> nn.Module:
    """By the older function, whose layers hold a tensor that torch does not copy."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        first = torch.nn.utils.weight_norm(nn.Linear(20, 32))
    return nn.Sequential(first, nn.Tanh(), nn.Linear(32, 5))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 5))


def normed_cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.2)),
        *(nn.Conv2d(6, 8, 3, stride=2), nn.BatchNorm2d(8, momentum=None), nn.ReLU()),
        *(nn.Flatten(), nn.Dropout(0.2), nn.Linear(32, 5)),
    )


def spectral() -> nn.Module:
    """A layer whose forward changes a buffer, and computes with it."""
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(20, 32)), nn.Tanh(), nn.Linear(32, 5))


def dropped() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 32), nn.Dropout(0.5), nn.Linear(32, 5))


def mean_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def decayed_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """With a penalty on all weights, which are used outside of their layers for that."""
    penalty = sum(weight.pow(2).sum() for weight in model.parameters())
    return mean_loss(model, batch) + 0.01 * penalty


def pair_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples of class k count k + 1 times: shares of equal size have unequal counts."""
    weights = batch[1] + 1
    return (F.cross_entropy(model(batch[0]), batch[1], reduction="none") * weights).sum(), weights.sum()


def penalty_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """With a gradient of its own: what each sample changes by moving a little is held small."""
    inputs = batch[0].clone().requires_grad_()
    scores = model(inputs)
    (slope,) = torch.autograd.grad(scores.sum(), inputs, create_graph=True)
    return F.cross_entropy(scores, batch[1]) + slope.square().sum(1).mean()


def token_mean_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """A mean over samples of each sample's own mean."""
    tokens, targets = batch
    losses = F.cross_entropy(model(tokens).transpose(1, 2), targets, ignore_index=-1, reduction="none")
    return (losses.sum(1) / (targets >= 0).sum(1)).mean()


def token_pair_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, targets = batch
    losses = F.cross_entropy(model(tokens).transpose(1, 2), targets, ignore_index=-1, reduction="sum")
    return losses, (targets >= 0).sum()


def accuracy(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"accuracy": model(batch[0]).argmax(1) == batch[1]}


DATA = {
    "averaged": vectors,
    "experts": vectors,
    "heads": vectors,
    "idle": vectors,
    "later": vectors,
    "scales": vectors,
    "weight_norm": vectors,
    "encoder": texts,
    "encoder_drop": texts,
    "gated": vectors,
    "gpt4": texts,
    "encoder4": texts,
    "gpt8": texts,
    "encoder8": texts,
    "deep8": vectors,
    "deep": vectors,
    "hooked": vectors,
    "mlp": vectors,
    "cnn": pictures,
    "gpt": texts,
    "tied": vectors,
    "norm": vectors,
    "norm_cnn": pictures,
    "drop": vectors,
    "spectral": vectors,
}
BUILDERS = {
    "averaged": Averaged,
    "experts": Experts,
    "heads": TwoHeads,
    "idle": Idle,
    "later": Later,
    "scales": Scales,
    "weight_norm": weight_normed,
    "encoder": Encoder,
    "encoder_drop": lambda: Encoder(0.1),
    "gated": Gated,
    "gpt4": lambda: GPT(vocabulary=11, context=8, layers=4, heads=2, width=16),
    "encoder4": lambda: Unmasked(layers=4),
    "gpt8": lambda: GPT(vocabulary=11, context=8, layers=8, heads=2, width=16),
    "encoder8": lambda: Unmasked(layers=8),
    "deep8": lambda: deep(8),
    "deep": deep,
    "hooked": hooked,
    "mlp": mlp,
    "cnn": cnn,
    "gpt": gpt,
    "tied": Tied,
    "norm": normed,
    "norm_cnn": normed_cnn,
    "drop": dropped,
    "spectral": spectral,
}
LOSS = {
    ("mlp", "mean"): mean_loss,
    ("cnn", "mean"): mean_loss,
    ("gpt", "mean"): token_mean_loss,
    ("tied", "mean"): tied_loss,
    ("norm", "mean"): mean_loss,
    ("norm_cnn", "mean"): mean_loss,
    ("drop", "mean"): mean_loss,
    ("spectral", "mean"): mean_loss,
    ("averaged", "mean"): mean_loss,
    ("experts", "mean"): mean_loss,
    ("experts", "pair"): pair_loss,
    ("heads", "mean"): mean_loss,
    ("heads", "pair"): pair_loss,
    ("idle", "mean"): mean_loss,
    ("later", "mean"): mean_loss,
    ("scales", "mean"): mean_loss,
    ("scales", "pair"): pair_loss,
    ("weight_norm", "mean"): mean_loss,
    ("mlp", "decayed"): decayed_loss,
    ("mlp", "pair"): pair_loss,
    ("mlp", "penalty"): penalty_loss,
    ("cnn", "pair"): pair_loss,
    ("gpt", "pair"): token_pair_loss,
    ("encoder", "pair"): token_pair_loss,
    ("encoder_drop", "pair"): token_pair_loss,
    ("gated", "mean"): mean_loss,
    ("gpt4", "pair"): token_pair_loss,
    ("encoder4", "pair"): token_pair_loss,
    ("gpt8", "pair"): token_pair_loss,
    ("encoder8", "pair"): token_pair_loss,
    ("deep8", "mean"): mean_loss,
    ("deep", "mean"): mean_loss,
    ("hooked", "mean"): mean_loss,
}
OPTIMIZER: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.1),
    "still": lambda parameters: torch.optim.SGD(parameters, lr=0.0),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "fused": lambda parameters: torch.optim.Adam(parameters, lr=3e-3, fused=True),
    "foreach": lambda parameters: torch.optim.NAdam(parameters, lr=3e-3, foreach=True),
    "muon": lambda parameters: torch.optim.Muon([one for one in parameters if one.ndim == 2], lr=0.02),
    "muon_adamw": MuonAndAdamW,
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.05, weight_decay=0.1),
    "hf_adafactor": hf_adafactor,
    "rprop": lambda parameters: torch.optim.Rprop(parameters, lr=0.01),
    "plain": lambda parameters: torch.optim.ASGD(parameters, lr=0.05, foreach=False),
}
