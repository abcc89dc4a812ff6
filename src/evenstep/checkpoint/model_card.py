"""The model card of an exported checkpoint: what was trained, how, and how well, for people and for the Hub."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

from evenstep.checkpoint import files
from evenstep.errors import EvenstepError
from evenstep.plan import IN_THIS_PROCESS, Plan
from evenstep.record import FILE, Record, Summary, study_of
from evenstep.task_options import value_in_words

README = "README.md"
USE = {
    "safetensors": """\
from safetensors.torch import load_file

model = ...  # your nn.Module, as in training
model.load_state_dict(load_file("model.safetensors"))
model.eval()
""",
    "torch": """\
import torch

model = ...  # your nn.Module, as in training
model.load_state_dict(torch.load("model.pt", weights_only=True))
model.eval()
""",
    "hf": """\
from {module} import {name}

model = {name}.from_pretrained("path/of/this/folder")
""",
}


def write_readme(path: Path, folder: Path, to: str, model: object = None) -> None:
    """Write the model card of the checkpoint at `path` into a folder; one that is there, as PEFT's, is continued."""
    file = folder / README
    # What save_pretrained has written has a header of its own.
    text = f"{file.read_text()}\n" if file.exists() else _header("transformers" if to == "hf" else "pytorch")
    file.write_text(text + "\n".join(_body(path, to, model)) + "\n")


def _header(library: str) -> str:
    return f"---\nlibrary_name: {library}\ntags:\n- evenstep\n---\n\n"


def _body(path: Path, to: str, model: object) -> Iterator[str]:
    state = files.read_state(path)
    saved = state.get("plan")
    plan = Plan.from_json(saved) if saved else None
    summary = _summary(path)
    yield f"# {_title(path, plan)}"
    yield f"\nTrained with evenstep {state['evenstep']} and torch {state['torch']}.\n"
    facts = {
        "checkpoint": _position(path, state, plan),
        **_size(path),
        **(_training(plan) if plan is not None else {"seed": str(state["seed"])}),
        **_speed(summary),
    }
    yield from _table("training", "", facts)
    valid = state.get("valid") or {}
    if valid:
        yield "\n## Evaluation\n\nOf this checkpoint, on all validation samples, each counted once.\n"
        yield from _table("metric", "value", {name: f"{value:.6g}" for name, value in valid.items()})
    if summary is not None and summary.audit is not None:
        yield f"\n## Data\n\nSamples that the training used: {summary.audit['sentence']}."
    names = {"module": type(model).__module__.partition(".")[0], "name": type(model).__name__}
    yield f"\n## Use\n\n```python\n{USE[to].format(**names) if to == 'hf' else USE[to]}```"
    if plan is not None and plan.task != IN_THIS_PROCESS:
        yield f"\n## Train it again\n\n```console\n{_command(plan)}\n```"


def _title(path: Path, plan: Plan | None) -> str:
    """The name of the run; that of a trial is a number, which says little without its task and study."""
    run = path.resolve().parent.parent
    name = plan.name if plan is not None else run.name or "Model"
    study = study_of(run)
    if study is None or plan is None:
        return name
    return f"{plan.task_name}, trial {name} of {study.name}"


def _position(path: Path, state: files.State, plan: Plan | None) -> str:
    """Which step of the run the weights are of, and why that one."""
    step, num_steps = state["step"], state["num_steps"]
    of = f" of {num_steps:,}" if num_steps is not None and step < num_steps else ""
    best = path.parent / "best"
    is_best = of and best.exists() and best.resolve() == path.resolve()
    why = f"; the best by {plan.best or 'loss'}" if is_best and plan is not None else ""
    return f"step {step:,}{of}, after {state['loader']['position']:,} samples{why}"


def _summary(path: Path) -> Summary | None:
    """Of the run that holds the checkpoint; None if it is not done, or the checkpoint was moved elsewhere."""
    record = path.resolve().parent.parent / FILE
    try:
        return Record.read(record, kinds=("summary",)).summary if record.is_file() else None
    except EvenstepError:
        return None


def _size(path: Path) -> dict[str, str]:
    tensors = files.tensor_table(path / files.WEIGHTS).values()
    num = sum(math.prod(shape) for _, shape in tensors)
    dtypes = ", ".join(sorted({dtype for dtype, _ in tensors}))
    return {"weights": f"{num:,} numbers in {len(tensors)} tensors ({dtypes})"}


def _training(plan: Plan) -> dict[str, str]:
    """Without paths, which say where it was trained, and to nobody else anything."""
    devices = ", ".join(plan.devices)
    machines = f", on {plan.machines} machines" if plan.machines is not None else ""
    facts = {
        "task": plan.task_name,
        "options": plan.options_in_words,
        "global batch": str(plan.batch),
        "length": f"{plan.epochs} epochs" if plan.steps is None else f"{plan.steps} steps",
        "seed of weights and sample order": str(plan.seed),
        "precision": plan.precision,
        "strategy": f"{plan.strategy} on {devices}{machines}",
        "virtual replicas": str(plan.virtual_replicas or ""),
    }
    return {name: value for name, value in facts.items() if value}


def _speed(summary: Summary | None) -> dict[str, str]:
    if summary is None:
        return {}
    return {"time": f"{summary.seconds:,.0f} s, at {summary.samples_per_second:,.0f} samples/s"}


def _command(plan: Plan) -> str:
    """Whatever the devices, it trains the same model."""
    length = ["--epochs", str(plan.epochs)] if plan.steps is None else ["--steps", str(plan.steps)]
    options = [f"{name}={value_in_words(value)}" for name, value in plan.options.items()]
    given = {"--virtual-replicas": plan.virtual_replicas, "--best": plan.best, "--threads": plan.threads}
    others = [word for name, value in given.items() if value is not None for word in (name, str(value))]
    more = ["--batch", str(plan.batch), *length, "--seed", str(plan.seed), "--precision", plan.precision, *others]
    return shlex.join(["evenstep", "train", plan.task_name, *options, *more])


def _table(first: str, second: str, rows: Mapping[str, str]) -> Iterator[str]:
    yield f"| {first} | {second} |\n|---|---|"
    for name, value in rows.items():
        yield f"| {_cell(name)} | {_cell(value)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
