"""What a checkpoint is exported as: a model with its weights in Python, and files that other programs read."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import torch

from evenstep.checkpoint import files, integrity
from evenstep.checkpoint.model_card import README, write_readme
from evenstep.checkpoint.sharded_safetensors import StoredTensor, TensorFile, stored_tensors
from evenstep.checkpoint.state_dict import load_weights
from evenstep.errors import CheckpointError, TaskError, shorten
from evenstep.plan import IN_THIS_PROCESS, Plan
from evenstep.task import Task, TaskFunction, call_task, find_task, moved_spec, refuse_untrusted
from evenstep.typed_values import check_choice

Format = Literal["safetensors", "torch", "hf"]
FORMATS: tuple[str, ...] = get_args(Format)
AnyTask: TypeAlias = "str | TaskFunction | Task | None"
Stored: TypeAlias = dict[str, StoredTensor]


def load_model(where: str | Path, task: AnyTask = None, instead: str = "") -> Any:
    """The task's model with the weights of a checkpoint, on the CPU, in evaluation mode; a dict of several models.

    With an average of the weights (`ema`), it has that, as in evaluations. The task that the checkpoint names is
    imported if it lies in the working folder; `instead` tells how to name another.
    """
    path, _ = integrity.find(str(where))
    saved = files.read_state(path).get("plan")
    plan = Plan.from_json(saved) if saved else None
    if task is None:
        task = _named_task(plan, path, instead)
    source = find_task(task) if isinstance(task, str) else task
    made = call_task(source, plan.data if plan else None, plan.options if plan else {}).model()
    weights = _evaluated_weights(path)
    for key, model in made.items() if isinstance(made, Mapping) else [("", made)]:
        if plan is not None and plan.precision == "fp64":
            model.double()
        load_weights(model, _of_model(key, weights), str(path))
        model.eval()
    return made


def _named_task(plan: Plan | None, path: Path, instead: str) -> str:
    if plan is None or plan.task == IN_THIS_PROCESS:
        raise TaskError(f"{path} does not name the task that it is from, in a file or module; {instead}")
    spec = moved_spec(plan.task)
    refuse_untrusted(spec, str(path), instead)
    return spec


def _of_model(key: str, weights: Stored) -> Stored:
    """The weights of one of several models, whose names begin with its key."""
    if not key:
        return weights
    return {name.removeprefix(f"{key}."): value for name, value in weights.items() if name.startswith(f"{key}.")}


def export(where: str | Path, to: str, folder: Path, task: AnyTask = None) -> list[Path]:
    """Write the weights of a checkpoint into `folder` in another format, with a model card; returns the files."""
    check_choice("format", to, FORMATS, CheckpointError)
    writers: dict[str, Callable[[Path], Any]] = {
        "safetensors": lambda beside: _write_safetensors(where, beside),
        "torch": lambda beside: torch.save(
            {name: one.read() for name, one in _weights(where).items()}, beside / "model.pt"
        ),
        "hf": lambda beside: _write_pretrained(where, task, folder, beside),
    }
    beside = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        beside.mkdir(parents=True)
        model = writers[to](beside)
        write_readme(integrity.find(str(where))[0], beside, to, model)
        return _move(beside, folder)
    except OSError as error:
        raise CheckpointError(f"{shorten(str(folder))} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _weights(where: str | Path) -> Stored:
    path, _ = integrity.find(str(where))
    return _evaluated_weights(path)


def _evaluated_weights(path: Path) -> Stored:
    """What evaluations of this checkpoint used."""
    return stored_tensors(path / (files.EMA if (path / files.EMA).exists() else files.WEIGHTS))


def _write_safetensors(where: str | Path, beside: Path) -> None:
    # Hugging Face's libraries read a file only with this note. One tensor at a time is in memory.
    TensorFile(_weights(where), {"format": "pt"}).write(beside / "model.safetensors")


def _write_pretrained(where: str | Path, task: AnyTask, folder: Path, beside: Path) -> Any:
    instead = f"name it: evenstep checkpoint export {shorten(str(where))} {shorten(str(folder))} --to hf --task TASK"
    model = load_model(where, task, instead)
    save = getattr(model, "save_pretrained", None)
    if not callable(save):
        raise CheckpointError(
            f"the model is a {type(model).__name__}, which has no save_pretrained, as Hugging Face's models have; "
            "use --to safetensors or torch"
        )
    save(beside)
    return model


def _move(beside: Path, folder: Path) -> list[Path]:
    """Move all files into their folder, none over another, with the permissions of the umask.

    A folder keeps the README that it has: of an earlier export into it, or the user's own.
    """
    has_readme = os.path.lexists(folder / README)
    written = [one for one in sorted(beside.iterdir()) if not (has_readme and one.name == README)]
    taken = [one.name for one in written if os.path.lexists(folder / one.name)]
    if taken:
        raise CheckpointError(f"{folder / taken[0]} exists; choose another folder, or remove it")
    folder.mkdir(parents=True, exist_ok=True)
    mask = os.umask(0)
    os.umask(mask)
    for one in written:
        if one.is_file():
            # safetensors creates files that only their owner can read.
            one.chmod(0o666 & ~mask)
        one.rename(folder / one.name)
    return [folder / one.name for one in written]
