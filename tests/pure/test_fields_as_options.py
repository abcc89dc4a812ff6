"""Commands that take dataclasses: their fields are the options."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from evenstep.cli.app import fields_as_options
from evenstep.cli.settings import TaskArguments


@dataclass(frozen=True)
class First:
    path: Annotated[str, typer.Argument()]
    steps: Annotated[int, typer.Option(min=1)] = 4


@dataclass(frozen=True)
class Second:
    kind: Annotated[str, typer.Option()]
    is_quiet: Annotated[bool, typer.Option("--quiet")] = False


def command() -> typer.Typer:
    app = typer.Typer(context_settings={"allow_extra_args": True})

    @app.command()
    @fields_as_options
    def show(context: typer.Context, first: First, second: Second) -> None:
        """Show what was given."""
        print(first, second, context.args)

    return app


def test_each_field_is_an_option_and_each_dataclass_gets_its_own() -> None:
    done = CliRunner().invoke(command(), ["a", "--kind", "b", "--quiet", "--steps", "7", "rest"])
    assert done.output == "First(path='a', steps=7) Second(kind='b', is_quiet=True) ['rest']\n"
    done = CliRunner().invoke(command(), ["a", "--kind", "b"])
    assert done.output == "First(path='a', steps=4) Second(kind='b', is_quiet=False) []\n"


def test_a_field_without_a_default_is_required_wherever_it_stands() -> None:
    done = CliRunner().invoke(command(), ["a"])
    assert done.exit_code == 2
    assert "Missing option '--kind'" in done.output


def test_a_parameter_of_the_command_may_have_the_name_of_a_field() -> None:
    app = typer.Typer()

    @app.command()
    @fields_as_options
    def show(first: First, steps: Second) -> None:
        print(first.steps, steps.kind)

    assert CliRunner().invoke(app, ["a", "--kind", "b", "--steps", "7"]).output == "7 b\n"


@dataclass(frozen=True)
class Listed:
    values: Annotated[list[int], typer.Option()] = field(default_factory=list)


def test_a_field_whose_default_is_made_by_a_function_is_refused() -> None:
    def show(listed: Listed) -> None: ...

    with pytest.raises(TypeError, match=r"listed\.values has a default_factory"):
        fields_as_options(show)


def test_help_lists_the_fields_in_their_order() -> None:
    shown = CliRunner().invoke(command(), ["--help"], env={"COLUMNS": "100"}).output
    assert "Show what was given." in shown
    places = [shown.index(text) for text in ("path", "--steps", "--kind", "--quiet")]
    assert places == sorted(places)


def test_a_file_sets_them_where_the_wrapper_of_a_command_has_no_annotations(capsys: pytest.CaptureFixture[str]) -> None:
    """As in Python 3.14, where functools.update_wrapper does not copy them."""
    app = typer.Typer()

    @app.command()
    @fields_as_options
    def show(second: Second, given: TaskArguments) -> None:
        print(second)

    made = typer.main.get_command(app)
    assert made.callback is not None
    made.callback.__annotations__ = {}
    Path("run.toml").write_text('kind = "b"\nquiet = true\n')
    made(["--config", "run.toml", "a"], standalone_mode=False)
    assert capsys.readouterr().out == "Second(kind='b', is_quiet=True)\n"
