"""The command `evenstep`: argv to one call. torch is imported inside commands, so that help is instant."""

from __future__ import annotations

import re
import sys
from typing import Any

import typer
from rich.console import Console

from evenstep.cli import compare, doctor, inspect, report, train, verify  # noqa: F401  (their commands are found in `app`)
from evenstep.cli.app import app, refuse_broken
from evenstep.errors import MAX_CHARACTERS, STOPPED, BadInput, EvenstepError, shorten

MOST_IN_A_LINE = 1000
_COMMAND = re.compile(r"(?<!\S)(evenstep [a-z]{2,20} |--[a-z-]{2,30} )(?=\S)")
"""Where one begins that a message advises, or its options."""

# Typer keeps its name for "the command line is wrong" to itself; this public one is made from it.
_USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]


def main() -> None:
    """Run the command, and end with a code that means something: 0 done, 1 failed, 2 bad input, 130 stopped."""
    try:
        if sys.argv[1:2] != ["run"]:  # What follows a script is the script's.
            refuse_broken(sys.argv[1:])
        sys.exit(app(prog_name="evenstep", standalone_mode=False))
    except EvenstepError as error:
        _say_error(str(error))
        sys.exit(error.exit_code)
    except _USAGE_ERROR as error:
        _say_usage(error)
        sys.exit(BadInput.exit_code)
    except KeyboardInterrupt:
        _say_error("stopped")
        sys.exit(STOPPED)


def _say_usage(error: Any) -> None:
    """What is wrong with the command line; without any arguments, Typer has shown the help already."""
    message = error.format_message().strip().rstrip(".")
    if message:
        command = error.ctx.command_path if error.ctx else "evenstep"
        _say_error(f"{message}{'' if message.endswith('?') else ';'} see {command} --help")


def _say_error(message: str) -> None:
    """On stderr; what was given, and is very long, is shortened."""
    from evenstep.report.progress import without_control

    # emoji: ":100:" is a line number here, not a picture.
    console = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)
    console.print("[bold red]error:[/bold red] ", end="")
    for line in without_control(message).splitlines() or [""]:
        console.print(shorten(_with_short_words(line), MOST_IN_A_LINE), markup=False)


def _with_short_words(line: str) -> str:
    """A command to copy stays whole: one of which a path is cut does something else, or nothing."""
    found = _COMMAND.search(line)
    end = found.start() if found is not None else len(line)
    return re.sub(rf"\S{{{MAX_CHARACTERS},}}", lambda long: shorten(long[0]), line[:end]) + line[end:]
