"""The arithmetic of the benchmarks, the pages made from their results, and that one of them runs. Never a time."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import random
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))

import growth  # noqa: E402
import harness  # noqa: E402
import peers  # noqa: E402
import suite  # noqa: E402
import table  # noqa: E402
import table_gpu  # noqa: E402
from harness import Entry, Plain, Race, Result, Row  # noqa: E402
from models import MLP  # noqa: E402


def noisy(median: float, count: int, seed: int) -> list[float]:
    draw = random.Random(seed)
    return [median * (1 + draw.uniform(-0.05, 0.05)) for _ in range(count)]


def test_a_ratio_is_the_median_of_the_rounds_and_its_interval_holds_the_truth() -> None:
    inside = 0
    for seed in range(40):
        found = harness.compared(noisy(2.0, 15, seed), noisy(3.0, 15, 1000 + seed))
        assert found.low <= found.ratio <= found.high
        inside += found.low <= 1.5 <= found.high
    assert inside >= 34


def test_a_drift_that_both_share_does_not_touch_the_ratio() -> None:
    drift = [1.0, 1.5, 4.0, 2.0]
    found = harness.compared([2 * one for one in drift], [3 * one for one in drift])
    assert (found.ratio, found.low, found.high) == (1.5, 1.5, 1.5)


def test_rounds_go_forwards_and_backwards() -> None:
    turns: list[str] = []

    def block(name: str) -> harness.Block:
        return lambda: float(len(turns)) if turns.append(name) is None else 0.0

    figures = harness.interleaved({name: block(name) for name in "ABC"}, 2)
    assert turns == list("ABCCBA")
    assert figures == {"A": [1.0, 6.0], "B": [2.0, 5.0], "C": [3.0, 4.0]}


ENTRIES = {
    "ours, best": Entry("ours", "best"),
    "ours": Entry("ours", "default"),
    "ours, whole": Entry("ours", "best", goal=0.98, against="bare"),
    "bare": Entry("limit", "best", goal=0.98),
    "bare, again": Entry("control", "best", against="bare"),
    "peer, default": Entry("peer", "default", goal=1.0),
    "peer, best": Entry("peer", "best", goal=3.0),
    "gone": Entry("peer", "best", goal=1.0),
}


def raced(is_rate: bool = False) -> Race:
    times = {"ours, best": 1.0, "ours": 2.0, "ours, whole": 1.25, "bare": 0.5, "bare, again": 0.55}
    times |= {"peer, default": 6.0, "peer, best": 2.0}
    drift = [0.9, 1.0, 1.1, 1.3, 1.2]
    wobble = [1.0, 1.01, 0.99, 1.02, 0.98]
    figures = {
        name: [
            (1 / (one * a) if is_rate else one * a) * (b if name.startswith("peer") or "again" in name else 1.0)
            for a, b in zip(drift, wobble, strict=True)
        ]
        for name, one in times.items()
    }
    return harness.judge("work", "ms", ENTRIES, figures, is_rate, {"gone": "not installed"})


@pytest.mark.parametrize("is_rate", [False, True])
def test_every_racer_is_judged_against_ours_of_its_own_setting(is_rate: bool) -> None:
    rows = {row.name: row for row in raced(is_rate).rows}
    ratios = {name: round(row.ratio, 2) for name, row in rows.items() if row.ratio is not None}
    assert ratios["bare"] == 0.5
    assert ratios["peer, default"] == 3.0
    assert ratios["peer, best"] == 2.0
    assert ratios["ours, whole"] == 0.4
    assert rows["ours, best"].ratio is None
    assert rows["ours"].ratio is None
    assert "gone" not in rows


def test_a_goal_is_met_by_the_lower_end_and_a_miss_says_by_how_much() -> None:
    verdicts = {row.name: row.verdict for row in raced().rows}
    assert verdicts["peer, default"] == "1: met"
    assert verdicts["peer, best"] == "3: missed by 33 %"
    assert Row("a", "peer", "", 1.0, 1.1, 0.9, 1.2, 1.0).verdict == "1: not sure"
    assert Row("a", "peer", "", 1.0, 1.1, 1.1, 1.1, 1.0).verdict == "1: one block says nothing"
    assert Row("a", "peer", "", 1.0).verdict == ""


def test_the_control_says_what_may_not_be_claimed() -> None:
    spread = raced().control_spread
    assert spread is not None
    assert 0.08 < spread < 0.14
    assert harness.notes_of(raced())[0].startswith("Control: nothing smaller than ")
    assert "gone did not race: not installed" in harness.notes_of(raced())


def test_a_block_of_several_ranks_takes_as_long_as_the_slowest() -> None:
    assert harness.slowest([{"a": [1.0, 5.0]}, {"a": [2.0, 4.0]}]) == {"a": [2.0, 5.0]}


def written(folder: Path, name: str, result: Result, when: str) -> None:
    machine = {"python": "3.11", "torch": "2.13", "system": "Linux", "cores": 2, "cards": []}
    content = {"command": "python bench/c1_step.py", "when": when, "machine": machine, "peers": {"accelerate": "1.15"}}
    (folder / name).write_text(json.dumps({**content, "results": asdict(result)}))


def fixture() -> Result:
    plain = Plain("Memory", ["a", "b"], [["1 | 2", "3"]], ["a note"])
    return Result("C1", "cost of a step", "at most 1.02 x", [raced()], [plain], {"ours_over_raw": 2.0})


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    written(tmp_path, "a.json", fixture(), "2026-11-15T10:00:00")
    assert table.newest(tmp_path)["C1"].result == fixture()
    assert suite.headline(tmp_path / "a.json") == {"ours_over_raw": 2.0}


def test_the_newest_result_counts_and_foreign_files_do_not(tmp_path: Path) -> None:
    written(tmp_path, "b.json", fixture(), "2026-11-15T10:00:00")
    written(tmp_path, "a.json", Result("C1", "newer", ""), "2026-11-16T10:00:00")
    (tmp_path / "other.json").write_text(json.dumps({"results": {"raw again": {}}}))
    (tmp_path / "list.json").write_text(json.dumps({"results": [1, 2]}))
    assert {key: one.result.title for key, one in table.newest(tmp_path).items()} == {"C1": "newer"}


def test_pages_show_what_is_there_and_say_what_is_not(tmp_path: Path) -> None:
    written(tmp_path, "a.json", fixture(), "2026-11-15T10:00:00")
    found = table.newest(tmp_path)
    page = "\n".join(table.page(found, None))
    assert "| peer, best | best | 2.18 | 2.00 (1.96 to 2.04) | 3: missed by 33 % |" in page
    assert "- gone did not race: not installed" in page
    assert "| 1 \\| 2 | 3 |" in page
    assert "Not measured yet: no result of `bench/c4_ddp.py` is in `bench/results`." in page
    short = table.summary(found, None)
    assert any("| C4 | not measured yet |" in line for line in short)
    assert any("missed by" in line and line.startswith("| C1 |") for line in short)


def of_a_gpu(folder: Path, name: str = "a-gpu-h200.json", when: str = "2026-11-15T10:00:00") -> None:
    """As bench/gpu.py writes it: a race of steps, the same compiled, one of input."""

    def row(ms: float, wobble: float = 0.01) -> dict[str, Any]:
        return {"figures_ms": [ms * (1 + wobble * one) for one in (0, 1, -1)], "loss_after": 0.5, "peak_bytes": 2**21}

    def goal(text: str, wanted: float, *figures: float, is_least: bool = True) -> dict[str, Any]:
        ratio = dict(zip(("ratio", "low", "high"), figures, strict=True))
        return {"text": text, "wanted": wanted, "is_least": is_least, "is_met": True, **ratio}

    check = {"check": {"steps": 50, "start_loss": 2.0, "tolerance": 0.2}, "absent": {"Fabric": "ValueError: no"}}
    rows = {"raw": row(8.0), "ours": row(1.0, 0), "limit: graph": row(0.5), "raw, again": row(10.0, 0)}
    eager = goal("raw / ours, the best eager peer", 6.0, 8.0, 7.9, 8.1)
    compiled = {
        "raw": row(6.0),
        "ours": row(3.0),
        "ours, compiled": row(2.0, 0),
        "idle": {**row(1.0), "figures_ms": []},
    }
    nested = {"text": "resident / DataLoader", "wanted": 3.0, "is_least": True, "is_met": False}
    nested["got"] = {"first": 1.0, "second": 2.0, "ratio": 2.4, "low": 2.0, "high": 2.5}
    rates = {"default: thread, pinned, own stream": [4.0], "default, again": [4.0], "resident": [9.0]}
    rates |= {"DataLoader, slow": [1.0], "DataLoader, quick": [3.0], "limit: copies": [16.0]}
    results = {
        "G1": {"MLP 2, fp32": {"rows": rows, "goals": [eager, "raw: 2 s to start"], **check}},
        "G1 compiled": {"MLP 2, fp32": {"rows": compiled, "goals": [], **check}},
        "G2": {"pictures": {"rates": rates, "goals": [nested]}},
        "G3": {"error": "OutOfMemoryError: too large"},
        "G4": {"MLP 2": {"rows": {"raw": row(8.0)}, "goals": ["not judged"], "absent": {"ours": "ValueError: no"}}},
        "seconds": {"G1": 3.0},
    }
    machine = {
        "python": "3.12",
        "torch": "2.11",
        "system": "Linux",
        "cores": 16,
        "cards": ["NVIDIA H200"],
        "cuda": "13",
    }
    content = {"command": "python bench/gpu.py", "when": when, "machine": machine, "peers": {"accelerate": "1.15"}}
    (folder / name).write_text(json.dumps({**content, "results": results}))


def test_the_page_has_every_race_of_a_gpu(tmp_path: Path) -> None:
    of_a_gpu(tmp_path)
    page = "\n".join(table.gpu_page(table_gpu.newest(tmp_path)))
    assert "- Goal: raw / ours, the best eager peer: at least 6; 8.00 (7.90 to 8.10): met by 33 %." in page
    assert "| raw | 8 | 8.00 (7.92 to 8.08) | 0.5 | 2 |" in page
    assert "| limit: graph | 0.5 | 0.500 (0.495 to 0.505) | 0.5 | 2 |" in page
    assert "| control: raw, again | 10 | 0.800 (0.792 to 0.808) of the first | 0.5 | 2 |" in page
    assert "- Control: nothing smaller than 20.8 % is claimed." in page
    assert "- Share of the limit, graph: 50.0 % (49.5 % to 50.5 %)." in page
    assert "- raw: 2 s to start" in page
    assert "- Fabric did not race: ValueError: no" in page
    assert "- G3 ended early: OutOfMemoryError: too large" in page
    assert "- G4, MLP 2: ours did not race: ValueError: no" in page
    assert "driver not recorded, CUDA 13, 16 CPU cores" in page


def test_what_is_compiled_is_compared_with_ours_compiled_and_only_those_who_raced(tmp_path: Path) -> None:
    of_a_gpu(tmp_path)
    page = "\n".join(table.gpu_page(table_gpu.newest(tmp_path)))
    assert "| racer | ms a step | ours, compiled, is x as fast (95 %) | loss after | peak MiB |" in page
    assert "| ours | 3 | 1.500 (1.485 to 1.515) | 0.5 | 2 |" in page
    assert "idle" not in page


def test_input_on_a_gpu_is_a_rate(tmp_path: Path) -> None:
    of_a_gpu(tmp_path)
    page = "\n".join(table.gpu_page(table_gpu.newest(tmp_path)))
    assert "| racer | samples/s | default is x as fast (95 %) |" in page
    assert "| DataLoader, quick | 3 | 1.333 (one block) |" in page
    assert "| resident | 9 | 3.00 (one block) x DataLoader, quick |" in page
    assert "- Goal: resident / DataLoader: at least 3; 2.40 (2.00 to 2.50): missed by 20 %." in page


def test_a_goal_on_a_gpu_is_judged_by_its_interval_and_beside_the_control() -> None:
    def outcome(*figures: float, is_least: bool = True, spread: float = 0.0) -> str:
        return table_gpu.Goal("", 2.0, is_least, *figures, spread).outcome

    assert outcome(2.2, 2.1, 2.3) == "met by 10 %"
    assert outcome(2.2, 1.9, 2.3) == "not sure: 10 % beyond"
    assert outcome(1.5, 1.4, 2.3) == "missed by 25 %"
    assert outcome(1.9, 1.8, 1.95, is_least=False) == "met by 5 %"
    assert outcome(1.9, 1.8, 2.1, is_least=False) == "not sure: 5 % beyond"
    assert outcome(3.0, 2.0, 4.0, is_least=False) == "missed by 50 %"
    assert outcome(2.2, 2.1, 2.3, spread=0.2) == "met by 10 %, within the control"


def test_the_summary_has_a_line_for_each_goal_on_a_gpu_and_reports_its_absence(tmp_path: Path) -> None:
    assert table_gpu.newest(tmp_path) is None
    assert any(line.startswith("| One H200 | not measured yet |") for line in table.summary({}, None))
    missing = "Not measured yet: no `*-gpu-h200.json` of `bench/gpu.py` is in `bench/results`."
    assert missing in table.page({}, None)
    of_a_gpu(tmp_path)
    of_a_gpu(tmp_path, "0-gpu-h200.json", "2026-11-16T10:00:00")
    gpu = table_gpu.newest(tmp_path)
    assert gpu is not None
    assert gpu.file == "0-gpu-h200.json"
    lines = [line for line in table.summary({}, gpu) if line.startswith("| G")]
    assert lines == ["| G1 | MLP 2 | raw | 8 | 6: met by 33 % |"]


def test_the_readme_shows_ours_beside_one_competitor_and_skips_what_was_not_measured(tmp_path: Path) -> None:
    written(tmp_path, "c4.json", replace(fixture(), id="C4"), "2026-11-15T10:00:00")
    shown = table.Shown("a step", "C4", raced().title, "peer, best", "a peer")
    rows = [line for line in table.speed(table.newest(tmp_path), None, (shown, *table.README_ROWS)) if "|" in line]
    assert rows[2:] == ["| a step | 1.1 ms | a peer | 2.00 (1.96 to 2.04) | [C4] |"]


def test_a_wide_table_is_shown_as_several_with_the_same_first_columns() -> None:
    wide = Plain("", [f"head {n}" for n in range(9)], [["a key", "another", *[30 * str(n) for n in range(7)]]])
    parts = table.narrow(wide)
    assert [part.heads[:2] for part in parts] == [["head 0", "head 1"]] * len(parts)
    assert [head for part in parts for head in part.heads[2:]] == wide.heads[2:]
    assert max(len(line) for part in parts for line in table.markdown(part.heads, part.rows)) <= table.WIDEST


def test_only_what_is_between_the_markers_is_replaced() -> None:
    begin, end = table.BEGIN.format("x"), table.END.format("x")
    text = table.put(f"before\n{begin}\nold\n{end}\nafter\n", "x", ["new"])
    assert text == f"before\n{begin}\n\nnew\n\n{end}\nafter\n"
    assert table.put(text, "x", ["new"]) == text
    with pytest.raises(SystemExit, match="no place for y"):
        table.put(text, "y", ["new"])


def test_pages_of_this_repository_are_those_of_its_results() -> None:
    subprocess.run([sys.executable, str(BENCH / "table.py"), "--check"], check=True, timeout=60)


def test_a_slope_is_the_power_with_which_a_cost_grows() -> None:
    sizes = [10.0, 100.0, 1000.0]
    assert growth.slope(sizes, [3 * one**0.5 for one in sizes]) == pytest.approx(0.5)
    assert growth.slope(sizes, [7.0, 7.0, 7.0]) == pytest.approx(0.0)


def test_a_racer_that_learns_something_else_is_not_in_the_race() -> None:
    same, again = (peers.raw(MLP, peers.Place(), is_best) for is_best in (True, False))
    half = peers.raw(MLP, peers.Place(0, 2), True)
    absent = peers.learned_the_same({"same": same, "again": again, "half": half}, "same")
    assert list(absent) == ["half"]
    assert absent["half"].startswith("learned something else: loss ")


def test_a_loop_that_owns_its_thread_steps_when_it_is_its_turn() -> None:
    seen: list[int] = []

    def loop(batches: Any) -> None:
        for batch in batches:
            seen.append(len(batch[0]))

    handed = peers.Handed(peers.Feed(MLP), loop)
    assert seen == []
    handed.run(3)
    assert seen == [MLP.batch] * 3
    handed.run(2)
    assert len(seen) == 5


def test_a_loop_that_fails_in_its_thread_says_so() -> None:
    def loop(batches: Any) -> None:
        next(iter(batches))
        raise ValueError("no such batch")

    handed = peers.Handed(peers.Feed(MLP), loop)
    with pytest.raises(ValueError, match="no such batch"):
        handed.run(3)


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_quick_ends_with_one_json_object() -> None:
    done = subprocess.run([sys.executable, str(BENCH / "quick.py"), "C1"], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert list(found) == ["C1"]
    assert {"ours_over_raw", "train_over_raw"} <= found["C1"].keys()
    assert all(isinstance(one, float) and one > 0 for one in found["C1"].values() if one is not None)


def test_a_benchmark_that_leaves_no_result_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(suite.PARTS, "C3", suite.Part("not_there.py", "nothing"))
    assert suite.run("C3", tmp_path / "out.json") == "there is no bench/not_there.py yet"
    monkeypatch.setitem(suite.PARTS, "C3", suite.Part("harness.py", "nothing"))
    assert suite.run("C3", tmp_path / "out.json") == "exit code 0"


@pytest.mark.parametrize("script", sorted(BENCH.glob("*.py")), ids=lambda script: script.name)
def test_what_a_benchmark_imports_of_ours_is_there(script: Path) -> None:
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] in ("evenstep", "tests"):
            module = importlib.import_module(str(node.module))
            for name in node.names:
                assert hasattr(module, name.name) or importlib.util.find_spec(f"{node.module}.{name.name}"), name.name
