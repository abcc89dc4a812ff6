"""Pages: everything escaped, two scripts and no others, small however long the run; and the server of the live one."""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import math
import pickle
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.errors import BadInput
from evenstep.plan import Plan
from evenstep.record import Record, RecordWriter
from evenstep.report.comparison import Comparison
from evenstep.report.html.curves import MOST_SAMPLED, Curves, Quantiles, Sampled, Thinned
from evenstep.report.html.live import Watched, WatchServer
from evenstep.report.html.page import page_of_comparison, page_of_runs, write_page
from tests.browser import examples
from tests.pure.conftest import Ended

MOST_BYTES = 3_000_000


class Read(HTMLParser):
    """The tags of a page, the text that is read, and the scripts that would run."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.scripts: list[str] = []
        self.data: dict[str, object] = {}
        self._inside = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        is_data = dict(attrs).get("type") == "application/json"
        self._inside = "data" if is_data else tag if tag in ("script", "style") else ""

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts.append(data)
        elif self._inside == "data":
            self.data = json.loads(data)
        elif self._inside == "":
            self.text += data

    @property
    def policy(self) -> str:
        return next(str(attrs["content"]) for tag, attrs in self.tags if tag == "meta" and "http-equiv" in attrs)


def long_record(num_steps: int) -> Record:
    """A long run, made quickly."""
    found = Record(examples.plan(), machine=dict(examples.MACHINE))
    found.steps = [examples.step(number, loss) for number, loss in enumerate(examples.losses(num_steps))]
    return found


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Read:
    """The page of four strategies."""
    folder = tmp_path_factory.mktemp("compared")
    return Read(page_of_comparison(examples.comparison(folder), folder))


def test_a_page_runs_two_scripts_that_its_policy_names_and_allows_no_others(compared: Read) -> None:
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in compared.scripts]
    assert len(hashes) == 2
    assert f"script-src 'sha256-{hashes[0]}' 'sha256-{hashes[1]}';" in compared.policy
    assert compared.policy.startswith("default-src 'none';")
    assert "unsafe-eval" not in compared.policy
    assert "connect-src" not in compared.policy


def test_a_page_names_nothing_that_lies_elsewhere(compared: Read) -> None:
    links = [value for _, attrs in compared.tags for name, value in attrs.items() if name in ("src", "href")]
    assert links == ["data:,"]
    assert not [name for _, attrs in compared.tags for name in attrs if name.startswith("on")]


def test_a_page_of_a_comparison_says_in_words_all_that_its_charts_show(compared: Read) -> None:
    text = compared.text
    for words in (
        "ddp x 2",
        "1.70 x",
        "85%",
        "212 MiB",
        "4.2 MiB",
        "✗ differs",
        "try --sync-batchnorm",
        "without input",
    ):
        assert words in text
    assert "ddp: 1.70x on 2 devices, even memory" in text
    assert "evenstep compare digits --devices 1,2" in text
    assert "The Records of ddp x 4 are missing" in text


def test_nasty_names_stay_text(tmp_path: Path) -> None:
    nasty = examples.comparison(tmp_path, task=examples.NASTY, why=examples.NASTY)
    row = replace(nasty.rows[1], strategy=examples.NASTY, peak_bytes={examples.NASTY: 1})
    read = Read(page_of_comparison(replace(nasty, rows=[*nasty.rows, row]), tmp_path))
    assert len([tag for tag, _ in read.tags if tag == "script"]) == 3
    assert "img" not in [tag for tag, _ in read.tags]
    assert examples.NASTY in read.text
    assert {"speedup", "parts", "loss", "memory", "times"} <= set(read.data)


def test_nasty_machines_and_metrics_stay_text() -> None:
    record = examples.finished(examples.record("ddp", 2))
    record.machine = {examples.NASTY: [examples.NASTY, {"a": examples.NASTY}], "escape": "\x1b[31mred"}
    first = record.evaluations[0]
    record.evaluations[0] = replace(first, values={**first.values, examples.NASTY: 1.0})
    read = Read(page_of_runs([record]))
    assert len([tag for tag, _ in read.tags if tag == "script"]) == 3
    assert "\x1b" not in read.text
    assert "metric-1" in read.data


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_losses_that_are_no_numbers_leave_a_gap_and_are_counted(bad: float) -> None:
    record = examples.record("single", 1)
    record.steps[7] = replace(record.steps[7], loss=bad)
    record.steps[9] = replace(record.steps[9], loss=bad)
    read = Read(page_of_runs([record]))
    assert "(2 not finite)" in read.text
    assert "loss" in read.data


def test_an_empty_record_has_a_page() -> None:
    read = Read(page_of_runs([Record(examples.plan())]))
    assert "Nothing to draw yet" in read.text
    assert read.data == {}


def test_twelve_runs_of_one_name_are_told_apart() -> None:
    read = Read(page_of_runs([long_record(5) for _ in range(12)]))
    assert "run (12)" in read.text
    assert len([tag for tag, attrs in read.tags if attrs.get("data-chart") == "loss"]) == 13


def test_a_page_of_a_hundred_thousand_steps_is_small() -> None:
    record = long_record(100_000)
    assert len(page_of_runs([record]).encode()) < MOST_BYTES


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=300), st.integers(1, 20))
def test_thinning_keeps_both_ends_the_least_the_most_and_the_gaps(values: list[float], num_bins: int) -> None:
    points = Thinned.of(enumerate(values), num_bins).points()
    kept = [y for _, y in points]
    finite = [value for value in values if math.isfinite(value)]
    assert len(kept) <= 3 * 2 * num_bins + 2
    assert [x for x, _ in points] == sorted({x for x, _ in points})
    assert all(values[int(x)] == y for x, y in points if math.isfinite(y))
    assert not values or (points[0][0], points[-1][0]) == (0, len(values) - 1)
    assert len(values) > 2 * num_bins or len(kept) == len(values)
    assert any(not math.isfinite(value) for value in kept) == (len(finite) < len(values))
    if finite:
        shown = [value for value in kept if math.isfinite(value)]
        assert (min(shown), max(shown)) == (min(finite), max(finite))


def test_quantiles_of_nothing_are_none() -> None:
    assert Quantiles.of(Sampled([math.nan])) is None
    found = Quantiles.of(Sampled([1.0, 2.0, 3.0, math.nan]))
    assert found is not None
    assert (found.count, found.least, found.middle, found.most) == (3, 1.0, 2.0, 3.0)


def test_quantiles_of_many_values_are_those_of_a_sample_of_them() -> None:
    # Every hundredth is slow, as steps with a checkpoint are: values taken at equal distances could all be slow.
    sampled = Sampled(100.0 if number % 100 == 0 else number / 100_000 for number in range(100_000))
    found = Quantiles.of(sampled)
    assert found is not None
    assert len(sampled.values) == MOST_SAMPLED
    assert (found.count, found.least, found.most) == (100_000, 1e-5, 100.0)
    assert found.p5 == pytest.approx(0.05, abs=0.01)
    assert found.middle == pytest.approx(0.5, abs=0.03)
    assert found.p95 == pytest.approx(0.96, abs=0.01)


def test_of_a_long_run_no_more_is_kept_for_a_page_than_of_a_short_one() -> None:
    (step,) = examples.record("single", 1, num_steps=1).steps
    kept = [len(pickle.dumps(Curves(replace(step, step=number) for number in range(num)))) for num in (20_000, 100_000)]
    assert kept[1] < 1.1 * kept[0]


def test_a_comparison_reads_no_records_from_outside_its_folder(tmp_path: Path) -> None:
    examples.write_record(examples.record("ddp", 2, task="outside"), tmp_path / "outside")
    inside = tmp_path / "inside"
    inside.mkdir()
    made = Comparison(
        task="t", batch=64, precision="fp32", steps=1, rounds=1, rows=[examples.row("single", 1, runs=["../outside"])]
    )
    read = Read(page_of_comparison(made, inside))
    assert "outside" not in read.text
    assert "The Records of single are missing" in read.text


def test_a_comparison_without_rows_has_a_page(tmp_path: Path) -> None:
    made = Comparison(task="t", batch=64, precision="fp32", steps=1, rounds=1, rows=[], left_out={"ddp x 2": "no"})
    assert "ddp x 2 failed: no" in Read(write_page(made, tmp_path).read_text()).text


def test_report_writes_a_page_beside_the_first_run(evenstep: Callable[..., Ended], tmp_path: Path) -> None:
    for name in ("a", "b"):
        examples.write_record(examples.record("ddp", 2, num_steps=5, name=name), tmp_path / "runs" / name)
    ended = evenstep("report", "runs/a", "runs/b")
    assert (ended.code, ended.out.strip()) == (0, "runs/a/page.html")
    text = Read(Path("runs/a/page.html").read_text()).text
    assert "evenstep train --plan runs/b/plan.json" in text
    assert evenstep("report", "runs/a", "--out", "mine.html").out.strip() == "mine.html"


def test_report_finds_a_comparison(evenstep: Callable[..., Ended], tmp_path: Path) -> None:
    examples.comparison(tmp_path)
    assert evenstep("report", tmp_path).code == 0
    assert "Side by side" in (tmp_path / "page.html").read_text()


def test_helpful_errors(evenstep: Callable[..., Ended], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    examples.comparison(tmp_path)
    run = examples.write_record(examples.record("ddp", 2), tmp_path / "a")
    said = {
        "nowhere does not exist": evenstep("report", "nowhere"),
        "is a comparison, and a page holds one; give it alone": evenstep("report", run, tmp_path),
        "cannot be written (No such file or directory); give another path with --out": evenstep(
            "report", run, "--out", "no/such/page.html"
        ),
        "--watch serves the page of one run and writes none": evenstep("report", "--watch", run, run),
        "is a comparison, which is over": evenstep("report", "--watch", tmp_path),
        "is not there; give the folder of a run": evenstep("report", "--watch", "nowhere"),
    }
    monkeypatch.setitem(sys.modules, "bokeh", None)
    said["pip install 'evenstep[page]'"] = evenstep("report", run)
    for words, ended in said.items():
        assert ended.code == 2
        assert words in ended.err


@contextmanager
def served(run: Path) -> Iterator[WatchServer]:
    """The live page of a run."""
    with WatchServer(Watched(run), 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(server: WatchServer, path: str, method: str = "GET", host: str | None = None) -> tuple[int, str]:
    """What the server answers."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port)
    try:
        connection.request(method, path, headers={"Host": host} if host is not None else {})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_the_live_page_grows_with_the_record_and_says_when_it_ended(tmp_path: Path) -> None:
    record = examples.finished(examples.record("ddp", 2))
    with served(tmp_path) as server:
        assert "waiting for the first row" in ask(server, "/")[1]
        writer = RecordWriter(tmp_path, record.plan, record.machine)
        for begun, number in ((0, 3), (3, 40)):
            for step in record.steps[begun:number]:
                writer.append(step)
            writer.flush()
            news = json.loads(ask(server, "/news.json")[1])
            assert f"step {number}" in news["status"]
        assert len(news["charts"]["loss"]["sources"]["run 0 line"]["x"]) == 40
        assert record.summary is not None
        writer.append(record.summary)
        writer.close()
        ended = json.loads(ask(server, "/news.json")[1])
        assert ended["has_ended"]
        assert ended["status"].startswith("ended after 60 steps")
        assert ended["shape"] == news["shape"]
    with pytest.raises(ConnectionRefusedError):
        ask(server, "/")


def test_a_new_metric_changes_the_shape_of_the_live_page(tmp_path: Path) -> None:
    record = examples.finished(examples.record("ddp", 2))
    watched = Watched(tmp_path)
    writer = RecordWriter(tmp_path, record.plan, record.machine)
    writer.append(record.steps[0])
    writer.flush()
    before = watched.news()["shape"]
    writer.append(record.evaluations[0])
    writer.close()
    assert watched.news()["shape"] != before


def test_a_learning_rate_is_drawn_once_it_changes(tmp_path: Path) -> None:
    record = examples.record("single", 1, num_steps=3)
    watched = Watched(tmp_path)
    writer = RecordWriter(tmp_path, record.plan, record.machine)
    first, second, third = record.steps
    for step in (first, replace(second, lr=first.lr)):
        writer.append(step)
    writer.flush()
    before = watched.news()
    assert "lr" not in before["charts"]
    writer.append(replace(third, lr=first.lr / 2))
    writer.close()
    after = watched.news()
    assert "lr" in after["charts"]
    assert after["shape"] != before["shape"]


def test_a_row_that_is_still_being_written_is_left_for_next_time(tmp_path: Path) -> None:
    record = examples.record("single", 1, num_steps=3)
    run = examples.write_record(record, tmp_path / "run")
    whole = (run / "record.jsonl").read_bytes()
    (run / "record.jsonl").write_bytes(whole[:-20])
    watched = Watched(run)
    assert watched.news()["runs"][0][5] == "3"
    (run / "record.jsonl").write_bytes(whole)
    assert "memory" in watched.news()["charts"]


def test_another_run_of_as_many_rows_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    run = examples.write_record(examples.record("single", 1, num_steps=3), tmp_path / "run")
    watched = Watched(run)
    before = watched.news()["runs"]
    (run / "record.jsonl").rename(tmp_path / "old")  # Its inode is not given to the new one.
    examples.write_record(examples.record("ddp", 2, num_steps=3), run)
    assert watched.news()["runs"] != before


def test_samples_of_several_runs_are_counted_as_those_of_one() -> None:
    long, short = Sampled(float(one) for one in range(9 * MOST_SAMPLED)), Sampled([1e6] * MOST_SAMPLED)
    merged = Sampled.merged([long, short, Sampled()])
    assert (merged.count, merged.least, merged.most) == (10 * MOST_SAMPLED, 0, 1e6)
    assert len(merged.values) == MOST_SAMPLED
    assert merged.values.count(1e6) == MOST_SAMPLED / 10


def test_a_run_that_is_begun_anew_is_followed_from_its_start(tmp_path: Path) -> None:
    run = examples.write_record(examples.record("single", 1, num_steps=30), tmp_path / "run")
    watched = Watched(run)
    assert watched.news()["runs"][0][5] == "30"
    (run / "record.jsonl").unlink()
    examples.write_record(examples.record("single", 1, num_steps=3), run)
    assert watched.news()["runs"][0][5] == "3"


def test_steps_that_were_lost_in_a_crash_leave_the_curves_of_the_live_page(tmp_path: Path) -> None:
    record = examples.record("single", 1, num_steps=9)
    watched = Watched(tmp_path)
    for begun, number in ((0, 7), (4, 5)):
        writer = RecordWriter(tmp_path, record.plan, record.machine, {"step": begun})
        for step in record.steps[begun:number]:
            writer.append(replace(step, loss=float(number)))
        writer.close()
        news = watched.news()
    line = news["charts"]["loss"]["sources"]["run 0 line"]
    assert (line["x"], line["y"]) == ([1, 2, 3, 4, 5], [7.0, 7.0, 7.0, 7.0, 5.0])
    assert "step 5, epoch 1, restarted 1 x" in news["status"]


def test_a_step_that_is_short_beside_the_others_has_a_scale_of_its_own() -> None:
    records = [examples.record("single", 1, num_steps=3), examples.record("ddp", 2, num_steps=3)]
    assert Read(page_of_runs(records)).text.count("All steps share one scale.") == 2
    slow = [
        replace(lane, spans=[(name, 50 * a, 50 * b) for name, a, b in lane.spans])
        for lane in records[0].timelines[0].lanes
    ]
    records[0].timelines = [replace(records[0].timelines[0], lanes=slow)]
    assert Read(page_of_runs(records)).text.count("has its own scale") == 1


def test_the_server_answers_two_paths_by_its_own_name_and_nothing_else(tmp_path: Path) -> None:
    run = examples.write_record(examples.record("single", 1, num_steps=3), tmp_path / "run")
    with served(run) as server:
        assert server.server_address[0] == "127.0.0.1"
        assert ask(server, "/", host=f"localhost:{server.server_port}")[0] == 200
        for host in ("evil.example", f"evil.example:{server.server_port}", "127.0.0.1", ""):
            assert ask(server, "/news.json", host=host)[0] == 403
        for path in ("/record.jsonl", "/../record.jsonl", "/?x", "/news.json/", "/page.css", "/%2e%2e/"):
            assert ask(server, path)[0] == 404
        for method in ("POST", "PUT", "DELETE", "HEAD", "OPTIONS"):
            assert ask(server, "/", method)[0] == 501


def test_a_file_that_is_no_record_is_refused_by_the_live_page(tmp_path: Path) -> None:
    (tmp_path / "record.jsonl").write_text("[]\n")
    with pytest.raises(BadInput, match="is not a record of a run"):
        Watched(tmp_path).news()


def test_clients_that_ask_nothing_do_not_keep_others_out(tmp_path: Path) -> None:
    with served(tmp_path) as server, ExitStack() as stack:
        clients = [stack.enter_context(silent(server)) for _ in range(server.most_connections + 8)]
        assert ask(server, "/news.json")[0] == 200
        # The oldest were ended to make room: they read the end of the stream.
        assert [client.recv(1) for client in clients[:8]] == [b""] * 8


def silent(server: WatchServer) -> socket.socket:
    """A client that connects and asks nothing."""
    return socket.create_connection(("127.0.0.1", server.server_port), timeout=30)


def test_the_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with served(tmp_path) as server, pytest.raises(BadInput, match=f"port {server.server_port} is taken"):
        WatchServer(Watched(tmp_path), server.server_port)


def test_the_live_page_may_ask_its_own_server_alone(tmp_path: Path) -> None:
    run = examples.write_record(examples.record("single", 1, num_steps=3), tmp_path / "run")
    with served(run) as server:
        policy = Read(ask(server, "/")[1]).policy
    assert re.search(r"connect-src 'self';", policy)
    assert policy.startswith("default-src 'none';")


def test_plans_of_other_devices_are_shown_where_they_differ() -> None:
    records = [examples.record("single", 1), examples.record("ddp", 2)]
    text = Read(page_of_runs(records)).text
    assert "Plan, differences" in text
    assert isinstance(records[0].plan, Plan)
