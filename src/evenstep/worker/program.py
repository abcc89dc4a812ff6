"""A program of the user's (a script, a module, a function) as one of several processes. Imports no torch by itself."""

from __future__ import annotations

import json
import logging
import multiprocessing.util
import os
import pickle
import runpy
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from evenstep.worker.lifeline import begin, end, read_rank, take_signals


@dataclass(frozen=True)
class Program:
    """A script and its arguments; or a module, as `python -m` would run it."""

    name: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    rank_flag: str | None = None
    """How a script of before torchrun is told its local rank: `--local_rank` or `--local-rank`."""

    def to_json(self) -> str:
        """For a process of its own."""
        return json.dumps(asdict(self))


def run_program(logs: str, program: Program) -> None:
    """Run it as if Python had been started with it, and end the process as Python would."""
    _run(logs, lambda: _as_main(program))


def run_function(logs: str, results: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Call a function that this process has a copy of; what it returns goes back to the launcher."""
    import torch

    # OpenMP's threads do not survive the copying of a process; more than one would wait for them for ever.
    torch.set_num_threads(1)

    def call() -> None:
        rank, _, _ = read_rank()
        returned = pickle.dumps(function(*arguments))
        (Path(results) / f"{rank}.pickle").write_bytes(returned)

    _run(logs, call)


def _run(logs: str, what: Callable[[], None]) -> None:
    begin(logs)
    take_signals()
    try:
        what()
    except SystemExit as request:
        _finish()
        end(_exit_code(request))
    except BaseException as error:
        # A second Ctrl-C, while the first is told of, would be taken for a good end.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        from evenstep.worker.main import write_report
        from evenstep.worker.world import stay_in_group

        stay_in_group()
        rank, _, _ = read_rank()
        write_report(Path(logs), rank, error)
        end(1)
    _finish()
    end(0)


def _finish() -> None:
    """What Python does at the end of a program: wait for threads and processes, and write logs out."""
    threading._shutdown()  # type: ignore[attr-defined]
    multiprocessing.util._exit_function()  # type: ignore[attr-defined]
    logging.shutdown()


def _exit_code(request: SystemExit) -> int:
    """What Python makes of `sys.exit(...)`: a text is printed, and means 1."""
    if request.code is None or isinstance(request.code, int):
        return (request.code or 0) & 0xFF
    print(request.code, file=sys.stderr)
    return 1


def _as_main(program: Program) -> None:
    flag = [f"{program.rank_flag}={os.environ['LOCAL_RANK']}"] if program.rank_flag else []
    sys.argv = [program.name, *flag, *program.arguments]
    if program.is_module:
        sys.path.insert(0, "")
        runpy.run_module(program.name, run_name="__main__", alter_sys=True)
        return
    path = Path(program.name)
    sys.path.insert(0, str(path.resolve().parent))
    main: Any = type(sys)("__main__")
    # What pickle and multiprocessing look for, for as long as the process lives.
    main.__file__ = program.name
    main.__builtins__ = __builtins__
    sys.modules["__main__"] = main
    # Or it would be compiled with this file's own `from __future__ import annotations`.
    code = compile(path.read_bytes(), program.name, "exec", dont_inherit=True)
    exec(code, main.__dict__)


if __name__ == "__main__":
    given = json.loads(sys.argv[2])
    run_program(sys.argv[1], Program(**{**given, "arguments": tuple(given["arguments"])}))
