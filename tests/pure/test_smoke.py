"""`make test`, and so `.ci/run`, covers a fault of each group: the tests marked `smoke`."""

from __future__ import annotations

from pathlib import Path

FAULTS = Path(__file__).parents[1] / "faults"
GROUPS = {
    "crash": "test_crashes.py",
    "stall": "test_stalls.py",
    "disk": "test_checkpoint_writes.py",
    "link between machines": "test_machines.py",
    "Slurm": "test_slurm.py",
}


def test_each_group_of_faults_has_a_test_that_always_runs() -> None:
    marked = {file.name for file in FAULTS.glob("test_*.py") if "@pytest.mark.smoke\n" in file.read_text()}
    assert marked == set(GROUPS.values())
