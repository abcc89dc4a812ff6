"""Signs of life: written by one process, read by another that gets no answer from it."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

from evenstep.distributed.heartbeat import (
    EVALUATING,
    FORWARD,
    PHASES,
    make_heartbeats,
    open_heartbeat,
)


def test_what_a_stopped_process_was_doing_can_still_be_read(tmp_path: Path) -> None:
    heartbeats = make_heartbeats(tmp_path / "beats", 2)
    ready = multiprocessing.get_context("fork").Event()

    def work() -> None:
        heartbeat = open_heartbeat(str(tmp_path / "beats"), 1)
        heartbeat.step = 7
        heartbeat.beat(FORWARD)
        ready.set()
        os.kill(os.getpid(), signal.SIGSTOP)

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    assert ready.wait(10)
    first, second = heartbeats.read()
    process.kill()
    process.join()
    assert (first.count, first.where) == (0, "starting up")
    assert (second.count, second.where) == (1, "at step 7, in forward")
    assert second.progress > first.progress


def test_no_two_heartbeats_look_alike_though_the_slot_is_opened_again(tmp_path: Path) -> None:
    heartbeats = make_heartbeats(tmp_path / "beats", 1)
    open_heartbeat(str(tmp_path / "beats"), 0).beat(FORWARD)
    open_heartbeat(str(tmp_path / "beats"), 0).beat(FORWARD)
    assert heartbeats.read()[0].count == 2


def test_every_phase_has_a_phrase() -> None:
    assert PHASES[EVALUATING] == "evaluating"
    assert len(set(PHASES)) == len(PHASES)
