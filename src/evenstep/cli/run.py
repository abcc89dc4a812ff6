"""`evenstep run`: a script in several processes, as torchrun starts it."""

from __future__ import annotations

import sys
from dataclasses import asdict, astuple, dataclass
from typing import Annotated

import typer

from evenstep.cli.app import MACHINES_HELP, RENDEZVOUS_HELP, OutOption, app, fields_as_options, flag, refuse_broken

RUN_EXAMPLES = """
[bold]Examples[/bold]

evenstep run --devices 2 train.py --lr 0.1

evenstep run --devices 2 -m package.train

evenstep run --machines 2 --rendezvous node0:29400 --devices 8 train.py
"""


TorchrunOption = Annotated[str | None, typer.Option(hidden=True)]


@dataclass(frozen=True)
class HiddenTorchrunOptions:
    """The fields of `launcher.script.TorchrunOptions`, which is imported late: accepted, and not shown."""

    node_rank: TorchrunOption = None
    master_addr: TorchrunOption = None
    master_port: TorchrunOption = None
    rdzv_backend: TorchrunOption = None
    rdzv_id: TorchrunOption = None
    rdzv_conf: TorchrunOption = None


@dataclass(frozen=True)
class RunOptions:
    """Arguments and options of `evenstep run`."""

    script: Annotated[
        str, typer.Argument(metavar="SCRIPT", help="A script written for torchrun, or with evenstep.join().")
    ]
    devices: Annotated[
        str | None,
        typer.Option(
            "--devices",
            "--nproc-per-node",
            metavar="N",
            help="Number of processes, one per device; or gpu, cpu or auto: one per GPU or CPU core; default: 1, or "
            "PET_NPROC_PER_NODE.",
        ),
    ] = None
    module: Annotated[bool, flag("--module", "-m", help="SCRIPT is a module, as for python -m.")] = False
    restarts: Annotated[
        int, typer.Option("--restarts", "--max-restarts", metavar="N", help="Restart the script after up to N crashes.")
    ] = 0
    stall_after: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="End a script when all of its ranks have stayed on the same line for SECONDS; default: only report "
            "it, after 600.",
        ),
    ] = None
    fresh: Annotated[
        bool,
        flag(
            "--fresh",
            help="Start a new interpreter per process, for scripts that set environment variables for torch.",
        ),
    ] = False
    machines: Annotated[str | None, typer.Option("--machines", "--nnodes", metavar="N|MIN:MAX", help=MACHINES_HELP)] = (
        None
    )
    rendezvous: Annotated[
        str | None, typer.Option("--rendezvous", "--rdzv-endpoint", metavar="HOST:PORT", help=RENDEZVOUS_HELP)
    ] = None
    out: OutOption = None
    standalone: Annotated[bool, typer.Option("--standalone", hidden=True)] = False


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
@fields_as_options
def run(context: typer.Context, given: RunOptions, theirs: HiddenTorchrunOptions) -> None:
    """Run a script in several processes, like torchrun; ARGS after SCRIPT are passed to it.

    torchrun's options for processes, machines and restarts work; for any other,
    the error says what to write.

    Shows the output of rank 0 and the errors of all ranks; all output is in
    runs/DATE-TIME-SCRIPT/logs.
    """
    texts = (given.script, given.devices, given.machines, given.rendezvous, given.out, *astuple(theirs))
    refuse_broken(text for text in texts if text)
    from evenstep.launcher.script import (
        Script,
        TorchrunOptions,
        in_our_words,
        processes_here,
        refuse_option,
        run_script,
    )

    refuse_option(given.script)
    num = processes_here(given.devices)
    torchrun = TorchrunOptions(**asdict(theirs))
    script = Script(
        given.script,
        tuple(context.args[1:] if context.args[:1] == ["--"] else context.args),
        num,
        is_module=given.module,
        is_fresh=given.fresh,
        restarts=given.restarts,
        stall_after=given.stall_after,
        machines=given.machines,
        rendezvous=given.rendezvous if given.machines is None else given.rendezvous or torchrun.rendezvous,
    )
    words = sys.argv[2 : len(sys.argv) - len(context.args)]
    run_script(script, given.out, in_our_words(script, words))
