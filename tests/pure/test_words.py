"""PyTorch's words, not private ones, in source and docs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import evenstep

SOURCE = Path(evenstep.__file__).parent
ROOT = SOURCE.parents[1]
PRIVATE = (
    *("seat", "seats", "card", "cards", "spread", "piece", "pieces", "told", "letters", "voices", "heard"),
    *("tap", "taps", "pulse", "beat", "beats", "wish", "anew", "so many", "all the same", "likeness", "lever", "knock"),
    *("of somebody's own", "recorded step", "by itself", "the measure"),
)
"""Instead: replica or rank, GPU, wrap, micro-batch, message, timer, heartbeat, request, again, N, still, custom."""
ALLOWED = (
    "use letters, digits",
    '"samples/s", "spread"',  # of measurements
    "can be told apart",
    "model card",  # of the Hugging Face Hub
    "were told to use CPUs",
    *('"cards"', "'cards'", 'class="card'),  # a key of Records, and of styles
    *("heartbeat.py: def beat(", ".beat(", 'f"beat/'),
)


def lines() -> Iterator[tuple[Path, str]]:
    history = {ROOT / "docs/decisions.md"}
    texts = (*SOURCE.rglob("*.py"), *SOURCE.rglob("*.j2"), *ROOT.glob("examples/**/*.py"), *ROOT.glob("docs/*.md"))
    for file in (*texts, ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        if file not in history:
            yield from ((file, line) for line in file.read_text().splitlines())


def test_no_private_words() -> None:
    private = re.compile(rf"\b({'|'.join(PRIVATE)})\b", re.IGNORECASE)
    found = [f"{file.relative_to(ROOT)}: {line.strip()}" for file, line in lines() if private.search(line)]
    assert [line for line in found if not any(word in line for word in ALLOWED)] == []
