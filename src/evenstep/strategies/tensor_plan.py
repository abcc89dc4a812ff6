"""Which layers of a model tensor parallelism can split: what is understood is split, and everything else stays whole.

`PairsOfLinears` finds Linears whose outputs go through nothing but functions of single numbers into another Linear. It
watches one computation of the loss instead of reading the code, so that a block may be written in any way: attributes,
nn.Sequential, functions, gates. A packed Linear for queries, keys and values is cut up and reshaped by its block, which
is no function of single numbers: it stays whole. Without a sample of the loss, nn.Sequential alone is read.
"""

from __future__ import annotations

import re
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from evenstep.distributed.world import World
from evenstep.errors import TaskError
from evenstep.private_apis import call_hooks, tree_leaves
from evenstep.strategies.base import SMALL_ENOUGH, Sample, copied

ACTIVATIONS = (
    *(nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU),
    *(nn.Softplus, nn.Softsign, nn.Hardswish, nn.Hardtanh, nn.Hardsigmoid, nn.LogSigmoid, nn.Identity),
)
"""Layers that compute number by number."""
OF_NUMBERS = {
    *("relu", "relu_", "relu6", "gelu", "silu", "mish", "tanh", "tanh_", "sigmoid", "sigmoid_", "leaky_relu", "elu"),
    *("selu", "celu", "softplus", "softsign", "hardswish", "hardtanh", "hardsigmoid", "logsigmoid", "exp", "square"),
    *("mul", "mul_", "__mul__", "__rmul__", "__imul__", "multiply", "add", "add_", "__add__", "__radd__", "__iadd__"),
    *("sub", "__sub__", "__rsub__", "div", "__truediv__", "true_divide", "neg", "__neg__", "pow", "__pow__", "abs"),
    *("clamp", "erf", "sqrt", "rsqrt", "float", "double", "bfloat16", "half", "to", "type", "contiguous", "clone"),
}
"""Functions of tensors that compute number by number."""
KNOWN_ALIKE = {"dtype", "device", "requires_grad", "ndim", "is_cuda", "layout", "is_sparse", "is_nested", "is_leaf"}
"""What a slice has in common with the whole."""
WHOLE_STYLES = {"colwise_rep", "colwise_gather_output", "embedding_rowwise", "replicate", "gather"}
"""Of a Hugging Face plan: layers whose results every rank has anyway; they stay whole."""
ALONE_STYLE = "replicated_with_grad_allreduce"
"""A whole layer that each rank applies to its own heads: gradients are summed."""


NOT_NUMBER_BY_NUMBER = (
    "its output does not reach exactly one Linear elementwise, or passes a dropout that is used elsewhere too"
)
Pairs = dict[tuple[tuple[str, ...], str], list[str]]
"""Linears, the one that takes what they gave, and the dropout layers between them."""


@dataclass
class SplitPlan:
    """What is split, by the names of layers."""

    pairs: list[tuple[tuple[str, ...], str]] = field(default_factory=list)
    """Linears that are split by outputs, and the one that is split by inputs and takes what they gave."""
    dropouts: dict[str, str] = field(default_factory=dict)
    """Dropout layers between them, and the Linear whose outputs they get."""
    attentions: list[str] = field(default_factory=list)
    """nn.MultiheadAttention, by heads."""
    alone: list[str] = field(default_factory=list)
    """Whole layers whose gradients are summed."""
    whole: dict[str, str] = field(default_factory=dict)
    """Layers that could have been split, and why they stay whole."""


def plan_of(model: nn.Module, world: World, sample: Sample | None) -> SplitPlan:
    """What to split; the same on all ranks, which call this together."""
    num = world.ranks_per_replica
    plan = _plan_of_attentions(model, num)
    given: Mapping[str, str] | None = getattr(model, "_tp_plan", None)
    if given:
        _add_given(plan, model, given, num)
    found, own_outside = _watched(model, sample) if sample is not None else (_read(model), [])
    own = [[list(sources), target, dropouts] for (sources, target), dropouts in found.items()]
    every, outside = zip(*world.gather((own, own_outside)), strict=True)
    _leave_whole(plan, {name for of_rank in outside for name in of_rank})
    # A rank whose samples took another branch may have seen what others did not.
    common = [one for one in every[0] if all(one in of_rank for of_rank in every[1:])]
    taken = {name for sources, target in plan.pairs for name in (*sources, target)}
    for sources, target, dropouts in common:
        if not taken & {*sources, target}:
            _add_pair(plan, model, (tuple(sources), target), dropouts, num)
    split = {name for sources, target in plan.pairs for name in (*sources, target)}
    for name, layer in model.named_modules():
        is_inside = any(name.startswith(f"{one}.") for one in plan.attentions)
        if isinstance(layer, nn.Linear) and name not in split and not is_inside:
            plan.whole.setdefault(name, NOT_NUMBER_BY_NUMBER)
    return plan


def _leave_whole(plan: SplitPlan, outside: set[str]) -> None:
    """Layers whose parameters are used outside of their forward: a penalty on all weights needs whole ones."""
    plan.whole |= dict.fromkeys(sorted(outside), "its parameters are used outside of its forward")
    plan.attentions = [name for name in plan.attentions if name not in outside]
    plan.pairs = [(sources, target) for sources, target in plan.pairs if not {*sources, target} & outside]


def _plan_of_attentions(model: nn.Module, num: int) -> SplitPlan:
    plan, tied = SplitPlan(), _tied(model)
    for name, layer in model.named_modules():
        if not isinstance(layer, nn.MultiheadAttention):
            continue
        if type(layer) is not nn.MultiheadAttention or any(id(one) in tied for one in layer.parameters()):
            plan.whole[name] = "it is a subclass, or shares weights"
        elif layer.in_proj_weight is None or layer.bias_k is not None or layer.add_zero_attn:
            plan.whole[name] = "it has kdim, vdim, add_bias_kv or add_zero_attn"
        elif layer.num_heads < num:
            plan.whole[name] = f"it has {layer.num_heads} heads for {num} shards"
        else:
            plan.attentions.append(name)
    return plan


def _tied(model: nn.Module) -> set[int]:
    names: dict[int, int] = {}
    for _, weight in model.named_parameters(remove_duplicate=False):
        names[id(weight)] = names.get(id(weight), 0) + 1
    return {key for key, count in names.items() if count > 1}


def _add_pair(
    plan: SplitPlan, model: nn.Module, pair: tuple[tuple[str, ...], str], dropouts: Sequence[str], num: int
) -> None:
    sources, target = pair
    width = model.get_submodule(target).in_features
    if isinstance(width, int) and width < num:
        plan.whole |= dict.fromkeys((*sources, target), f"only {width} hidden features for {num} shards")
        return
    plan.pairs.append(pair)
    plan.dropouts |= dict.fromkeys(dropouts, sources[0])


def _read(model: nn.Module) -> Pairs:
    """Pairs in nn.Sequential: Linear, activations and dropout, Linear."""
    tied = _tied(model)
    times = Counter(id(layer) for _, layer in model.named_modules(remove_duplicate=False))
    found: Pairs = {}
    dropouts: list[str] = []
    for prefix, sequence in model.named_modules():
        if type(sequence) is not nn.Sequential:
            continue
        source = ""
        # Not named_children, which leaves out a layer that comes again.
        every = sequence.named_modules(remove_duplicate=False)
        for key, layer in ((key, layer) for key, layer in every if key and "." not in key):
            name = f"{prefix}.{key}".lstrip(".")
            if any(call_hooks(layer)):
                # They would see parts, or compute the weight, as those of weight_norm do.
                source = ""
            elif type(layer) is nn.Linear and not any(id(one) in tied for one in layer.parameters()):
                if source:
                    found[((source,), name)] = dropouts
                    source, dropouts = "", []
                else:
                    source, dropouts = name, []
            elif type(layer) is nn.Dropout and source and times[id(layer)] == 1:
                dropouts = [*dropouts, name]
            elif not isinstance(layer, ACTIVATIONS):
                source = ""
    return found


def _watched(model: nn.Module, sample: Sample) -> tuple[Pairs, list[str]]:
    """Pairs that a computation of the loss shows, and the layers whose parameters it uses outside of their forward.

    A large model is not copied, and its buffers are put back.
    """
    if sum(weight.numel() for weight in model.parameters()) <= SMALL_ENOUGH:
        watched = PairsOfLinears(copied(model))
        with watched, torch.no_grad():
            sample(watched.model)
        return watched.pairs(), sorted(watched.outside)
    kept = [buffer.clone() for buffer in model.buffers()]
    watched = PairsOfLinears(model)
    with watched, torch.no_grad():
        sample(model)
        for buffer, before in zip(model.buffers(), kept, strict=True):
            buffer.copy_(before)
    return watched.pairs(), sorted(watched.outside)


@dataclass(frozen=True)
class _Origin:
    """Where a tensor comes from: the Linears whose outputs it is computed from, and the dropout on the way."""

    sources: frozenset[str]
    dropouts: frozenset[str] = frozenset()


class PairsOfLinears(TorchFunctionMode):
    """Inside, notes which Linears' outputs go number by number into which other Linear, and nowhere else."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._names = {id(layer): name for name, layer in model.named_modules()}
        self._running: list[nn.Module] = []
        self._origins: dict[int, _Origin] = {}
        self._alive: dict[int, weakref.ref[torch.Tensor]] = {}
        """What has an origin: kept alive, all activations of the whole model would be there at once."""
        self._escaped: set[str] = set()
        """Linears whose outputs something else uses than functions of single numbers and Linears."""
        self.outside: set[str] = set()
        """Layers whose parameters are used outside of their forward."""
        self._targets: dict[str, set[str]] = {}
        self._inputs: dict[str, set[_Origin | None]] = {}
        self._drops: dict[str, set[frozenset[str]]] = {}
        """The Linears from which each dropout layer got outputs, in each of its calls; none, where it was another."""
        self._constants = {id(buffer) for buffer in model.buffers() if buffer.numel() == 1}
        tied = _tied(model)
        self._linear_of = {
            id(weight): name
            for name, layer in model.named_modules()
            if type(layer) is nn.Linear and not any(id(one) in tied for one in layer.parameters())
            for weight in layer.parameters()
        }
        self._owner_of = {
            **self._linear_of,
            **{
                id(weight): name
                for name, layer in model.named_modules()
                if isinstance(layer, nn.MultiheadAttention)
                for weight in layer.parameters()
            },
        }
        self._hooks = ExitStack()

    def __enter__(self) -> PairsOfLinears:
        for layer in self.model.modules():
            if isinstance(layer, nn.Linear | nn.Dropout | nn.MultiheadAttention):
                before = layer.register_forward_pre_hook(lambda one, _: self._running.append(one))
                after = layer.register_forward_hook(lambda *_: self._left(), always_call=True)
                self._hooks.callback(before.remove)
                self._hooks.callback(after.remove)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._hooks.close()

    def _left(self) -> None:
        self._running.pop()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        name = getattr(func, "__name__", "")
        running = self._running[-1] if self._running else None
        if name == "linear" and self._is_call_of(running, args):
            self._called(self._names[id(running)], args[0], result)
            return result
        # A weight that is computed with outside of its layer must be whole.
        if any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(result)):
            self.outside |= {self._owner_of[id(one)] for one in given if id(one) in self._owner_of} - self._inside()
        found = [self._origins[id(one)] for one in given if id(one) in self._origins]
        if isinstance(running, nn.Dropout):
            sources = frozenset(source for one in found for source in one.sources)
            self._drops.setdefault(self._names[id(running)], set()).add(sources)
        if found:
            self._follow(func, given, result, found)
        return result

    def _inside(self) -> set[str]:
        return {self._names[id(layer)] for layer in self._running}

    def _is_call_of(self, running: nn.Module | None, args: tuple[Any, ...]) -> bool:
        return (
            type(running) is nn.Linear
            and len(args) > 1
            and self._linear_of.get(id(args[1])) == self._names[id(running)]
        )

    def _called(self, name: str, given: torch.Tensor, result: torch.Tensor) -> None:
        origin = self._origins.get(id(given))
        self._inputs.setdefault(name, set()).add(origin)
        for source in origin.sources if origin is not None else ():
            self._targets.setdefault(source, set()).add(name)
        self._keep(result, _Origin(frozenset([name])))

    def _follow(self, func: Any, given: list[torch.Tensor], result: Any, found: list[_Origin]) -> None:
        name = getattr(func, "__name__", "")
        if name == "__get__" and getattr(getattr(func, "__self__", None), "__name__", "") in KNOWN_ALIKE:
            return
        if name in ("dim", "is_floating_point", "is_complex"):
            return
        sources = frozenset(source for one in found for source in one.sources)
        dropouts = frozenset(drop for one in found for drop in one.dropouts)
        is_dropout = name == "dropout" and self._running and type(self._running[-1]) is nn.Dropout
        # A single number of another tensor would get a part of its gradient on each rank; one of Python is in no list.
        is_plain = name in OF_NUMBERS and all(id(one) in self._origins or id(one) in self._constants for one in given)
        is_alike = isinstance(result, torch.Tensor) and all(
            one.shape == result.shape for one in given if id(one) in self._origins
        )
        if not is_alike or not (is_plain or is_dropout):
            self._escaped |= sources
            return
        if is_dropout:
            dropouts |= {self._names[id(self._running[-1])]}
        self._keep(result, _Origin(sources, dropouts))

    def _keep(self, tensor: torch.Tensor, origin: _Origin) -> None:
        key = id(tensor)
        # Another tensor may get the id of one that is gone.
        self._alive[key] = weakref.ref(tensor, lambda _: self._forget(key))
        self._origins[key] = origin

    def _forget(self, key: int) -> None:
        del self._alive[key], self._origins[key]

    def pairs(self) -> Pairs:
        """Linears whose outputs go into one Linear alone, that Linear, and the dropout between them."""
        found: Pairs = {}
        used: set[str] = set()
        for target, inputs in self._inputs.items():
            if len(inputs) != 1 or None in inputs:
                continue
            (origin,) = inputs
            assert origin is not None
            sources = sorted(origin.sources, key=list(self._inputs).index)
            is_apart = all(self._targets[one] == {target} and one not in self._escaped for one in sources)
            # A layer that is used elsewhere too would draw masks of one width for all of its inputs.
            is_own = all(len(self._drops[drop]) == 1 for drop in origin.dropouts)
            if is_apart and is_own and not {*sources, target} & (used | self.outside):
                used |= {*sources, target}
                found[(tuple(sources), target)] = sorted(origin.dropouts)
        return found


def _add_given(plan: SplitPlan, model: nn.Module, given: Mapping[str, str], num: int) -> None:
    """The plan that a Hugging Face model, or the user, gives: `_tp_plan`, patterns of names and how each is split."""
    columns: list[str] = []
    rows: list[str] = []
    for pattern, style in given.items():
        names = list(_matching(model, pattern))
        if not names:
            raise TaskError(
                f"the model's _tp_plan has {pattern!r}, and no layer has that name; the layers are such as "
                f"{', '.join(_examples(model))}: correct the plan, or remove that line"
            )
        if style == "colwise":
            columns += names
        elif style == "rowwise":
            rows += names
        elif style == ALONE_STYLE:
            plan.alone += names
        elif style in WHOLE_STYLES:
            plan.whole |= dict.fromkeys(names, f"{style} in the model's plan: each rank has its result anyway")
        else:
            raise TaskError(
                f"the model's _tp_plan splits {names[0]} as {style!r}, which evenstep does not know; it knows colwise, "
                f"rowwise and {ALONE_STYLE}: remove that line, and the layer stays whole, or use --strategy fsdp"
            )
    _check_given(model, [*columns, *rows], num)
    for row in rows:
        block = row.rpartition(".")[0]
        plan.pairs.append((tuple(one for one in columns if one.rpartition(".")[0] == block), row))
    alone = set(columns) - {one for sources, _ in plan.pairs for one in sources}
    if alone:
        raise TaskError(f"the model's _tp_plan splits {min(alone)} by columns, and nothing beside it by rows")


def _check_given(model: nn.Module, names: Sequence[str], num: int) -> None:
    config = getattr(model, "config", None)
    for key in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, key, None)
        if isinstance(heads, int) and heads % num:
            raise TaskError(f"{key} is {heads}, which does not split over {num} shards; use a size that divides it")
    if model.training and getattr(config, "attention_dropout", None):
        raise TaskError(
            "attention_dropout inside split heads would draw other masks on each rank; set it to 0, or use fsdp"
        )
    for name in names:
        layer = model.get_submodule(name)
        if type(layer) is not nn.Linear:
            raise TaskError(f"the model's _tp_plan splits {name}, a {type(layer).__name__}; nn.Linear alone is split")


def _matching(model: nn.Module, pattern: str) -> Iterator[str]:
    text = re.escape(pattern).replace(r"\*", r"[^.]+")
    return (name for name, _ in model.named_modules() if re.fullmatch(text, name))


def _examples(model: nn.Module) -> list[str]:
    return [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)][:3]
