"""Which configuration is recommended, and which bottleneck is named, on five constructed cases and their neighbours."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from evenstep.errors import BadInput
from evenstep.report.comparison import Comparison, LargerBatch, Parity, Range, Row
from evenstep.report.html.tables import parts_sheet
from evenstep.report.recommend import advise, best, bottleneck
from evenstep.report.terminal import step_table

GIB = 2**30


def spread(middle: float) -> Range:
    return Range(middle=middle, low=middle * 0.98, high=middle * 1.02)


def row(
    strategy: str,
    num: int,
    step: float,
    *,
    waits: float = 0.0,
    sends: float = 0.0,
    peaks: tuple[int, ...] = (),
    parity: Parity = "same",
) -> Row:
    """A way whose step takes so many seconds, of which it waits some for input and some for others."""
    rest = step - waits - sends
    parts = {"input": waits, "forward": rest / 3, "backward": rest / 2, "communication": sends, "optimizer": rest / 6}
    return Row(
        strategy=strategy,
        devices=[f"cuda:{index}" for index in range(num)],
        samples_per_second=spread(64 / step),
        step_seconds=spread(step),
        parts=parts,
        without_input_seconds=spread(step - waits),
        without_communication_seconds=spread(step - sends) if num > 1 else None,
        sent_bytes=1000 if num > 1 else 0,
        peak_bytes={f"cuda:{index}": size for index, size in enumerate(peaks or (GIB,) * num)},
        start_seconds=spread(1.0),
        parity="reference" if strategy == "single" else parity,
    )


def comparison(*rows: Row, larger_batch: LargerBatch | None = None, cores: int = 8) -> Comparison:
    return Comparison(
        task="mine",
        batch=64,
        precision="fp32",
        steps=50,
        rounds=3,
        rows=list(rows),
        machine={"cores": cores},
        larger_batch=larger_batch,
    )


def test_input_bound_more_devices_do_not_help_and_input_is_the_lever() -> None:
    found = comparison(row("single", 1, 0.050, waits=0.040), row("ddp", 2, 0.049, waits=0.042, sends=0.001))
    said = advise(found)
    assert said[0].startswith("Recommended: single, with 1,280 samples/s")
    assert "no other strategy that matches single is clearly faster" in said[0]
    assert "Bottleneck: input. A step waits 40.00 ms of 50.00 ms" in said[2]
    assert "at most 5.0x as fast" in said[2]


def test_communication_bound_the_one_device_is_kept_or_communication_is_the_lever() -> None:
    slow = comparison(row("single", 1, 0.010), row("ddp", 2, 0.030, sends=0.024))
    assert best(slow).label == "single"
    assert "ddp x 2 0.33x (1.67x with free communication)" in advise(slow)[1]
    faster = comparison(row("single", 1, 0.100), row("ddp", 2, 0.080, sends=0.030))
    said = advise(faster)
    assert said[0].startswith("Recommended: ddp x 2, 1.25x as fast as single on 2 devices, 62% efficiency")
    assert "Bottleneck: communication. 30.00 ms of 80.00 ms" in said[2]
    assert "takes 50.00 ms, at most 1.6x as fast" in said[2]


def test_a_tiny_model_stays_on_one_device_and_wants_a_larger_batch() -> None:
    larger = LargerBatch(times=4, label="single", samples_per_second=3.4 * 64 / 0.0004)
    found = comparison(row("single", 1, 0.0004), row("ddp", 2, 0.0016, sends=0.001), larger_batch=larger)
    said = advise(found)
    assert said[0].startswith("Recommended: single")
    assert "the batch, which is small for this model: --batch 256 gives 3.4x as many samples/s" in said[2]


def test_of_two_that_are_about_as_fast_the_one_with_even_memory_is_taken() -> None:
    found = comparison(
        row("single", 1, 0.100),
        row("dp-torch", 2, 0.060, peaks=(int(2.3 * GIB), GIB)),
        row("ddp", 2, 0.062, sends=0.002),
    )
    said = advise(found)
    assert said[0].startswith("Recommended: ddp x 2, 1.61x as fast as single on 2 devices, 81% efficiency")
    assert said[0].endswith("all devices use about the same memory.")
    assert "dp-torch x 2 1.67x and cuda:0 uses 2.3x the memory of the device that uses least" in said[1]


def test_fine_as_it_is() -> None:
    found = comparison(row("single", 1, 0.100), row("ddp", 2, 0.053, sends=0.001))
    said = advise(found)
    assert said[0].startswith("Recommended: ddp x 2, 1.89x as fast as single on 2 devices, 94% efficiency")
    assert "Bottleneck: none stands out; forward and backward take" in said[2]


def test_on_one_device_nothing_is_wrapped_for_nothing() -> None:
    found = comparison(row("single", 1, 0.100), row("ddp", 1, 0.099))
    assert best(found).label == "single"


def test_what_learns_something_else_is_never_recommended() -> None:
    found = comparison(row("single", 1, 0.100), row("ddp", 2, 0.050, parity="differs"))
    said = advise(found)
    assert said[0].startswith("Recommended: single")
    assert "ddp x 2 2.00x, but it does not match single" in said[1]


def test_times_that_contradict_each_other_are_not_passed_on_without_a_word() -> None:
    steady = comparison(row("single", 1, 0.100), row("ddp", 2, 0.060))
    assert len(advise(steady)) == 3
    wide = replace(row("ddp", 2, 0.060), samples_per_second=Range(middle=1000.0, low=500.0, high=1100.0))
    other = replace(row("dp", 2, 0.060), step_seconds=spread(0.020))
    said = advise(comparison(row("single", 1, 0.100), wide, other))
    assert said[1].startswith("Recommended, if these times hold: ")
    assert said[0].startswith(
        "Do not rely on these times (ddp x 2: rounds differ too much; dp x 2: parts of a step do not add up"
    )
    # Three times as fast on two devices: the one device was held up.
    faster = advise(comparison(row("single", 1, 0.100), row("ddp", 2, 0.030)))
    assert "(ddp x 2: speed is more than the number of devices allows)" in faster[0]
    assert faster[1:] == ["Nothing is recommended: ddp x 2 cannot be 3.33x as fast."]


def test_what_could_not_be_checked_is_recommended_with_that_word() -> None:
    unknown = replace(row("ddp", 2, 0.050, parity="unknown"), why="it stalled")
    said = advise(comparison(row("single", 1, 0.100), unknown))
    assert said[0].startswith("Recommended: ddp x 2")
    assert said[0].endswith("; whether it matches single was not checked (it stalled).")


def test_more_threads_than_cores_are_the_first_thing_to_mend() -> None:
    crowded = replace(row("ddp", 4, 0.020), devices=["cpu"] * 4, threads=1)
    said = bottleneck(comparison(row("single", 1, 0.1), crowded, cores=2), crowded)
    assert "4 CPU devices x 1 thread share 2 cores" in said
    assert "use --devices 2" in said


def test_a_comparison_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    larger = LargerBatch(times=4, label="single", samples_per_second=9.0)
    found = comparison(row("single", 1, 0.1), row("ddp", 2, 0.06), larger_batch=larger)
    found.write(tmp_path)
    assert Comparison.read(tmp_path) == found


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"rows": [{}]}'])
def test_what_is_no_comparison_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "comparison.json").write_text(text)
    with pytest.raises(BadInput, match="is not a comparison"):
        Comparison.read(tmp_path)


def test_a_folder_without_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"does not exist"):
        Comparison.read(tmp_path)


def test_the_bubble_of_a_pipeline_is_a_part_of_its_step_and_named() -> None:
    one, cut = row("single", 1, 0.100), row("pipeline", 2, 0.080)
    assert "bubble" not in [column.header for column in step_table(comparison(one, cut)).columns]
    waits = {**cut.parts, "forward": 0.01, "backward": 0.02, "bubble": 0.036, "optimizer": 0.014}
    cut = replace(cut, parts=waits, without_communication_seconds=None, schedule="1f1b", accumulate=4)
    found = comparison(one, cut)
    assert cut.label == "pipeline x 2, 1f1b"
    assert "36.00" in next(list(column.cells) for column in step_table(found).columns if column.header == "bubble")
    assert "Bottleneck: the bubble of the pipeline. A rank waits 36.00 ms of 80.00 ms" in bottleneck(found, cut)
    sheet = parts_sheet(found)
    assert sheet.columns.index("bubble") == sheet.columns.index("communication") + 1
