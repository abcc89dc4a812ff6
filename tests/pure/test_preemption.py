"""What ranks ask of each other, as one number that is summed."""

from __future__ import annotations

import os
import signal

import pytest

from evenstep.checkpoint.save_interval import SaveInterval
from evenstep.distributed.preemption import Requests
from evenstep.training.loss_weighting import MeanLoss
from evenstep.training.optimizer_step import WeightUpdate
from evenstep.training.step import AgreedLater, Done


def total(*every: Requests) -> float:
    return sum(one.encode() for one in every)


def test_one_rank_that_is_signalled_stops_all_of_them() -> None:
    first, second = Requests(), Requests()
    with second.listening(signal.SIGUSR1):
        os.kill(os.getpid(), signal.SIGUSR1)
        encode = total(first, second)
    for one in (first, second):
        one.agree(encode)
        assert one.stop
        assert not one.save


def test_a_save_by_the_clock_is_no_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evenstep.checkpoint.save_interval.SAVE_SECONDS", -1.0)
    every, interval = [Requests() for _ in range(300)], SaveInterval()
    for one in every:
        one.save_is_due = interval.is_due
    every[0].agree(total(*every))
    assert every[0].save
    assert not every[0].stop
    monkeypatch.setattr("evenstep.checkpoint.save_interval.SAVE_SECONDS", 30.0)
    interval.saved(0.1)
    every[0].agree(every[0].encode())
    assert not every[0].save


def test_the_second_ctrl_c_does_not_wait_and_a_second_sigterm_does() -> None:
    asked = Requests()
    with asked.listening(signal.SIGINT, signal.SIGTERM):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked.stop_requested
        assert not asked.is_interrupt
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            signal.pause()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_eager_step_among_replayed_ones_counts_its_requests_when_it_is_read() -> None:
    """On another rank the same step is replayed, and the host learns of a request some steps later."""
    requests = Requests()
    requests.stop_requested = True
    requests.agree(requests.encode())
    step = AgreedLater(Done(MeanLoss(1.0, 2.0), WeightUpdate(True, None)), requests)
    requests.agreed = False, False
    assert float(step.read()) == 1.0
    assert requests.agreed == (True, False)
