"""What is trained: a Task, and finding one by name, file or module."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from evenstep.errors import MAX_CHARACTERS, EvenstepError, Preempted, TaskError, shorten
from evenstep.task_options import options_of, read_options

if TYPE_CHECKING:
    import torch
    from torch.optim.lr_scheduler import LRScheduler

    from evenstep.sampling.rng import Draws

Batch: TypeAlias = Any
"""Whatever the user's data collates to: a tuple or dict of tensors, most of the time."""

Amount: TypeAlias = "torch.Tensor | tuple[torch.Tensor, torch.Tensor | int | float]"
"""A mean over the samples of a batch, or a pair (sum, count)."""

Model: TypeAlias = Any
"""The user's module, as `Task.model` made it: it has all its methods and attributes under every strategy."""

ScheduleEvery = Literal["step", "epoch"]
ScheduleLength = Literal["num_steps", "steps_per_epoch"]
LENGTHS: tuple[ScheduleLength, ...] = ("num_steps", "steps_per_epoch")

TaskFunction: TypeAlias = "Callable[..., Task]"

NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})

MAX_LINE = 80
"""Characters of a source line in a message."""
NO_GROUP = "process group has not been initialized"
"""Part of torch's error."""
WITHOUT_GROUP = (
    "A task needs no process group, and there is none while it is made: give the whole data; each rank gets its share"
)


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained: model, data, loss and optimizer; and options.

    def task() -> Task:
        return Task(
            model=lambda: nn.Linear(784, 10),
            train=(images, labels),
            loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
            optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
        )
    """

    model: Callable[[], Any]
    """Returns the model, or a dict of several models."""
    train: Any
    """A tuple or dict of tensors or arrays, any dataset (map-style or iterable), or a DataLoader."""
    loss: Any
    """`loss(model, batch)` returns a mean over the samples of the batch, or a pair (sum, count) such as (token losses,
    tokens). Of several models: a dict of functions `loss(models, batch)`; each trains the model of its name."""
    optimizer: Any
    """Called with the parameters; with the model, if its parameter is called `model` or annotated as nn.Module. Of
    several models: a dict, in the order in which they are stepped."""
    valid: Any = None
    """As `train`; or several validation sets, by name: {"clean": data, "noisy": data}."""
    metrics: Callable[[Model, Batch], Mapping[str, Amount]] | None = None
    """Named values of a batch: one per sample (a vector), a mean, or a pair (sum, count). With `loss` among them, an
    evaluation does not compute the loss separately."""
    predict: Callable[[Model, Batch], tuple[Any, Any]] | None = None
    """(predictions, targets) of a validation batch, for `scores`: tensors or lists, or tuples or dicts of these."""
    scores: Mapping[str, Any] | None = None
    """Functions of all predictions and targets of the validation data, or objects with update, compute and reset."""
    scheduler: Callable[..., LRScheduler] | Mapping[str, Callable[..., LRScheduler]] | None = None
    """Called with the optimizer, and with `num_steps` and `steps_per_epoch` if it has such parameters. Stepped after
    every optimizer step; a ReduceLROnPlateau after every evaluation, with the metric of `--best`. Of several
    optimizers: a dict."""
    schedule_every: ScheduleEvery = "step"
    """When the scheduler is stepped: after every optimizer step, or after every epoch."""
    augment: Callable[[Any, torch.Generator], Any] | None = None
    """Changes one training sample; its generator depends only on (seed, epoch, sample)."""
    augment_batch: Callable[[Batch, Draws], Batch] | None = None
    """Changes a training batch on the device; `draws.uniform(k)` depends only on (seed, epoch, sample)."""
    sampler: Any = None
    """One of evenstep.samplers, or a torch Sampler; shuffled if not given."""
    collate: Callable[[list[Any]], Batch] | None = None
    """Makes a batch of a list of samples; torch's default if not given."""
    drop_last: bool = False
    """Whether a short last batch of an epoch is left out, as with a DataLoader's drop_last."""
    show: Callable[[Model], str] | None = None
    """A text about the trained model, shown at the end: a generated sentence, for example."""
    after: Callable[[Any], None] | None = None
    """Called between steps, on all ranks: `after(run)`, with run.model, run.step, run.epoch, run.metrics and more."""
    after_every: int | None = None
    """Steps between two calls of `after`; None: at the end of each epoch."""
    ema: float | None = None
    """The decay of an average of the weights, such as 0.999, which is evaluated and saved beside them."""
    batch: int | None = None
    """The global batch, unless the plan gives one; if neither does, that of the DataLoader, or 64."""
    epochs: int = 1
    """The length, unless the plan gives one."""
    steps: int | None = None
    """The length in steps, instead of `epochs`, unless the plan gives one."""
    best: str | None = None
    """The metric of the best checkpoint, early stopping and ReduceLROnPlateau, unless the plan gives one: accuracy."""
    clip: float | None = None
    """The largest norm of the gradients, unless the plan gives one."""
    accumulate: int | None = None
    """Micro-batches of a step on each device, unless the plan gives a number."""
    precision: str | None = None
    """As in the plan, unless that gives one."""


def has_several(task: Task) -> bool:
    """Whether it trains several models, each with a loss and an optimizer."""
    return isinstance(task.loss, Mapping) or isinstance(task.optimizer, Mapping)


def takes_model(optimizer: Callable[..., Any]) -> bool:
    """Whether the function of an optimizer takes the model, for the names of its parameters.

    >>> takes_model(lambda model: None), takes_model(lambda parameters: None), takes_model(lambda module, lr=1: None)
    (True, False, True)
    """
    try:
        first = next(iter(inspect.signature(optimizer).parameters.values()), None)
    except (TypeError, ValueError):  # a class written in C has no signature
        return False
    if first is None:
        return False
    annotation = first.annotation if isinstance(first.annotation, str) else getattr(first.annotation, "__name__", "")
    return first.name in ("model", "module") or annotation.rpartition(".")[2] == "Module"


def lengths_taken(scheduler: Callable[..., Any]) -> dict[str, ScheduleLength]:
    """Which parameters of a scheduler besides the optimizer get which length; another required one gets num_steps.

    >>> lengths_taken(lambda optimizer, total: None), lengths_taken(lambda optimizer, rate=1, *, steps_per_epoch: None)
    ({'total': 'num_steps'}, {'steps_per_epoch': 'steps_per_epoch'})
    """
    more = list(inspect.signature(scheduler).parameters.values())[1:]
    taken: dict[str, ScheduleLength] = {length: length for length in LENGTHS if length in [one.name for one in more]}
    required = [one.name for one in more[:1] if one.kind is one.POSITIONAL_OR_KEYWORD and one.default is one.empty]
    if "num_steps" not in taken:
        taken = {**dict.fromkeys(required, "num_steps"), **taken}
    return taken


_OF_FILES = "evenstep_task_"

BUILT_IN = {
    "digits": "evenstep.tasks.digits:task",
    "mnist": "evenstep.tasks.mnist:mnist",
    "fashion-mnist": "evenstep.tasks.mnist:fashion_mnist",
    "cifar10": "evenstep.tasks.cifar10:task",
    "cifar10-resnet18": "evenstep.tasks.cifar10:resnet18",
    "shakespeare": "evenstep.tasks.shakespeare:task",
}


def load_task(spec: str, data: str | None = None, options: Mapping[str, Any] = NO_OPTIONS) -> Task:
    """The Task behind `digits`, `file.py`, `file.py:function` or `package.module:function`."""
    return call_task(find_task(spec), data, options)


def call_task(source: TaskFunction | Task, data: str | None = None, options: Mapping[str, Any] = NO_OPTIONS) -> Task:
    """The Task that a function returns; its other parameters are its options, and `data` is the folder."""
    if isinstance(source, Task):
        if options:
            raise TaskError("a Task takes no options; give a function instead: def task(lr: float = 1e-3) -> Task: ...")
        return source
    name = getattr(source, "__name__", repr(source))
    if not callable(source):
        raise TaskError(f"{name!r} is neither a Task nor a function that makes one; write: def task() -> Task: ...")
    arguments = read_options(source, options)
    parameters = inspect.signature(source).parameters
    missing = [one.name for one in options_of(source) if one.default is one.empty and one.name not in arguments]
    if missing:
        raise TaskError(f"{name}() needs {', '.join(missing)}; write {' '.join(f'{one}=...' for one in missing)}")
    folder = parameters.get("data")
    if data is not None and folder is None and all(one.kind is not one.VAR_KEYWORD for one in parameters.values()):
        raise TaskError(f"{name}() takes no data folder; leave --data out, or give the function a parameter `data`")
    if folder is not None and (data is not None or folder.default is folder.empty):
        arguments["data"] = data
    try:
        with _samplers_of_one_rank():
            made = source(**arguments)
    except EvenstepError:
        raise
    except Exception as error:
        raise TaskError(f"{name}() does not make its Task: {describe(error)}{_nearest_field(error)}") from error
    if not isinstance(made, Task):
        raise TaskError(f"{name}() returned {type(made).__name__}, not a Task; end it with: return Task(...)")
    return made


@contextmanager
def _samplers_of_one_rank() -> Iterator[None]:
    """Let `DistributedSampler(dataset)` be made where no process group is: what it samples is shared out later."""
    distributed = sys.modules.get("torch.distributed")
    data = sys.modules.get("torch.utils.data")
    if data is None or distributed is None or distributed.is_initialized():
        yield
        return
    kind, made = data.DistributedSampler, data.DistributedSampler.__init__

    def make(
        self: Any, dataset: Any, num_replicas: int | None = None, rank: int | None = None, *more: Any, **by_name: Any
    ) -> None:
        alone = num_replicas is None and rank is None
        made(self, dataset, 1 if alone else num_replicas, 0 if alone else rank, *more, **by_name)

    kind.__init__ = make
    try:
        yield
    finally:
        kind.__init__ = made


def _nearest_field(error: Exception) -> str:
    """A hint for a mistyped field: Task(losss=...)."""
    found = re.match(r"Task\.__init__\(\) got an unexpected keyword argument '(\w+)'", str(error))
    close = difflib.get_close_matches(found[1], [one.name for one in fields(Task)], n=1) if found else []
    return f"; did you mean {close[0]}?" if close else ""


EXAMPLE = "def task() -> Task: return Task(model=..., train=..., loss=..., optimizer=...)"
"""Shown where a file has no task."""


def find_task(spec: str, example: str = EXAMPLE) -> TaskFunction | Task:
    """The function (or Task) that a spec names, without calling it; an error shows the `example`."""
    where, name = split_spec(BUILT_IN.get(spec, spec))
    if _is_file(where):
        module = _import_file(Path(where))
    elif name or (name is not None and where not in BUILT_IN):
        module = _import_module(where)
    else:
        close = difflib.get_close_matches(spec[:MAX_CHARACTERS], BUILT_IN, n=1)
        raise TaskError(
            f"no task called {spec!r}; {f'did you mean {close[0]}? Built' if close else 'built'} "
            f"in are {', '.join(BUILT_IN)}.\n"
            "Your own is given as file.py, file.py:function or package.module:function."
        )
    return _pick(module, where, name, example)


def split_spec(spec: str) -> tuple[str, str | None]:
    """The file or module of a spec, and the name of the function; None if there is no colon.

    >>> split_spec("my_task.py:small"), split_spec("/a:b/my_task.py")
    (('my_task.py', 'small'), ('/a:b/my_task.py', None))
    """
    file, ending, name = spec.rpartition(".py:")
    if ending:
        return f"{file}.py", name
    where, colon, name = (spec, "", "") if spec.endswith(".py") else spec.partition(":")
    return where, name if colon else None


def absolute_spec(spec: str) -> str:
    """The spec of the same task from any folder; that of a module is looked for in the working folder."""
    where, name = split_spec(spec)
    if spec in BUILT_IN or not _is_file(where):
        return spec
    return os.path.abspath(where) + (f":{name}" if name is not None else "")


def moved_spec(spec: str) -> str:
    """The spec of the same task after its file was moved into the working folder, or on another machine."""
    where, name = split_spec(spec)
    here = os.path.basename(where)
    if not os.path.isabs(where) or os.path.exists(where) or not os.path.exists(here):
        return spec
    return os.path.abspath(here) + (f":{name}" if name is not None else "")


def _is_file(where: str) -> bool:
    return where.endswith(".py") or os.sep in where


def refuse_untrusted(spec: str, named_by: str, instead: str) -> Path | None:
    """The file that a spec makes Python import, found without importing it; None for a built-in task.

    For a spec that comes from a file, not from the user: code outside the working folder, or installed in it, is
    refused, with what to do instead.
    """
    if spec in BUILT_IN:
        return None
    file = _file_of(split_spec(spec)[0])
    is_inside = file is not None and file.is_relative_to(Path.cwd().resolve())
    if file is None or not is_inside or _is_installed(file):
        why = "an installed package" if is_inside else "not in this folder"
        raise TaskError(
            f"{shorten(named_by)} names the task {shorten(spec)}, which is {why}: importing it runs it.\n"
            f"If you trust it, {instead}"
        )
    return file


def _is_installed(file: Path) -> bool:
    """Whether pip or Python installed it: a virtual environment is often inside the working folder."""
    prefix, here = Path(sys.prefix).resolve(), Path.cwd().resolve()
    # Python may be installed above the working folder, or in it: /usr and /usr/src/app.
    is_below = prefix != here and prefix.is_relative_to(here)
    return _is_library(str(file)) or (is_below and file.is_relative_to(prefix))


def _file_of(where: str) -> Path | None:
    """The path of a file, or of the package or module that is imported first."""
    if _is_file(where):
        return Path(os.path.realpath(where))
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found = importlib.util.find_spec(where.partition(".")[0])
    except (ImportError, ValueError):
        return None
    paths = [found.origin, *(found.submodule_search_locations or ())] if found is not None else []
    return next((Path(os.path.realpath(one)) for one in paths if one is not None and os.path.exists(one)), None)


def spec_of(source: TaskFunction | Task | str) -> str | None:
    """The spec under which another process finds `source`; None if it exists only in this process."""
    if isinstance(source, str):
        return source
    name = getattr(source, "__qualname__", "")
    module = sys.modules.get(getattr(source, "__module__", None) or "")
    if module is None or not name.isidentifier() or getattr(module, name, None) is not source:
        return None
    if module.__name__ != "__main__" and not module.__name__.startswith(_OF_FILES):
        return f"{module.__name__}:{name}"
    file = getattr(module, "__file__", None)
    return f"{Path(file).resolve()}:{name}" if file and file.endswith(".py") else None


def _pick(module: ModuleType, where: str, name: str | None, example: str) -> TaskFunction | Task:
    """The function called `name`; with None, the one that the module has."""
    if name:
        if not hasattr(module, name):
            raise TaskError(f"{where} has no {name!r}; it has {', '.join(_candidates(module)) or 'no task at all'}")
        found: TaskFunction | Task = getattr(module, name)
        return found
    candidates = _candidates(module)
    if not candidates:
        loop = f"if it has a training loop: evenstep run --devices 2 {where}; else " if _is_file(where) else ""
        raise TaskError(f"{where} has no task; {loop}add a function that returns an evenstep.Task:\n{example}")
    if name is not None:
        specs = ", ".join(f"{where}:{candidate}" for candidate in candidates)
        raise TaskError(f"{where + ':'!r} names no function; choose from {specs}")
    if "task" in candidates:
        return candidates["task"]
    if len(candidates) > 1:
        first = next(iter(candidates))
        raise TaskError(
            f"{where} has {len(candidates)} tasks: {', '.join(candidates)}; choose one with {where}:{first}"
        )
    return next(iter(candidates.values()))


def _candidates(module: ModuleType) -> dict[str, TaskFunction | Task]:
    return {name: value for name, value in vars(module).items() if _is_task(name, value, module)}


def _is_task(name: str, value: object, module: ModuleType) -> bool:
    if isinstance(value, Task):
        return True
    if not inspect.isfunction(value):
        return False
    if value.__module__ != module.__name__:
        return name == "task"
    returns = value.__annotations__.get("return")
    return name == "task" or returns is Task or returns in ("Task", "evenstep.Task")


def _import_file(path: Path) -> ModuleType:
    if not os.path.isfile(path):
        close = _nearest_file(path)
        usual = f"a task is a built-in name ({', '.join(BUILT_IN)}) or a Python file of yours"
        raise TaskError(f"no file {path}; {f'did you mean {close}?' if close else usual}")
    # The name is fixed, so that a task pickled or inspected in one process is found in another.
    name = f"{_OF_FILES}{path.stem}"
    module_spec = importlib.util.spec_from_file_location(name, path.resolve())
    if module_spec is None or module_spec.loader is None:
        raise TaskError(f"{path} is not a Python file; a task file ends with .py")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module
    # As `python file.py` does, so that it can import files next to it.
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        with _samplers_of_one_rank():
            module_spec.loader.exec_module(module)
    except Preempted:
        raise
    except (Exception, SystemExit) as error:
        raise TaskError(f"{path} cannot be imported: {describe(error, str(path))}") from error
    return module


def _nearest_file(path: Path) -> Path | None:
    """A Python file of a similar name in the same folder."""
    try:
        names = [name.removesuffix(".py") for name in os.listdir(path.parent) if name.endswith(".py")]
    except OSError:
        return None
    close = difflib.get_close_matches(path.name.removesuffix(".py")[:MAX_CHARACTERS], names, n=1)
    return path.with_name(f"{close[0]}.py") if close else None


def _import_module(name: str) -> ModuleType:
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        with _samplers_of_one_rank():
            return importlib.import_module(name)
    except Preempted:
        raise
    except (Exception, SystemExit) as error:
        raise TaskError(f"module {name} cannot be imported: {describe(error)}") from error


def describe(error: BaseException, prefer: str | None = None) -> str:
    """One line: what was raised and the line of the user's own code that raised it."""
    what = f"{type(error).__name__}: {error}".strip().rstrip(":").replace("\n", " ")
    if isinstance(error, SyntaxError):
        line = shorten((error.text or "").strip(), MAX_LINE)
        return f"{what}: {line}" if line else what
    if NO_GROUP in what:
        what = f"{what} {WITHOUT_GROUP}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if is_user_code(frame.filename)]
    preferred = [frame for frame in own if prefer and frame.filename.endswith(prefer)] or own
    return f"{what} ({preferred[-1].filename}:{preferred[-1].lineno})" if preferred else what


def is_user_code(filename: str) -> bool:
    """Whether a frame is the user's own code, not ours, torch's or Python's."""
    ours = str(Path(__file__).parent)
    if filename.startswith("<") and not filename.startswith("<ipython"):
        return False
    if os.path.basename(filename) == "evenstep":
        return False  # the command itself
    return not filename.startswith(ours) and not _is_library(filename)


def _is_library(filename: str) -> bool:
    """Whether it was installed by pip, or is part of Python."""
    libraries = (
        f"{os.sep}site-packages{os.sep}",
        f"{os.sep}dist-packages{os.sep}",
        os.path.dirname(os.__file__) + os.sep,
    )
    return any(part in filename for part in libraries)
