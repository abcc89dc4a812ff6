"""Whatever is typed, and however a file is damaged: exit code 2 and at most two lines, nothing started, nothing left.

Inputs are made by hypothesis: some of each kind in the default run, more than a thousand in `make test-all`.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest
import torch
import typer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import evenstep as library
from evenstep.checkpoint import files
from evenstep.cli import main
from evenstep.cli.app import app
from evenstep.errors import BadInput
from evenstep.launcher import fork_server
from evenstep.report.html.live import Watched
from tests.pure.conftest import Ended
from tests.pure.test_bad_input import write_task
from tests.pure.test_recommend import comparison, row

FEW, MANY = 15, 250


def inputs(num: int) -> Callable[[Any], Any]:
    """So many of them; a folder is shared by all inputs of a test, and is as it was after each."""
    return settings(max_examples=num, suppress_health_check=[HealthCheck.function_scoped_fixture])


def command(*words: str) -> Ended:
    """The command line in this process."""
    out, err = io.StringIO(), io.StringIO()
    before = sys.argv
    sys.argv = ["evenstep", *words]
    try:
        # What is read of the words before the command is; it only looks, so it has no error of its own.
        with patch.dict(os.environ), patch.object(fork_server, "start_server"):
            fork_server.start_server_for(words)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as ended:
            main()
    finally:
        sys.argv = before
    return Ended(int(ended.value.code or 0), out.getvalue(), err.getvalue())


def listed(folder: Path = Path()) -> list[str]:
    return sorted(str(path) for path in folder.rglob("*") if "__pycache__" not in path.parts)


def check_refusal(ended: Ended, words: tuple[str, ...]) -> None:
    said = [line for line in ended.err.strip().splitlines() if not line.startswith("importing ")]
    assert ended.out == "", (words, ended)
    assert "Traceback" not in ended.err, (words, ended)
    assert said[0].startswith("error: "), (words, ended)
    assert len(said) <= 2, (words, ended)
    assert all(len(line) <= 1100 for line in said), (words, ended)


def check_refused(*words: str) -> None:
    files, processes = listed(), psutil.Process().children()
    ended = command(*words)
    assert ended.code == 2, (words, ended)
    check_refusal(ended, words)
    assert listed() == files
    assert psutil.Process().children() == processes


def check_refused_or_done(*words: str) -> None:
    """For damage that may be none: what is read as well-formed is worked with, and never ends in a traceback."""
    files, processes = listed(), psutil.Process().children()
    ended = command(*words)
    assert ended.code in (0, 1, 2), (words, ended)
    assert "Traceback" not in ended.err, (words, ended)
    if ended.code == 2:
        check_refusal(ended, words)
        assert listed() == files
    assert psutil.Process().children() == processes


# Command lines.

LONG = ["9" * 5000, "a" * 256 + ".py", "a" * 5000, "a/" * 3000 + "x.py", "x " * 3000, "é" * 120, "名" * 100]
BROKEN = ["a\x00b", "a\nb", "a\x1b[2J", "a\u2028b", "\ud800", "\udcff.py"]
NAMES = [
    *("", " ", "-", "--", ".", "..", "/", "../..", "~", "runs", "my_task.py/x", "my_task.py:", ":", "::", "my_task.py"),
    *("{}", "[1]", "%s%n", "$(id)", "; rm", "*", "fp23", "ddp,", ",,,", "single", "fsdp", "bf16", "tensorboard", "off"),
    *("/dev/null", "/dev/zero", "/proc/self/mem", "unreadable", "pipe", "empty.json", "os:system", "os.path:join"),
    *(
        "cuda:99999",
        "cuda:-1",
        "cpu,cuda:0",
        "cpu:0",
        "cpu",
        "cpu,cpu",
        "mps",
        "1,2",
        "0",
        "-1",
        "2",
        "١",
        "²",
        "1e400",
    ),
    *("1:2:3", "2:1", "0:0", "a:b", "head:99999", ":29400", "[::1]:0", "nan", "inf", "--no-such-flag", "--batch", "-x"),
]
WORDS = st.one_of(*map(st.sampled_from, (NAMES, NAMES, LONG, BROKEN)), st.text(max_size=20))
INTEGERS = st.one_of(
    st.sampled_from(["0", "-1", "1", "2", "3", "20", "21", "1000", "99999999", str(2**31), str(2**63), "9" * 30]),
    st.integers().map(str),
    WORDS,
)
NUMBERS = st.one_of(st.sampled_from(["0", "-1", "1", "nan", "inf", "1e308", "1e400", "5e-324"]), st.floats().map(str))
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
VERBS = {name: one for name, one in COMMANDS.items() if name not in ("checkpoint", "doctor", "manifest", "runs")}
VERBS |= {f"checkpoint {name}": one for name, one in COMMANDS["checkpoint"].commands.items()}


WHOLE = ("batch", "epochs", "steps", "seed", "accumulate", "checkpoint_every", "keep", "workers", "threads", "restarts")
WHOLE += ("check_every", "profile", "rounds", "port")
ARGUMENTS = {"train": "my_task.py", "verify": "my_task.py", "compare": "my_task.py", "run": "my_task.py"}


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    """A verb, its argument, and options of its own, most of them of the right kind."""
    verb = draw(st.sampled_from(["train", *sorted(VERBS)]))
    options = [one for one in VERBS[verb].params if one.opts[0].startswith("--")]
    # A rendezvous that could be one would be waited at, a live page is served for ever, a run in --out is made, and
    # predict --check has nothing to refuse.
    left_out = ("rendezvous", "watch", "help", "out", "check")
    names = st.sampled_from([one for one in options if one.name not in left_out])
    words = []
    for option in draw(st.lists(names, max_size=3, unique_by=lambda one: one.name)):
        values = INTEGERS if option.name in WHOLE else NUMBERS if option.name in ("clip", "stall_after") else WORDS
        words += [option.opts[0]] if option.is_flag else [option.opts[0], draw(values)]
    usual = [ARGUMENTS[verb]] if verb in ARGUMENTS else []
    argument = draw(st.one_of(st.just(usual), st.just(usual), WORDS.map(lambda word: [word])))
    return [*verb.split(), *words, *argument, *draw(st.sampled_from([[], [], [], ["more"]]))]


@pytest.fixture
def cluttered() -> None:
    """A folder in which no run can be made: what nothing else refuses is refused for that, at the last moment."""
    write_task()
    Path("runs").write_text("this is a file")
    Path("empty.json").touch()
    Path("unreadable").touch(mode=0o000)
    os.mkfifo("pipe")


def is_help(words: list[str]) -> bool:
    return bool({"--help", "--version"} & set(words)) or words == ["checkpoint"]


def check_line(words: list[str]) -> None:
    if not is_help(words):
        check_refused(*words)


@given(WORDS)
@inputs(FEW)
@pytest.mark.usefixtures("cluttered")
def test_a_folder_of_runs_is_listed_or_refused(word: str) -> None:
    check_refused_or_done("runs", word)
    check_refused("runs")


@given(command_lines())
@inputs(FEW)
@pytest.mark.usefixtures("cluttered")
def test_a_command_line_is_refused(words: list[str]) -> None:
    check_line(words)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@given(command_lines())
@inputs(MANY)
@pytest.mark.usefixtures("cluttered")
def test_hundreds_of_command_lines_are_refused(words: list[str]) -> None:
    check_line(words)


@pytest.mark.usefixtures("cluttered")
@pytest.mark.parametrize("verb", sorted(ARGUMENTS))
def test_a_folder_that_cannot_be_made_is_refused(verb: str) -> None:
    for word in ("a" * 256, "a/" * 3000, "pipe", "pipe/x", "my_task.py", "/proc/self/mem", "/dev/null/x", *BROKEN):
        check_refused(verb, "--out", word, ARGUMENTS[verb])


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("cluttered")
@pytest.mark.parametrize("verb", sorted(VERBS))
def test_every_option_refuses_what_is_long_or_broken_or_no_file_to_read(verb: str) -> None:
    options = [one.opts[0] for one in VERBS[verb].params if one.opts[0].startswith("--") and not one.is_flag]
    options = [option for option in options if option != "--out"]
    for word in (*LONG, *BROKEN, "/proc/self/mem", "pipe", "", "²"):
        check_refused(*verb.split(), word)
        for option in options:
            check_refused(*verb.split(), option, word, ARGUMENTS.get(verb, "."))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@given(command_lines())
@inputs(40)
@pytest.mark.usefixtures("cluttered")
def test_real_processes_refuse_them_too(words: list[str]) -> None:
    if is_help(words) or any("\0" in word or re.search("[\ud800-\udfff]", word) for word in words):
        return  # The last two cannot be given to a process.
    files = listed()
    ended = subprocess.run([sys.executable, "-m", "evenstep", *words], capture_output=True, text=True, timeout=100)
    assert ended.returncode == 2, (words, ended)
    check_refusal(Ended(2, ended.stdout, ended.stderr), tuple(words))
    assert listed() == files


# Files.

WILD: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from([None, True, False, 0, -1, 2**63, 10**30, 10**400, 1e308, -1e308, 5e-324]),
    st.sampled_from([float("nan"), float("inf"), -float("inf"), "", "a\nb", "\x00", "\ud800", "a" * 5000, "../x"]),
    st.sampled_from([[], {}, [[]], [None], {"": None}, [1, "a"], {"loss": "a"}, "<script>", "step", "start", "nan"]),
    st.integers(0, 300).map(lambda depth: json.loads("[" * depth + "]" * depth) if depth else []),
    st.floats(),
    st.integers(),
    st.text(max_size=10),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to everything inside a JSON value."""
    yield path
    inside = value.items() if isinstance(value, dict) else enumerate(value[:3]) if isinstance(value, list) else ()
    for key, one in inside:
        yield from places(one, (*path, key))


def changed(draw: Callable[..., Any], text: str) -> str:
    """One value inside of a JSON text replaced, taken out, or put beside another one."""
    whole = json.loads(text)
    # What lies near the top is what most of the code looks at.
    depth = draw(st.sampled_from([1, 1, 1, 2, 2, 9]))
    path = draw(st.sampled_from([path for path in places(whole) if len(path) <= depth]))
    if not path:
        return json.dumps(draw(WILD))
    *way, last = path
    parent = whole
    for key in way:
        parent = parent[key]
    action = draw(st.sampled_from(["replace", "remove", "add"]))
    if action == "replace":
        parent[last] = draw(WILD)
    elif action == "remove":
        del parent[last]
    elif isinstance(parent, dict):
        parent[draw(st.text(max_size=5))] = draw(WILD)
    else:
        parent.append(draw(WILD))
    return json.dumps(whole)


def torn(draw: Callable[..., Any], content: bytes) -> bytes:
    """Bytes cut off, turned, put in, or others altogether."""
    at = draw(st.integers(0, max(0, len(content) - 1)))
    return draw(
        st.one_of(
            st.just(content[:at]),
            st.just(content[at:]),
            st.binary(min_size=1, max_size=4).map(lambda new: content[:at] + new + content[at + len(new) :]),
            st.binary(max_size=40).map(lambda new: content[:at] + new + content[at:]),
            st.sampled_from([b"", b"\n", b"null\n", b"[" * 100_000, b"\xff\xfe", b"{}\n" * 3, b"\x00" * 100]),
        )
    )


def damaged(draw: Callable[..., Any], content: bytes) -> bytes:
    """A file, or a line of it, with something wrong."""
    if not draw(st.integers(0, 3)):
        return torn(draw, content)
    lines = content.decode().splitlines(keepends=True)
    if len(lines) > 1 and lines[0].strip() == "{":
        return changed(draw, content.decode()).encode()
    number = draw(st.integers(0, len(lines) - 1))
    lines[number] = changed(draw, lines[number]) + "\n"
    return "".join(lines).encode()


@dataclass(frozen=True)
class Reading:
    """A kind of file, and the commands that read it."""

    file: str
    commands: tuple[tuple[str, ...], ...]
    is_json: bool = True


CHECKPOINT = "runs/first/checkpoints/step-00000002"
# The name is taken, so that what is well-formed after all is refused in the end, before anything is started.
TAKEN = ("--name", "first", "--steps", "4")
RESUME = (("train", "my_task.py", "--resume", "runs/first", *TAKEN), ("train", "--resume", CHECKPOINT, *TAKEN))
INSPECT = (("checkpoint", "inspect", "runs/first"), ("checkpoint", "inspect", CHECKPOINT, "--json"))
AUDIT = (("audit", "runs/first"), ("audit", "runs/first", "--json"))
PLAN = (("train", "--plan", "runs/first", *TAKEN), ("train", "my_task.py", "--plan", "runs/first/plan.json", *TAKEN))
READINGS = {
    "plan": Reading("runs/first/plan.json", PLAN),
    "state": Reading(f"{CHECKPOINT}/state.json", (*RESUME, *INSPECT)),
    "sums": Reading(f"{CHECKPOINT}/SHA256SUMS", (*RESUME, *INSPECT), is_json=False),
    "weights": Reading(f"{CHECKPOINT}/weights.safetensors", (*RESUME, *INSPECT), is_json=False),
    "optimizer": Reading(f"{CHECKPOINT}/optimizer.safetensors", RESUME, is_json=False),
    "foreign": Reading("weights.pt", (("train", "my_task.py", "--resume", "weights.pt", *TAKEN),), is_json=False),
    "samples": Reading("runs/first/samples.jsonl", AUDIT),
    "record": Reading("runs/first/record.jsonl", AUDIT),
}
PAGES = {
    "record": Reading("runs/first/record.jsonl", (("report", "runs/first", "--out", "page.html"),)),
    "comparison": Reading("runs/compared/comparison.json", (("report", "runs/compared", "--out", "page.html"),)),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every kind of file that is read."""
    folder = tmp_path_factory.mktemp("made")
    with contextlib.chdir(folder):
        write_task()
        library.train("my_task.py", steps=2, name="first", audit=True, progress=False)
        Path("runs/compared").mkdir()
        comparison(row("single", 1, 0.02), row("ddp", 2, 0.01)).write(Path("runs/compared"))
        torch.save({"weight": torch.zeros(2, 4), "bias": torch.zeros(2)}, "weights.pt")
    return folder


def check_damage(made: Path, draw: Callable[..., Any], readings: dict[str, Reading]) -> None:
    reading = readings[draw(st.sampled_from(sorted(readings)))]
    content = (made / reading.file).read_bytes()
    new = damaged(draw, content) if reading.is_json else torn(draw, content)
    words, is_signed = draw(st.sampled_from(reading.commands)), bool(draw(st.integers(0, 3)))
    with contextlib.chdir(made), replaced(Path(reading.file), new, is_signed):
        check_refused_or_done(*words)


@contextlib.contextmanager
def replaced(file: Path, content: bytes, is_signed: bool) -> Iterator[None]:
    """Another content for a while; with the sum that belongs to it, as one writes who wants it to be believed."""
    sums = file.parent / files.SUMS
    before = {path: path.read_bytes() for path in (file, sums) if path.exists()}
    file.write_bytes(content)
    if is_signed and file != sums and sums in before:
        names = [line.split("  ")[1] for line in before[sums].decode().splitlines()]
        sums.write_text("".join(f"{digest(file.parent / name)}  {name}\n" for name in names))
    try:
        yield
    finally:
        for path, known in before.items():
            path.write_bytes(known)
        Path("page.html").unlink(missing_ok=True)


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


@given(st.data())
@inputs(FEW)
def test_a_damaged_file_is_refused(made: Path, data: st.DataObject) -> None:
    check_damage(made, data.draw, READINGS)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@given(st.data())
@inputs(3 * MANY)
def test_hundreds_of_damaged_files_are_refused(made: Path, data: st.DataObject) -> None:
    check_damage(made, data.draw, READINGS)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@given(st.data())
@inputs(100)
def test_a_page_of_damaged_files_is_made_or_refused(made: Path, data: st.DataObject) -> None:
    check_damage(made, data.draw, PAGES)


@pytest.mark.slow
@pytest.mark.timeout(600)
@given(st.data())
@inputs(60)
def test_a_live_page_of_a_damaged_record_is_shown_or_refused(made: Path, data: st.DataObject) -> None:
    content = damaged(data.draw, (made / "runs/first/record.jsonl").read_bytes())
    folder = made / "live"
    folder.mkdir(exist_ok=True)
    (folder / "record.jsonl").write_bytes(content)
    with contextlib.suppress(BadInput):
        json.dumps(Watched(folder).news(), allow_nan=False)


@pytest.mark.parametrize("name", sorted({**READINGS, **PAGES}))
def test_files_that_are_not_damaged_are_read(made: Path, name: str) -> None:
    """Else the tests above would show nothing."""
    with contextlib.chdir(made):
        for words in {**READINGS, **PAGES}[name].commands:
            ended = command(*words)
            assert ended.code == 0 or "runs/first exists" in ended.err or "runs/first is the run" in ended.err, ended
        Path("page.html").unlink(missing_ok=True)
