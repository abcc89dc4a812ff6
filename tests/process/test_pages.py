"""The commands of the pages run, and the Chinese pages have the commands and the code of the English ones."""

from __future__ import annotations

import ast
import functools
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from evenstep.cli import app

ROOT = Path(__file__).parents[2]
README, QUESTIONS = ROOT / "README.md", ROOT / "docs" / "questions.md"
FROM_PLAIN_TORCH = ROOT / "docs" / "from-plain-torch.md"
TASK, RECIPES = ROOT / "docs" / "task.md", ROOT / "docs" / "recipes.md"
CHINESE = {
    README: ROOT / "README.zh-CN.md",
    **{page: page.parent / "zh" / page.name for page in (QUESTIONS, FROM_PLAIN_TORCH, TASK, RECIPES)},
}
CHOOSING = ROOT / "docs" / "zh" / "choosing.md"
"""Of no English page: it joins what README.md and docs/compare.md say."""
PAGES = [*CHINESE, *CHINESE.values(), CHOOSING]
RUN_AS_THEY_STAND = [README, QUESTIONS, FROM_PLAIN_TORCH, CHOOSING]
"""From top to bottom. The commands of task.md need runs of the reader's; test_recipes.py runs recipes.md."""
PROGRAMS = {
    "evenstep": [sys.executable, "-m", "evenstep"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
}
IS_COMMAND = re.compile(r"(?:evenstep|torchrun|python|pip|make|source|srun) \S")
NEEDS_MORE = re.compile(r"cuda|--machines")
"""Commands for GPUs and for several machines."""
TAKES_LONG = re.compile(r"verify|compare|--epochs 40")
EXIT_CODES = {"evenstep verify norm.py --strategies ddp": {1}, "evenstep doctor": {0, 1}}
"""Of commands that do not end with 0: the first finds the planted mistake, the second judges the machine."""


def blocks(page: Path, *languages: str) -> list[str]:
    """The fenced blocks in one of these languages."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    return [text for language, text in found if language in languages]


def shown(page: Path) -> list[str]:
    """Commands on lines of their own, in order, without prompt and comment."""
    text = re.sub(r"^```(?:python|diff)\n.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    lines = [*re.finditer(r"^(?: {4}(?:\$ )?|\$ )(.+?)(?: +#.*)?$", text, re.MULTILINE)]
    return [line[1] for line in lines if IS_COMMAND.match(line[1])]


def in_sentences(page: Path) -> list[str]:
    """Commands between backticks, in running text and tables."""
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", outside_code(page))]
    return [span for span in spans if IS_COMMAND.match(span)]


def outside_code(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def task_files(page: Path) -> dict[str, str]:
    """The task files of a page, each under the name that was mentioned last before it."""
    text = page.read_text()
    return {
        re.findall(r"`(\w+\.py)`", text[: block.start()])[-1]: block[1]
        for block in re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
        if "def task()" in block[1]
    }


def write_task_files(*pages: Path) -> None:
    for page in pages:
        for name, text in task_files(page).items():
            Path(name).write_text(text)


def run(command: str) -> str:
    program, *arguments = shlex.split(command)
    # No GPUs: the pages must mean the same on a machine that has some.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*PROGRAMS[program], *arguments], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode in EXIT_CODES.get(command, {0}), f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def can_run(command: str) -> bool:
    return command.split()[0] in PROGRAMS and NEEDS_MORE.search(command) is None


def without_comments(text: str) -> str:
    return re.sub(r" +#.*", "", text)


@pytest.mark.parametrize("page", CHINESE, ids=lambda page: page.name)
def test_the_chinese_page_has_the_commands_of_the_english_one(page: Path) -> None:
    assert len(shown(page)) >= 3
    assert shown(CHINESE[page]) == shown(page)
    assert set(in_sentences(CHINESE[page])) == set(in_sentences(page))


@pytest.mark.parametrize("page", CHINESE, ids=lambda page: page.name)
def test_the_chinese_page_has_the_code_and_the_output_of_the_english_one(page: Path) -> None:
    codes, chinese_codes = ([tree(code) for code in blocks(one, "python", "py")] for one in (page, CHINESE[page]))
    assert chinese_codes == codes
    outputs, chinese_outputs = (
        [without_comments(block) for block in blocks(one, "console", "diff", "toml")] for one in (page, CHINESE[page])
    )
    assert chinese_outputs == outputs


def tree(code: str) -> str:
    """What the code does: comments and docstrings are translated."""
    parsed = ast.parse(code)
    for node in ast.walk(parsed):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
            del node.body[0]
    return ast.dump(parsed)


@pytest.mark.parametrize("page", CHINESE, ids=lambda page: page.name)
def test_the_chinese_page_has_the_sections_and_table_rows_of_the_english_one(page: Path) -> None:
    headings, chinese_headings = (
        re.findall(r"^(#+) ", outside_code(one), re.MULTILINE) for one in (page, CHINESE[page])
    )
    assert chinese_headings == headings
    rows, chinese_rows = (numbers_of_measured_rows(one) for one in (page, CHINESE[page]))
    assert chinese_rows == rows


def numbers_of_measured_rows(page: Path) -> list[list[str]]:
    """The numbers of each table row with an interval."""
    rows = re.findall(r"^\|.*(?:\([\d.]+ to [\d.]+\)|（[\d.]+～[\d.]+）).*", page.read_text(), re.MULTILINE)
    return [re.findall(r"\d+(?:[.,]\d+)*", row) for row in rows]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_links_to_is_there(page: Path) -> None:
    text = page.read_text()
    links = [*re.findall(r"\]\(([^)#]+)\)", text), *re.findall(r"^\[\w+\]: (\S+)", text, re.MULTILINE)]
    assert links
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", [*CHINESE, CHOOSING], ids=lambda page: page.name)
def test_every_command_of_a_page_has_options_that_exist(page: Path) -> None:
    commands = [command for command in (*shown(page), *in_sentences(page)) if re.match(r"evenstep \w+ \S", command)]
    assert commands
    for command in commands:
        verb, options = command.split()[1], set(re.findall(r" (--[a-z-]+)", command)) - {"--help"}
        if verb == "run":  # what follows the script is the script's
            options = set(re.findall(r" (--[a-z-]+)", re.split(r" \S+\.py\b", command)[0]))
        if verb == "checkpoint":
            verb = " ".join(command.split()[1:3])
        assert options <= options_of(verb), command


@functools.cache
def options_of(verb: str) -> set[str]:
    command = typer.main.get_command(app)
    for name in verb.split():
        command = command.commands[name]  # type: ignore[attr-defined]
    return {option for parameter in command.params for option in parameter.opts}


def test_the_quick_commands_of_the_readme_run_and_print_what_it_shows() -> None:
    write_task_files(README)
    printed = [run(command) for command in shown(README) if can_run(command) and not TAKES_LONG.search(command)]
    assert len(printed) >= 5
    everything = {" ".join(line.split()) for output in printed for line in output.splitlines()}
    lines = re.findall(
        r"^(?:global batch .*|(?:train|valid) loss .*)", "\n".join(blocks(README, "console")), re.MULTILINE
    )
    assert len(lines) == 6
    assert {" ".join(line.split()) for line in lines} <= everything
    assert "800 samples, 0 repeated, 0 missed" in everything


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", RUN_AS_THEY_STAND, ids=lambda page: page.name)
def test_all_commands_of_a_page_run_from_top_to_bottom(page: Path) -> None:
    Path("examples").symlink_to(ROOT / "examples")
    write_task_files(README, page)
    commands = [command for command in (*shown(page), *in_tables(page)) if can_run(command)]
    assert commands
    for command in commands:
        run(command)


def in_tables(page: Path) -> list[str]:
    """Whole commands in the cells of tables."""
    rows = [line for line in page.read_text().splitlines() if line.startswith("|")]
    return [span for row in rows for span in re.findall(r"`(evenstep train [^`]+)`", row)]
