"""The files of a checkpoint, and what its state.json holds.

runs/NAME/checkpoints/
  step-00000120/
    weights.safetensors     the user's own parameter names, whole tensors
    optimizer.safetensors   "parameter/state" names, whole tensors
    state.json              step, position, scheduler, generators, plan
    SHA256SUMS              `sha256sum -c SHA256SUMS` agrees
  latest -> step-00000120
  best -> step-00000080     ../../FIRST/checkpoints/step-00000080 where a resumed run has no better one
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypedDict, cast

from msgspec import Meta
from safetensors import SafetensorError, safe_open

from evenstep.early_stopping import BestSoFar
from evenstep.errors import CheckpointError, shorten
from evenstep.record import Evaluation, Tally
from evenstep.typed_values import Natural, Positive, Schema

FORMAT = 1
FOLDER = "checkpoints"
SUMS = "SHA256SUMS"
WEIGHTS = "weights.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
LINK = "link.safetensors"
"""What `--link` keeps between steps."""
EMA = "ema.safetensors"
"""The average of the weights, under their names, where a task has one."""
EXTRA = "extra.safetensors"
"""Tensors that a custom loop has added."""


class LoaderState(TypedDict):
    """The position of a training in its data."""

    position: Natural
    num_finished: Natural
    num_samples: Natural | None
    order: NotRequired[str]
    stream: NotRequired[list[Positive] | None]


class OptimizerGroup(TypedDict):
    """Parameters by name, next to the group's options."""

    params: list[str]


OptimizerState = TypedDict(
    "OptimizerState",
    {
        "class": str,
        "values": dict[str, dict[str, Any]],
        "groups": list[OptimizerGroup],
        "made_with": NotRequired[list[dict[str, Any]]],
    },
)
"""By parameter name: values that are no tensors; and the groups, with what `state.made_with` returned for each."""

Word = Annotated[int, Meta(ge=0, lt=2**32)]


class HostState(TypedDict):
    """The generators of one rank: Python's, NumPy's and torch's, which earlier checkpoints lack."""

    python: tuple[Literal[3], Annotated[list[Word], Meta(min_length=625, max_length=625)], float | None]
    numpy: tuple[
        Literal["MT19937"],
        Annotated[list[Word], Meta(min_length=624, max_length=624)],
        Annotated[int, Meta(ge=0, le=624)],
        Literal[0, 1],
        float,
    ]
    torch: NotRequired[str]
    cuda: NotRequired[list[str]]


@dataclass(frozen=True, kw_only=True)
class Totals:
    """What a restart must know about the rows before it, which may be millions."""

    tally: Tally
    best: float | None
    """The best value of the metric of `--best`."""
    evaluation: Evaluation | None
    """At this step."""
    best_so_far: BestSoFar | None = None


class State(TypedDict):
    """The required content of state.json; a caller may add to it."""

    format: Positive
    evenstep: str
    torch: str
    step: Natural
    seed: Natural
    loader: LoaderState
    num_steps: Natural | None
    scheduler: dict[str, Any] | None
    scaler: dict[str, Any] | None
    generators: list[HostState]
    optimizers: dict[str, OptimizerState]
    plan: NotRequired[dict[str, Any] | None]
    valid: NotRequired[dict[str, float]]
    evaluation_due: NotRequired[bool]
    so_far: NotRequired[Totals | None]
    requires_grad: NotRequired[dict[str, dict[str, bool]]]
    """By model and parameter, where it changed during the training."""
    numerics: NotRequired[dict[str, Any]]
    """With virtual replicas: what the bits depend on."""


@dataclass(frozen=True)
class _Version:
    """The part of state.json that shows whether this version can read the rest."""

    format: Positive
    evenstep: str = "another version"


_VALUES: Schema[dict[str, Any]] = Schema(dict[str, Any], "state of a checkpoint", CheckpointError)
_VERSION: Schema[_Version] = Schema(_Version, "state of a checkpoint", CheckpointError)
_STATE: Schema[State] = Schema(State, "state of a checkpoint", CheckpointError)


def step_name(step: int) -> str:
    """The folder of a step's checkpoint."""
    return f"step-{step:08d}"


def read_state(path: Path) -> State:
    """The JSON part of a checkpoint that was verified, with all that was added to it."""
    where = path / STATE
    values = _VALUES.read(where)
    version = _VERSION.convert(values, where)
    if version.format > FORMAT:
        raise CheckpointError(
            f"{path} has format {version.format} and this evenstep reads up to {FORMAT}; "
            f"it was written by evenstep {shorten(version.evenstep)}: upgrade to load it"
        )
    so_far = _STATE.convert(values, where).get("so_far")
    return cast(State, {**values, "so_far": so_far})


def start_of(resume: str | None) -> tuple[int, int]:
    """(step, position) at which a run starts: those of a checkpoint; (0, 0) for a new run or a file of weights."""
    if resume is None or os.path.isfile(resume):
        return 0, 0
    state = read_state(Path(resume))
    return state["step"], state["loader"]["position"]


def tensor_table(path: Path) -> dict[str, tuple[str, list[int]]]:
    """Names, types and shapes of a safetensors file, from its header alone."""
    try:
        with safe_open(path, framework="numpy") as file:
            parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  (it is no dict)
            return {name: (part.get_dtype(), part.get_shape()) for name, part in parts.items()}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{shorten(str(path))} is not a safetensors file ({shorten(str(error))})") from error
