"""Checkpoint folders: written to a temporary folder, flushed, hashed, renamed; `latest` moves last.

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

import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Mapping
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
_NAME = re.compile(r"step-([0-9]+)")
_SPARE = ".spare"
LARGE_BYTES = 2**26
"""A checkpoint that is finished in the background, and whose files the next one is written over."""


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


def write(folder: Path, step: int, files: Mapping[str, Callable[[Path], None]]) -> Path:
    """Write one checkpoint of `files` (each a function that fills a path) below `folder`; its final path.

    Killed at any point, this leaves the older checkpoints as they were.
    """
    beside = begin(folder, step)
    try:
        for name, fill in files.items():
            fill(beside / name)
        return finish(beside, step)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise


def begin(folder: Path, step: int) -> Path:
    """The empty folder that a checkpoint is written to."""
    own = f".{step_name(step)}.{os.getpid()}"
    # A process that was killed in the middle may have left this, and may have had our process id.
    for left in (folder / own, *folder.glob(f"{own}.*")):
        shutil.rmtree(left, ignore_errors=True)
    # Random: on another machine, a rank that does not see this folder would write its shards into one that was left.
    beside = folder / f"{own}.{os.urandom(8).hex()}"
    beside.mkdir(parents=True)
    return beside


def finish(beside: Path, step: int) -> Path:
    """Hash and flush what was written, and make it the latest checkpoint; its final path."""
    folder = beside.parent
    final = folder / step_name(step)
    replaced = folder / f".{final.name}.replaced"
    sums = "".join(f"{_sha256(path)}  {path.name}\n" for path in sorted(beside.iterdir()))
    (beside / SUMS).write_text(sums)
    # safetensors creates files with mode 0600; give them the mode of the other files.
    mode = (beside / SUMS).stat().st_mode
    for path in [*beside.iterdir(), beside]:
        if path.is_file():
            path.chmod(mode)
        _flush(path)
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    beside.rename(final)
    _flush(folder)
    _retire(replaced)
    point(folder, "latest", final.name)
    return final


def _retire(path: Path) -> None:
    """Delete a checkpoint, or keep the files of a large one as those that the next one is written over.

    Pages of a file that is there are written five times as fast as those of a new one, and stay in the page cache.
    """
    spare = path.parent / _SPARE
    if path.is_dir() and not spare.exists() and sum(file.stat().st_size for file in path.iterdir()) >= LARGE_BYTES:
        path.rename(spare)
    else:
        shutil.rmtree(path, ignore_errors=True)


def take_spare(folder: Path, name: str, num_bytes: int) -> Path | None:
    """A file of a deleted checkpoint, of this name and size, to be renamed and written over; None if there is none.

    One that another program has open, or that has another name too, is not taken: it would change under them.
    """
    path = folder / _SPARE / name
    try:
        with path.open("r+b") as file:
            found = os.fstat(file.fileno())
            if found.st_size != num_bytes or found.st_nlink != 1 or path.is_symlink():
                return None
            # Refused while the file is open or mapped elsewhere on this machine, and where nobody can know that.
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except (OSError, AttributeError):  # no leases but on Linux
        return None
    return path


def drop_spare(folder: Path) -> None:
    """Delete what `take_spare` would give."""
    shutil.rmtree(folder / _SPARE, ignore_errors=True)


def remove(beside: Path) -> None:
    """Give up a checkpoint that was begun."""
    shutil.rmtree(beside, ignore_errors=True)


def point(folder: Path, link: str, target: str) -> None:
    """Move `latest` or `best` to a checkpoint, at once or not at all."""
    temporary = folder / f".{link}.{os.getpid()}"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    temporary.replace(folder / link)
    _flush(folder)


def keep_best(folder: Path, resumed: Path, step: int) -> Path | None:
    """Let `best` of a resumed run point to the best checkpoint of the run before; None if that is gone."""
    named = resumed.parent / step_name(step)
    # The run before may itself have been resumed.
    found = next((one.resolve() for one in (named, resumed.parent / "best") if (one / STATE).is_file()), None)
    if found is None or found.name != named.name:
        return None
    if found.parent != folder.resolve():
        folder.mkdir(parents=True, exist_ok=True)
        # Relative: the folder of all runs may be moved.
        point(folder, "best", os.path.relpath(found, folder.resolve()))
    return found


def prune(folder: Path, keep: int) -> None:
    """Delete all but the last `keep` checkpoints, the best one, and the one that `latest` names."""
    spared = {(folder / link).resolve() for link in ("latest", "best")}
    for path in whole(folder)[:-keep]:
        if path.resolve() not in spared:
            _retire(path)
    # Of processes that were killed while they wrote; a run that is killed often would fill the disk with them.
    for left in (*folder.glob(".step-*"), *folder.glob(".latest.*"), *folder.glob(".best.*")):
        left.unlink() if left.is_symlink() else shutil.rmtree(left, ignore_errors=True)


def whole(folder: Path) -> list[Path]:
    """The finished checkpoints below a folder, oldest first."""
    for replaced in folder.glob(".step-*.replaced"):
        # A process was killed between moving the old one away and renaming the new one.
        final = folder / replaced.name.removeprefix(".").removesuffix(".replaced")
        if not final.exists():
            replaced.rename(final)
    found = ((_NAME.fullmatch(path.name), path) for path in folder.glob("step-*") if path.is_dir())
    # Eight digits sort as text; from step 100,000,000 on there are nine.
    return [path for _, path in sorted((int(name[1]), path) for name, path in found if name is not None)]


def verify(path: Path) -> None:
    """Raise CheckpointError unless every file has the hash it was written with."""
    try:
        lines = (path / SUMS).read_text().splitlines()
        expected = {name: digest for digest, name in (line.split("  ", 1) for line in lines)}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not a checkpoint: its {SUMS} cannot be read ({error})") from error
    missing = {WEIGHTS, OPTIMIZER, STATE} - set(expected)
    if missing:
        raise CheckpointError(f"{path} is not a complete checkpoint: {SUMS} does not list {', '.join(sorted(missing))}")
    for name, digest in expected.items():
        file = path / Path(name).name
        if not file.is_file():
            raise CheckpointError(f"{path} is damaged: {name} is missing")
        if _sha256(file) != digest:
            raise CheckpointError(f"{path} is damaged: {name} is not what was written (SHA-256 differs)")


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


def find(where: str) -> tuple[Path, list[str]]:
    """The newest whole checkpoint of a run folder (or the checkpoint itself), verified, and warnings about others."""
    path = Path(where)
    if not os.path.exists(path):
        if path.parent.name == FOLDER and os.path.isdir(path.parent):
            there = sorted(one.name for one in path.parent.iterdir() if os.path.isdir(one))
            if path.is_symlink():
                raise CheckpointError(f"{where} points to {path.resolve()}, which was moved or deleted")
            raise CheckpointError(f"{path.parent} has no checkpoint {path.name}; it has {', '.join(there) or 'none'}")
        raise CheckpointError(f"{where} does not exist; give a run folder, such as runs/2026-11-15-digits-ddp")
    if (path / SUMS).exists() or (path / STATE).exists():
        verify(path)
        return path.resolve(), []
    candidates = whole(path / FOLDER) or whole(path)
    if not candidates:
        raise CheckpointError(
            f"{where} is neither a checkpoint nor a run folder with one; the first is written after the first epoch"
        )
    warnings = []
    for candidate in reversed(candidates):
        try:
            verify(candidate)
            read_state(candidate)
        except CheckpointError as error:
            warnings.append(f"{error}; using the one before it")
            continue
        return candidate.resolve(), warnings
    raise CheckpointError(f"no whole checkpoint in {where}; {warnings[0].removesuffix('; using the one before it')}")


def tensor_table(path: Path) -> dict[str, tuple[str, list[int]]]:
    """Names, types and shapes of a safetensors file, from its header alone."""
    try:
        with safe_open(path, framework="numpy") as file:
            parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  (it is no dict)
            return {name: (part.get_dtype(), part.get_shape()) for name, part in parts.items()}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{shorten(str(path))} is not a safetensors file ({shorten(str(error))})") from error


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
