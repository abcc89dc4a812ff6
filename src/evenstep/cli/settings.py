"""`--config run.toml`: the options of a command and of its task, from a file; the command line wins."""

from __future__ import annotations

import difflib
import inspect
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, get_args, get_origin

import typer

from evenstep.cli.app import OptionsArgument, TaskArgument, refuse_broken
from evenstep.cli.completion import complete_settings
from evenstep.errors import MAX_CHARACTERS, BadInput, PlanError, shorten
from evenstep.task import refuse_untrusted
from evenstep.task_options import parse_options
from evenstep.typed_values import read_value

OPTIONS = "options"
"""The table of the task's options."""
ONLY_TYPED = ("allow-pickle", "config", "on")
"""What a file may not set: it would allow code to run, or have every launcher on a cluster start a cluster's run."""


@dataclass(frozen=True)
class Settings:
    """What a file of settings holds."""

    path: str
    task: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    """Of the task."""
    flags: dict[str, Any] = field(default_factory=dict)
    """Of the command."""


def read_settings(path: str) -> Settings:
    """Read a TOML file; which command it is for, only `_apply` knows."""
    if not os.path.isfile(path):
        raise BadInput(f"{shorten(path)} does not exist; --config takes a TOML file, with lines such as batch = 64")
    try:
        with open(path, "rb") as file:
            values = tomllib.load(file)
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(f"{shorten(path)} is not TOML: {shorten(str(error))}") from error
    refuse_broken(_texts(values), f"in {shorten(path)}")
    task, options = values.pop("task", None), values.pop(OPTIONS, {})
    if not isinstance(task, str | None):
        raise BadInput(f'{shorten(path)}: task is {shorten(repr(task))}; write a text, such as "my_task.py"')
    if not isinstance(options, dict):
        raise BadInput(f"{shorten(path)}: options is {shorten(repr(options))}; write [options], and below it lr = 0.1")
    return Settings(path, task, options, values)


def _texts(value: Any) -> Iterator[str]:
    """All keys and texts, however deep."""
    if isinstance(value, str):
        yield value
    parts = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else ()
    for part in parts:
        yield from _texts(part)


def _apply(context: typer.Context, settings: Settings | None) -> Settings | None:
    """Make the file's values the defaults of the command."""
    if settings is None:
        return None
    assert context.command.callback is not None
    types = _types(context.command.callback)
    flags = {flag: str(one.name) for one in context.command.params for flag in one.opts if one.name in types}
    known = {flag.removeprefix("--"): name for flag, name in flags.items() if flag.startswith("--")}
    defaults: dict[str, Any] = {}
    for key, value in settings.flags.items():
        name = key.replace("_", "-")
        if name in ONLY_TYPED:
            raise BadInput(f"{settings.path}: {name} cannot be set in a file; write --{name} on the command line")
        if name not in known:
            raise BadInput(f"{settings.path}: {_unknown(key, known, context)}")
        defaults[known[name]] = _read(f"{settings.path}: {key}", value, types[known[name]])
    context.default_map = {**(context.default_map or {}), **defaults}
    return settings


def _types(callback: Callable[..., Any]) -> dict[str, Any]:
    """By parameter."""
    # Those of its signature: it is typer's wrapper, which has no `__annotations__` from Python 3.14 on.
    parameters = inspect.signature(callback, eval_str=True).parameters.values()
    kinds = {one.name: one.annotation for one in parameters}
    return {name: get_args(kind)[0] if get_origin(kind) is Annotated else kind for name, kind in kinds.items()}


def _unknown(key: str, known: Mapping[str, Any], context: typer.Context) -> str:
    names = [*(name for name in known if name not in ONLY_TYPED), "task"]
    close = difflib.get_close_matches(key[:MAX_CHARACTERS].replace("_", "-"), names, n=1)
    advice = f"did you mean {close[0]}? Options" if close else "options"
    return f"{context.command_path} has no option {shorten(key)}; {advice} of the task stand below [options]"


def _read(where: str, value: Any, kind: Any) -> Any:
    """A value of an option's type, without Typer's conversions, which take 1.5 for a whole number; a list is a text."""
    (kind,) = [one for one in get_args(kind) or (kind,) if one is not type(None)]
    words = value if isinstance(value, list) else [value]
    if kind is str and all(isinstance(word, str | int) and not isinstance(word, bool) for word in words):
        return ",".join(map(str, words))
    return read_value(where, value, kind, BadInput, is_text=False)


SettingsOption = Annotated[
    Settings | None,
    typer.Option(
        "--config",
        metavar="FILE",
        parser=read_settings,
        callback=_apply,
        is_eager=True,
        autocompletion=complete_settings,
        help="TOML file of options, such as batch = 64; those of the task go under \\[options]. The command line wins.",
    ),
]


@dataclass(frozen=True)
class TaskArguments:
    """The first arguments of most commands, and `--config`, which may hold them."""

    task: TaskArgument = None
    options: OptionsArgument = None
    settings: SettingsOption = None


def choose_task(given: TaskArguments, verb: str = "train") -> tuple[str | None, dict[str, Any] | None]:
    """The task and its options, from the command line and the file; a resumed run may leave the task out.

    `verb` is what comes before the task in a command that names it.
    """
    task, words, settings = given.task, given.options or (), given.settings
    if task is not None and "=" in task and not os.path.exists(task):
        words, task = (task, *words), None
    options: dict[str, Any] = {**(settings.options if settings else {}), **parse_options(words)}
    if task is None and settings is not None and settings.task is not None:
        instead = f"name it yourself: evenstep {verb} {settings.task} --config {settings.path}"
        refuse_untrusted(settings.task, settings.path, instead)
        task = settings.task
    return task, options or None


def need_task(given: TaskArguments, verb: str) -> tuple[str, dict[str, Any]]:
    """The same, for a command that cannot do without a task."""
    task, options = choose_task(given, verb)
    if task is None:
        raise PlanError(f"no task given; try: evenstep {verb} digits")
    return task, options or {}
