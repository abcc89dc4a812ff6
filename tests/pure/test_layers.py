"""Imports point one way, help does not wait for torch, and the public names are these."""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import typer

import evenstep
from evenstep.cli import app
from evenstep.plan import Plan
from evenstep.strategy_facts import REFERENCE, STRATEGIES

SOURCE = Path(evenstep.__file__).parent
VALUES = {
    *("errors", "typed_values", "strategy_facts", "mesh", "pipeline_schedule", "pipeline_balance"),
    *("best_metric", "link_method", "plan", "record", "early_stopping", "task_options", "task"),
}
ENGINE = {
    *VALUES,
    "private_apis",
    "sampling",
    "audit",
    "data",
    "distributed",
    "checkpoint",
    "strategies",
    "monitor",
    "profiling",
}
MAY_IMPORT = {
    "errors": set(),
    "typed_values": {"errors"},
    "strategy_facts": set(),
    "private_apis": set(),
    "sampling": {"errors", "private_apis"},
    "mesh": {"errors", "strategy_facts"},
    "pipeline_schedule": set(),
    "pipeline_balance": set(),
    "best_metric": {"errors"},
    "link_method": {"errors"},
    "plan": {"errors", "typed_values", "strategy_facts", "mesh", "best_metric", "link_method", "sampling"},
    "record": {"errors", "typed_values", "plan"},
    "early_stopping": {"errors", "typed_values", "best_metric", "plan", "record"},
    "task_options": {"errors", "typed_values"},
    "task": {"errors", "typed_values", "task_options", "sampling"},
    "audit": {*VALUES, "sampling"},
    "report": {*VALUES, "sampling"},
    "tasks": {"errors", "task"},
    "distributed": {*VALUES, "private_apis"},
    "profiling": {*VALUES, "private_apis", "distributed"},
    "data": {*VALUES, "private_apis", "sampling", "distributed"},
    "checkpoint": {*VALUES, "private_apis", "sampling", "distributed"},
    "strategies": {*VALUES, "private_apis", "distributed"},
    "monitor": {*VALUES, "private_apis", "distributed", "data", "checkpoint", "strategies"},
    "trackers": {*VALUES, "report"},
    "training": {*ENGINE, "trackers"},
    "worker": {*ENGINE, "training"},
    "fit": {*ENGINE, "report", "training"},
    "launcher": {*ENGINE, "report", "trackers", "training", "worker", "fit"},
    "verify": {*ENGINE, "report", "training", "worker", "launcher"},
    "compare": {*ENGINE, "report", "training", "worker", "fit", "launcher", "verify", "predict"},
    "tune": {*ENGINE, "report", "training", "worker", "launcher"},
    "adopt": {*ENGINE, "training", "launcher"},
    "predict": {*VALUES, "report"},
    "clusters": {*VALUES, "distributed", "launcher"},
    "doctor": {*VALUES, "private_apis", "distributed", "monitor", "report", "worker", "launcher", "predict"},
    "cli": {
        *VALUES,
        "audit",
        "checkpoint",
        "report",
        "trackers",
        "launcher",
        "doctor",
        "verify",
        "compare",
        "adopt",
        "predict",
        "clusters",
        "tune",
        "fit",
    },
    "__main__": {"cli", "distributed", "errors", "private_apis", "launcher"},
    # Names that are found when first asked for.
    "__init__": {*VALUES, "sampling", "data", "checkpoint", "training", "launcher", "adopt"},
}
TORCH_FREE = {*VALUES, "private_apis", "sampling", "audit", "report", "predict", "trackers", "cli", "__init__"}
FILES_WITHOUT_TORCH = {
    "checkpoint/atomic_write.py",
    "checkpoint/files.py",
    "checkpoint/integrity.py",
    "distributed/worker_process.py",
    "distributed/heartbeat.py",
}


def layer(file: Path) -> str:
    return file.relative_to(SOURCE).parts[0].removesuffix(".py")


@dataclasses.dataclass(frozen=True)
class Source:
    """What these tests look at in a file: a walk over all nodes of all files takes seconds, so there is one."""

    imports: list[ast.Import | ast.ImportFrom]
    texts: list[str]
    """Docstrings aside."""
    classes: list[str]
    """Those of the module itself."""


@functools.cache
def source_of(file: Path) -> Source:
    nodes = list(ast.walk(ast.parse(file.read_text())))
    docs = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    constants = [node for node in nodes if isinstance(node, ast.Constant) and id(node) not in docs]
    module = nodes[0]
    assert isinstance(module, ast.Module)
    return Source(
        imports=[node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)],
        texts=[node.value for node in constants if isinstance(node.value, str)],
        classes=[node.name for node in module.body if isinstance(node, ast.ClassDef)],
    )


def imported_layers(file: Path) -> set[str]:
    names: set[str] = set()
    for node in source_of(file).imports:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        else:
            assert node.level == 0, f"{file}:{node.lineno} imports relatively"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    found = {name.split(".")[1] for name in names if name.startswith("evenstep.")}
    return found - {layer(file)}


NAMES_A_STRATEGY = {
    "private_apis.py": "where torch keeps the private parts of fully_shard",
    "cli/train.py": "examples of commands",
    "cli/evaluate.py": "examples of commands",
    "cli/verify.py": "examples of commands",
    "cli/compare.py": "examples of commands",
    "cli/predict.py": "examples of commands",
    "cli/fit.py": "examples of commands",
    "compare/layer_costs.py": "how each of them would divide a model, timed in one process",
    "adopt/hf_trainer.py": "an argument of transformers has this name too",
    "monitor/known_errors.py": "what an error of torch's DDP or fully_shard means, which other strategies do not raise",
}


def strategies_named(file: Path) -> list[str]:
    """Texts with a strategy's name, docstrings aside, and imports of one's file."""
    source = source_of(file)
    imports = [node.module or "" for node in source.imports if isinstance(node, ast.ImportFrom)]
    # "single" is a word of its own inside a sentence, and what the others are compared with.
    # Those that are ordinary words too are looked for as a choice.
    words = [REFERENCE, *(row.name for row in STRATEGIES.values() if row.model_axis is not None)]
    others = "|".join(name for name in STRATEGIES if name not in words)
    named = rf"{'|'.join(words)}|.*--strateg(y|ies) ({'|'.join(words[1:])}).*|.*(?<![\w-])({others})(?![\w-]).*"
    return [text for text in source.texts if re.fullmatch(named, text, re.DOTALL)] + [
        name for name in imports if re.match(r"evenstep\.strategies\.(?!base|model_units)", name)
    ]


def test_outside_of_the_strategies_and_their_facts_nothing_names_one() -> None:
    own = [file for file in FILES if layer(file) not in ("strategies", "strategy_facts")]
    naming = {str(file.relative_to(SOURCE)): strategies_named(file) for file in own}
    assert {file: texts for file, texts in naming.items() if texts and file not in NAMES_A_STRATEGY} == {}
    assert all(naming[file] for file in NAMES_A_STRATEGY), "an exception that is not needed any more"


def module_name(file: Path) -> str:
    parts = ("evenstep", *file.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts).removesuffix(".__init__")


FILES = sorted(SOURCE.rglob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_a_module_imports_only_what_lies_below_it(file: Path) -> None:
    assert imported_layers(file) <= MAY_IMPORT[layer(file)]


def test_every_package_is_listed_and_no_two_can_import_each_other() -> None:
    assert MAY_IMPORT.keys() == {layer(file) for file in FILES}
    # Raises CycleError; what is imported lazily or for type checkers counts as well.
    assert list(TopologicalSorter(MAY_IMPORT).static_order())


def test_values_reports_and_commands_do_not_import_torch() -> None:
    light = [
        module_name(file)
        for file in FILES
        if layer(file) in TORCH_FREE or str(file.relative_to(SOURCE)) in FILES_WITHOUT_TORCH
    ]
    assert {"evenstep", "evenstep.cli", "evenstep.report.terminal", "evenstep.checkpoint.files"} <= set(light)
    check = "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", f"import sys, {', '.join(light)}; {check}"], check=True)


def test_help_waits_neither_for_torch_nor_for_numpy() -> None:
    check = "assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", f"import sys, evenstep.__main__, evenstep.cli; {check}"], check=True)


def test_the_public_names_are_these_and_each_is_there() -> None:
    assert evenstep.__all__ == [
        "EvenstepError",
        "Plan",
        "Record",
        "Run",
        "Scaler",
        "Task",
        "adopt",
        "gather",
        "join",
        "launch",
        "log",
        "progress",
        "samplers",
        "train",
    ]
    for name in evenstep.__all__:
        assert getattr(evenstep, name).__name__.rpartition(".")[2] == name
    with pytest.raises(AttributeError, match="evenstep has no 'Trainer'; it has EvenstepError, Plan"):
        _ = evenstep.Trainer


def test_no_two_modules_and_no_two_classes_have_the_same_name() -> None:
    files = [file for file in SOURCE.rglob("*.py") if file.name != "__init__.py"]
    modules = [file.stem for file in files]
    assert [name for name in modules if modules.count(name) > 1] == []
    classes = [name for file in files for name in source_of(file).classes]
    assert [name for name in classes if classes.count(name) > 1] == []


def test_every_option_of_train_is_a_field_of_the_plan_and_the_other_way_round() -> None:
    command = typer.main.get_command(app).commands["train"]  # type: ignore[attr-defined]
    flags = {flag for option in command.params for flag in option.opts if flag.startswith("-")}
    # How the command is given, and what it shows.
    others = {"--json", "--suggest", "--help", "--config", "--quiet", "-q", "-h", "--on", "--shards", "--stages"}
    options = {flag.removeprefix("--").replace("-", "_") for flag in flags - others}
    fields = {field.name for field in dataclasses.fields(Plan)}
    # Of the task, and behind it: NAME=VALUE.
    assert options == fields - {"task", "options"} | {"plan"}
