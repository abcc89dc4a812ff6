"""The entry points of a worker: one rank of a training (`work`), of a script (`run_program`), of a function.

Imports neither torch nor NumPy at the top: a script that is started with --fresh sets variables for them first.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from evenstep.distributed.heartbeat import ENDING, LOADING
from evenstep.distributed.huge_pages import use_huge_pages
from evenstep.distributed.preemption import catch_early_signals
from evenstep.distributed.worker_process import (
    WorkerSpec,
    begin,
    detach_from_server,
    end,
    new_main,
    read_rank,
    tidy_up_at_exit,
    unblock_signals,
)
from evenstep.errors import EvenstepError, Preempted, shorten
from evenstep.private_apis import free_group_after_reducer, run_module_as_main, wait_for_threads
from evenstep.strategy_facts import StrategyFacts, add_strategy

if TYPE_CHECKING:
    from evenstep.plan import Plan
    from evenstep.task import Task

Perform: TypeAlias = "Callable[[Plan, Task, Path], Iterator[object]]"
"""What a rank runs: `training.trainer.perform`, or a function like it; texts among its events are printed."""
MAX_LOGGED_CHARS = 10**6
"""Characters of a line of a traceback: a message with a tensor in it can be a hundred times longer."""


@dataclass(frozen=True, kw_only=True)
class TrainingSpec(WorkerSpec):
    """One rank of a training."""

    plan: Plan
    run_folder: str
    cwd: str | None = None
    """The working folder, if the task has already chosen one."""
    strategies: tuple[StrategyFacts, ...] = ()
    """Custom ones, which the plan may name; the task's file, which adds them, is loaded after the plan."""


def work(spec: TrainingSpec, perform: Perform, source: Task | None = None) -> None:
    """Do this rank's part of a run and end the process; write a report if it fails.

    `perform` is the training, or what is done instead of it; `source` is a task that this fork inherited.
    """
    begin(spec)
    catch_early_signals()
    # Ctrl-C reaches every process of a terminal; only the launcher handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        _perform_rank(spec, perform, source)
    except Preempted:
        # A requested stop is not a failure: a report could be taken for the cause of one.
        end(Preempted.exit_code)
    except BaseException as error:
        report_failure(spec, error)
        end(error.exit_code if isinstance(error, EvenstepError) else 1)
    end(0)


def _perform_rank(spec: TrainingSpec, perform: Perform, source: Task | None) -> None:
    """Load the task under the plan's seed and run it to the end."""
    from evenstep.distributed.world import read_heartbeat
    from evenstep.sampling.rng import seed_everything
    from evenstep.task import call_task, has_several, load_task

    for row in spec.strategies:
        add_strategy(row)
    plan = replace(spec.plan, resume=spec.resume or spec.plan.resume)
    if spec.cwd is not None:
        os.chdir(spec.cwd)
    read_heartbeat().beat(LOADING)
    seed_everything(plan.seed)
    task = call_task(source) if source is not None else load_task(plan.task, plan.data, plan.options)
    if has_several(task):
        from evenstep.training.several_models import in_turn

        task = in_turn(task)
    for event in perform(plan, task, Path(spec.run_folder)):
        if isinstance(event, str):
            print(event, flush=True)
    # A rank that exits with code 0 without this heartbeat called os._exit.
    read_heartbeat().beat(ENDING)


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
    _run(spec, lambda: _marked_main(spec))


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
    # A fork has torch already; a new Python (--fresh) may never import it.
    if "torch" in sys.modules:
        free_group_after_reducer()
    unblock_signals()
    use_huge_pages()
    try:
        what()
    except SystemExit as request:
        exit_program(_exit_code(request))
    except BaseException as error:
        # A second Ctrl-C while the first is reported would be taken for a normal exit.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        report_failure(spec, error)
        try:
            _call_hook(error)
        finally:
            end(1)
    exit_program(0)


def exit_program(exit_code: int) -> None:
    """End the process as Python does after the last line: wait for threads, then call exit handlers.

    The hang report recognizes this function's name in a stack.
    """
    wait_for_threads()
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


ALONE = "alone"
"""Ending of the file that a rank leaves in its logs if it trained and never joined the others."""


def _marked_main(spec: ProgramSpec) -> None:
    try:
        _as_main(spec)
    finally:
        if _trained_alone():
            with suppress(OSError):
                Path(spec.logs, f"rank{read_rank()[0]}.{ALONE}").touch()


def _trained_alone() -> bool:
    """Whether this process made an optimizer and, for certain, no process group."""
    torch = sys.modules.get("torch")
    # init_process_group leaves an excepthook, also after destroy_process_group.
    if torch is None or sys.excepthook is not sys.__excepthook__ or torch.distributed.is_initialized():
        return False
    kinds = [torch.optim.Optimizer]
    for kind in kinds:
        kinds += kind.__subclasses__()
    # Optimizer.__init__ marks the step of its class.
    return any(getattr(kind.step, "hooked", False) for kind in kinds)


def _as_main(program: ProgramSpec) -> None:
    flag = [f"{program.rank_flag}={read_rank()[2]}"] if program.rank_flag else []
    sys.argv = [program.name, *flag, *program.arguments]
    sys.orig_argv = [sys.executable, "-u", *(["-m"] if program.is_module else []), *sys.argv]
    folder = os.getcwd() if program.is_module else str(Path(program.name).resolve().parent)
    sys.path[:] = [*([] if sys.flags.safe_path else [folder]), *program.search_path]
    main = new_main(program.name)
    if program.is_module:
        run_module_as_main(program.name)
        return
    # Without dont_inherit it would be compiled with this file's `from __future__ import annotations`.
    code = compile(Path(program.name).read_bytes(), str(main.__file__), "exec", dont_inherit=True)
    exec(code, vars(main))


def report_failure(spec: WorkerSpec, error: BaseException) -> None:
    """Write the report of this rank, which has failed."""
    from evenstep.distributed.world import stay_in_group

    stay_in_group()
    rank, _, _ = read_rank()
    write_report(Path(spec.logs), rank, error, is_custom_loop=not isinstance(spec, TrainingSpec))


ENGINE = tuple(f"{Path(__file__).parents[1] / name}{os.sep}" for name in ("training", "data", "strategies"))
"""In a traceback, what a task or a call of a custom loop goes through."""


def write_report(logs: Path, rank: int, error: BaseException, is_custom_loop: bool = False) -> None:
    """Write what the launcher shows of this failure if it is the first cause."""
    from evenstep.distributed.world import spare_folder
    from evenstep.monitor.known_errors import answer, is_victim, message_of, noted_advice, noted_step
    from evenstep.task import is_user_code

    raised = _raised(error)
    frames = traceback.extract_tb(raised.__traceback__)
    own = [frame for frame in frames if is_user_code(frame.filename)]
    report = {
        "rank": rank,
        "nanoseconds": time.time_ns(),
        "type": type(raised).__name__,
        "message": message_of(raised),
        "is_plain": isinstance(error, EvenstepError),
        "is_final": getattr(error, "is_final", False),
        "exit_code": error.exit_code if isinstance(error, EvenstepError) else 1,
        "step": noted_step(error),
        "is_victim": is_victim(error),
        "is_between_calls": is_custom_loop and not any(frame.filename.startswith(ENGINE) for frame in frames),
        "answer": noted_advice(error) or answer(error),
        "lines": [f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}" for frame in own[-4:]],
    }
    # A full disk may be the error itself; the launcher reads both folders.
    for folder in (logs, spare_folder()):
        with suppress(OSError):
            _write_report(folder, rank, report, error)
            return


def _raised(error: BaseException) -> BaseException:
    """What the user's code raised: Python turns a StopIteration inside a generator into a RuntimeError."""
    cause = error.__cause__
    return cause if isinstance(error, RuntimeError) and isinstance(cause, StopIteration) else error


def _write_report(folder: Path, rank: int, report: dict[str, Any], error: BaseException) -> None:
    path = folder / f"rank{rank}.error.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    # Written and renamed: this process may be stopped while it writes.
    beside = path.with_suffix(".writing")
    beside.write_text(json.dumps(report))
    beside.replace(path)
    with path.with_name(f"rank{rank}.traceback").open("a") as log:
        log.writelines(shorten(part, MAX_LOGGED_CHARS) for part in traceback.format_exception(error))


if __name__ == "__main__":
    run_program(msgspec.json.decode(sys.argv[1], type=ProgramSpec))
