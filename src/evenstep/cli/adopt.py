"""`evenstep adopt`: does an adopted task take the steps of its original?"""

from __future__ import annotations

from typing import Annotated

import typer

from evenstep.cli.app import OptionsArgument, app

EXAMPLES = """
[bold]Examples[/bold]

evenstep adopt my_task.py

evenstep adopt my_task.py --steps 100
"""


@app.command(epilog=EXAMPLES)
def adopt(
    task: Annotated[str, typer.Argument(metavar="TASK", help="A file whose task is made by evenstep.adopt.")],
    options: OptionsArgument = None,
    steps: Annotated[int, typer.Option(metavar="N", help="Optimizer steps to compare.", min=1)] = 20,
) -> None:
    """Check that a task adopted from a Trainer or LightningModule takes the original's first steps, bit for bit.

    Exit code 1 if they differ.
    """
    from evenstep.adopt.proof import compare_with_original
    from evenstep.task_options import parse_options

    proof = compare_with_original(task, parse_options(options or []), steps)
    for line in (*proof.left_out, *proof.differences):
        print(line)
    if proof.differences:
        raise typer.Exit(1)
    print(f"{steps} steps: losses and weights equal those of {proof.original}, bit for bit")
