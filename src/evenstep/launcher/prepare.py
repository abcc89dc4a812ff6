"""Turn the user's choices into a checked Plan: whatever can be refused is refused before a process starts."""

from __future__ import annotations

import datetime
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from evenstep.checkpoint import files, integrity
from evenstep.data.adapt import AdaptedData, adapt_train, adapt_valid
from evenstep.distributed.devices import check_devices, choose_devices, num_cores
from evenstep.errors import PlanError, TaskError, shorten
from evenstep.launcher.preflight import probe, probe_evaluation
from evenstep.mesh import least_ranks
from evenstep.plan import (
    IN_THIS_PROCESS,
    PLAN_FILE,
    RUNS,
    Plan,
    Seed,
    parse_devices,
    parse_log,
    parse_machines,
    parse_shares,
    read_plan,
    write_plan_file,
)
from evenstep.report.terminal import without_control
from evenstep.sampling.batch_shares import enough_for_all
from evenstep.sampling.order import Lengths, Order, lengths_of
from evenstep.sampling.rng import seed_everything
from evenstep.strategy_facts import DEFAULT, REFERENCE, STRATEGIES
from evenstep.task import (
    BUILT_IN,
    NO_OPTIONS,
    Task,
    TaskFunction,
    absolute_spec,
    call_task,
    describe,
    find_task,
    has_several,
    moved_spec,
    refuse_untrusted,
    spec_of,
    split_spec,
)
from evenstep.task_options import options_of, read_options
from evenstep.typed_values import check

DEFAULT_BATCH = 64
MOST_CHARACTERS = 95
"""Of a run's name, of which a number may become part."""
PER_START = ("name", "out", "machines", "rendezvous", "requeue", "profile")
"""Fields of one start, which a repeated or resumed run does not take over."""
OF_TASK = ("clip", "accumulate", "precision", "best")
"""Fields that a task may set, for plans that do not."""
PER_COMMAND = ("allow_pickle",)
"""Fields that only a command may set, not a file: they allow code to run."""


@dataclass(frozen=True)
class Prepared:
    """A plan checked against the task, the data and the machine, and its run folder."""

    plan: Plan
    task: Task
    folder: Path
    lengths: Lengths
    num_steps: int | None = None
    notes: list[str] = field(default_factory=list)
    """What to tell the user before the first step."""
    cwd: str = "."
    """The working folder that the task chose: its data may be read from there."""

    @property
    def is_importable(self) -> bool:
        """Whether another process can import the task; one that exists only in this process reaches it by fork."""
        return self.plan.task != IN_THIS_PROCESS


def prepare(source: str | TaskFunction | Task | None, choices: Mapping[str, Any], is_training: bool = True) -> Prepared:
    """Fill in defaults, check everything (of an evaluation: what it needs), and make the run folder."""
    chosen = {name: value for name, value in choices.items() if value is not None}
    base = _base(chosen)
    if source is None:
        flag = "--resume" if "resume" in chosen else "--plan"
        source = named_task(base.get("task"), flag, str(chosen.get("resume") or choices.get("plan")))
    spec = spec_of(source)
    values, dropped = _values(spec, chosen, base)
    is_same = _is_same_file(spec, base.get("task"))
    before = base.get("options", {}) if is_same else {}
    values["options"] = {**before, **chosen.get("options", {})}
    load_strategies(str(values["strategy"]), source, values.get("seed"))
    # Check what needs no task before loading it: its data may take a while.
    draft = _draft(values, label_of(source, values["options"]))
    if spec is None and (STRATEGIES[draft.strategy].processes_per_device or draft.restarts):
        draft = replace(draft, threads=_forked_threads(draft.threads))
    # Before the file is imported, so that data created at module level is the same here and in every worker.
    seed_everything(draft.seed)
    draft, notes = _resumed(draft)
    start = files.start_of(draft.resume)
    with _users_code():
        found = find_task(source) if isinstance(source, str) else source
        if not is_same:
            before = _options_kept(base, found)
            values["options"] = {**before, **values["options"]}
            draft = replace(draft, options=values["options"])
        if "name" not in values:
            label = label_of(source, values["options"], found)
            draft = replace(draft, name=free_name(label, draft.strategy, draft.out))
        loaded = _load_task(found, draft, values, is_training)
        cwd = os.getcwd()
    notes = [
        *notes,
        *dropped,
        *(() if is_same else [f"option of the earlier run: {name}={value}" for name, value in before.items()]),
        *(_changed(found, before, loaded.plan) if base else ()),
        *loaded.notes,
    ]
    num_steps = loaded.plan.num_steps(loaded.lengths, *start)
    return Prepared(loaded.plan, loaded.task, _make_folder(loaded.plan), loaded.lengths, num_steps, notes, cwd)


def _values(spec: str | None, chosen: Mapping[str, Any], base: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The fields of the plan that are chosen, and lines to log about those of an earlier run that are dropped."""
    task_spec = absolute_spec(spec) if spec is not None else IN_THIS_PROCESS
    values = {**base, **chosen, **_devices(chosen, base), "task": task_spec}
    if os.path.exists(values.get("data", "")):
        # As the task: a resume may start in another folder.
        values["data"] = os.path.abspath(values["data"])
    _settle_micro(values, chosen, base)
    dropped = _drop_shares(values) if "shares" not in chosen else []
    if "mesh" not in chosen and any(values[name] != base.get(name) for name in ("strategy", "devices")):
        # That of an earlier run, which was arranged differently.
        values.pop("mesh", None)
    dropped += _drop_link(values) if "link" not in chosen else []
    dropped += _drop_offload(values) if "cpu_offload" not in chosen else []
    return values, dropped


def _options_kept(base: Mapping[str, Any], found: TaskFunction | Task) -> dict[str, Any]:
    """Options of the earlier run that a copy of its task, or another version of it, has too."""
    names = {one.name for one in options_of(found)}
    return {name: value for name, value in base.get("options", {}).items() if name in names}


@dataclass(frozen=True)
class _LoadedTask:
    """A task, and a plan with its defaults."""

    plan: Plan
    task: Task
    lengths: Lengths
    notes: list[str]


def _load_task(found: TaskFunction | Task, draft: Plan, values: Mapping[str, Any], is_training: bool) -> _LoadedTask:
    """Make the task, and try what a training or an evaluation will do with it."""
    draft = replace(draft, options=msgspec.to_builtins(read_options(found, draft.options), enc_hook=str))
    task = _in_turn(call_task(found, draft.data, draft.options))
    train = adapt_train(task)
    plan = _completed(draft, values, task, train)
    valid = adapt_valid(task)
    order = train.order(plan.seed, plan.batch)
    if is_training:
        probe(plan, task, train, valid, order)
    else:
        probe_evaluation(plan, task, valid)
    of_valid = dict.fromkeys(note for one in valid.values() for note in one.notes)
    notes = [*train.notes, *_dropped(order), *of_valid, *_crowded(plan)]
    return _LoadedTask(plan, task, lengths_of(order), notes)


def _is_same_file(spec: str | None, other: str | None) -> bool:
    """Whether two specs name a task of one file or module, or neither names any; the other may have been moved here."""
    here, there = (os.path.realpath(split_spec(one or IN_THIS_PROCESS)[0]) for one in (spec, other))
    return here == there or (os.path.basename(here) == os.path.basename(there) and not os.path.exists(there))


def load_strategies(names: str | None, source: object, seed: int | None) -> None:
    """If a strategy of a list such as `ddp,mine` is not known, import the task's file, which may add it."""
    unknown = {name.strip() for name in (names or "").split(",")} - {"", *STRATEGIES}
    if not unknown or not isinstance(source, str) or source in BUILT_IN:
        return
    check("seed", seed or 0, Seed, PlanError)
    # As in every worker: data that the file makes at its top is the same.
    seed_everything(seed or 0)
    with _users_code():
        find_task(source)


@contextmanager
def _users_code() -> Iterator[None]:
    """Guard the first calls of the user's code: they may not exit, nor change the working folder."""
    home = os.getcwd()
    try:
        yield
    except SystemExit as error:
        raise TaskError(
            f"the task calls sys.exit({error.code!r}) before the first step: {describe(error)}; "
            "raise an exception if it cannot continue, or remove that line"
        ) from error
    finally:
        os.chdir(home)


def named_task(spec: str | None, flag: str, named_by: str) -> str:
    """The task that a plan or a checkpoint names; printed before it is imported, since importing runs it."""
    if spec is None or spec == IN_THIS_PROCESS:
        raise PlanError("no task given; try: evenstep train digits")
    spec = moved_spec(spec)
    words = ("evaluate", named_by, spec) if flag == "evaluate" else ("train", spec, flag, named_by)
    file = refuse_untrusted(spec, named_by, f"name it yourself: evenstep {' '.join(map(shorten, words))}")
    if file is not None and os.path.exists(file):
        print(without_control(f"importing {file}, which {named_by} names"), file=sys.stderr)
    return spec


def prepare_from_plan(plan: Plan, source: str | TaskFunction | Task | None, own: Mapping[str, Any]) -> Prepared:
    """Prepare a plan made on another machine, or earlier, in the folder of its name.

    `own` holds the choices that may differ between machines: the devices.
    """
    spec = spec_of(source) if source is not None else named_task(plan.task, "--plan", "the plan of this run")
    if spec is None:
        raise PlanError("on many machines a task comes from a file or a module: evenstep train my_task.py --machines 2")
    given = parse_devices(str(own["devices"])) if own.get("devices") else None
    devices = choose_devices(given) if isinstance(given, int) else given or plan.devices
    check_devices(devices)
    seed_everything(plan.seed)
    with _users_code():
        plan = replace(plan, task=absolute_spec(spec), data=own.get("data") or plan.data)
        task = _in_turn(call_task(find_task(spec), plan.data, plan.options))
        order = adapt_train(task).order(plan.seed, plan.batch)
        cwd = os.getcwd()
    write_plan(plan.folder, plan)
    plan = replace(plan, devices=devices, allow_pickle=bool(own.get("allow_pickle")))
    return Prepared(plan, task, plan.folder, lengths_of(order), cwd=cwd)


def write_plan(folder: Path, plan: Plan) -> None:
    """Make the folder of a run, if it is not there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / PLAN_FILE).exists():
            write_plan_file(folder, plan)
    except OSError as error:
        raise PlanError(f"{folder} cannot be written: {os.strerror(error.errno or 0)}") from error


def _changed(source: TaskFunction | Task, before: Mapping[str, Any], plan: Plan) -> list[str]:
    """Options of the task that differ from those of the run that is resumed or repeated, and what that does."""
    was = {one.name: one.default for one in options_of(source)} | dict(before)
    changed = [f"{name}={value} (was {was[name]})" for name, value in plan.options.items() if value != was[name]]
    effect = "; weights, optimizer state and learning rate are still those of the checkpoint" if plan.resume else ""
    return [f"options changed: {', '.join(changed)}{effect}"] if changed else []


def _settle_micro(values: dict[str, Any], chosen: Mapping[str, Any], base: Mapping[str, Any]) -> None:
    """`--accumulate` or `--micro auto`; what that chose for an earlier run is kept, if a device has as many samples."""
    if "accumulate" in chosen and "micro" in chosen:
        raise PlanError("--accumulate and --micro exclude each other; give one of them")
    if "accumulate" in chosen:
        values.pop("micro", None)
    if values.get("micro") is None:
        return
    same = all(values.get(name, base.get(name)) == base.get(name) for name in ("batch", "shares"))
    is_kept = base.get("micro") is not None and same and len(values["devices"]) == len(base.get("devices", ()))
    values["accumulate"] = base.get("accumulate", 1) if is_kept else 1


def _drop_shares(values: dict[str, Any]) -> list[str]:
    """Shares of an earlier run are those of its devices; a line to log if there are now more, or fewer."""
    if values.get("shares") is None:
        return []
    shares = parse_shares(values["shares"])
    machines = parse_machines(str(values["machines"])) if values.get("machines") else (1, 1)
    num = len(values["devices"]) * machines[1]
    if num > 1 and (shares is None or (len(shares) == num and machines[0] == machines[1])):
        return []
    del values["shares"]
    if shares is None:
        return []
    given = ",".join(map(str, shares))
    return [f"--shares {given} was for {len(shares)} devices, and this run has {num}; ignoring it"]


def _drop_link(values: dict[str, Any]) -> list[str]:
    """A resumed run may have no link any more; a line to log."""
    facts, link = STRATEGIES.get(str(values["strategy"])), values.get("link")
    is_used = facts is None or (facts.links and all(str(device) == "cpu" for device in values["devices"]))
    if link is None or is_used:
        return []
    del values["link"]
    return [f"--link {link} needs several CPU processes, and this run has none; ignoring it"]


def _drop_offload(values: dict[str, Any]) -> list[str]:
    """A resumed run may have nothing to offload any more; a line to log."""
    facts = STRATEGIES.get(str(values["strategy"]))
    is_used = facts is None or (facts.offloads and all(str(device) != "cpu" for device in values["devices"]))
    if not values.get("cpu_offload") or is_used:
        return []
    del values["cpu_offload"]
    return ["--cpu-offload needs shards on GPUs, and this run has none; ignoring it"]


def _dropped(order: Order | None) -> list[str]:
    if order is None or not order.dropped.rest:
        return []
    num = order.dropped.rest
    return [
        f"drop_last leaves {num} of {num + (order.lengths.rest or 0)} samples out of each epoch, its short last batch"
    ]


def _crowded(plan: Plan) -> list[str]:
    num = plan.devices.count("cpu")
    return [f"{num} CPU devices share {num_cores()} cores"] if num > num_cores() else []


def _forked_threads(threads: int | None) -> int:
    """A task that lives in this process alone reaches its workers by fork; OpenMP's threads do not survive that."""
    if threads not in (None, 1):
        raise PlanError(
            f"threads is {threads}, and processes copied from this one can use 1 each; "
            "put the task in a file and train 'file.py' to use more"
        )
    return 1


def _draft(values: dict[str, Any], label: str) -> Plan:
    """The plan as far as it is known; small ones stand for a batch and a length that the task sets."""
    machines = parse_machines(str(values["machines"]))[1] if values.get("machines") else 1
    accumulate = max(1, int(values.get("accumulate", 1)))
    shares = parse_shares(str(values["shares"])) if values.get("shares") else None
    num_parts = max(machines * len(values["devices"]), int(values.get("virtual_replicas") or 1))
    smallest = max(num_parts * accumulate, enough_for_all(shares or (1,), accumulate))
    stand_ins: dict[str, Any] = {"batch": smallest, "name": label}
    if "epochs" not in values and "steps" not in values:
        stand_ins["epochs"] = 1
    draft = Plan(**{**stand_ins, **values})
    check_devices(draft.devices)
    if draft.log is not None:
        from evenstep.trackers import check_installed

        check_installed(parse_log(draft.log))
    return draft


def _in_turn(task: Task) -> Task:
    if not has_several(task):
        return task
    from evenstep.training.several_models import in_turn

    return in_turn(task)


def _completed(draft: Plan, values: Mapping[str, Any], task: Task, train: AdaptedData) -> Plan:
    """The draft, with the task's (or its DataLoader's) batch and epochs as defaults."""
    chosen: dict[str, Any] = {"batch": values.get("batch") or task.batch or train.batch or DEFAULT_BATCH}
    for name in OF_TASK:
        if name not in values and getattr(task, name) is not None:
            chosen[name] = getattr(task, name)
    if "epochs" not in values and "steps" not in values:
        chosen |= {"epochs": task.epochs} if task.steps is None else {"epochs": None, "steps": task.steps}
    return replace(draft, **chosen)


def _base(chosen: dict[str, Any]) -> dict[str, Any]:
    """Values to start from: those of a repeated plan, or of the resumed run."""
    base: dict[str, Any] = {}
    repeated = chosen.pop("plan", None)
    if repeated is not None:
        base = (Plan.from_json(repeated) if isinstance(repeated, Mapping) else read_plan(str(repeated))).to_json()
        _refuse_foreign_resume(base["resume"], chosen, str(repeated))
    resume = chosen.get("resume")
    if resume is not None and not os.path.isfile(resume):
        path, _ = integrity.find(str(resume))
        # A custom loop saves no plan.
        saved = files.read_state(path).get("plan")
        base |= Plan.from_json(saved).to_json() if saved else {}
    # Given steps replace epochs, and the other way round.
    dropped = {*PER_START, *PER_COMMAND}
    if "steps" in chosen:
        dropped.add("epochs")
    elif "epochs" in chosen:
        dropped.add("steps")
    return {name: value for name, value in base.items() if value is not None and name not in dropped}


def out_of_resumed(resume: object) -> str | None:
    """The folder of run folders that holds the run to resume; None for a checkpoint or run that was moved elsewhere."""
    path = Path(os.path.abspath(str(resume)))
    run = path.parent.parent if path.parent.name == files.FOLDER else path
    if not os.path.isdir(path) or not os.path.isfile(run / "plan.json"):
        return None
    try:
        out = os.path.abspath(read_plan(run).out)
    except PlanError:
        # What a resume needs is in the checkpoint.
        return None
    if os.path.basename(out) != run.parent.name:
        return None
    return str(run.parent.relative_to(Path.cwd()) if run.parent.is_relative_to(Path.cwd()) else run.parent)


def _refuse_foreign_resume(path: str | None, chosen: Mapping[str, Any], named_by: str) -> None:
    """A plan may resume from a path in the working folder; any other path must be given with --resume."""
    if path is None or "resume" in chosen or Path(os.path.realpath(path)).is_relative_to(Path.cwd().resolve()):
        return
    raise PlanError(
        f"{shorten(named_by)} resumes from {shorten(path)}, which is not in this folder.\n"
        f"If you trust it, name it yourself: --resume {shorten(path)}"
    )


def _devices(chosen: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """Strategy and devices together: each determines the other's default."""
    strategy = chosen.get("strategy") or (DEFAULT if chosen.get("machines") and not base.get("strategy") else None)
    given = chosen.get("devices")
    if strategy is None and given is None:
        strategy, given = base.get("strategy"), base.get("devices")
    if given is None:
        given = 1
        if strategy not in (None, REFERENCE):
            least = least_ranks(chosen.get("mesh"), strategy)
            given = max(least, len(base.get("devices", ())) or torch.cuda.device_count())
    if isinstance(given, str):
        given = parse_devices(given)
    devices = choose_devices(given) if isinstance(given, int) else tuple(map(str, given))
    if strategy is None:
        before = base.get("strategy", REFERENCE)
        strategy = REFERENCE if len(devices) == 1 else before if before != REFERENCE else DEFAULT
    return {"strategy": strategy, "devices": devices}


def label_of(
    source: str | TaskFunction | Task, options: Mapping[str, Any] = NO_OPTIONS, found: TaskFunction | Task | None = None
) -> str:
    """The task's file and function, and the options that were given, as part of a folder's name."""
    if isinstance(source, str):
        module, name = split_spec(source)
        name = name or getattr(found, "__name__", None)
        is_plain = source in BUILT_IN or name in (None, "task", Path(module).stem)
        label = Path(module).stem if module.endswith(".py") else module.rpartition(".")[2]
        label = label if is_plain else f"{label}-{name}"
    else:
        label = str(getattr(source, "__name__", "task"))
        file = getattr(sys.modules.get(getattr(source, "__module__", "")), "__file__", None)
        label = Path(file).stem if label == "task" and file else label
    label = "-".join([label[:50], *(f"{name}={value}" for name, value in options.items())])
    return re.sub(r"[^\w.=]+", "-", label).strip("-.")[:100].rstrip("-.") or "task"


def free_name(label: str, what: str, out: str = RUNS) -> str:
    """An unused run name: the date, the task, and the strategy or the command."""
    date, what = datetime.date.today().isoformat(), what[:20]
    stem = f"{date}-{label[: MOST_CHARACTERS - len(date) - len(what) - 2].rstrip('-.')}-{what}"
    name, number = stem, 1
    while os.path.exists(Path(out) / name):
        number += 1
        name = f"{stem}-{number}"
    return name


def _resumed(plan: Plan) -> tuple[Plan, list[str]]:
    """The plan with the checkpoint that all ranks will load, and notes about others."""
    if plan.resume is None:
        return plan, []
    if os.path.isfile(plan.resume):
        return replace(plan, resume=str(Path(plan.resume).resolve())), []
    path, notes = integrity.find(plan.resume)
    return replace(plan, resume=str(path)), notes


def _make_folder(plan: Plan) -> Path:
    folder, out = plan.folder, Path(plan.out)
    try:
        if not os.path.isdir(out):
            out.mkdir(parents=True)
        folder.mkdir()
        write_plan_file(folder, plan)
    except FileExistsError:
        if not out.is_dir():
            raise PlanError(
                f"{out} is a file, and runs need a folder of that name; move the file, or give another --out"
            ) from None
        if plan.resume is not None and Path(plan.resume).is_relative_to(folder.resolve()):
            raise PlanError(
                f"{folder} is the run given to --resume, and the new run needs its own folder: "
                "omit --name, or choose another"
            ) from None
        raise PlanError(f"{folder} exists; choose another --name, or continue it with --resume {folder}") from None
    except OSError as error:
        raise PlanError(
            f"{folder} cannot be written: {os.strerror(error.errno or 0)}; "
            "start in a folder that you can write to, give another --out, or free space"
        ) from error
    return folder
