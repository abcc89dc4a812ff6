"""The networks of the built-in tasks; images are bytes, and each network normalizes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Normalize(nn.Module):
    """Normalizes bytes, with one mean and deviation per channel, or one for all."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, mean: Sequence[float], deviation: Sequence[float]) -> None:
        super().__init__()
        # Not persistent: constants of the data do not belong in a checkpoint.
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("deviation", torch.tensor(deviation).view(-1, 1, 1), persistent=False)

    def forward(self, images: Tensor, reader: Tensor) -> Tensor:
        # The dtype of the weight that reads them: FSDP in bfloat16 casts the weights but not these buffers.
        return ((images.to(self.mean.dtype) - self.mean) / self.deviation).to(reader.dtype)


class SimpleNet(nn.Module):
    def __init__(self, normalize: Normalize) -> None:
        super().__init__()
        self.normalize = normalize
        self.hidden = nn.Linear(28 * 28, 256)
        self.output = nn.Linear(256, 10)

    def forward(self, images: Tensor) -> Tensor:
        pixels = self.normalize(images.unsqueeze(1), self.hidden.weight).flatten(1)
        logits: Tensor = self.output(F.relu(self.hidden(pixels)))
        return logits


class Net(nn.Module):
    """Two convolutions and three linear layers: the small net of PyTorch's CIFAR-10 tutorial."""

    def __init__(self, normalize: Normalize) -> None:
        super().__init__()
        self.normalize = normalize
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.normalize(images, self.conv1.weight)
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(x.flatten(1)))
        logits: Tensor = self.fc3(F.relu(self.fc2(x)))
        return logits


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(out)) + self.shortcut(x))


class ResNet18(nn.Module):
    """ResNet-18 for 32x32 images: a 3x3 stem and no max-pool, so that resolution is kept early on."""

    def __init__(self, normalize: Normalize) -> None:
        super().__init__()
        self.normalize = normalize
        self.stem = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(64)
        shapes = [(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)]
        self.blocks = nn.ModuleList()
        for channels_in, channels, stride in shapes:
            self.blocks.append(ResidualBlock(channels_in, channels, stride))
            self.blocks.append(ResidualBlock(channels, channels, 1))
        self.output = nn.Linear(512, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(self.normalize(images, self.stem.weight))))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.output(x.mean((2, 3)))
        return logits


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        # No bias: softmax cancels that of the keys, so its gradient is rounding noise, which Adam would amplify.
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.query_key_value(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.output(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class TransformerBlock(nn.Module):
    """Attention, then an MLP, each with a residual connection and a LayerNorm before it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class GPT(nn.Module):
    """A small decoder-only transformer."""

    def __init__(self, vocabulary: int, context: int, layers: int, heads: int, width: int) -> None:
        super().__init__()
        self.context = context
        self.token_embedding = nn.Embedding(vocabulary, width)
        self.position_embedding = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(TransformerBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, vocabulary, bias=False)
        # Torch draws embeddings from N(0, 1), far too large beside layers of this size.
        nn.init.normal_(self.token_embedding.weight, std=0.02)
        nn.init.normal_(self.position_embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens.long()) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.output(self.norm(x))
        return logits

    @torch.no_grad()
    def generate(self, tokens: Tensor, num_tokens: int, generator: torch.Generator) -> Tensor:
        """`tokens` (batch x length) with `num_tokens` more, drawn one after the other."""
        tokens = tokens.to(self.token_embedding.weight.device)
        for _ in range(num_tokens):
            logits = self(tokens[:, -self.context :])[:, -1]
            # Drawn on the CPU, so that a seed means the same text on every device.
            drawn = torch.multinomial(logits.float().softmax(-1).cpu(), 1, generator=generator)
            tokens = torch.cat([tokens, drawn.to(tokens)], dim=1)
        return tokens
