"""A task is found by name, file, module or function; what is not one is refused in the user's own words."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from evenstep.errors import TaskError
from evenstep.task import Task, call_task, find_task, load_task, spec_of

FILE = """
from __future__ import annotations
from evenstep import Task

def nothing(*arguments):
    return None

def make(batch):
    return Task(model=nothing, train=[], loss=nothing, optimizer=nothing, batch=batch)
"""


def write(text: str, name: str = "my_task.py") -> None:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(FILE + text)


def a_task(batch: int = 64) -> Task:
    return Task(model=None, train=[], loss=None, optimizer=None, batch=batch)  # type: ignore[arg-type]


def a_task_of(data: str | None) -> Task:
    return Task(model=None, train=data, loss=None, optimizer=None)  # type: ignore[arg-type]


def test_by_built_in_name() -> None:
    assert isinstance(load_task("digits"), Task)


@pytest.mark.parametrize(
    "text",
    [
        "def task(): return make(7)",
        "def task() -> Task: return make(7)",
        "def of_any_name() -> Task: return make(7)",
        "of_any_name = make(7)",
        "def other() -> Task: return make(8)\ndef task() -> Task: return make(7)",
    ],
    ids=["task", "task annotated", "one annotated function", "one Task", "task among others"],
)
def test_by_file(text: str) -> None:
    write(text)
    assert load_task("my_task.py").batch == 7


def test_by_file_and_function() -> None:
    write("def one(): return make(1)\ndef two(): return make(2)\nthree = make(3)")
    assert [load_task(f"my_task.py:{name}").batch for name in ("one", "two", "three")] == [1, 2, 3]


def test_by_module_and_function() -> None:
    write("def one(): return make(1)", "evenstep_test_package/inner.py")
    assert load_task("evenstep_test_package.inner:one").batch == 1


def test_a_file_can_import_its_neighbours() -> None:
    write("SEVEN = 7", "folder/evenstep_test_neighbour.py")
    write("from evenstep_test_neighbour import SEVEN\ndef task(): return make(SEVEN)", "folder/my_task.py")
    assert load_task("folder/my_task.py").batch == 7


def test_by_itself_and_by_function() -> None:
    task = a_task(5)
    assert call_task(task) is task
    assert call_task(lambda: task) is task


def test_a_function_with_a_parameter_called_data_is_given_the_folder() -> None:
    assert call_task(a_task_of, "/data").train == "/data"
    write("def task(data=None) -> Task: return Task(model=nothing, train=data, loss=nothing, optimizer=nothing)")
    assert load_task("my_task.py", "/data").train == "/data"
    assert load_task("my_task.py").train is None


def test_without_a_folder_the_default_of_the_parameter_called_data_stands() -> None:
    write('def task(data="here") -> Task: return Task(model=nothing, train=data, loss=nothing, optimizer=nothing)')
    assert load_task("my_task.py").train == "here"
    assert load_task("my_task.py", "/data").train == "/data"
    assert call_task(a_task_of).train is None
    write("def task(*, data) -> Task: return Task(model=nothing, train=data, loss=nothing, optimizer=nothing)")
    assert load_task("my_task.py").train is None


@pytest.mark.parametrize(
    ("text", "spec", "message"),
    [
        (
            "",
            "digit",
            "no task called 'digit'; did you mean digits? Built in are digits, mnist, .*\nYour own is given as file.py",
        ),
        ("", "gone.py", "no file gone.py; a task is a built-in name (digits, mnist, "),
        ("", "some/folder", "no file some/folder; a task is a built-in name"),
        (
            "",
            "my_task.py",
            "my_task.py has no task; if it has a training loop: evenstep run --devices 2 my_task.py; else add a "
            "function that returns an evenstep.Task:",
        ),
        (
            "def one() -> Task: ...\ndef two() -> Task: ...",
            "my_task.py",
            "my_task.py has 2 tasks: one, two; choose one with my_task.py:one",
        ),
        ("def one() -> Task: ...", "my_task.py:two", "my_task.py has no 'two'; it has one"),
        ("", "my_task.py:two", "my_task.py has no 'two'; it has no task at all"),
        ("def task(): return make(7)", "my_task.py:", "'my_task.py:' names no function; choose from my_task.py:task"),
        (
            "def one() -> Task: ...\ndef two() -> Task: ...",
            "my_task.py:",
            "'my_task.py:' names no function; choose from my_task.py:one, my_task.py:two",
        ),
        (
            "",
            "my_task.py:",
            "my_task.py has no task; if it has a training loop: evenstep run --devices 2 my_task.py; else add a "
            "function that returns an evenstep.Task:",
        ),
        ("def task(): return make(7)", "my_task:", "'my_task:' names no function; choose from my_task:task"),
        ("", "digits:", "no task called 'digits:'; did you mean digits? Built in are digits, mnist, "),
        (
            "def task(:\n  pass",
            "my_task.py",
            "my_task.py cannot be imported: SyntaxError: .* (my_task.py, line 10): def task(:",
        ),
        (
            "x = (1, # " + "a" * 500,
            "my_task.py",
            "was never closed (my_task.py, line 10): x = (1, # aaaaaaa.* ... aaaaaa",
        ),
        ("import nowhere", "my_task.py", "my_task.py cannot be imported: ModuleNotFoundError: .*/my_task.py:10)"),
        ("\n\n1 / 0", "my_task.py", "my_task.py cannot be imported: ZeroDivisionError: .*/my_task.py:12)"),
        ("import sys; sys.exit(0)", "my_task.py", "my_task.py cannot be imported: SystemExit: 0 .*/my_task.py:10)"),
        ("", "nowhere.at.all:task", "module nowhere.at.all cannot be imported: ModuleNotFoundError: No module"),
        ("", ":task", "module  cannot be imported"),
        ("def task(): return 7", "my_task.py", "task() returned int, not a Task; end it with: return Task(...)"),
        ("def task(): make(7)", "my_task.py", "task() returned NoneType, not a Task"),
        ("NUMBER = 7", "my_task.py:NUMBER", "is neither a Task nor a function that makes one; write: def task()"),
        (
            "def task(): return open('gone')",
            "my_task.py",
            "task() does not make its Task: FileNotFoundError: .*/my_task.py:10)",
        ),
        ("def task(size): return make(size)", "my_task.py", "task() needs size; write size=..."),
    ],
)
def test_helpful_errors(text: str, spec: str, message: str) -> None:
    write(text)
    with pytest.raises(TaskError) as refused:
        load_task(spec)
    said, position = str(refused.value), 0
    for part in message.split(".*"):
        position = said.index(part, position) + len(part)
    assert len(said.splitlines()) <= 2


def test_another_process_finds_a_function_of_a_module_and_a_string() -> None:
    assert spec_of(a_task) == f"{__name__}:a_task"
    assert find_task(f"{__name__}:a_task") is a_task
    assert spec_of("anything.py:at_all") == "anything.py:at_all"


def test_another_process_finds_a_function_of_a_file() -> None:
    write("def task(): return make(7)")
    found = find_task("my_task.py")
    spec = spec_of(found)
    assert spec == f"{Path('my_task.py').resolve()}:task"
    assert load_task(spec).batch == 7


def test_another_process_finds_a_function_of_the_script_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    write("def task(): return make(7)", "script.py")
    script = sys.modules[find_task("script.py").__module__]
    monkeypatch.setattr(script, "__name__", "__main__")
    monkeypatch.setattr(script.task, "__module__", "__main__")
    monkeypatch.setitem(sys.modules, "__main__", script)
    assert spec_of(script.task) == f"{Path('script.py').resolve()}:task"


def nested() -> Callable[[], Task]:
    def inner() -> Task:
        return a_task()

    return inner


@pytest.mark.parametrize("source", [lambda: a_task(), nested(), a_task()], ids=["lambda", "nested function", "Task"])
def test_no_other_process_finds_what_lives_in_this_one_alone(source: Callable[[], Task] | Task) -> None:
    assert spec_of(source) is None
