"""`--help` of every command on a terminal of 80 columns: nothing is cut, and it speaks of metavars, not of types."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer
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
