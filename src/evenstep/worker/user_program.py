"""Run the user's program (a script, a module, a function) in a worker process. Imports no torch itself."""

from __future__ import annotations

import os
import pickle
import runpy
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from evenstep.distributed.process import (
    WorkerSpec,
    begin,
    detach_from_server,
    end,
    new_main,
    read_rank,
    tidy_up_at_exit,
    unblock_signals,
)


@dataclass(frozen=True, kw_only=True)
class ProgramSpec(WorkerSpec):
    """A script and its arguments; or a module, as `python -m` would run it."""

    name: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    rank_flag: str | None = None
    """The flag that passes the local rank to an old script: `--local_rank` or `--local-rank`."""
    search_path: tuple[str, ...] = ()
    """`sys.path` of a new Python, without the folder of what it runs."""


def run_program(spec: ProgramSpec) -> None:
    """Run it as if Python had been started with it, and end the process as Python would."""
    detach_from_server()
    _run(spec, lambda: _as_main(spec))


def run_function(spec: WorkerSpec, results: Path, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Call a function that this fork inherited; its result goes back to the launcher."""

    def call() -> None:
        rank, _, _ = read_rank()
        (results / f"{rank}.pickle").write_bytes(pickle.dumps(function(*arguments)))

    _run(spec, call)


def _run(spec: WorkerSpec, what: Callable[[], None]) -> None:
    # As under torchrun: the launcher forwards Ctrl-C, and a program that signals its process group reaches only itself.
    with suppress(PermissionError):
        os.setsid()
    begin(spec)
    tidy_up_at_exit()
    unblock_signals()
    try:
        what()
    except SystemExit as request:
        exit_program(_exit_code(request))
    except BaseException as error:
        # A second Ctrl-C while the first is reported would be taken for a normal exit.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        from evenstep.distributed.world import stay_in_group
        from evenstep.worker.main import write_report

        stay_in_group()
        rank, _, _ = read_rank()
        write_report(Path(spec.logs), rank, error)
        try:
            _call_hook(error)
        finally:
            end(1)
    exit_program(0)


def exit_program(exit_code: int) -> None:
    """End the process as Python does after the last line: wait for threads, then call exit handlers.

    The hang report recognizes this function's name in a stack.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    end(exit_code)


def _call_hook(error: BaseException) -> None:
    """Call the script's own excepthook; torch's only repeats what the launcher reports in fewer lines."""
    hook = sys.excepthook
    if hook is not sys.__excepthook__ and not str(hook.__module__).startswith("torch."):
        hook(type(error), error, error.__traceback__)


def _exit_code(request: SystemExit) -> int:
    """The exit code of `sys.exit(...)`: a text is printed, and means 1."""
    if request.code is None or isinstance(request.code, int):
        return (request.code or 0) & 0xFF
    print(request.code, file=sys.stderr)
    return 1


def _as_main(program: ProgramSpec) -> None:
    flag = [f"{program.rank_flag}={os.environ['LOCAL_RANK']}"] if program.rank_flag else []
    sys.argv = [program.name, *flag, *program.arguments]
    sys.orig_argv = [sys.executable, "-u", *(["-m"] if program.is_module else []), *sys.argv]
    folder = os.getcwd() if program.is_module else str(Path(program.name).resolve().parent)
    sys.path[:] = [*([] if sys.flags.safe_path else [folder]), *program.search_path]
    main = new_main(program.name)
    if program.is_module:
        runpy._run_module_as_main(program.name)  # type: ignore[attr-defined]
        return
    # Without dont_inherit it would be compiled with this file's `from __future__ import annotations`.
    code = compile(Path(program.name).read_bytes(), str(main.__file__), "exec", dont_inherit=True)
    exec(code, vars(main))


if __name__ == "__main__":
    run_program(msgspec.json.decode(sys.argv[1], type=ProgramSpec))
