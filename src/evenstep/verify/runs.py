"""The runs of a check: each made once, in processes of its own, and kept until all of it is judged."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evenstep.errors import EvenstepError, Preempted
from evenstep.launcher.prepare import Prepared
from evenstep.launcher.variants import run_apart, variant
from evenstep.verify.evidence import Evidence, Failure
from evenstep.verify.verdict import Way
from evenstep.worker.examine import FOLDER as EXAMINED
from evenstep.worker.main import Instead

Say = Callable[[str], None]


def one_device(way: Way) -> Way:
    """What a way is compared with."""
    return Way("single", way.devices[:1])


@dataclass
class Runs:
    """Runs by what they are; asked for twice, a run is made once."""

    base: Prepared
    folder: Path
    steps: int
    sync_batchnorm: bool = False
    say: Say = lambda line: None
    _made: dict[str, Any] = field(default_factory=dict)

    def watched(
        self, way: Way, precision: str, *, again: str = "", norms: str = "own", is_saved: bool = False, **changes: Any
    ) -> Any:
        """What a training of so many steps computed: Evidence, or the Failure that it ended with.

        Its checkpoints are kept where it `is_saved`, until they are forgotten.
        """
        how = re.sub(r"\W+", "-", again)
        name = "-".join(filter(None, [_name(way), precision, how, norms if norms != "own" else ""]))
        if changes.get("sync_batchnorm"):
            name += "-sync"
        if name not in self._made:
            self.say(f"{way.label} in {precision}{f', {again}' if again else ''}")
            instead = Instead("evenstep.worker.witness:perform_watched", {"norms": norms})
            every = {"checkpoint_every": max(1, self.steps // 2)} if is_saved else {}
            made = self._run(name, way, instead, {"precision": precision, **every, **changes})
            if isinstance(made, Evidence) and not is_saved:
                made.forget_checkpoints()
            self._made[name] = made
        return self._made[name]

    def examined(self, way: Way, precision: str, is_rough: bool) -> list[dict[str, Any]]:
        """What each rank found out about the task by itself; empty if that could not be done."""
        name = f"{_name(way)}-{precision}-examined"
        if name not in self._made:
            self.say(f"looking for the cause, {way.label}")
            instead = Instead("evenstep.worker.examine:perform_examination", {"is_rough": is_rough})
            found = self._run(name, way, instead, {"precision": precision, "accumulate": 1})
            paths = sorted((self.folder / name / EXAMINED).glob("rank*.json"))
            self._made[name] = [] if isinstance(found, Failure) else [json.loads(path.read_text()) for path in paths]
        result: list[dict[str, Any]] = self._made[name]
        return result

    def _run(self, name: str, way: Way, instead: Instead, changes: dict[str, Any]) -> Evidence | Failure:
        fields = {
            "strategy": way.strategy,
            "devices": way.devices,
            "accumulate": way.accumulate,
            "steps": self.steps,
            "audit": True,
            "keep": self.steps,
            "sync_batchnorm": self.sync_batchnorm and way.strategy in ("ddp", "fsdp"),
            **changes,
        }
        try:
            for _ in run_apart(variant(self.base, self.folder / name, **fields), instead):
                pass
        except Preempted:
            raise
        except EvenstepError as error:
            return Failure(str(error))
        return Evidence(self.folder / name)


def _name(way: Way) -> str:
    cut = f"-by-{way.accumulate}" if way.accumulate > 1 else ""
    return f"{way.strategy}-{len(way.devices)}{cut}"
