"""The command's root, and what several of its commands share."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Annotated

import typer
from rich.console import Console

import evenstep
from evenstep.errors import BREAKS_LINES, BadInput, shorten
from evenstep.task import BUILT_IN

TASKS = f"{', '.join(BUILT_IN)}; or your own as file.py, file.py:function or package.module:function."

app = typer.Typer(
    name="evenstep",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
checkpoint_app = typer.Typer(help="Inspect checkpoints.", no_args_is_help=True)
app.add_typer(checkpoint_app, name="checkpoint")

MACHINES_HELP = "Number of machines, such as 2, or minimum and maximum, such as 2:4."
RENDEZVOUS_HELP = "Host name of the first machine and a free port on it; the same on all machines."
MachinesOption = Annotated[str | None, typer.Option(help=MACHINES_HELP)]
RendezvousOption = Annotated[str | None, typer.Option(metavar="HOST:PORT", help=RENDEZVOUS_HELP)]


def refuse_broken(words: Iterable[str]) -> None:
    """Refuse control characters and broken UTF-8, which would garble messages or fail later."""
    for word in words:
        if re.search(f"[{BREAKS_LINES}]", word):
            raise BadInput(
                f"{shorten(ascii(word))} on the command line holds a control character, or bytes that are no UTF-8"
            )


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"evenstep {evenstep.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Train one PyTorch task, unchanged, on one device or many, with the same result."""


@contextmanager
def saying() -> Iterator[Callable[[str], None]]:
    """What is being done, on stderr: one line that changes on a terminal, one after another elsewhere."""
    console = Console(stderr=True, highlight=False, emoji=False)
    status = console.status("preparing") if console.is_terminal else None
    try:
        with status or nullcontext():
            yield status.update if status else lambda line: console.print(line, markup=False, soft_wrap=True)
    except KeyboardInterrupt:
        console.print("stopped")
        raise
