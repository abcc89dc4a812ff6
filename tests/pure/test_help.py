"""`--help` of every command on a terminal of 80 columns: nothing is cut, and it speaks of metavars, not of types."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any, get_args

import pytest
import typer
from typer.models import OptionInfo
from typer.testing import CliRunner

from evenstep.cli import app
from evenstep.strategy_facts import STRATEGIES


def commands(group: Any, *words: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield words, group
    for word, command in getattr(group, "commands", {}).items():
        yield from commands(command, *words, word)


COMMANDS = dict(commands(typer.main.get_command(app)))


def help_of(*words: str) -> str:
    done = CliRunner().invoke(app, [*words, "--help"], prog_name="evenstep", env={"COLUMNS": "80"})
    assert done.exit_code == 0, done.output
    return done.output


def in_one_line(*words: str) -> str:
    return " ".join(re.sub("[│╭╮╰╯─]", " ", help_of(*words)).split())


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_option_is_shown_whole_in_80_columns(words: tuple[str, ...]) -> None:
    shown = help_of(*words)
    parameters = [one for one in COMMANDS[words].params if not getattr(one, "hidden", False)]
    options = [option for one in parameters for option in one.opts if option.startswith("--")]
    assert [one for one in options if not re.search(rf"(?<![\w-]){one}(?![\w-])", shown)] == []
    assert "…" not in shown


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_names_values_and_no_types_of_python(words: tuple[str, ...]) -> None:
    assert re.findall(r"<[\w\[\], ]+>|\{[A-Z|]+\}", help_of(*words)) == []


def test_the_usage_of_run_shows_where_the_arguments_of_the_script_go() -> None:
    assert "Usage: evenstep run [OPTIONS] SCRIPT [ARGS]... " in in_one_line("run")


@pytest.mark.parametrize(
    ("verb", "code"),
    [
        ("adopt", "Exit code 1 if they differ."),
        ("fit", "Exit code 1 if nothing fits."),
        ("tune", "Exit code 1 if no trial has a result."),
        ("predict", "Exit code 1 if nothing can be predicted."),
    ],
)
def test_a_verb_names_its_exit_code(verb: str, code: str) -> None:
    assert code in in_one_line(verb)


def test_evaluate_lists_the_strategies() -> None:
    shown = in_one_line("evaluate")
    assert [name for name in STRATEGIES if not re.search(rf"\b{name}\b", shown)] == []
    assert "default: that of the run." in shown


def option_infos(command: Any) -> dict[str, Any]:
    """What `typer.Option` got, for each parameter of a command."""
    parameters = inspect.signature(command.callback, eval_str=True).parameters if command.callback else {}
    found = {
        name: [what for what in get_args(one.annotation)[1:] if hasattr(what, "param_decls")]
        for name, one in parameters.items()
    }
    return {name: infos[0] for name, infos in found.items() if infos and isinstance(infos[0], OptionInfo)}


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_an_option_named_like_its_metavar_is_declared(words: tuple[str, ...]) -> None:
    """Typer 0.27 makes `--NAME` of metavar="NAME" for a parameter `name`."""
    undeclared = [
        name
        for name, info in option_infos(COMMANDS[words]).items()
        # In an Annotated, the first declaration is where a default would be.
        if not isinstance(info.default, str) and (info.metavar or "").lower() == name.replace("_", "-")
    ]
    assert undeclared == []


def test_options_of_commands_are_seen_by_the_test_above() -> None:
    assert {"name", "batch", "as_json"} <= option_infos(COMMANDS["train",]).keys()
