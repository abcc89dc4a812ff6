"""A model, placed on every seat that this process drives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import nn

T = TypeVar("T")


class Bound(nn.Module):
    """Runs a function of the user's model as its own forward.

    The engine's wrappers (DDP, `fully_shard`) work by hooks around one forward. Wrapping the whole loss instead of
    the model means that no call of the user's can go around them: `model.encode(x)` is as good as `model(x)`.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[..., T], *arguments: Any) -> T:
        return work(self.model, *arguments)


class Spread:
    """What `Team.spread` returns: the user's model on the team's devices.

    `module` has the user's own parameter names; optimizers and checkpoints see it. `seats` are called to compute:
    `seats[i](work, *arguments)` runs `work(model, *arguments)` on the i-th device of this process.
    """

    def __init__(self, module: nn.Module, seats: list[nn.Module], bounds: list[Bound] | None = None) -> None:
        self.module = module
        self.weights = list(module.parameters())
        """The parameters that an optimizer updates; found once, for walking the modules takes longer than a layer."""
        self.has_buffers = next(module.buffers(), None) is not None
        self.is_checked = False
        """Whether the team has seen that it can be trained."""
        self.seats = seats
        self.bounds = bounds if bounds is not None else seats
        self.weights_of = [list(bound.parameters()) for bound in self.bounds]
        """Those of each seat, which get its gradients."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters that an optimizer updates."""
        return iter(self.weights)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Inside, dropout and batch statistics are off; afterwards every layer is as the user had it."""
        with evaluating(self.module, *self.seats):
            yield


@contextmanager
def evaluating(*modules: nn.Module) -> Iterator[None]:
    """Inside, every layer is in eval mode; afterwards each is in its own mode again."""
    layers = [layer for module in modules for layer in module.modules()]
    modes = [layer.training for layer in layers]
    for layer in layers:
        layer.training = False
    try:
        yield
    finally:
        for layer, mode in zip(layers, modes, strict=True):
            layer.training = mode
