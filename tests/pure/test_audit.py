"""Every sample once: what was written is counted, through crashes and resumed runs; every planted fault is found."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from evenstep.audit import FILE, Audit, SamplesWriter, audit, coverage
from evenstep.audit.sample_log import MAX_PROBLEMS, Problems, read_lines
from evenstep.errors import BadInput
from evenstep.plan import Plan
from evenstep.record import FILE as RECORD
from evenstep.record import Record, RecordWriter, Step, Summary
from evenstep.sampling.order import Lengths
from tests.pure.conftest import Ended

PLAN = Plan(task="digits", batch=4, epochs=3)
SUMMARY = Summary(
    strategy="single",
    devices=["cpu"],
    steps=3,
    samples=10,
    train_loss=0.5,
    valid={},
    samples_per_second=1.0,
    seconds=1.0,
    peak_bytes={},
    checkpoint=None,
    run="runs/a",
)


@dataclass(frozen=True)
class Taken:
    """A step as a run writes it."""

    epoch: int
    step: int
    ids: Sequence[int]


def facts(num_samples: int | None = 10, **changes: Any) -> dict[str, Any]:
    usual = {"sampler": "shuffled", "repeats": False, "num_samples": num_samples, "first": [], "rest": num_samples}
    return {**usual, "step": 0, "position": 0, **changes}


def write_run(name: str | Path, lines: Sequence[Taken], plan: Plan = PLAN, **changes: Any) -> Path:
    folder = Path(name)
    folder.mkdir(parents=True)
    RecordWriter(folder, plan, {}, facts(**changes)).close()
    writer = SamplesWriter(folder)
    for line in lines:
        writer.append(line.epoch, line.step, line.ids)
    writer.close()
    return folder


def batches(epochs: Sequence[Sequence[int]], batch: int = 4, step: int = 0, first: int = 0) -> list[Taken]:
    """Epochs of ids, cut into steps."""
    lines: list[Taken] = []
    for epoch, ids in enumerate(epochs, first):
        for start in range(0, len(ids), batch):
            lines.append(Taken(epoch, step + len(lines) + 1, ids[start : start + batch]))
    return lines


def shuffled(seed: int, num: int = 10) -> list[int]:
    return random.Random(seed).sample(range(num), num)


def audit_of(epochs: Sequence[Sequence[int]], **changes: Any) -> Audit:
    return audit([write_run("a", batches(epochs), **changes)])


# What is said of runs in which all is well.


def test_a_whole_epoch_has_every_sample_once() -> None:
    found = audit_of([shuffled(0)])
    assert found.sentence() == "10 samples, 0 repeated, 0 missed"
    assert found.is_clean
    assert found.problems == []
    assert found.counts() == {"samples": 10, "repeated": 0, "missed": 0, "redone": 0, "dropped": 0}


@pytest.mark.parametrize(
    ("epochs", "changes", "sentence"),
    [
        ([range(10)] * 3, {}, "10 samples x 3 epochs, 0 repeated, 0 missed"),
        ([range(10), range(4)], {}, "10 samples x 1 epoch and 4 of the next, 0 repeated, 0 missed"),
        ([range(10)] * 3 + [range(4)], {}, "10 samples x 3 epochs and 4 of the next, 0 repeated, 0 missed"),
        ([range(4)], {}, "4 of 10 samples, 0 repeated, 0 missed"),
        ([], {}, "0 of 10 samples, 0 repeated, 0 missed"),
        ([[0]], {"num_samples": 1}, "1 sample, 0 repeated, 0 missed"),
        ([range(3), range(6), range(10)], {"first": [3, 6]}, "19 samples in 3 epochs, 0 repeated, 0 missed"),
        ([range(3), range(2)], {"first": [3, 6]}, "3 samples x 1 epoch and 2 of the next, 0 repeated, 0 missed"),
        ([[7, 9, 2], [9, 2, 7]], {"rest": 3}, "3 samples x 2 epochs, 0 repeated, 0 missed"),
        ([range(10)] * 2, {"num_samples": None}, "10 samples x 2 epochs, 0 repeated, 0 missed"),
        ([range(10), range(7)], {"num_samples": None}, "17 samples in 2 epochs, 0 repeated, 0 missed"),
        ([], {"num_samples": None}, "0 samples, 0 repeated, 0 missed"),
        ([range(8)], {"rest": 8, "dropped": [2]}, "8 samples, 0 repeated, 0 missed, 2 left out by drop_last"),
        (
            [range(8), range(2, 10), range(4)],
            {"rest": 8, "dropped": [2]},
            "8 samples x 2 epochs and 4 of the next, 0 repeated, 0 missed, 4 left out by drop_last",
        ),
        (
            [range(4), range(8)],
            {"first": [4], "rest": 8, "dropped": [1, 2]},
            "12 samples in 2 epochs, 0 repeated, 0 missed, 3 left out by drop_last",
        ),
    ],
)
def test_what_is_there_is_said_in_one_sentence(epochs: list[list[int]], changes: Any, sentence: str) -> None:
    found = audit_of(epochs, **changes)
    assert found.sentence() == sentence
    assert found.is_clean


def test_a_sampler_with_replacement_may_repeat_as_it_promised() -> None:
    changes: dict[str, Any] = {"sampler": "weighted", "repeats": True, "rest": 6}
    found = audit([write_run("one", batches([[3, 3, 1, 3, 9, 1]]), **changes)])
    assert found.sentence() == "6 samples drawn by weighted, 3 different, 0 missed"
    assert found.is_clean
    found = audit([write_run("two", batches([[3, 3, 1, 3, 9, 1], [2, 2, 9, 2, 2, 2], [5, 5]]), **changes)])
    assert found.sentence() == "6 samples x 2 epochs and 2 of the next drawn by weighted, 5 different, 0 missed"
    assert found.is_clean
    assert found.repeated == 0


def test_of_a_resumed_run_alone_its_own_part_is_judged_and_the_sentence_says_so() -> None:
    order = shuffled(3)
    middle = audit([write_run("b", batches([order[4:], range(10)], step=1), step=1, position=4)])
    assert middle.is_clean
    assert middle.sentence() == (
        "16 samples in 2 epochs, 0 repeated, 0 missed (counted from step 2 on, 4 samples into epoch 1)"
    )
    border = audit([write_run("c", batches([range(10)], step=3, first=1), step=3, position=10)])
    assert border.is_clean
    assert border.sentence() == ("10 samples, 0 repeated, 0 missed (counted from step 4 on, the beginning of epoch 2)")


# Chains.


def test_work_that_was_lost_and_done_again_counts_once() -> None:
    order = [shuffled(epoch) for epoch in range(2)]
    lines = batches(order)
    first = write_run("a", lines[:4])
    second = write_run("b", lines[2:], step=2, position=8)
    found = audit([first, second])
    assert found.is_clean
    assert found.sentence() == "10 samples x 2 epochs, 0 repeated, 0 missed"
    assert found.redone == len(lines[2].ids) + len(lines[3].ids)
    assert audit([second, first]) == found
    assert audit([first, second, first]) == found
    assert audit([str(first), second / FILE]) == found


def test_a_run_that_died_before_its_first_checkpoint_was_all_for_nothing() -> None:
    lines = batches([range(10)])
    found = audit([write_run("a", lines[:2]), write_run("b", lines)])
    assert found.sentence() == "10 samples, 0 repeated, 0 missed"
    assert found.redone == 8


def test_the_batch_may_change_when_a_run_goes_on() -> None:
    order = shuffled(1)
    first = write_run("a", batches([order[:8]]))
    second = write_run("b", batches([order[4:]], batch=1, step=1), step=1, position=4)
    assert audit([first, second]).sentence() == "10 samples, 0 repeated, 0 missed"


def test_a_stream_knows_the_lengths_of_its_finished_epochs_when_it_goes_on() -> None:
    stream: dict[str, Any] = {"num_samples": None, "sampler": "stream"}
    lines = batches([range(6), range(6), range(6)])
    first = write_run("a", lines[:3], **stream)
    second = write_run("b", lines[3:], first=[6], step=3, position=10, **stream)
    assert audit([first, second]).sentence() == "6 samples x 3 epochs, 0 repeated, 0 missed"
    alone = audit([second])
    assert alone.is_clean
    assert "from step 4 on, 4 samples into epoch 2" in alone.sentence()


def test_a_stream_is_held_to_the_lengths_that_a_later_run_knows() -> None:
    first = write_run("a", batches([range(4), range(4)]), num_samples=None)
    second = write_run("b", [], num_samples=None, first=[6], step=2, position=8)
    found = audit([first, second])
    assert found.missed == 2
    assert found.problems[0] == "epoch 2 begins at step 2 though epoch 1 has had 4 of 6"


def test_a_run_left_out_of_a_chain_is_missed() -> None:
    lines = batches([range(10), range(10)], batch=2)
    first = write_run("a", lines[:3])
    third = write_run("c", lines[7:], step=7, position=14)
    found = audit([first, third])
    assert not found.is_clean
    assert found.problems == [
        "steps 4 to 7 are in no file",
        "epoch 2 begins at step 8 though epoch 1 has had 6 of 10",
        "epoch 1 missed 4 of 10 samples: ids 6, 7, 8, ...",
    ]
    assert found.missed == 4


def test_a_run_that_goes_on_at_another_position_is_no_continuation() -> None:
    lines = batches([range(20)])
    first = write_run("a", lines[:2], num_samples=20)
    second = write_run("b", lines[3:4], step=2, position=12, num_samples=20)
    assert audit([first, second]).problems == [
        "b continues at step 2 after 12 samples, and the steps before it used 8",
        "step 3 is in no file",
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_samples": 11}, "num samples is 10 in one and 11 in the other"),
        ({"sampler": "weighted"}, "sampler is shuffled in one and weighted in the other"),
        ({"repeats": True}, "repeats is False in one and True in the other"),
        ({"rest": 9}, "their epochs have different lengths"),
        ({"first": [5]}, "their epochs have different lengths"),
        ({"plan": replace(PLAN, seed=1)}, "seed is 0 in one and 1 in the other"),
    ],
)
def test_runs_of_different_trainings_are_no_chain(changes: dict[str, Any], message: str) -> None:
    first, second = write_run("a", batches([range(10)])), write_run("b", [], step=3, position=10, **changes)
    with pytest.raises(BadInput, match=f"a and b are not parts of one training run: {message}"):
        audit([first, second])


def test_streams_whose_finished_epochs_differ_are_no_chain() -> None:
    first = write_run("a", [], num_samples=None, first=[6])
    second = write_run("b", [], num_samples=None, first=[5, 6], step=3, position=11)
    with pytest.raises(BadInput, match="their epochs have different lengths"):
        audit([first, second])


# Faults.


def test_a_repeated_and_a_missed_sample_do_not_make_up_for_each_other() -> None:
    found = audit_of([[0, 1, 2, 3, 4, 5, 6, 7, 8, 3]])
    assert (found.samples, found.repeated, found.missed) == (10, 1, 1)
    assert found.sentence() == "10 samples, 1 repeated, 1 missed"
    assert found.problems == [
        "epoch 1 repeated 1 sample: id 3 again in step 3",
        "epoch 1 missed 1 of 10 samples: ids 9",
    ]


def test_an_epoch_that_ends_early_has_missed_the_rest() -> None:
    found = audit_of([range(8), range(10)])
    assert found.sentence() == "18 samples in 2 epochs, 0 repeated, 2 missed"
    assert found.problems[0] == "epoch 2 begins at step 3 though epoch 1 has had 8 of 10"


def test_ids_that_an_epoch_of_some_samples_has_missed_are_not_guessed() -> None:
    found = audit_of([[7, 9], [7, 9, 2]], rest=3)
    assert found.problems[1:] == ["epoch 1 missed 1 of 3 samples"]


def test_an_epoch_that_is_in_no_file_is_missed_whole() -> None:
    lines = [*batches([range(10)]), *batches([range(10)], step=3, first=2)]
    found = audit([write_run("a", lines)])
    assert found.missed == 10
    assert found.problems == ["epoch 2 is in no file"]
    far = audit([write_run("b", [*lines, Taken(10**9, 7, [0])])])
    assert far.problems[1] == f"epochs 4 to {10**9} are in no file"


def test_an_epoch_is_not_missed_before_it_is_over_but_a_lost_step_is_a_problem() -> None:
    lines = batches([range(100)])
    found = audit([write_run("a", [*lines[:2], *lines[4:6], *lines[7:9]], num_samples=100)])
    assert found.problems == ["steps 3 to 4 are in no file", "step 7 is in no file"]
    assert found.sentence() == "24 of 100 samples, 0 repeated, 0 missed, but 2 problems"
    assert not found.is_clean


def test_a_step_that_is_there_twice_is_repeated() -> None:
    lines = batches([range(10)])
    found = audit([write_run("a", [*lines[:2], lines[1], lines[2]])])
    assert found.problems[0] == "step 2 comes again in a"
    assert (found.samples, found.repeated, found.missed) == (14, 4, 0)


def test_steps_that_go_backwards_are_a_problem() -> None:
    lines = batches([range(10)])
    found = audit([write_run("a", [lines[1], lines[0], lines[2]])])
    assert "step 1 of a comes after step 2" in found.problems


def test_an_epoch_that_comes_back_is_a_problem() -> None:
    lines = batches([range(10)] * 2)
    found = audit([write_run("a", [*lines, Taken(0, 7, [1])])])
    assert found.problems == ["step 7 of a is of epoch 1, though epoch 2 has begun"]


def test_a_step_from_before_the_run_began_is_a_problem() -> None:
    found = audit([write_run("a", batches([range(4)], batch=2, step=4), step=5, position=0)])
    assert found.problems[0] == "step 5 comes again in a"


def test_more_different_samples_than_an_epoch_has_are_a_problem() -> None:
    assert audit_of([range(7)], rest=5).problems == ["epoch 1 used 7 samples and should use 5"]


def test_a_draw_with_replacement_can_fall_short_too() -> None:
    found = audit_of([[1, 1, 1], [1, 1, 1, 1]], repeats=True, rest=4, sampler="weighted")
    assert found.sentence() == "7 samples in 2 epochs drawn by weighted, 1 different, 1 missed"
    assert not found.is_clean


def test_a_gap_in_a_stream_is_missed() -> None:
    found = audit_of([[0, 1, 2, 5, 6], [0, 1]], num_samples=None)
    assert found.sentence() == "7 samples in 2 epochs, 0 repeated, 2 missed"
    assert found.problems == ["epoch 1 missed 2 of 7 samples: ids 3, 4"]


def test_a_stream_that_goes_on_too_early_or_too_late_is_found() -> None:
    at: dict[str, Any] = {"num_samples": None, "step": 1, "position": 4}
    late = audit([write_run("a", [Taken(0, 2, [6, 7])], **at)])
    assert late.problems == ["epoch 1 missed 2 of 4 samples: ids 4, 5"]
    early = audit([write_run("b", [Taken(0, 2, [3, 4])], **at)])
    assert early.problems == ["id 3 of step 2 is outside this part of the stream (from 4 on)"]


@pytest.mark.parametrize("odd", [-1, 10, 4711, 10**30, -(10**30), 2**63])
def test_an_id_outside_the_data_is_named(odd: int) -> None:
    found = audit([write_run("a", batches([[0, 1, 2, 3, 4, odd]]))])
    assert found.problems == [f"id {odd} of step 2 is outside the data (10 samples)"]
    assert found.sentence() == "6 of 10 samples, 0 repeated, 0 missed, but 1 problem"


def test_an_id_beyond_those_that_an_audit_counts_is_named_and_fills_no_memory() -> None:
    found = audit([write_run("a", [Taken(0, 1, [0, 2**32]), Taken(0, 2, [1, 2**26])], num_samples=None)])
    assert f"id {2**32} of step 1 is not counted: an audit counts ids below 4,294,967,296" in found.problems
    assert found.missed == 2**26 + 1 - 3
    large = audit([write_run("b", [Taken(0, 1, [0, 2**32])], num_samples=2**33, rest=2**33)])
    assert large.problems == [f"id {2**32} of step 1 is not counted: an audit counts ids below 4,294,967,296"]


@pytest.mark.parametrize("odd", ["2.0", "true", "null", '"2"', "[2]", "NaN"])
def test_an_id_that_is_no_whole_number_is_named(odd: str) -> None:
    folder = write_run("a", [])
    (folder / FILE).write_text(f'{{"epoch": 0, "step": 1, "ids": [0, 1, {odd}]}}\n')
    found = audit([folder])
    assert found.problems == [f"step 1 has {odd} for an id; ids are integers"]
    assert found.samples == 3


@pytest.mark.parametrize(
    "text",
    [
        "# a heading",
        "",
        "[1, 2]",
        "17",
        '{"epoch": 0, "step": 2}',
        '{"epoch": 0, "step": 2, "ids": 7}',
        '{"epoch": -1, "step": 2, "ids": []}',
        '{"epoch": 0, "step": 0, "ids": []}',
        '{"epoch": 0, "step": true, "ids": []}',
        '{"epoch": 0.5, "step": 2, "ids": []}',
        '{"epoch": 0, "step": 2, "ids": [4, 5',
        "\0" * 64,
        "\xff\xfe",
        "[" * 100_000,
    ],
)
def test_a_line_that_is_not_a_step_is_named_and_the_others_are_counted(text: str) -> None:
    folder = write_run("a", [])
    lines = ['{"epoch": 0, "step": 1, "ids": [0]}', text, '{"epoch": 0, "step": 2, "ids": [1]}', ""]
    (folder / FILE).write_bytes("\n".join(lines).encode("latin-1"))
    found = audit([folder])
    assert found.problems == ["line 2 of a/samples.jsonl is not the samples of a step"]
    assert found.samples == 2


def test_a_file_that_is_all_wrong_does_not_fill_the_memory() -> None:
    folder = write_run("a", [])
    (folder / FILE).write_text("wrong\n" * 1000)
    found = audit([folder])
    assert (len(found.problems), found.num_problems) == (MAX_PROBLEMS, 1000)


def test_steps_that_the_record_has_and_the_samples_have_not_are_lost() -> None:
    folder = write_run("a", batches([range(10), range(4)])[:2])
    (folder / "record.jsonl").unlink()
    writer = RecordWriter(folder, PLAN, {}, facts())
    writer.append(SUMMARY)
    writer.close()
    assert audit([folder]).problems == ["step 3 is in no file"]
    (folder / FILE).unlink()
    whole = SamplesWriter(folder)
    for line in batches([range(10)]):
        whole.append(line.epoch, line.step, line.ids)
    whole.close()
    assert audit([folder]).is_clean


# Folders that are none.


def test_a_run_without_samples_is_refused() -> None:
    (write_run("a", []) / FILE).unlink()
    with pytest.raises(BadInput, match=r"a has no samples.jsonl; train it with --audit"):
        audit(["a"])


def test_no_run_and_no_run_folder_are_refused() -> None:
    with pytest.raises(BadInput, match="no run given"):
        audit([])
    with pytest.raises(BadInput, match=r"nowhere does not exist; give a run folder"):
        audit(["nowhere"])


@pytest.mark.parametrize(
    "data",
    [
        {},
        [],
        None,
        facts(num_samples=0),
        facts(rest="ten"),
        facts(first=7),
        facts(first=[0]),
        facts(step=-1),
        facts(position=1.5),
        facts(step=None),
    ],
)
def test_a_record_that_does_not_say_how_samples_are_drawn_is_refused(data: Any) -> None:
    folder = write_run("a", [])
    (folder / RECORD).write_text(json.dumps({"kind": "start", "plan": PLAN.to_json(), "machine": {}, "data": data}))
    with (folder / RECORD).open("a") as file:
        file.write("\n")
    with pytest.raises(
        BadInput, match=r"does not describe how its samples are drawn|is not a record of a run: line 1, data"
    ):
        audit([folder])


def test_a_file_that_goes_away_is_refused() -> None:
    with pytest.raises(BadInput, match="gone cannot be read: No such file"):
        list(read_lines(Path("gone"), Problems()))


# Writing.


def test_a_line_has_epoch_step_and_ids_as_plain_numbers() -> None:
    writer = SamplesWriter(Path())
    writer.append(0, 12, np.array([3, 1, 2]))
    writer.append(1, 13, [])
    assert Path(FILE).read_text() == '{"epoch":0,"step":12,"ids":[3,1,2]}\n{"epoch":1,"step":13,"ids":[]}\n'
    writer.close()


def test_what_was_written_before_a_kill_is_there() -> None:
    script = (
        "import os, signal; from pathlib import Path; from evenstep.audit import SamplesWriter\n"
        "writer = SamplesWriter(Path()); writer.append(0, 1, [4, 2]); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == -9
    assert Path(FILE).read_text() == '{"epoch":0,"step":1,"ids":[4,2]}\n'


def test_a_file_cut_off_anywhere_is_counted_up_to_its_last_whole_line() -> None:
    lines = batches([range(10)] * 2)
    file = write_run("a", lines) / FILE
    content = file.read_bytes()
    for cut in range(len(content)):
        file.write_bytes(content[:cut])
        found = audit(["a"])
        assert found.is_clean
        assert found.samples == sum(len(line.ids) for line in lines[: content[:cut].count(b"\n")])


def test_the_record_says_how_samples_are_drawn_and_from_where_the_run_goes_on() -> None:
    folder = write_run("a", [], step=3, position=12, first=[2, 4])
    assert Record.read(folder).data == facts(step=3, position=12, first=[2, 4])
    RecordWriter(Path(), PLAN, {}).close()
    assert Record.read(Path(RECORD)).data == {}


def test_a_record_of_before_there_was_an_audit_is_read() -> None:
    Path(RECORD).write_text(json.dumps({"kind": "start", "plan": PLAN.to_json(), "machine": {}}) + "\n")
    assert Record.read(RECORD).data == {}


def test_a_record_keeps_what_the_audit_found_and_is_read_without_its_steps() -> None:
    step = Step(
        step=1, epoch=0, loss=1, samples=4, count=4, seconds=1, input_seconds=0, lr=1, peak_bytes={}, epoch_samples=10
    )
    summary = replace(SUMMARY, audit={"samples": 10, "repeated": 0, "missed": 0})
    writer = RecordWriter(Path(), PLAN, {}, facts())
    writer.append(step)
    writer.append(summary)
    writer.close()
    whole, short = Record.read(RECORD), Record.read(RECORD, kinds=("summary",))
    assert (whole.steps, whole.summary) == ([step], summary)
    assert (short.steps, short.summary, short.data) == ([], summary, facts())


# The command.


def test_the_command_says_it_and_ends_with_0(evenstep: Callable[..., Ended]) -> None:
    lines = batches([range(10)])
    write_run("a", lines[:2])
    write_run("b", lines[1:], step=1, position=4)
    ended = evenstep("audit", "a", "b")
    assert ended == Ended(
        0, "10 samples, 0 repeated, 0 missed\n4 more were lost when a run was cut off, and done again\n", ""
    )


def test_the_command_ends_with_1_and_says_what_is_wrong(evenstep: Callable[..., Ended]) -> None:
    write_run("a", [Taken(0, 2 * step, [step]) for step in range(1, 13)], num_samples=100)
    ended = evenstep("audit", "a")
    said = ended.out.splitlines()
    assert ended.code == 1
    assert said[0] == "12 of 100 samples, 0 repeated, 0 missed, but 12 problems"
    assert said[1:] == [*(f"step {step} is in no file" for step in range(1, 20, 2)), "and 2 more problems"]


def test_the_command_gives_json_in_one_line(evenstep: Callable[..., Ended]) -> None:
    write_run("a", batches([[0, 0, 1]], batch=3), num_samples=3)
    ended = evenstep("audit", "a", "--json")
    assert ended.code == 1
    assert ended.out.count("\n") == 1
    assert json.loads(ended.out) == {
        "is_clean": False,
        "samples": 3,
        "repeated": 1,
        "missed": 1,
        "redone": 0,
        "dropped": 0,
        "epochs": 1,
        "unfinished": 0,
        "sampler": "shuffled",
        "repeats": False,
        "sentence": "3 samples, 1 repeated, 1 missed",
        "problems": [
            "epoch 1 repeated 1 sample: id 0 again in step 1",
            "epoch 1 missed 1 of 3 samples: ids 2",
        ],
        "num_problems": 2,
    }


def test_the_command_refuses_what_is_no_run(evenstep: Callable[..., Ended]) -> None:
    assert evenstep("audit", "nowhere").code == 2
    assert evenstep("audit").code == 2


def test_the_command_needs_no_torch() -> None:
    write_run("a", batches([range(10)]))
    for arguments in (["audit", "a"], ["audit", "--help"]):
        script = (
            f"import sys; sys.argv[1:] = {arguments}; from evenstep.cli import main\n"
            "try: main()\nexcept SystemExit as ended: sys.exit(ended.code or 50 * ('torch' in sys.modules))"
        )
        subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.DEVNULL)


# Any training, cut anywhere.


@dataclass(frozen=True)
class Part:
    """One run of a chain; `kept` of its steps were not done again."""

    step: int
    position: int
    lines: list[Taken]
    kept: int


@dataclass(frozen=True)
class Training:
    lengths: Lengths
    num_samples: int
    parts: list[Part]

    @property
    def kept(self) -> list[tuple[int, int]]:
        """(part, line) of every step that counts."""
        return [(number, line) for number, part in enumerate(self.parts) for line in range(part.kept)]

    def line(self, at: tuple[int, int]) -> Taken:
        return self.parts[at[0]].lines[at[1]]

    def with_lines(self, at: tuple[int, int], lines: Sequence[Taken]) -> Training:
        """The same with another line, none, or more of them in the place of one."""
        part = self.parts[at[0]]
        changed = replace(part, lines=[*part.lines[: at[1]], *lines, *part.lines[at[1] + 1 :]])
        return replace(self, parts=[*self.parts[: at[0]], changed, *self.parts[at[0] + 1 :]])

    def audit(self, turn: int = 0) -> Audit:
        """The verdict on its runs, written as a training writes them."""
        data = {"num_samples": self.num_samples, "rest": self.lengths.rest, "first": list(self.lengths.first)}
        with tempfile.TemporaryDirectory() as folder:
            runs = [
                write_run(Path(folder) / f"run{number}", part.lines, step=part.step, position=part.position, **data)
                for number, part in enumerate(self.parts)
            ]
            return audit([*runs[turn:], *runs[:turn]])


@st.composite
def trainings(draw: st.DrawFn) -> Training:
    num_samples = draw(st.integers(1, 20))
    first = draw(st.lists(st.integers(1, num_samples), max_size=2))
    lengths = Lengths(draw(st.integers(1, num_samples)), tuple(first))
    seed = draw(st.integers(0, 100))
    parts: list[Part] = []
    step = position = 0
    for is_last in [*[False] * draw(st.integers(0, 3)), True]:
        batch = draw(st.integers(1, 8))
        start = (step, position)
        marks, lines = [start], []
        for _ in range(draw(st.integers(0, 10))):
            span = lengths.span(position, batch)
            order = random.Random(f"{seed} {span.epoch}").sample(range(num_samples), lengths.of(span.epoch) or 0)
            step, position = step + 1, position + len(span)
            lines.append(Taken(span.epoch, step, order[span.start : span.stop]))
            marks.append((step, position))
        kept = len(lines) if is_last else draw(st.integers(0, len(lines)))
        step, position = marks[kept]
        parts.append(Part(*start, lines, kept))
    return Training(lengths, num_samples, parts)


@contextmanager
def few_at_a_time(size: int) -> Iterator[None]:
    """Ids are counted in blocks of this size, instead of tens of thousands."""
    with mock.patch.object(coverage, "_IDS_AT_ONCE", size):
        yield


SIZES = st.sampled_from([1, 3, 1 << 16])


@given(trainings(), SIZES)
def test_any_chain_in_which_nothing_was_lost_is_clean(training: Training, size: int) -> None:
    with few_at_a_time(size):
        found = training.audit()
    assert found.problems == []
    assert found.is_clean
    assert "0 repeated, 0 missed" in found.sentence()
    assert found.samples == sum(len(training.line(at).ids) for at in training.kept)
    lost = [len(line.ids) for part in training.parts for line in part.lines[part.kept :]]
    assert found.redone == sum(lost)
    epoch, place = training.lengths.locate(found.samples)
    assert (found.epochs, found.unfinished) == (epoch, place)


@given(trainings(), st.integers(0, 3))
def test_a_chain_may_be_given_in_any_order(training: Training, turn: int) -> None:
    starts = [part.step for part in training.parts]
    assume(len(set(starts)) == len(starts))
    assert replace(training.audit(turn), problems=[]) == replace(training.audit(), problems=[])


@given(trainings(), st.data())
def test_a_line_that_is_dropped_is_found(training: Training, data: st.DataObject) -> None:
    # Without the very last one the run just ends a step earlier.
    assume(len(training.kept) > 1)
    at = data.draw(st.sampled_from(training.kept[:-1]))
    found = training.with_lines(at, []).audit()
    assert not found.is_clean
    assert f"step {training.line(at).step} is in no file" in found.problems


@given(trainings(), st.data())
def test_a_line_that_is_there_twice_is_found(training: Training, data: st.DataObject) -> None:
    assume(training.kept)
    at = data.draw(st.sampled_from(training.kept))
    line = training.line(at)
    found = training.with_lines(at, [line, line]).audit()
    assert not found.is_clean
    assert found.repeated == len(line.ids)


@given(trainings(), st.data(), SIZES)
def test_an_id_that_comes_twice_is_found(training: Training, data: st.DataObject, size: int) -> None:
    counts = Counter(training.line(at).epoch for at in training.kept for _ in training.line(at).ids)
    possible = [at for at in training.kept if counts[training.line(at).epoch] > 1]
    assume(possible)
    at = data.draw(st.sampled_from(possible))
    line = training.line(at)
    place = data.draw(st.integers(0, len(line.ids) - 1))
    same_epoch = [training.line(other) for other in training.kept if training.line(other).epoch == line.epoch]
    others = [id_ for other in same_epoch for id_ in other.ids if id_ != line.ids[place]]
    again = data.draw(st.sampled_from(others))
    with few_at_a_time(size):
        found = training.with_lines(at, [replace(line, ids=_put(line.ids, place, again))]).audit()
    assert not found.is_clean
    assert found.repeated == 1
    is_over = counts[line.epoch] == training.lengths.of(line.epoch)
    assert found.missed == (1 if is_over else 0)


@given(trainings(), st.data())
def test_an_id_that_is_not_in_the_data_is_found(training: Training, data: st.DataObject) -> None:
    assume(training.kept)
    at = data.draw(st.sampled_from(training.kept))
    line = training.line(at)
    place = data.draw(st.integers(0, len(line.ids) - 1))
    foreign = data.draw(st.sampled_from([-1, training.num_samples, 10**6]))
    found = training.with_lines(at, [replace(line, ids=_put(line.ids, place, foreign))]).audit()
    assert not found.is_clean
    wanted = f"id {foreign} of step {line.step} is outside the data ({training.num_samples} samples)"
    assert wanted in found.problems


@given(trainings(), st.data())
def test_a_step_of_the_lost_work_may_be_anything(training: Training, data: st.DataObject) -> None:
    lost = [(number, at) for number, part in enumerate(training.parts) for at in range(part.kept, len(part.lines))]
    assume(lost)
    at = data.draw(st.sampled_from(lost))
    assert training.with_lines(at, [replace(training.line(at), ids=[-1, -1])]).audit().is_clean


def _put(ids: Sequence[int], place: int, id_: int) -> list[int]:
    return [*ids[:place], id_, *ids[place + 1 :]]


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=14), min_size=2, max_size=4), st.booleans(), SIZES)
def test_numbers_are_those_of_counting_by_hand(epochs: list[list[int]], is_stream: bool, size: int) -> None:
    repeated = sum(len(ids) - len(set(ids)) for ids in epochs)
    lengths = [max(ids) + 1 if is_stream else 10 for ids in epochs]
    missed = [length - len(set(ids)) for length, ids in zip(lengths, epochs, strict=True)]
    if not is_stream and len(epochs[-1]) < 10:
        missed.pop()
    with tempfile.TemporaryDirectory() as folder, few_at_a_time(size):
        found = audit([write_run(Path(folder) / "a", batches(epochs), num_samples=None if is_stream else 10)])
    assert (found.samples, found.repeated, found.missed) == (sum(map(len, epochs)), repeated, sum(missed))
    assert found.is_clean == (repeated == sum(missed) == 0)


# Which runs are one training.


def resumed(folder: Path) -> Plan:
    return replace(PLAN, resume=str(folder.resolve() / "checkpoints" / "step-00000002"))


def test_a_run_goes_on_from_one_that_is_given_or_they_are_no_chain() -> None:
    lines = batches([shuffled(0)])
    first, stranger = write_run("first", lines[:2]), write_run("stranger", lines[:2])
    rest = write_run("rest", lines[2:], resumed(first), step=2, position=8)
    assert audit([first, rest]).is_clean
    # Begun again because it was cut off before its first checkpoint: one training.
    assert audit([stranger, first, rest]).is_clean
    assert audit([rest]).sentence().endswith(f"; with the runs before it: evenstep audit {first} {rest})")
    with pytest.raises(BadInput, match="the other one was resumed from first, which was not given"):
        audit([stranger, rest])


def test_a_run_that_came_to_its_end_is_not_gone_over_again() -> None:
    lines = batches([shuffled(0)])
    done, other = write_run("done", lines), write_run("other", lines[:1])
    with (done / "record.jsonl").open("a") as record:
        record.write(json.dumps({"kind": "summary", **asdict(replace(SUMMARY, steps=3))}) + "\n")
    assert audit([done]).is_clean
    with pytest.raises(BadInput, match="the first one ended at step 3, and the other one begins at step 0"):
        audit([done, other])
