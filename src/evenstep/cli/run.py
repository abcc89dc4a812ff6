"""`evenstep run`: a script in several processes, as torchrun starts it."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from evenstep.cli.app import MACHINES_HELP, RENDEZVOUS_HELP, OutOption, app, flag, refuse_broken

RUN_EXAMPLES = """
[bold]Examples[/bold]

evenstep run --devices 2 train.py --lr 0.1

evenstep run --devices 2 -m package.train

evenstep run --machines 2 --rendezvous node0:29400 --devices 8 train.py
"""


TorchrunOption = Annotated[str | None, typer.Option(hidden=True)]


@app.command(
    epilog=RUN_EXAMPLES,
    options_metavar="[OPTIONS]",
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
        # torchrun takes both spellings of its options, and both are in use.
        "token_normalize_func": lambda name: name.replace("_", "-"),
    },
)
def run(
    context: typer.Context,
    script: Annotated[
        str, typer.Argument(metavar="SCRIPT", help="A script written for torchrun, or with evenstep.join().")
    ],
    devices: Annotated[
        str | None,
        typer.Option(
            "--devices",
            "--nproc-per-node",
            metavar="N",
            help="Number of processes, one per device; or gpu, cpu or auto: one per GPU or CPU core; default: 1, or "
            "PET_NPROC_PER_NODE.",
        ),
    ] = None,
    module: Annotated[bool, flag("--module", "-m", help="SCRIPT is a module, as for python -m.")] = False,
    restarts: Annotated[
        int, typer.Option("--restarts", "--max-restarts", metavar="N", help="Restart the script after up to N crashes.")
    ] = 0,
    stall_after: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="End a script when none of its ranks has moved to another line for SECONDS; default: report that "
            "after 600, and let it run.",
        ),
    ] = None,
    fresh: Annotated[
        bool,
        flag(
            "--fresh",
            help="Start a new interpreter for each process: for a script that sets environment variables for torch.",
        ),
    ] = False,
    machines: Annotated[str | None, typer.Option("--machines", "--nnodes", help=MACHINES_HELP)] = None,
    rendezvous: Annotated[
        str | None, typer.Option("--rendezvous", "--rdzv-endpoint", metavar="HOST:PORT", help=RENDEZVOUS_HELP)
    ] = None,
    out: OutOption = None,
    standalone: Annotated[bool, typer.Option("--standalone", hidden=True)] = False,
    node_rank: TorchrunOption = None,
    master_addr: TorchrunOption = None,
    master_port: TorchrunOption = None,
    rdzv_backend: TorchrunOption = None,
    rdzv_id: TorchrunOption = None,
    rdzv_conf: TorchrunOption = None,
) -> None:
    """Run a script as several processes, like torchrun; what follows SCRIPT is passed to it.

    torchrun's options are understood. The output of rank 0 is shown, and the errors of all ranks;
    runs/DATE-TIME-SCRIPT/logs has all output.
    """
    theirs = (node_rank, master_addr, master_port, rdzv_backend, rdzv_id, rdzv_conf)
    refuse_broken(word for word in (script, devices, machines, rendezvous, out, *theirs) if word)
    from evenstep.launcher.script import (
        Script,
        TorchrunOptions,
        in_our_words,
        processes_here,
        refuse_option,
        run_script,
    )

    refuse_option(script)
    arguments = context.args[1:] if context.args[:1] == ["--"] else context.args
    num = processes_here(devices)
    torchrun = TorchrunOptions(*theirs)
    if machines is not None:
        rendezvous = rendezvous or torchrun.rendezvous
    what = Script(script, tuple(arguments), num, module, fresh, restarts, stall_after, machines, rendezvous)
    words = sys.argv[2 : len(sys.argv) - len(context.args)]
    run_script(what, out, in_our_words(what, words))
