"""Python's fork server and its resource tracker are killed: a crash like any other, and no traceback of it."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable

import psutil
import pytest

from tests.faults.runs import LONGEST_SECONDS, Ended, audit, fail, nothing_is_left, start, steps, train, weights

pytestmark = pytest.mark.fresh
EVERY_THIRD = ("--checkpoint-every", "3", "--audit")
STEPS = list(range(1, 23))


def is_exact(undisturbed: Callable[..., bytes]) -> bool:
    """Nothing lost, nothing done twice, the same weights."""
    exact = audit().startswith("62 samples x 2 epochs, 0 repeated, 0 missed")
    return exact and steps() == STEPS and weights() == undisturbed()


def says_nothing_of_python(ended: Ended) -> bool:
    return not any(word in ended.err for word in ("Traceback", "resource_tracker", "exit code 255"))


@pytest.mark.slow
def test_a_killed_fork_server_is_named_and_the_run_goes_on(undisturbed: Callable[..., bytes]) -> None:  # 32
    ended = train(*EVERY_THIRD, "--restarts", "1", fault=fail("kill the server", rank=1, step=8, once=True))
    assert ended.code == 0, ended.err
    assert "the fork server, from which all ranks are forked, was ended by SIGKILL" in ended.err
    assert "restart 1 of 1, from step-00000006" in ended.err
    assert says_nothing_of_python(ended), ended.err
    assert is_exact(undisturbed)


@pytest.mark.slow
def test_without_restarts_it_is_one_error_of_ours() -> None:  # 32
    ended = train(fault=fail("kill the server", rank=0, step=3))
    assert ended.code == 1
    assert ended.report[0] == "the fork server, from which all ranks are forked, was ended by SIGKILL"
    assert says_nothing_of_python(ended), ended.err


@pytest.mark.slow
def test_killed_again_while_it_starts_it_is_started_once_more(undisturbed: Callable[..., bytes]) -> None:  # 32
    fault = fail("kill the server", rank=1, step=8, once=True)
    launcher = start(*EVERY_THIRD, "--restarts", "3", fault=fault)
    first = next_server(launcher.pid, ())
    second = next_server(launcher.pid, (first,))
    psutil.Process(second).send_signal(signal.SIGKILL)
    out, err = launcher.communicate(timeout=LONGEST_SECONDS)
    nothing_is_left(seconds=2)
    ended = Ended(launcher.returncode, out, err)
    assert ended.code == 0, ended.err
    # The ranks may have saved once more before the second kill.
    assert re.search(r"restart 2 of 3, from step-0000000[69]", ended.err), ended.err
    assert says_nothing_of_python(ended), ended.err
    assert is_exact(undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", [pytest.param("kill the tracker", marks=pytest.mark.slow), "kill the tracker and a rank"]
)
def test_a_killed_tracker_is_replaced_without_a_word(fault: str, undisturbed: Callable[..., bytes]) -> None:  # 32
    ended = train(*EVERY_THIRD, "--restarts", "1", fault=fail(fault, rank=1, step=8, once=True))
    assert ended.code == 0, ended.err
    assert says_nothing_of_python(ended), ended.err
    assert is_exact(undisturbed)


def next_server(launcher: int, known: tuple[int, ...]) -> int:
    """The fork server that comes after those that are known; looks without a pause, to find it before it is ready."""
    while True:
        for process in psutil.Process(launcher).children():
            if process.pid not in known and "forkserver" in " ".join(process.cmdline()):
                return process.pid
