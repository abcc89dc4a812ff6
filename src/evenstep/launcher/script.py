"""Run the user's own program in several processes: a script, as torchrun would, or a function."""

from __future__ import annotations

import ast
import datetime
import difflib
import os
import pickle
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from evenstep.distributed.devices import count_processes
from evenstep.distributed.temporary_folders import live_folder
from evenstep.distributed.worker_process import WorkerSpec
from evenstep.errors import MAX_CHARACTERS, PlanError, WorkerFailed, shorten
from evenstep.launcher.launch import refuse_fork_after_cuda
from evenstep.launcher.rendezvous.addresses import free_port, open_store
from evenstep.launcher.rendezvous.pods import find_elastic_node
from evenstep.launcher.rendezvous.rank_assignment import LocalRendezvous, RankAssignment, Rendezvous
from evenstep.launcher.rendezvous.slurm import find_slurm
from evenstep.launcher.rendezvous.version_check import Identity, identity_of, sources_of_file, sources_of_module
from evenstep.launcher.supervisor import Launch, Supervisor
from evenstep.launcher.variables import master_variables, threads_for_script, torchrun_variables
from evenstep.plan import RUNS, check_patience, parse_machines, parse_rendezvous
from evenstep.report.terminal import Progress
from evenstep.worker.main import ALONE, ProgramSpec, run_function, run_program

SPELLINGS = ("--local-rank", "--local_rank")
DECLARE = ("add_argument", "option")
"""The calls that declare an option in argparse and click."""
SPAWNS = frozenset(
    f"torch.multiprocessing.{module}{name}" for module in ("", "spawn.") for name in ("spawn", "start_processes")
)
"""The functions of torch that start processes, by the names they can be imported by."""
RANK_VARIABLES = ("RANK", "LOCAL_RANK")
"""What a script reads if it expects a launcher."""
IN_RUNS = "omit it: each rank's output is in a folder below runs/, or below that of --out"
SEARCHED = "omit it, and search each rank's output for these words, in a folder below runs/, or below that of --out"
NOT_OURS = {
    "--log-dir": "write --out DIR: each rank's output is in a folder below it",
    "--redirects": IN_RUNS,
    "-r": IN_RUNS,
    "--tee": IN_RUNS,
    "-t": IN_RUNS,
    "--logs-specs": IN_RUNS,
    "--local-ranks-filter": "omit it: rank 0 is shown, and each rank's output is in a folder below runs/",
    "--duplicate-stdout-filters": SEARCHED,
    "--duplicate-stderr-filters": SEARCHED,
    "--event-log-handler": "omit it: failures and restarts are printed",
    "--no-python": "give a Python script, or a module after -m",
    "--run-path": "omit it",
    "--start-method": "omit it: processes are forked, or new with --fresh",
    "--local-addr": "omit it: the address is the one that leads to the first machine",
    "--role": "omit it: all processes have the role `default`",
    "--monitor-interval": "omit it: processes are checked many times a second",
    "--shutdown-timeout": "omit it: after a signal, the script may take as long as it needs",
    "--signals-to-handle": "omit it: SIGINT, SIGTERM, SIGHUP and SIGUSR1 are forwarded to the script",
    "--virtual-local-rank": "omit it: each process sees all GPUs, and LOCAL_RANK is the index of its own",
    "--numa-binding": "omit it: processes are not bound to cores; numactl can start evenstep on those of one node",
}
"""Options of torchrun that are not accepted, and what to write instead."""
OWN = ("--devices", "--machines", "--rendezvous", "--restarts", "--module", "--stall-after", "--out", "--fresh")
"""Options that are no torchrun's."""


@dataclass(frozen=True)
class TorchrunOptions:
    """Options of torchrun that are accepted, and mean something else here, or nothing."""

    node_rank: str | None = None
    master_addr: str | None = None
    master_port: str | None = None
    rdzv_backend: str | None = None
    rdzv_id: str | None = None
    rdzv_conf: str | None = None

    def __post_init__(self) -> None:
        if self.rdzv_backend not in (None, "c10d", "static"):
            raise PlanError(
                f"--rdzv-backend {shorten(self.rdzv_backend)}: machines use torch's c10d rendezvous; omit it, and "
                "write --machines 2 --rendezvous HOST:PORT on each of them"
            )

    @property
    def rendezvous(self) -> str | None:
        """The address of the first machine, which knows itself by it: node ranks are not needed."""
        return f"{self.master_addr}:{self.master_port or 29500}" if self.master_addr else None


def in_our_words(script: Script, words: Sequence[str]) -> str:
    """The command with our options, if any of `words`, the options before the script, is torchrun's."""
    foreign = [word.partition("=")[0] for word in words if word.startswith("--") and word != "--"]
    if all(word in OWN for word in foreign):
        return ""
    several = script.machines is not None and parse_machines(script.machines) != (1, 1)
    options = [
        *(["--devices", str(script.num)] if script.num != 1 else []),
        *(["--machines", str(script.machines), "--rendezvous", str(script.rendezvous)] if several else []),
        *(["--restarts", str(script.restarts)] if script.restarts else []),
        *(["-m"] if script.is_module else []),
    ]
    return shlex.join(["evenstep", "run", *options, script.name]) + (" ..." if script.arguments else "")


class LocalTorchrunRendezvous(LocalRendezvous):
    """Processes of one machine meet at MASTER_PORT, as torchrun's do."""

    def next_round(self, num: int, attempt: int, resume: str | None = None) -> RankAssignment:
        assignment = super().next_round(num, attempt, resume)
        # A new store for each attempt: a killed process's keys would be mistaken for a new one's.
        self._store = open_store() if num > 1 else None
        port = self._store.port if self._store is not None else free_port()
        # The launcher holds the store, so that no other program can take its port. A single process may be a script
        # that spawns its own workers: its rank 0 must hold the store.
        return replace(assignment, store=None, environment=master_variables(port, is_store_held=num > 1))


@dataclass(frozen=True)
class Script:
    """A user's script or module, and how to run it."""

    name: str
    arguments: tuple[str, ...] = ()
    num: int = 1
    """Processes on this machine."""
    is_module: bool = False
    is_fresh: bool = False
    """Whether every process is a new Python, not forked from the fork server."""
    restarts: int = 0
    stall_after: float | None = None
    machines: str | None = None
    rendezvous: str | None = None

    def spec(self) -> ProgramSpec:
        return ProgramSpec(
            name=self.name,
            arguments=self.arguments,
            is_module=self.is_module,
            rank_flag=self._rank_flag(),
            # The first entry is the folder of the command `evenstep`.
            search_path=tuple(sys.path[0 if sys.flags.safe_path else 1 :]),
            environment={**torchrun_variables(self.restarts), **threads_for_script(self.num)},
        )

    def _rank_flag(self) -> str | None:
        try:
            return None if self.is_module else old_flag(Path(self.name).read_text(errors="replace"), self.arguments)
        except OSError as error:
            raise PlanError(f"{self.name} cannot be read: {error.strerror}; give a Python file") from error


def refuse_option(name: str) -> None:
    """Refuse an option where the script is expected, and name the alternative."""
    if name.startswith("-"):
        option = name.partition("=")[0]
        close = difflib.get_close_matches(option[:MAX_CHARACTERS], OWN, n=1, cutoff=0.75)
        usual = f"did you mean {close[0]}?" if close else "see evenstep run --help"
        raise PlanError(
            f"evenstep run has no option {shorten(option)}; {NOT_OURS.get(option.replace('_', '-'), usual)}"
        )


def processes_here(given: str | None) -> int:
    """Processes for this machine: as given by the option, or by torchrun's variable; 1 without both."""
    if given is not None:
        return count_processes(given)
    node = find_elastic_node()
    return count_processes(node.processes, "PET_NPROC_PER_NODE") if node is not None and node.processes else 1


def run_script(script: Script, out: str | None = None, hint: str = "") -> None:
    """Run it: rank 0's output is shown, other ranks' warnings too; all logs are in a folder below `out`, or runs/.

    `hint` is shown if there is nothing to refuse.
    """
    if not script.is_module and not os.path.isfile(script.name):
        raise PlanError(f"{script.name} does not exist; write: evenstep run [OPTIONS] SCRIPT [ARGS]")
    _check(script.num, script.restarts, script.stall_after)
    spec, rendezvous = script.spec(), _rendezvous(script)
    launch = Launch(
        _folder(script.name if script.is_module else Path(script.name).stem, out or RUNS),
        script.num,
        run_program,
        spec,
        how="program" if script.is_fresh else "server",
        restarts=script.restarts,
        stall_after=script.stall_after,
    )
    lines = [f"in evenstep's words: {hint}"] if hint else []
    _watch(Supervisor(launch, rendezvous), [*lines, *_spawning(script)], lambda: _unused(script, launch.folder))


def _spawning(script: Script) -> list[str]:
    """A warning of a script of which each process starts its own: they would wait for each other without a word."""
    if script.num == 1 or script.is_module:
        return []
    call = find_spawn(Path(script.name).read_text(errors="replace"))
    if call is None:
        return []
    where = f"line {call.line}: {shorten(call.name)}"
    function = f"{shorten(call.function)}(...)" if call.function else "the function"
    return [
        f"warning: {script.name} starts its own processes ({where}), here in each of the {script.num}; "
        f"run it with python {script.name}, or call {function} there, with the rank from the environment variable "
        "RANK, and evenstep starts the processes"
    ]


@dataclass(frozen=True)
class SpawnCall:
    """Where a script starts processes through torch.multiprocessing."""

    line: int
    name: str
    """As the script calls it."""
    function: str
    """What runs in the processes; empty if it has no name."""


def find_spawn(source: str) -> SpawnCall | None:
    """The first call of torch.multiprocessing.spawn or start_processes, unless the script also reads a launcher's rank.

    >>> find_spawn("import torch.multiprocessing as mp\\nmp.spawn(train, nprocs=2)")
    SpawnCall(line=2, name='mp.spawn', function='train')
    """
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError):
        return None
    imported = _imported(nodes)
    calls = [node for node in nodes if isinstance(node, ast.Call) and _full_name(node.func, imported) in SPAWNS]
    # Scripts that can be started either way spawn only without a launcher.
    if not calls or any(map(_reads_rank, nodes)):
        return None
    first = min(calls, key=lambda call: call.lineno)
    target = next((word.value for word in first.keywords if word.arg == "fn"), first.args[0] if first.args else None)
    function = ast.unparse(target) if isinstance(target, ast.Name | ast.Attribute) else ""
    return SpawnCall(first.lineno, ast.unparse(first.func), function)


def _imported(nodes: Sequence[ast.AST]) -> dict[str, str]:
    """The names that imports bind, with what they stand for."""
    names = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                names[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def _full_name(node: ast.expr, imported: dict[str, str]) -> str:
    """The imported name that an expression such as mp.spawn stands for; empty if there is none."""
    if isinstance(node, ast.Name):
        return imported.get(node.id, "")
    base = _full_name(node.value, imported) if isinstance(node, ast.Attribute) else ""
    return f"{base}.{node.attr}" if isinstance(node, ast.Attribute) and base else ""


def _reads_rank(node: ast.AST) -> bool:
    """Whether it is os.environ["RANK"], os.environ.get("RANK"), os.getenv("RANK") or "RANK" in os.environ."""
    if isinstance(node, ast.Subscript):
        words = [node.slice] if isinstance(node.ctx, ast.Load) else []
    elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in ("get", "getenv"):
        words = node.args[:1]
    else:
        words = [node.left] if isinstance(node, ast.Compare) else []
    return any(isinstance(word, ast.Constant) and word.value in RANK_VARIABLES for word in words)


def _unused(script: Script, folder: Path) -> str:
    """What a script that succeeded did not use: its processes, or its task; empty if nothing."""
    alone = {path.name for path in folder.glob(f"logs/**/rank*.{ALONE}")}
    if 1 < script.num == len(alone):
        return (
            f"warning: {script.name} never joined its {script.num} processes, so each trained its own model; see "
            '"Your own loop" in the README'
        )
    if not script.is_module and only_defines_task(Path(script.name).read_text(errors="replace")):
        return f"warning: {script.name} defines a task, and ran nothing; write: evenstep train {script.name}"
    return ""


def only_defines_task(source: str) -> bool:
    """Whether a file has a task, and no line that does anything.

    >>> only_defines_task("import evenstep\\ndef task() -> evenstep.Task: ...")
    True
    """
    try:
        lines = ast.parse(source).body
    except (SyntaxError, ValueError):
        return False
    defines = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)
    is_text = [isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant) for one in lines]
    if not all(known or isinstance(one, defines) for one, known in zip(lines, is_text, strict=True)):
        return False
    functions = [one for one in lines if isinstance(one, ast.FunctionDef)]
    returned = [ast.unparse(one.returns).strip("'").rpartition(".")[2] if one.returns else "" for one in functions]
    return "Task" in returned


def _rendezvous(script: Script) -> Rendezvous:
    """One machine, or several as given by the options or by the environment: torchrun's variables, or Slurm's."""
    node = find_elastic_node()
    slurm = find_slurm() if node is None else None
    machines, rendezvous, is_head = script.machines, script.rendezvous, None
    if node is not None and machines is None:
        machines, rendezvous, is_head = node.machines, node.rendezvous, node.is_head
    elif slurm is not None and slurm.has_several_tasks and machines is None:
        machines, rendezvous, is_head = str(slurm.num_tasks), slurm.rendezvous, slurm.task == 0
    # `torchrun --nnodes 1 --rdzv-endpoint localhost:0`, as it is often written.
    is_local = machines is not None and parse_machines(machines) == (1, 1)
    where = None if is_local else parse_rendezvous(machines, rendezvous)
    if where is None:
        return LocalTorchrunRendezvous()
    from evenstep.launcher.rendezvous.elastic import C10dRendezvous  # what it imports is not needed on one machine

    identity = _identity(script, f"{slurm.job}.{slurm.step}" if slurm is not None else "none")
    backend = C10dRendezvous(*where, identity, is_head)
    if slurm is not None and slurm.has_several_tasks:
        backend.num_before, backend.num_here = slurm.local * script.num, slurm.num_local * script.num
    return backend


def _identity(script: Script, job: str) -> Identity:
    """What must be the same on all machines; the number of processes may differ."""
    arguments = shlex.join(script.arguments)
    command = {"command": "run", "script": script.name, "arguments": arguments, "job": job}
    sources = sources_of_module(script.name) if script.is_module else sources_of_file(Path(script.name))
    return identity_of(command, sources)


def launch(
    function: Callable[..., Any],
    *arguments: Any,
    devices: int = 1,
    restarts: int = 0,
    stall_after: float | None = None,
) -> list[Any]:
    """Call `function(*arguments)` in `devices` processes, from a script or a notebook; return what each returned.

    def main(rate):
        team = evenstep.join()
        ...
    evenstep.launch(main, 0.1, devices=2)
    """
    if not callable(function):
        raise PlanError(f"launch takes a function, and was given {type(function).__name__}: launch(main, devices=2)")
    _check(devices, restarts, stall_after)
    refuse_fork_after_cuda()
    with live_folder() as results:
        what = Launch(
            _folder(getattr(function, "__name__", "function").strip("<>")),
            devices,
            run_function,
            # OpenMP's threads do not survive a fork; with more than one, the process would wait for them forever.
            WorkerSpec(environment={**torchrun_variables(restarts), "OMP_NUM_THREADS": "1"}),
            (results, function, arguments),
            "fork",
            restarts,
            stall_after,
        )
        _watch(Supervisor(what, LocalTorchrunRendezvous()))
        # Safe to unpickle: written by forks of this process, in a private folder.
        return [_returned(results / f"{rank}.pickle") for rank in range(devices)]


def _check(num: int, restarts: int, stall_after: float | None) -> None:
    if num < 1:
        raise PlanError(f"{num} devices were requested; give 1 or more")
    check_patience(restarts, stall_after)


def _returned(path: Path) -> Any:
    if not path.is_file():
        raise WorkerFailed(f"rank {path.stem} ended, with exit code 0, before the function returned: sys.exit?")
    return pickle.loads(path.read_bytes())


def old_flag(source: str, arguments: Sequence[str] = ()) -> str | None:
    """The spelling of `--local-rank` that a script declares, which torch.distributed.launch used to pass.

    Read from the source, since a parser refuses the other spelling.
    """
    if any(word.startswith(SPELLINGS) for word in arguments):
        return None
    try:
        calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    except SyntaxError:
        return None
    named = [call for call in calls if getattr(call.func, "attr", getattr(call.func, "id", "")) in DECLARE]
    known = {word.value for call in named for word in call.args if isinstance(word, ast.Constant)}
    return next((flag for flag in SPELLINGS if flag in known), None)


def _watch(supervisor: Supervisor, at_start: Sequence[str] = (), at_end: Callable[[], str] = str) -> None:
    with Progress(None, is_bare=True) as shown:
        for line in at_start:
            shown.log(line)
        for event in supervisor.events():
            shown.show(event)
        if last := at_end():
            shown.log(last)


def _folder(label: str, out: str = RUNS) -> Path:
    stamp = datetime.datetime.now().strftime("%Y-%m-%d-%H%M%S")
    path = Path(out) / f"{stamp}-{re.sub(r'[^0-9A-Za-z_.-]+', '-', label)}"
    number = 1
    while True:
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            number += 1
            path = path.with_name(f"{stamp}-{label}-{number}")
        except OSError as error:
            advice = "start in a folder that you can write to"
            raise PlanError(f"{path} cannot be written: {error.strerror}; {advice}") from error
