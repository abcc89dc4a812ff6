"""One training in several ways: prepared once, run as often as one likes, each time into a folder of its own.

base = prepare("digits", {"name": "choice"})
two = variant(base, base.folder / "ddp-2", strategy="ddp", devices=("cpu", "cpu"), steps=20)
for event in run_apart(two): ...
Record.read(two.folder)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from evenstep.launcher.meeting import OneMachine
from evenstep.launcher.prepare import Prepared, write_plan
from evenstep.launcher.supervise import Supervisor, of_plan
from evenstep.launcher.train import refuse_fork_after_cuda
from evenstep.worker.job import Event
from evenstep.worker.main import Instead


def variant(base: Prepared, folder: Path, **changes: Any) -> Prepared:
    """The same task with some fields of its plan changed; `steps` takes the place of epochs, and the reverse."""
    if changes.get("steps") is not None:
        changes.setdefault("epochs", None)
    if changes.get("epochs") is not None:
        changes.setdefault("steps", None)
    plan = replace(base.plan, name=folder.name, **changes)
    write_plan(folder, plan)
    return replace(base, plan=plan, folder=folder, num_steps=plan.num_steps(base.lengths))


def run_apart(prepared: Prepared, instead: Instead | None = None) -> Iterator[Event]:
    """Run it in processes of its own, single and dp too: what they hold in memory is then theirs alone."""
    if prepared.spec is None:
        refuse_fork_after_cuda()
    return Supervisor(of_plan(prepared, instead), OneMachine()).events()
