"""Random kills of every kind of process; `python -m tests.faults.kills --kills 250` is the whole trial."""

from __future__ import annotations

import pytest

from tests.faults.kills import ANY, KINDS, trial


# A fork server that is itself a fork (tests/forked.py) has no command line to be found by.
@pytest.mark.fresh
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_after_random_kills_nothing_is_lost_or_done_twice_and_no_traceback_is_shown() -> None:
    for kind, count in trial([*KINDS, ANY], kills=12):
        assert count.killed == 2
        assert count.is_well, (kind, count)
