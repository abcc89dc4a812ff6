"""Signs of life: written by one process, read by another that gets no answer from it."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

from evenstep.worker.pulse import BACKWARD, EVALUATING, FORWARD, PHASES, SAVING, Pulse, make_beats, open_pulse


def test_what_a_stopped_process_was_doing_can_still_be_read(tmp_path: Path) -> None:
    beats = make_beats(tmp_path / "beats", 2)
    ready = multiprocessing.get_context("fork").Event()

    def work() -> None:
        pulse = open_pulse(str(tmp_path / "beats"), 1)
        pulse.step = 7
        pulse.beat(FORWARD)
        ready.set()
        os.kill(os.getpid(), signal.SIGSTOP)

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    assert ready.wait(10)
    first, second = beats.read()
    process.kill()
    process.join()
    assert (first.count, first.where) == (0, "starting up")
    assert (second.count, second.where) == (1, "at step 7, in forward")
    assert second.progress > first.progress


def test_no_two_beats_look_alike_though_the_slot_is_opened_again(tmp_path: Path) -> None:
    beats = make_beats(tmp_path / "beats", 1)
    open_pulse(str(tmp_path / "beats"), 0).beat(FORWARD)
    open_pulse(str(tmp_path / "beats"), 0).beat(FORWARD)
    assert beats.read()[0].count == 2


def test_what_was_done_before_goes_on_after_a_save() -> None:
    pulse = Pulse()
    pulse.beat(BACKWARD)
    with pulse.during(SAVING):
        assert pulse.read().phase == SAVING
    assert pulse.read().phase == BACKWARD


def test_every_phase_has_a_phrase() -> None:
    assert PHASES[EVALUATING] == "evaluating"
    assert len(set(PHASES)) == len(PHASES)
