"""Standardized features (mean 0, deviation 1): fitted once, over the data of all ranks, and saved with the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn

from evenstep.distributed.world import World
from evenstep.errors import TaskError

EPSILON = torch.finfo(torch.float64).eps
VALUES_AT_ONCE = 2**15
"""Values processed at a time: their float64 copies stay in the CPU cache."""
HELD_BY_FLOAT32 = {
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16),
    *(torch.float16, torch.bfloat16, torch.float32),
}


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations of each feature, merged as by Chan, Golub and LeVeque.

    The mean is `mean + rest`, two doubles: for values near 1e8 with little noise, a single double would lose 1e-9 of
    the noise at every merge, instead of 1e-15.
    """

    count: int
    mean: torch.Tensor
    rest: torch.Tensor
    squares: torch.Tensor

    @classmethod
    def nothing(cls, num_features: int) -> Moments:
        zeros = torch.zeros(num_features, dtype=torch.float64)
        return cls(0, zeros, zeros, zeros)

    @classmethod
    def of(cls, values: torch.Tensor) -> Moments:
        """From a few values (features x values), in two passes."""
        values = values.to(torch.float64)
        guess = values.mean(1, keepdim=True)
        deviations = values - guess
        rest = deviations.mean(1, keepdim=True)
        squares = (deviations - rest).square().sum(1)
        return cls(values.shape[1], *_exact_sum(guess.squeeze(1), rest.squeeze(1)), squares)

    def add(self, values: torch.Tensor) -> Moments:
        """With more values (features x values) of any dtype; a TaskError names a feature that is not finite."""
        moments = self
        for few in values.split(max(1, VALUES_AT_ONCE // len(values)), dim=1):
            moments = moments.merge(Moments.of(few)) if few.numel() else moments
        bad = (~moments.squares.isfinite()).nonzero().flatten().tolist()
        if bad:
            raise TaskError(
                f"feature {bad[0]} of {len(values)} has NaN, infinity or a number too large to be squared"
                f"{f', and so have {len(bad) - 1} others' if len(bad) > 1 else ''}; a Scaler needs finite "
                "numbers: fill or leave out the others in the data"
            )
        return moments

    def merge(self, other: Moments) -> Moments:
        if not self.count or not other.count:
            return self if self.count else other
        count = self.count + other.count
        delta = (other.mean - self.mean) + (other.rest - self.rest)
        mean, rest = _exact_sum(self.mean, self.rest + delta * (other.count / count))
        squares = self.squares + other.squares + delta.square() * (self.count * other.count / count)
        return Moments(count, mean, rest, squares)

    def deviation(self) -> torch.Tensor:
        """Of the population; 1 for a feature that is constant within rounding, as in scikit-learn."""
        variance = self.squares / self.count
        bound = self.count * EPSILON * variance + (self.count * EPSILON * self.mean).square()
        return variance.sqrt().masked_fill(variance <= bound, 1.0)

    def to_json(self) -> list[Any]:
        """Lists, in which JSON keeps every bit of a double."""
        return [self.count, self.mean.tolist(), self.rest.tolist(), self.squares.tolist()]

    @classmethod
    def from_json(cls, lists: list[Any]) -> Moments:
        count, *vectors = lists
        return cls(count, *(torch.tensor(vector, dtype=torch.float64) for vector in vectors))


class Scaler(nn.Module):
    """Standardizes every feature, over the training data of all ranks, as scikit-learn's StandardScaler does.

    nn.Sequential(Scaler(20), nn.Linear(20, 64), ...)    # tables: 20 columns
    Scaler(3, dim=1)                                     # images N x C x H x W: one mean and deviation per channel
    Scaler(1, dim=None)                                  # images N x H x W: one mean and deviation for everything
    Scaler(20, of=lambda batch: batch["features"])       # what to fit it to, when a batch is a dict

    A part of the model: its statistics are saved and moved with the weights. Before it is fitted, it only changes the
    dtype; forward does not check that it was fitted, since the host would wait for the GPU.
    """

    count: torch.Tensor
    mean: torch.Tensor
    rest: torch.Tensor
    squares: torch.Tensor
    deviation: torch.Tensor

    def __init__(
        self, num_features: int, *, dim: int | None = -1, of: Callable[[Any], torch.Tensor] | None = None
    ) -> None:
        super().__init__()
        if num_features < 1 or (dim is None and num_features != 1):
            raise TaskError(
                f"Scaler({num_features}, dim={dim}): give the number of features, from 1 up, and the dimension that "
                "counts them; for one mean and deviation of everything: Scaler(1, dim=None)"
            )
        self.num_features = num_features
        self.dim = dim
        self.of = of
        self.dtype = torch.get_default_dtype()
        """The dtype of forward's result; `model.double()` changes it."""
        # All of one dtype, so that one message sends them to other ranks.
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        for name in ("mean", "rest", "squares"):
            self.register_buffer(name, torch.zeros(num_features, dtype=torch.float64))
        self.register_buffer("deviation", torch.ones(num_features, dtype=torch.float64))

    @property
    def is_fitted(self) -> bool:
        """Whether it has seen any value; synchronizes with the device."""
        return bool(self.count > 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = self._shape_beside(x)
        # In float64, 64 images of CIFAR-10 would take 1.1 ms instead of 0.15; but seconds since 1970 (int64) need it.
        is_exact = x.dtype in HELD_BY_FLOAT32
        working = torch.promote_types(self.dtype, torch.float32) if is_exact else self.mean.dtype
        mean = self.mean.to(working)
        rounded_off = (self.mean - mean).to(working)
        centred = x.to(working) - mean.view(shape) - rounded_off.view(shape)
        return (centred / self.deviation.to(working).view(shape)).to(self.dtype)

    def fit(self, batches: Iterable[Any], world: World | None = None) -> Self:
        """Fit to this process's share of the data, then merge all ranks' statistics; all ranks get the same bits.

        Every process of `world` calls this; one without any batch is fine. With virtual replicas, each is given all.
        """
        moments = Moments.nothing(self.num_features)
        for batch in batches:
            moments = moments.add(self._values(self._pick(batch)))
        if world is not None and world.num_virtual is None:
            every = [Moments.from_json(lists) for lists in world.gather(moments.to_json())]
            moments = Moments.nothing(self.num_features)
            for of_rank in every:
                moments = moments.merge(of_rank)
        if not moments.count:
            raise TaskError("a Scaler has nothing to be fitted to: no process has a sample")
        self._remember(moments)
        return self

    def update(self, x: torch.Tensor) -> Self:
        """Add values, in this process only; also after a checkpoint was loaded."""
        held = (vector.to("cpu").to(torch.float64) for vector in (self.mean, self.rest, self.squares))
        self._remember(Moments(int(self.count), *held).add(self._values(x)))
        return self

    def extra_repr(self) -> str:
        return f"{self.num_features}, dim={self.dim}"

    @torch.no_grad()
    def _remember(self, moments: Moments) -> None:
        if not moments.count:
            return
        self.count.fill_(moments.count)
        # In place: replicas and wrappers hold these very tensors.
        self.mean.copy_(moments.mean)
        self.rest.copy_(moments.rest)
        self.squares.copy_(moments.squares)
        self.deviation.copy_(moments.deviation())

    def _pick(self, batch: Any) -> torch.Tensor:
        """The tensor of a batch that is scaled."""
        first = batch[0] if isinstance(batch, tuple | list) and batch else batch
        picked: Any = self.of(batch) if self.of is not None else first
        if isinstance(picked, torch.Tensor):
            return picked
        if self.of is None and isinstance(batch, Mapping):
            names = ", ".join(map(repr, batch))
            raise TaskError(
                f"a batch is a dict of {names}, and the Scaler cannot know which to use; name it:\n"
                f"Scaler({self.num_features}, of=lambda batch: batch[{next(iter(batch), 'x')!r}])"
            )
        what = "`of` gave the Scaler" if self.of is not None else "the Scaler uses the batch or its first item, here"
        raise TaskError(
            f"{what} a {type(picked).__name__}; it needs a tensor:\nScaler({self.num_features}, of=lambda batch: ...)"
        )

    def _values(self, x: torch.Tensor) -> torch.Tensor:
        """`x` as features x values, on the CPU, so that statistics do not depend on the device."""
        self._shape_beside(x)
        x = x.detach().to("cpu")
        return x.reshape(1, -1) if self.dim is None else x.movedim(self.dim, 0).reshape(self.num_features, -1)

    def _shape_beside(self, x: torch.Tensor) -> list[int]:
        """The shape in which one number per feature broadcasts over `x`."""
        shape = [1] * x.ndim
        if self.dim is None:
            return shape
        if not -x.ndim <= self.dim < x.ndim or x.shape[self.dim] != self.num_features:
            raise TaskError(
                f"Scaler({self.num_features}, dim={self.dim}) got a tensor of shape {tuple(x.shape)}; dimension "
                f"{self.dim} must have {self.num_features} features. dim=1 is right for images N x C x H x W, "
                "Scaler(1, dim=None) for one mean and deviation of everything"
            )
        shape[self.dim] = self.num_features
        return shape

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Move with the model; its dtype becomes that of forward's result, while the statistics stay float64."""
        like = fn(torch.zeros((), dtype=self.dtype, device=self.count.device))
        self.dtype = like.dtype

        def move(statistic: torch.Tensor) -> torch.Tensor:
            if like.device.type == "mps":  # which has no float64
                return fn(statistic.float())
            moved = fn(statistic)
            return moved if moved.dtype == torch.float64 else statistic.to(moved.device).to(torch.float64)

        super()._apply(move, recurse)  # type: ignore[no-untyped-call]
        return self


def unfitted(module: nn.Module) -> list[Scaler]:
    """The Scalers of a model that have seen no data yet, in the order of its layers."""
    return [part for part in module.modules() if isinstance(part, Scaler) and not part.is_fitted]


def _exact_sum(one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rounded sum and its rounding error (Knuth's two-sum)."""
    total = one + other
    part = total - one
    return total, (one - (total - part)) + (other - part)
