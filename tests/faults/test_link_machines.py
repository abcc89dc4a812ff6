"""`--link` between real machines: two hosts with two ranks each, and a network that can be slowed down."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from evenstep.record import Record
from tests.faults.hosts import why_no_hosts
from tests.faults.test_machines import assert_ends, machines
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(200)
OPTIONS = ["--devices", "cpu,cpu", "--precision", "fp64"]


@pytest.fixture(autouse=True)
def _needs_hosts() -> None:
    if missing := why_no_hosts():
        pytest.skip(missing)


@pytest.mark.slow
@pytest.mark.parametrize("link", ["auto", None, "none"])
def test_exact_links_train_what_one_device_trains(tmp_path: Path, link: str | None) -> None:
    chosen = ["--link", link] if link is not None else []
    with machines(tmp_path, 2) as (first, second):
        for machine in (first, second):
            machine.train(first, "2", *OPTIONS, *chosen, "--epochs", "4", WIDTH="300")
        assert_ends(first, 0, 150)
        assert_ends(second, 0, 60)
        first.evenstep("train", "my_task.py", *OPTIONS[2:], "--name", "alone", "--epochs", "4", WIDTH="300")
        assert_ends(first, 0, 60)
        many, alone = (Record.read(first.folder / "runs" / name).losses for name in ("many", "alone"))
        assert many == pytest.approx(alone, rel=1e-9)
        for name, weight in first.weights("alone").items():
            torch.testing.assert_close(first.weights()[name], weight, rtol=1e-9, atol=1e-12)
        assert first.is_audited_clean(epochs=4)
        if link == "auto":
            said = first.host.said()
            assert "--link auto: " in said
            assert "between 2 machines" in said
            assert "Taken: " in said


@pytest.mark.slow
@pytest.mark.parametrize("mbit", [1000, 100])
def test_auto_trains_what_one_device_trains_over_a_link_of_20_ms(tmp_path: Path, mbit: int) -> None:
    if missing := why_no_hosts(are_delayed=True):
        pytest.skip(missing)
    with machines(tmp_path, 2, delay_ms=10) as (first, second):
        for machine in (first, second):
            machine.host.cap(mbit)
            machine.train(first, "2", *OPTIONS, "--link", "auto", "--epochs", "6", WIDTH="30000")
        assert_ends(first, 0, 150, "--link auto: ", "Taken: ")
        assert_ends(second, 0, 60)
        first.evenstep("train", "my_task.py", *OPTIONS[2:], "--name", "alone", "--epochs", "6", WIDTH="30000")
        assert_ends(first, 0, 60)
        many, alone = (Record.read(first.folder / "runs" / name).losses for name in ("many", "alone"))
        assert many == pytest.approx(alone, rel=1e-9)
        assert first.is_audited_clean(epochs=6)
        latency_ms, measured_mbit = _measured(first.host.said())
        assert 10 <= latency_ms < 100
        assert measured_mbit <= 1.1 * mbit


def _measured(said: str) -> tuple[float, float]:
    """Milliseconds of a small message and megabits a second, as --link auto printed them."""
    found = re.search(r"\(([\d.e+]+) ms,\s+([\d.e+]+)\s+Mbit/s", said)
    assert found is not None, said
    return float(found[1]), float(found[2])


@pytest.mark.slow
def test_each_byte_crosses_the_network_once_for_each_machine(tmp_path: Path) -> None:
    sent = {}
    for link in ("none", "auto-by-default"):
        (tmp_path / link).mkdir()
        with machines(tmp_path / link, 2) as (first, second):
            chosen = ["--link", "none"] if link == "none" else []
            for machine in (first, second):
                machine.train(first, "2", *OPTIONS, *chosen, "--steps", "20", WIDTH="20000")
            assert_ends(first, 0, 150)
            assert_ends(second, 0, 60)
            sent[link] = int(first.host.run("cat", "/sys/class/net/eth0/statistics/tx_bytes"))
    # A ring of four ranks sends 1.5 times the gradients, two leaders once.
    assert sent["auto-by-default"] < 0.75 * sent["none"]


@pytest.mark.slow
@pytest.mark.parametrize("link", ["local:5", "streaming:4:2", "powersgd:1", "topk:0.2", "bf16"])
def test_a_lossy_link_continues_after_a_machine_was_lost(tmp_path: Path, link: str) -> None:
    with machines(tmp_path, 2) as (first, second):
        options = [*OPTIONS, "--link", link, "--restarts", "2", "--checkpoint-every", "5"]
        for machine in (first, second):
            machine.train(first, "1:2", *options, "--epochs", "4", WIDTH="64", STEP_SECONDS="0.1")
        wait_until(lambda: first.has_taken(11), seconds=100)
        second.host.kill()
        assert_ends(first, 0, 150)
        assert first.is_audited_clean(epochs=4)
        assert len(Record.read(first.folder / "runs" / "many").losses) == 40
