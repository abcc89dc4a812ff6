"""From what the user gave to a Plan that will run: everything that can be refused is refused here."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from evenstep import checkpoint
from evenstep.errors import PlanError
from evenstep.plan import Plan, check_name, parse_devices, read_plan
from evenstep.task import Task, TaskFunction, call_task, find_task, spec_of
from evenstep.worker.machine import check_devices, choose_devices
from evenstep.worker.probe import probe
from evenstep.worker.randomness import seed_everything

RUNS = Path("runs")


@dataclass(frozen=True)
class Prepared:
    """A plan that was checked against the task, the data and the machine, and the folder it will fill."""

    plan: Plan
    task: Task
    spec: str | None
    """How another process finds the task; None if it lives in this one alone."""
    folder: Path
    num_samples: int
    said: list[str]

    @property
    def arithmetic(self) -> str:
        return self.plan.arithmetic(self.num_samples)


def prepare(source: str | TaskFunction | Task | None, choices: Mapping[str, Any]) -> Prepared:
    """Fill in what was not chosen, check all of it, and make the run folder."""
    chosen = {name: value for name, value in choices.items() if value is not None}
    base = _base(chosen)
    source = source if source is not None else base.get("task")
    if source is None:
        raise PlanError("no task given; try: evenstep train digits")
    spec = spec_of(source)
    values = {**base, **chosen, "task": spec or "(in this process)"}
    if "steps" in chosen:
        values["epochs"] = None
    elif "epochs" in chosen:
        values["steps"] = None
    values |= _devices(chosen, base)
    values.setdefault("batch", 1)
    values.setdefault("name", _free_name(_label(source), values["strategy"]))
    check_name(values["name"])
    # What can be refused without the task is refused before it is loaded: its data may take a while.
    length = {} if values.get("epochs") or values.get("steps") else {"epochs": 1}
    early = Plan(
        **{
            **values,
            **length,
            "batch": max(values["batch"], _smallest(values)) if "batch" not in chosen else values["batch"],
        }
    )
    check_devices(early.devices)
    found = find_task(source) if isinstance(source, str) else source
    seed_everything(early.seed)
    task = call_task(found, early.data)
    if "batch" not in chosen and "batch" not in base:
        values["batch"] = task.batch
    plan = Plan(**{**values, **({"epochs": task.epochs} if length else {})})
    resumed, said = _resumed(plan)
    plan = replace(plan, resume=str(resumed)) if resumed is not None else plan
    num_samples = probe(plan, task)
    folder = _make_folder(plan)
    return Prepared(plan, task, spec, folder, num_samples, said)


def _smallest(values: Mapping[str, Any]) -> int:
    return len(values["devices"]) * int(values.get("accumulate") or 1)


def _base(chosen: dict[str, Any]) -> dict[str, Any]:
    """Values to start from: those of a plan that is repeated, or of the run that goes on."""
    base: dict[str, Any] = {}
    repeated = chosen.pop("plan", None)
    if repeated is not None:
        base = read_plan(str(repeated))
    resume = chosen.get("resume")
    if resume is not None and not Path(resume).is_file():
        path, _ = checkpoint.find(str(resume))
        base |= Plan.from_json(checkpoint.read_state(path)["plan"]).to_json()
    return {name: value for name, value in base.items() if value is not None and name not in ("name", "resume")}


def _devices(chosen: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    """Strategy and devices together: each has a say in the other's default."""
    strategy = chosen.get("strategy") or base.get("strategy")
    given = chosen.get("devices") or (
        None if "strategy" in chosen and chosen["strategy"] == "single" else base.get("devices")
    )
    if isinstance(given, str):
        given = parse_devices(given)
    if given is None:
        given = max(1, torch.cuda.device_count()) if strategy not in (None, "single") else 1
    devices = choose_devices(given) if isinstance(given, int) else tuple(given)
    if strategy is None or ("strategy" not in chosen and strategy == "single" and len(devices) > 1):
        strategy = "single" if len(devices) == 1 else "ddp"
    return {"strategy": strategy, "devices": devices}


def _label(source: str | TaskFunction | Task) -> str:
    if isinstance(source, str):
        place, _, name = source.partition(":")
        return Path(place).stem if place.endswith(".py") else name or place
    return str(getattr(source, "__name__", "task")).strip("<>")


def _free_name(label: str, strategy: str) -> str:
    stem = f"{datetime.date.today().isoformat()}-{label}-{strategy}"
    name, number = stem, 1
    while (RUNS / name).exists():
        number += 1
        name = f"{stem}-{number}"
    return name


def _resumed(plan: Plan) -> tuple[Path | None, list[str]]:
    if plan.resume is None:
        return None, []
    if Path(plan.resume).is_file():
        return Path(plan.resume).resolve(), []
    return checkpoint.find(plan.resume)


def _make_folder(plan: Plan) -> Path:
    folder = RUNS / plan.name
    try:
        RUNS.mkdir(exist_ok=True)
        folder.mkdir()
        (folder / "plan.json").write_text(json.dumps(plan.to_json(), indent=2) + "\n")
    except FileExistsError:
        raise PlanError(f"{folder} exists; choose another --name, or go on from it with --resume {folder}") from None
    except OSError as error:
        raise PlanError(
            f"{folder} cannot be written: {os.strerror(error.errno or 0)}; start in a folder of yours, or free space"
        ) from error
    return folder
