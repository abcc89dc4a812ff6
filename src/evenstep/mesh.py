"""How the ranks of a run are arranged: `--mesh data=2,tensor=2` is two replicas of two ranks each.

Which axes a strategy has is in its row of facts. Along its model axis the ranks compute one replica together, and read
the same samples; along the others each has samples of its own. Along a shard axis they hold the shards of one copy of
the model, or of what a rank of a replica has of it; along the data axis there are copies. The model axis is innermost,
then the shard axis: ranks that send most to each other are neighbours, on one machine where that is possible.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from evenstep.errors import PlanError, shorten
from evenstep.strategy_facts import STRATEGIES, StrategyFacts


@dataclass(frozen=True)
class Mesh:
    """Axes and their sizes, outermost first."""

    axes: tuple[tuple[str, int], ...]
    model_axis: str | None = None
    """The axis along which ranks compute one replica together."""
    shard_axis: str | None = None
    """The axis along which ranks hold the shards of one copy of the model."""

    @property
    def num_shards(self) -> int | None:
        """Ranks along the shard axis; None: the strategy decides."""
        return dict(self.axes)[self.shard_axis] if self.shard_axis is not None else None

    @property
    def num_ranks(self) -> int:
        return math.prod(size for _, size in self.axes)

    @property
    def ranks_per_replica(self) -> int:
        """Consecutive ranks that compute one replica."""
        return dict(self.axes)[self.model_axis] if self.model_axis is not None else 1

    def __str__(self) -> str:
        shown = [(name, size) for name, size in self.axes if size > 1 or name != self.shard_axis or not self.model_axis]
        return ",".join(f"{name}={size}" for name, size in shown)


def arrange(text: str | None, facts: StrategyFacts, num_ranks: int) -> Mesh | None:
    """The mesh of `num_ranks` ranks; None for a strategy without axes.

    Of the axes that are left out one gets the ranks that are left: the model axis, or else the first one. A split model
    is sharded where that is requested.

    >>> str(arrange("tensor=2", STRATEGIES["tensor"], 4)), str(arrange(None, STRATEGIES["tensor"], 4))
    ('data=2,tensor=2', 'data=1,tensor=4')
    >>> str(arrange("fsdp=2", STRATEGIES["tensor"], 4))
    'data=1,fsdp=2,tensor=2'
    """
    if text is None and facts.model_axis is None:
        return None
    given = parse_mesh(text, facts) if text is not None else {}
    if not given and facts.model_axis is not None:
        given = {facts.model_axis: num_ranks}
    if facts.model_axis is not None and facts.shard_axis is not None:
        given.setdefault(facts.shard_axis, 1)
    missing = [axis for axis in facts.axes if axis not in given]
    known = math.prod(given.values())
    if num_ranks % known or (not missing and known != num_ranks):
        raise PlanError(_other_number(text, known, num_ranks, missing))
    sizes = {**given, **dict.fromkeys(missing, 1)}
    if missing:
        rest = facts.model_axis if facts.model_axis in missing else missing[0]
        sizes[rest] = num_ranks // known
    return Mesh(tuple((axis, sizes[axis]) for axis in facts.axes), facts.model_axis, facts.shard_axis)


def check_precision(facts: StrategyFacts, precision: str) -> None:
    """PlanError for fp16 where ranks see parts of the gradients."""
    if facts.model_axis is not None and precision == "fp16":
        raise PlanError(
            f"fp16's GradScaler needs whole gradients, and the ranks of {facts.name} hold parts of them; "
            "use --precision bf16"
        )


def take_sizes(choices: dict[str, Any]) -> None:
    """Turn `--shards 2` and `--stages 2` among a command's choices into the mesh that they stand for, in place."""
    strategy, mesh = choices.get("strategy"), choices.get("mesh")
    for facts in [row for row in STRATEGIES.values() if row.size_flag]:
        size = choices.pop(facts.size_flag, None)
        if size is None:
            continue
        if strategy not in (None, facts.name):
            raise PlanError(
                f"--{facts.size_flag} is for --strategy {facts.name}, and {strategy} was given; leave one out"
            )
        if mesh is not None:
            raise PlanError(f"--{facts.size_flag} {size} is --mesh {facts.model_axis}={size}; give one of them")
        parse_mesh(f"{facts.model_axis}={size}", facts)
        choices |= {"strategy": facts.name, "mesh": f"{facts.model_axis}={size}"}


def has_axes(text: str, facts: StrategyFacts) -> bool:
    """Whether a strategy has all axes that `--mesh` names; shards of a split model are meant where both are named.

    >>> has_axes("data=2,fsdp=2", STRATEGIES["fsdp"]), has_axes("tensor=2", STRATEGIES["fsdp"])
    (True, False)
    >>> has_axes("data=2,fsdp=2", STRATEGIES["tensor"]), has_axes("fsdp=2,tensor=2", STRATEGIES["tensor"])
    (False, True)
    """
    named = _names(text)
    is_other = facts.model_axis is not None and facts.model_axis not in named and facts.shard_axis in named
    return named <= {*facts.axes} and not is_other


def _names(text: str) -> set[str]:
    return {part.partition("=")[0].strip() for part in text.split(",")}


def refuse_axes(text: str, facts: StrategyFacts) -> None:
    """PlanError with the reason, where `--mesh` combines the model axis of this strategy with one that it refuses."""
    if facts.model_axis in _names(text) and _names(text) & {*facts.refused_axes}:
        parse_mesh(text, facts)


def examples(facts: StrategyFacts) -> list[str]:
    """What `--mesh` may be.

    >>> examples(STRATEGIES["tensor"]), examples(STRATEGIES["fsdp"])
    (['data=2,tensor=2', 'fsdp=2,tensor=2'], ['data=2,fsdp=2'])
    """
    if facts.model_axis is None:
        return [",".join(f"{axis}=2" for axis in facts.axes)]
    return [f"{axis}=2,{facts.model_axis}=2" for axis in facts.axes if axis != facts.model_axis]


def least_ranks(mesh: str | None, strategy: str | None) -> int:
    """How many ranks the axes that `--mesh` names are for."""
    facts = STRATEGIES.get(strategy or "")
    return math.prod(parse_mesh(mesh, facts).values()) if mesh is not None and facts is not None else 1


def parse_mesh(text: str, facts: StrategyFacts) -> dict[str, int]:
    """The axes that `--mesh` names, by name; PlanError for others than those of the strategy."""
    if not facts.axes:
        able = [row for row in STRATEGIES.values() if row.axes]
        shown = "; ".join(f"{row.name} ({', '.join(row.axes)})" for row in able)
        raise PlanError(
            f"--mesh arranges ranks along axes, and {facts.name} has one axis alone; those with more: {shown}"
        )
    sizes: dict[str, int] = {}
    for part in text.split(","):
        found = re.fullmatch(r"\s*([a-z]+)\s*=\s*([1-9][0-9]{0,5})\s*", part)
        if found is not None and found[1] in facts.refused_axes:
            raise PlanError(f"--mesh {shorten(text)}: {facts.refused_axes[found[1]]}")
        if found is None or found[1] not in facts.axes or found[1] in sizes:
            *first, last = facts.axes
            raise PlanError(
                f"--mesh {shorten(text)}: {shorten(part.strip() or 'nothing')!r} is not an axis and its size; the axes "
                f"of {facts.name} are {', '.join(first)} and {last}, each once: --mesh {' or '.join(examples(facts))}"
            )
        sizes[found[1]] = int(found[2])
    return sizes


def _other_number(text: str | None, known: int, num_ranks: int, missing: list[str]) -> str:
    multiple = "a multiple of " if missing else ""
    return (
        f"--mesh {text} is for {multiple}{known} rank{'s' * (known > 1)}, and there are {num_ranks}; "
        f"use --devices {known}, or other sizes"
    )
