"""`evenstep report`: a page of runs or of a comparison, a live page of one run, or runs sent to trackers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from evenstep.cli.app import app, flag
from evenstep.cli.completion import complete_run
from evenstep.errors import BadInput

EXAMPLES = """
[bold]Examples[/bold]

evenstep report runs/a runs/b

evenstep report runs/2026-11-15-digits-compare --out page.html

evenstep report --watch runs/2026-11-15-digits-ddp

evenstep report --to mlflow runs/2026-11-15-digits-ddp
"""


@app.command(epilog=EXAMPLES)
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN", help="Run folders, or the folder of a comparison.", autocompletion=complete_run),
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="HTML file to write; default: page.html in the first folder.")
    ] = None,
    watch: Annotated[bool, flag("--watch", help="Serve a live page of one run, until Ctrl-C.")] = False,
    port: Annotated[
        int,
        typer.Option(
            "--port",
            metavar="PORT",
            help="Port of the live page; default: any free port.",
            show_default=False,
            min=0,
            max=65535,
        ),
    ] = 0,
    to: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="Instead of writing a page, send these runs' missing values to trackers: tensorboard, wandb, mlflow, "
            "trackio.",
        ),
    ] = None,
) -> None:
    """Write one HTML page with charts and tables of runs or of a comparison."""
    if port and not watch:
        raise BadInput("--port is for the live page; add --watch")
    if to is not None:
        _send(runs, to, is_page=watch or out is not None)
    elif watch:
        _watch(runs, out, port)
    else:
        print(_write(runs, out))


def _write(folders: list[Path], out: Path | None) -> Path:
    from evenstep.record import Record
    from evenstep.report import comparison, prediction
    from evenstep.report.html.forecast_page import write_forecast_page
    from evenstep.report.html.page import FILE, write_page, write_page_of_runs

    predicted = [folder for folder in folders if os.path.isfile(folder / prediction.FILE)]
    if predicted and len(folders) == 1:
        return write_forecast_page(prediction.Forecast.read(folders[0]), folders[0], out)
    compared = [folder for folder in folders if os.path.isfile(folder / comparison.FILE)]
    if compared and len(folders) > 1:
        raise BadInput(f"{compared[0]} is a comparison, and a page holds one; give it alone")
    if compared:
        return write_page(comparison.Comparison.read(compared[0]), compared[0], out)
    beside = folders[0] if os.path.isdir(folders[0]) else folders[0].parent
    return write_page_of_runs([Record.read(folder) for folder in folders], out or beside / FILE)


def _send(folders: list[Path], to: str, is_page: bool) -> None:
    from evenstep.plan import parse_log
    from evenstep.record import Record
    from evenstep.trackers import check_installed
    from evenstep.trackers.tracker_process import send_run

    if is_page:
        raise BadInput("--to sends runs to trackers and writes no page; leave out --watch and --out")
    names = parse_log(to, "--to")
    check_installed(names, "--to")
    for folder in folders:
        Record.read(folder, kinds=())
    for folder in folders:
        run = folder if folder.is_dir() else folder.parent
        for name in names:
            print(f"{run} is in {name}: {send_run(name, run)}")


def _watch(folders: list[Path], out: Path | None, port: int) -> None:
    from evenstep.report.html.live import serve

    if len(folders) > 1 or out is not None:
        raise BadInput("--watch serves the page of one run and writes none; give one RUN and no --out")
    serve(folders[0], port)
