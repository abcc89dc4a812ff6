"""Several ranks, one voice."""

from __future__ import annotations

import io
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from evenstep.launcher.logs import MAX_LINE_BYTES, MergedLogs, Tail, end_of, ranks_in_words
from evenstep.launcher.processes import RankLogs
from evenstep.report.terminal import pass_on


@pytest.fixture
def logs(tmp_path: Path) -> RankLogs:
    return RankLogs(tmp_path)


def write(logs: RankLogs, rank: int, ending: str, text: str) -> None:
    with logs.path(rank, ending).open("a") as file:
        file.write(text)


def test_rank_0_speaks_and_the_others_only_warn(logs: RankLogs) -> None:
    merged = MergedLogs(logs, 3)
    write(logs, 0, "out", "epoch 1\n")
    write(logs, 0, "err", "loading\n")
    write(logs, 1, "out", "epoch 1, too\n")
    write(logs, 1, "err", "loading\nUserWarning: careful\n")
    assert list(merged.new(is_end=True)) == ["epoch 1", "loading", "[rank 1] UserWarning: careful"]


def test_what_all_ranks_say_is_said_once_with_its_count(logs: RankLogs) -> None:
    merged = MergedLogs(logs, 4)
    for rank in range(4):
        write(logs, rank, "err", "FutureWarning: old\nFutureWarning: old\n")
    assert list(merged.new(is_end=True)) == ["[ranks 0-3] FutureWarning: old (x2)"]
    for _ in range(10):
        write(logs, 1, "err", "FutureWarning: old\n")
    assert list(merged.new(is_end=True)) == ["[rank 1] FutureWarning: old (x10) (x18 so far)"]


def test_a_rank_cannot_speak_in_anothers_name(logs: RankLogs) -> None:
    merged = MergedLogs(logs, 2)
    write(logs, 0, "out", "\x1b[0m[rank 1] I am not rank 1\n  [ranks 0-3] nor these\n")
    write(logs, 1, "err", "warning\n[rank 0] error: forged\n")
    assert list(merged.new(is_end=True)) == [
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


def test_a_line_that_comes_in_parts_is_read_once_and_shows_what_one_in_one_part_does(tmp_path: Path) -> None:
    text = "10%\r50%\r100%\r\nplain\r\nä half\n\r\rtwice\n"
    for num in range(1, 6):
        tail, lines = Tail(tmp_path / f"log{num}"), []
        for start in range(0, len(text), num):
            with tail.path.open("a", newline="") as file:
                file.write(text[start : start + num])
            lines += tail.new()
            assert not tail.num_unread
        assert lines == ["100%", "plain", "ä half", "twice"]


def test_a_long_line_is_shown_by_its_beginning_and_held_by_no_more(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "log")
    for _ in range(40):
        with tail.path.open("ab") as file:
            file.write(b"x" * 100_000)
        assert tail.new() == []
    assert most_allocated(tail.new) < 2**20
    with tail.path.open("ab") as file:
        file.write(b"\nnext\n")
    long, following = tail.new()
    assert long == "x" * MAX_LINE_BYTES + f" ... ({4_000_000 - MAX_LINE_BYTES:,} bytes more)"
    assert following == "next"


def test_a_rank_that_writes_more_than_a_screen_takes_is_shown_by_its_last_lines(logs: RankLogs) -> None:
    merged = MergedLogs(logs, 2)
    line = "warning: " + "y" * 1000
    for rank, ending in ((0, "out"), (1, "err"), (1, "out")):
        with logs.path(rank, ending).open("w") as file:
            file.writelines(f"{line} {number}\n" for number in range(9_000))
    shown: list[str] = []
    assert most_allocated(lambda: shown.extend(merged.new(is_end=True))) < 2**23
    for rank, ending in ((0, "out"), (1, "err")):
        path = logs.path(rank, ending)
        assert shown.count(f"[rank {rank}] writes more than is shown here; the whole log is {path}") == 1
    numbers = [int(text.rpartition(" ")[2]) for text in shown if text.startswith(line)]
    assert numbers == list(range(numbers[0], 9_000))
    assert list(merged.new(is_end=True)) == []


def test_a_script_s_output_is_passed_on_whole_however_long_it_is(
    logs: RankLogs, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    text = "ä" * 10_000_001 + "\n"
    write(logs, 0, "out", text)
    assert list(MergedLogs(logs, 1, passes_rank_0_on=True).new(is_end=True)) == []
    assert capsysbinary.readouterr().out == text.encode()


def most_allocated(do: Callable[[], object]) -> int:
    """Bytes of Python objects that were there at once, more than before."""
    tracemalloc.start()
    try:
        do()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_of_a_long_log_the_end_is_read(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"x" * 5_000_000 + b"\nterminate called\n")
    assert most_allocated(lambda: end_of(tmp_path / "log")) < 2**22
    assert end_of(tmp_path / "log").endswith("x\nterminate called\n")
    assert end_of(tmp_path / "none") == ""


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
