"""A character model of Shakespeare's plays: 1.1 MB of text, 65 characters."""

from __future__ import annotations

import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from evenstep.errors import TaskError
from evenstep.task import Batch, Model, Task
from evenstep.tasks.download import Official, find, verified
from evenstep.tasks.networks import GPT

TINYSHAKESPEARE = Official(
    name="tinyshakespeare",
    md5={"input.txt": "6fb458f1232090904fb40fe944165e91"},
    url="https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/",
)
CONTEXT = 128
WARM_UP_STEPS = 50


def task(data: str | None = None) -> Task:
    """Predict the next character; the last tenth of the text is held out."""
    path = find(TINYSHAKESPEARE, data)["input.txt"]
    alphabet, tokens = read_text(verified(path, TINYSHAKESPEARE.md5["input.txt"]), path)
    num_train = len(tokens) * 9 // 10

    def show(model: Model) -> str:
        newline = torch.tensor([[alphabet.index("\n")]])
        sampled = model.generate(newline, 200, torch.Generator().manual_seed(0))[0, 1:]
        return "".join(alphabet[token] for token in sampled.tolist())

    return Task(
        model=lambda: GPT(len(alphabet), CONTEXT, layers=4, heads=4, width=128),
        train=windows(tokens[:num_train], CONTEXT),
        valid=windows(tokens[num_train:], CONTEXT),
        loss=_token_losses,
        metrics=_bits,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
        scheduler=lambda optimizer, num_steps: LambdaLR(
            optimizer, lambda step: min((step + 1) / WARM_UP_STEPS, 1 - step / num_steps)
        ),
        show=show,
        batch=16,
        epochs=2,
    )


def read_text(content: bytes, path: Path) -> tuple[str, Tensor]:
    """The characters of a text in sorted order, and the text as their indices."""
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise TaskError(f"{path} is not UTF-8 text: {error}; replace it") from error
    alphabet = "".join(sorted(set(text)))
    if not 0 < len(alphabet) <= 256:
        raise TaskError(f"{path} has {len(alphabet)} different characters, allowed are 1 to 256; replace it")
    index = {character: number for number, character in enumerate(alphabet)}
    return alphabet, torch.tensor([index[character] for character in text], dtype=torch.uint8)


def windows(tokens: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """A text cut into windows of `context` tokens, and for each token the next one."""
    return tokens[:-1].unfold(0, context, context), tokens[1:].unfold(0, context, context)


def _token_losses(model: Model, batch: Batch) -> tuple[Tensor, int]:
    inputs, targets = batch
    losses = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten().long(), reduction="sum")
    return losses, targets.numel()


def _bits(model: Model, batch: Batch) -> dict[str, tuple[Tensor, int]]:
    losses, num_tokens = _token_losses(model, batch)
    return {"bits_per_character": (losses / math.log(2), num_tokens)}
