"""Pages: links, files, tests and options exist, table rows fit a line, the README is short and begins with code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from evenstep.cli import app
from evenstep.record import EpochEnd, Evaluation, LayerStatistics, RunEnd, Start, Step, Summary

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src/evenstep"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)|^\[[^\]]+\]: (\S+)$|(?:src|srcset)=\"([^\"]+)\"", re.MULTILINE)
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
WIDEST_ROW = 120


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_relative_links_lead_to_a_file_and_a_heading(page: Path) -> None:
    found = ["".join(groups) for groups in LINK.findall(FENCE.sub("", page.read_text()))]
    for link in (one for one in found if not re.match(r"[a-z]+:", one)):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{name(page)} links to {link}"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{name(page)} links to {link}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_no_table_row_is_longer_than_a_line(page: Path) -> None:
    rows = [line for line in FENCE.sub("", page.read_text()).splitlines() if line.startswith("|")]
    assert [row for row in rows if len(row) > WIDEST_ROW] == []


def test_the_readme_has_150_to_200_lines_and_begins_with_code() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert 150 <= len(lines) <= 200
    assert "```python" in lines[:10]


@pytest.mark.parametrize("page", ["docs/task.md", "docs/zh/task.md"])
def test_every_field_of_a_record_is_documented(page: str) -> None:
    items = re.findall(r"^- `\w+`.*(?:\n  .*)*", (ROOT / page).read_text(), re.MULTILINE)
    documented = {names[0]: set(names[1:]) for names in (re.findall(r"`(\w+)`", item) for item in items)}
    for kind in (Start, Step, Evaluation, EpochEnd, LayerStatistics, Summary, RunEnd):
        assert {field.name for field in fields(kind)} <= documented[kind.__name__.lower()], kind


OWN_FOLDERS = {"bench", "docs", "examples", "src", "tests", *(path.name for path in SOURCE.iterdir() if path.is_dir())}
OWN_FILE = re.compile(r"(?<![\w/.-])(?:[\w-]+/)+[\w-]+\.(?:py|c|md|json|ipynb)\b")
OF_OTHERS = ("docs/evidence.md", "CHANGELOG.md")
"""Pages that name programs of other repositories, and files as they were called."""


@pytest.mark.parametrize("page", [page for page in PAGES if name(page) not in OF_OTHERS], ids=name)
def test_files_and_tests_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text()
    files = {file for file in OWN_FILE.findall(text) if file.split("/")[0] in OWN_FOLDERS and "DATE" not in file}
    folders = (ROOT, SOURCE, page.parent)
    assert {file for file in files if not any((folder / file).exists() for folder in folders)} == set()
    assert set(re.findall(r"`(test_\w+)`", text)) <= names_of_tests()


@cache
def names_of_tests() -> set[str]:
    return {
        found
        for file in (ROOT / "tests").rglob("test_*.py")
        for found in (file.stem, *re.findall(r"^def (test_\w+)", file.read_text(), re.MULTILINE))
    }


def commands(group: Any, *words: str) -> Iterator[tuple[str, set[str]]]:
    """Every command in full, and its options."""
    for word, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, *words, word)
        else:
            options = {
                option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)
            }
            yield " ".join((*words, word)), options | {"--help"}


COMMANDS = dict(commands(typer.main.get_command(app)))
COMMAND = re.compile(rf"\bevenstep ({'|'.join(COMMANDS)}) ([^`\n|#;>]*)")


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=name)
def test_commands_on_a_page_have_the_options_that_it_shows(page: Path) -> None:
    text = re.sub(r" *\\\n *", " ", page.read_text())
    for command, rest in COMMAND.findall(text):
        known = COMMANDS[command]
        if command == "run":  # torchrun's spelling is accepted, and what follows the script is passed to it
            rest = re.split(r"\S+\.py|-m ", rest)[0].replace("_", "-")
        if command.startswith("manifest"):  # the training's
            known = known | COMMANDS["train"]
        assert set(re.findall(r"(?<!\S)--[a-z][\w-]*", rest)) <= known, f"evenstep {command} {rest}"
    code = "\n".join((*FENCE.findall(text), *re.findall(r"^    .*$", text, re.MULTILINE)))
    shown = set(re.findall(r"^ *(?:\$ )?evenstep ([a-z]+)", code, re.MULTILINE))
    assert shown <= {command.split()[0] for command in COMMANDS}
