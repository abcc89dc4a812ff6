"""The command's root: its options, exit codes and error messages, and what several verbs share."""

from __future__ import annotations

import difflib
import inspect
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import wraps
from itertools import count, pairwise
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

import evenstep
from evenstep.cli.completion import complete_task
from evenstep.errors import BREAKS_LINES, MAX_CHARACTERS, STOPPED, BadInput, EvenstepError, Preempted, shorten
from evenstep.mesh import examples
from evenstep.strategy_facts import STRATEGIES, one_of
from evenstep.task import BUILT_IN, Task
from evenstep.task_options import value_in_words

TASKS = (
    f"{', '.join(BUILT_IN)}; or your own: a Python file with a function that returns an evenstep.Task, as file.py, "
    "file.py:function or package.module:function."
)

_Function = TypeVar("_Function", bound=Callable[..., Any])

MOST_IN_A_LINE = 1000
_COMMAND = re.compile(r"(?<!\S)(evenstep [a-z]{2,20} |--[a-z-]{2,30} )(?=\S)")
"""Where one begins that a message advises, or its options."""

NUMBERS = {
    "Input should be a valid integer": "write a whole number, such as 4",
    "Input should be a valid number": "write a number, such as 0.5",
}
"""For what Typer says of a text that is no number."""

# Typer keeps its name for "the command line is wrong" to itself; this public one is made from it.
_USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]


class Command(TyperCommand):
    """Shows metavars in its help and in its usage line, without Typer's types and braces."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        usage = [re.sub(r"^\{(.+)\}(?=$|\.)", r"\1", word) for word in super().collect_usage_pieces(ctx)]
        return usage if ctx.allow_interspersed_args else [*usage, "[ARGS]..."]


class Group(TyperGroup):
    """The same, for a command that has others."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))


def _without_types(parameters: list[Any]) -> list[Any]:
    """Typer shows `<list[Path]>` beside a metavar, and `<bool>` beside a flag: help says the same in words."""
    for one in parameters:
        if one.param_type_name == "argument" or one.metavar is None:
            vars(one)["display_type_rich"] = lambda ctx: None
    return parameters


class Verbs(typer.Typer):
    """An application whose commands are of the class above."""

    def command(self, *names: Any, **settings: Any) -> Callable[[_Function], _Function]:
        return super().command(*names, **{"cls": Command, **settings})


class StoppableGroup(Group):
    """Says how a command ended that Ctrl-C stopped; typer, around it, would end it without a word."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stop:
            print_stop(stop)
            raise


app = Verbs(
    name="evenstep",
    cls=StoppableGroup,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
checkpoint_app = Verbs(cls=Group, help="Inspect and export checkpoints.", no_args_is_help=True)
app.add_typer(checkpoint_app, name="checkpoint")

MACHINES_HELP = "Number of machines, such as 2, or minimum and maximum, such as 2:4; default: 1."
RENDEZVOUS_HELP = "Host name of the first machine and a free port on it; the same on all machines."


def flag(*names: str, help: str, **more: Any) -> Any:
    """An option without a value; help shows no type for it."""
    return typer.Option(*names, metavar="", help=help, **more)


def fields_as_options(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command take frozen dataclasses: their fields, in order, are its arguments and options.

    Typer reads a function's signature; this one has a parameter for each field.
    """
    kinds = {name: kind for name, kind in get_type_hints(command).items() if name != "return"}

    @wraps(command)
    def from_values(**values: object) -> None:
        command(**{name: _argument(name, kind, values) for name, kind in kinds.items()})

    parameters = [one for name, kind in kinds.items() for one in _parameters(name, kind)]
    vars(from_values)["__signature__"] = inspect.Signature(parameters)
    # Not those of the command, which `wraps` has copied: its parameters may have the names of fields.
    from_values.__annotations__ = {one.name: one.annotation for one in parameters}
    return from_values


def _argument(name: str, kind: Any, values: Mapping[str, object]) -> object:
    if not is_dataclass(kind):
        return values[name]
    make: Any = kind
    return make(**{one.name: values[one.name] for one in fields(kind)})


def _parameters(name: str, kind: Any) -> list[inspect.Parameter]:
    """Those of a dataclass, or one parameter that stays as it is, such as typer's context."""
    if not is_dataclass(kind):
        return [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind)]
    types = get_type_hints(kind, include_extras=True)
    made = [one.name for one in fields(kind) if one.default_factory is not MISSING]
    if made:
        raise TypeError(f"{name}.{made[0]} has a default_factory; an option needs a plain default")
    return [
        inspect.Parameter(
            one.name,
            # Only these may lack a default after one that has a default.
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if one.default is MISSING else one.default,
            annotation=types[one.name],
        )
        for one in fields(kind)
    ]


TaskArgument = Annotated[str | None, typer.Argument(metavar="TASK", help=TASKS, autocompletion=complete_task)]
OptionsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="NAME=VALUE",
        help="Options of the task (parameters of its function), such as lr=0.1: see `evenstep train TASK --help`.",
        show_default=False,
    ),
]
BatchOption = Annotated[
    int | None, typer.Option(metavar="N", help="Global batch size, over all devices; default: the task's.")
]
_MESHES = " or ".join(example for row in STRATEGIES.values() if row.axes for example in examples(row))
MeshOption = Annotated[
    str | None,
    typer.Option(
        metavar="AXIS=N,...",
        help=f"Device mesh, for strategies that split or shard models, such as {_MESHES}; an omitted axis gets the "
        "remaining ranks.",
    ),
]
CheckpointActivationsOption = Annotated[
    bool | None,
    flag(
        "--checkpoint-activations",
        help="Keep only each block's inputs, and recompute its activations in backward: less memory, about a third "
        "more time.",
    ),
]
CpuOffloadOption = Annotated[
    bool | None,
    flag(
        "--cpu-offload",
        help=f"With {one_of(row for row in STRATEGIES.values() if row.offloads)} on GPUs: keep parameters, gradients "
        "and optimizer state in host memory, and update them there: less GPU memory, more time.",
    ),
]
DataOption = Annotated[
    str | None,
    typer.Option(
        metavar="DIR",
        help="Data folder, for tasks whose function has a parameter `data`; default for built-in tasks: EVENSTEP_DATA.",
    ),
]
JsonOption = Annotated[bool, flag("--json", help="Print the result as one line of JSON.")]
MachinesOption = Annotated[str | None, typer.Option(metavar="N|MIN:MAX", help=MACHINES_HELP)]
OutOption = Annotated[
    str | None, typer.Option(metavar="DIR", help="Folder in which the run folder is created; default: runs.")
]
PrecisionOption = Annotated[str | None, typer.Option(metavar="NAME", help="fp64, fp32 (default), tf32, bf16 or fp16.")]
QuietOption = Annotated[
    bool, flag("--quiet", "-q", help="Show no plan and no progress: only messages, errors and the result.")
]
RendezvousOption = Annotated[str | None, typer.Option(metavar="HOST:PORT", help=RENDEZVOUS_HELP)]
SeedOption = Annotated[
    int | None,
    typer.Option(metavar="N", help="Seed of weights, sample order, dropout and augmentation; default: 0."),
]
ThreadsOption = Annotated[
    int | None, typer.Option(metavar="N", help="CPU threads per process; default: the cores divided by the processes.")
]
WorkersOption = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="DataLoader workers per rank (none for data in tensors); default: by free cores.",
    ),
]


@dataclass(frozen=True)
class OutputOptions:
    """The last options of most commands: what they show."""

    quiet: QuietOption = False
    as_json: JsonOption = False


def refuse_broken(words: Iterable[str], where: str = "on the command line") -> None:
    """Refuse control characters and broken UTF-8, which would garble messages or fail later."""
    for word in words:
        if re.search(f"[{BREAKS_LINES}]", word):
            raise BadInput(f"{shorten(ascii(word))} {where} holds a control character, or bytes that are not UTF-8")


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"evenstep {evenstep.__version__}")
        raise typer.Exit


EXIT_CODES = """
[bold]Exit codes[/bold]

0 done, 1 failed, 2 bad input: nothing was started

75 stopped by SIGTERM, SIGUSR1 or SIGHUP, after a checkpoint; 130 stopped by Ctrl-C, after a checkpoint

124 no progress: see train --stall-after
"""


@app.callback(epilog=EXIT_CODES)
def root(
    version: Annotated[
        bool, flag("--version", help="Show the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Train one PyTorch task, unchanged, on one device or many, with the same result."""


@contextmanager
def progress(total: int | None = None, quiet: bool = False) -> Iterator[Callable[..., None]]:
    """`progress_bar`, or nothing at all."""
    with nullcontext(lambda *_: None) if quiet else progress_bar(total) as report:
        yield report


@contextmanager
def progress_bar(total: int | None = None) -> Iterator[Callable[..., None]]:
    """Show on stderr what is being done: one line that changes on a terminal, one after another elsewhere.

    The total is an estimate; `report(line, total)` may correct it.
    """
    console = error_console()
    if not console.is_terminal:
        yield lambda line, total=None: console.print(line, markup=False, soft_wrap=True)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

    text = TextColumn("{task.description}", markup=False)
    columns = (SpinnerColumn(), text) if total is None else (text, BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        row, done = bar.add_task("preparing", total=total), count()

        def report(line: str, total: int | None = total) -> None:
            num = next(done)
            bar.update(row, description=line, completed=num, total=max(total or 0, num + 1))

        yield report


def error_console() -> Console:
    return Console(stderr=True, highlight=False, emoji=False)


def print_whole(table: Table, console: Console) -> None:
    """Print a table without folding its cells: a path that is cut cannot be copied."""
    console.width = MOST_IN_A_LINE
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        # The padding of the last column, which may stand before the end of a style.
        print(re.sub(r"\s+((?:\x1b\[[0-9;]*m)*)$", r"\1", line))


def refuse_study(where: str | Path) -> None:
    """A study holds many runs: name the checkpoint that is meant most often."""
    from evenstep.record import STUDY_FILE
    from evenstep.tune.study import read_study
    from evenstep.tune.study_table import best_checkpoint

    folder = Path(where)
    if not os.path.isfile(folder / STUDY_FILE):
        return
    best = best_checkpoint(read_study(folder), folder)
    advice = f"that of its best trial is {best}" if best else "none of its trials has one"
    raise BadInput(f"{shorten(str(where))} is a study of many runs, not a checkpoint; {advice}")


def note_on_best(where: str | Path) -> list[str]:
    """What to know where a run folder stands for its latest checkpoint, and an earlier one was better."""
    folder = Path(where) / "checkpoints"
    best, latest = folder / "best", folder / "latest"
    if not (os.path.exists(best) and os.path.exists(latest)) or os.path.samefile(best, latest):
        return []
    return [f"this is the latest checkpoint of {where}; its best one is {best}"]


def print_notes(notes: Iterable[str]) -> None:
    from evenstep.report.terminal import without_control

    for line in notes:
        error_console().print(without_control(line), style="yellow", markup=False, soft_wrap=True)


def without_nan(value: Any) -> Any:
    """JSON has no NaN and no infinity: None instead."""
    if isinstance(value, dict):
        return {name: without_nan(one) for name, one in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def main() -> None:
    """Run the command, and end with a code that means something: 0 done, 1 failed, 2 bad input, 130 stopped."""
    try:
        if sys.argv[1:2] != ["run"]:  # What follows a script is the script's.
            refuse_broken(sys.argv[1:])
        try:
            if {"-h", "--help"} & set(sys.argv[1:]):
                _show_task_options(sys.argv[1:])
        finally:
            code = app(prog_name="evenstep", standalone_mode=False)
        sys.exit(code)
    except Preempted as stop:
        print_stop(stop)
        sys.exit(stop.exit_code)
    except EvenstepError as error:
        _print_error(str(error))
        sys.exit(error.exit_code)
    except _USAGE_ERROR as error:
        _print_usage(error)
        sys.exit(BadInput.exit_code)
    except KeyboardInterrupt as stop:
        print_stop(stop)
        sys.exit(STOPPED)


def print_stop(stop: BaseException) -> None:
    """A stop that was requested is no error."""
    error_console().print(str(stop) or "stopped", markup=False, soft_wrap=True)


def _show_task_options(words: Sequence[str]) -> None:
    """Above the help of a command that names a task: what can be set in it."""
    from evenstep.task import find_task
    from evenstep.task_options import options_of
    from evenstep.tune.space import annotated_searches

    spec = words[1] if words[0] in ("train", "verify", "compare", "fit", "tune") and len(words) > 1 else "-"
    if spec.startswith("-") or "=" in spec:
        return
    task = find_task(spec)
    table = Table(box=None, pad_edge=False, show_header=False)
    ranges = annotated_searches(task) if words[0] == "tune" else {}
    for one in options_of(task):
        default = "required" if one.default is one.empty else f"default: {value_in_words(one.default)}"
        searched = f"searched: {ranges[one.name]}" if one.name in ranges else ""
        table.add_row(f"  {one.name}=", Text(_type_in_words(one.annotation)), Text(default), Text(searched))
    console = Console(highlight=False, emoji=False, soft_wrap=True)
    console.print(f"Options of {spec}{':' if table.row_count else ': none'}", style="bold", markup=False)
    if task.__doc__ and not isinstance(task, Task):
        console.print(f"  {inspect.cleandoc(task.__doc__)}", markup=False)
    if table.row_count:
        console.print(table)


def _type_in_words(kind: Any) -> str:
    """Choices where there are any, else the name of the type.

    >>> _type_in_words(Literal["tanh", "relu"] | None), _type_in_words(bool), _type_in_words(list[int])
    ('tanh | relu | none', 'true | false', 'list[int]')
    """
    if kind is bool:
        return "true | false"
    if kind is None or kind is type(None):
        return "none"
    if get_origin(kind) is Literal:
        return " | ".join(map(value_in_words, get_args(kind)))
    if get_origin(kind) in (Union, UnionType):
        return " | ".join(map(_type_in_words, get_args(kind)))
    is_plain = isinstance(kind, type) and not get_args(kind)
    return kind.__name__ if is_plain else str(kind).replace("typing.", "")


def _print_usage(error: Any) -> None:
    """What is wrong with the command line; without any arguments, Typer has shown the help already."""
    message = _in_our_words(error.format_message().strip().rstrip("."), sys.argv)
    if message:
        verb = sys.argv[1] if len(sys.argv) > 1 and not sys.argv[1].startswith("-") else ""
        command = error.ctx.command_path if error.ctx else f"evenstep {verb}".rstrip()
        _print_error(f"{message}{'' if message.endswith('?') else ';'} see {command} --help")


def _in_our_words(message: str, words: Sequence[str]) -> str:
    """Typer's message with the value that was given, and without options that are nothing like the one that was."""
    if found := re.match(r"No such option: (\S+) \(Possible options: (.+)\)", message):
        close = difflib.get_close_matches(found[1], found[2].split(", "), n=1, cutoff=0.75)
        return f"No such option: {found[1]}" + (f"; did you mean {close[0]}?" if close else _for_task(found[1], words))
    if found := re.fullmatch(r"No such option: (\S+)", message):
        return message + _for_task(found[1], words)
    if found := re.match(r"Invalid value for '(--\S+)': (.+)", message, re.DOTALL):
        given = [value for option, value in pairwise(words) if option == found[1]]
        given += [word.partition("=")[2] for word in words if word.startswith(f"{found[1]}=")]
        why = next((words for start, words in NUMBERS.items() if found[2].startswith(start)), found[2])
        why = re.sub(r"^Input should be (greater|less) than or equal to (\S+)$", _bound, why)
        return f"{found[1]} is {shorten(repr(given[-1]))}: {why}" if given else message
    return message


def _bound(found: re.Match[str]) -> str:
    return f"write {found[2]} or {'more' if found[1] == 'greater' else 'less'}"


def _for_task(flag: str, words: Sequence[str]) -> str:
    """A hint for `--lr 0.1`, which may be meant for the task."""
    name = flag.lstrip("-").replace("-", "_")
    takes_options = words[1:2] and words[1] in ("train", "verify", "compare", "fit", "evaluate", "tune")
    return f"; an option of the task is written {name}=VALUE" if takes_options and name.isidentifier() else ""


def _print_error(message: str) -> None:
    """On stderr; what was given, and is very long, is shortened."""
    from evenstep.report.terminal import without_control

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
