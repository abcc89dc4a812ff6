"""Pages: links lead somewhere, table rows fit a line, the README is short and begins with code."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from evenstep.record import EpochEnd, Evaluation, LayerStatistics, RunEnd, Start, Step, Summary

ROOT = Path(__file__).parents[2]
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
