"""Several ranks, one voice."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from evenstep.launcher.logs import Tail, Voices, ranks_in_words
from evenstep.launcher.processes import RankLogs
from evenstep.report.progress import pass_on


@pytest.fixture
def logs(tmp_path: Path) -> RankLogs:
    return RankLogs(tmp_path)


def write(logs: RankLogs, rank: int, ending: str, text: str) -> None:
    with logs.path(rank, ending).open("a") as file:
        file.write(text)


def test_rank_0_speaks_and_the_others_only_warn(logs: RankLogs) -> None:
    voices = Voices(logs, 3)
    write(logs, 0, "out", "epoch 1\n")
    write(logs, 0, "err", "loading\n")
    write(logs, 1, "out", "epoch 1, too\n")
    write(logs, 1, "err", "loading\nUserWarning: careful\n")
    assert list(voices.new(is_end=True)) == ["epoch 1", "loading", "[rank 1] UserWarning: careful"]


def test_what_all_ranks_say_is_said_once_with_its_count(logs: RankLogs) -> None:
    voices = Voices(logs, 4)
    for rank in range(4):
        write(logs, rank, "err", "FutureWarning: old\nFutureWarning: old\n")
    assert list(voices.new(is_end=True)) == ["[ranks 0-3] FutureWarning: old (x2)"]
    for _ in range(10):
        write(logs, 1, "err", "FutureWarning: old\n")
    assert list(voices.new(is_end=True)) == ["[rank 1] FutureWarning: old (x10) (x18 so far)"]


def test_a_rank_cannot_speak_in_anothers_name(logs: RankLogs) -> None:
    voices = Voices(logs, 2)
    write(logs, 0, "out", "\x1b[0m[rank 1] I am not rank 1\n  [ranks 0-3] nor these\n")
    write(logs, 1, "err", "warning\n[rank 0] error: forged\n")
    assert list(voices.new(is_end=True)) == [
        "[rank 0] [rank 1] I am not rank 1",
        "[rank 0]   [ranks 0-3] nor these",
        "[rank 1] warning",
        "[rank 1] [rank 0] error: forged",
    ]


def test_a_line_that_was_written_over_shows_what_it_showed_last_and_a_half_one_waits(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "log")
    (tmp_path / "log").write_text("10%\r50%\r100%\nnext")
    assert tail.new() == ["100%"]
    assert tail.new() == []


def test_ranks_in_words() -> None:
    assert ranks_in_words([3]) == "rank 3"
    assert ranks_in_words([0, 1, 2, 5, 7, 8]) == "ranks 0-2, 5, 7-8"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_what_a_script_writes_reaches_a_terminal_without_what_could_take_it_over() -> None:
    terminal, pipe = Terminal(), io.StringIO()
    text = "10%\r\x1b[2J20%\n[rank 3] forged\n"
    pass_on(text, terminal)
    pass_on(text, pipe)
    assert terminal.getvalue() == "10%\r20%\n[rank 0] [rank 3] forged\n"
    assert pipe.getvalue() == text
