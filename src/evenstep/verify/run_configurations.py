"""The runs of a check: each is run once, in new processes, and kept until the check is done."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import count, groupby
from pathlib import Path
from typing import Any

from evenstep.errors import EvenstepError, Preempted
from evenstep.launcher.launch import run_in_processes, variant
from evenstep.launcher.prepare import Prepared
from evenstep.strategy_facts import REFERENCE, STRATEGIES
from evenstep.verify.operation_bits import Traced, perform_bits
from evenstep.verify.recorder import Evidence, Failure, Norms, perform_watched
from evenstep.verify.task_experiments import BY_RANK, TESTS, perform_examination
from evenstep.verify.task_experiments import FOLDER as EXAMINED
from evenstep.verify.verdict_table import Configuration
from evenstep.worker.main import Perform

Log = Callable[[str], None]
MAX_CHARACTERS = 100
SEARCH_SECONDS = 75.0
"""Time limit of the search for causes, over all configurations; after it no further run is started."""
STALL_SECONDS, TIMES_SLOWEST = 30.0, 20
"""A run without progress for this long, and for this many times the slowest step of one device, hangs. Without this
limit, ranks that wait for each other (one skips a layer under fsdp) would wait the ten minutes of a first step."""


class OutOfTime(Exception):
    """The search for causes has taken as long as it may."""


@dataclass
class Budget:
    """Seconds for the runs of a search; one that has begun is not stopped."""

    seconds: float = SEARCH_SECONDS
    spent: float = 0.0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count the time of what runs inside; raises OutOfTime."""
        if self.spent >= self.seconds:
            raise OutOfTime
        begun = time.monotonic()
        try:
            yield
        finally:
            self.spent += time.monotonic() - begun


def one_device(config: Configuration) -> Configuration:
    """The reference for a configuration."""
    return Configuration(REFERENCE, config.devices[:1])


def has_ranks(config: Configuration) -> bool:
    return STRATEGIES[config.strategy].processes_per_device


@dataclass
class Runs:
    """Cached runs: the same run requested twice is run once."""

    base: Prepared
    folder: Path
    steps: int
    sync_batchnorm: bool = False
    log: Log = lambda line: None
    budget: Budget | None = None
    """Of a search for causes, whose runs raise OutOfTime; None: no limit."""
    _made: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    def watched(
        self,
        config: Configuration,
        precision: str,
        *,
        again: str = "",
        norms: Norms = "own",
        perturbation: int = 0,
        is_saved: bool = False,
        **changes: Any,
    ) -> Any:
        """Train for a few steps: Evidence, or the Failure that it ended with.

        Its checkpoints are kept where it `is_saved`, until they are forgotten. With the number of a `perturbation` it
        starts from perturbed weights.
        """
        key = (config, precision, again, norms, perturbation, is_saved, tuple(sorted(changes.items())))
        if key not in self._made:
            again = again or (f"perturbed {perturbation}" if perturbation else "")
            perform = partial(perform_watched, norms=norms, perturbation=perturbation)
            every = {"checkpoint_every": self.half} if is_saved else {}
            folder = self._folder(config, precision, again, norms if norms != "own" else "", *changes)
            message = f"{config.label} in {precision}{f', {again}' if again else ''}"
            made = self._run(folder, config, perform, {"precision": precision, **every, **changes}, message)
            if isinstance(made, Evidence) and not is_saved:
                made.forget_checkpoints()
            self._made[key] = made
        return self._made[key]

    def bits(
        self,
        config: Configuration,
        virtual_replicas: int,
        *,
        again: str = "",
        traced: Traced | None = None,
        **changes: Any,
    ) -> Any:
        """Train with virtual replicas, recorded bit for bit: Evidence, or the Failure that it ended with.

        Its checkpoints are kept, until they are forgotten; `traced` is a step of which every operation is listed.
        """
        key = (config, "bits", virtual_replicas, again, traced, tuple(sorted(changes.items())))
        if key not in self._made:
            words = [
                again,
                f"step {traced.step} traced" if traced else "",
                *("resumed" for name in changes if name == "resume"),
            ]
            folder = self._folder(config, "bits", *filter(None, words))
            every = {"virtual_replicas": virtual_replicas, "checkpoint_every": self.half, **changes}
            message = f"{config.label}, V={virtual_replicas}{''.join(f', {word}' for word in words if word)}"
            self._made[key] = self._run(folder, config, partial(perform_bits, traced=traced), every, message)
        return self._made[key]

    def examined(self, config: Configuration, precision: str, is_rough: bool) -> list[dict[str, Any]]:
        """The findings of each rank; or, under `failure`, why there are none."""
        key = (config, precision, is_rough)
        if key not in self._made:
            tests = list(TESTS if config == one_device(config) else BY_RANK)
            folder = self._folder(config, precision, "examined")
            perform = partial(perform_examination, is_rough=is_rough, tests=tests)
            changes = {"precision": precision, "accumulate": 1}
            found = self._run(folder, config, perform, changes, f"looking for the cause, {config.label}")
            paths = sorted((folder / EXAMINED).glob("rank*.json"))
            self._made[key] = (
                [{"failure": found.first_lines}]
                if isinstance(found, Failure)
                else [json.loads(path.read_text()) for path in paths]
            )
        result: list[dict[str, Any]] = self._made[key]
        return result

    @property
    def half(self) -> int:
        return max(1, self.steps // 2)

    def forget_checkpoints(self, config: Configuration | None = None) -> None:
        """Delete the checkpoints of all runs, or of one configuration."""
        for (of_config, *_), made in self._made.items():
            if isinstance(made, Evidence) and config in (None, of_config):
                made.forget_checkpoints()

    def _folder(self, config: Configuration, *words: str) -> Path:
        """A new folder with a readable name."""
        cut = f"by-{config.accumulate}" if config.accumulate > 1 else ""
        cut += f"v{config.virtual_replicas}" if config.virtual_replicas is not None else ""
        cut += f"s{config.shares}" if config.shares is not None else ""
        cut += f"link-{config.link}" if config.link is not None else ""
        name = "-".join(filter(None, [config.strategy, *_shortened(config.devices), cut, *words]))
        plain = re.sub(r"\W+", "-", name)[:MAX_CHARACTERS]
        paths = (self.folder / (f"{plain}-{number}" if number > 1 else plain) for number in count(1))
        return next(path for path in paths if not path.exists())

    def _run(
        self, folder: Path, config: Configuration, perform: Perform, changes: dict[str, Any], message: str
    ) -> Evidence | Failure:
        fields = {
            "strategy": config.strategy,
            "devices": config.devices,
            "accumulate": config.accumulate,
            "virtual_replicas": config.virtual_replicas,
            "shares": config.shares,
            "link": config.link,
            "mesh": config.mesh,
            "steps": self.steps,
            "audit": True,
            "keep": self.steps,
            "sync_batchnorm": self.sync_batchnorm and has_ranks(config),
            "stall_after": self._patience(config),
            **changes,
        }
        try:
            with self.budget.counted() if self.budget is not None else nullcontext():
                self.log(message)
                for _ in run_in_processes(variant(self.base, folder, **fields), perform):
                    pass
        except Preempted:
            raise
        except EvenstepError as error:
            return Failure(str(error))
        return Evidence(folder)

    def _patience(self, config: Configuration) -> float | None:
        """Seconds without progress before a run is ended; None until one device has shown how long its steps take."""
        single = one_device(config)
        runs = [one for (of_config, *_), one in self._made.items() if of_config == single and isinstance(one, Evidence)]
        slowest = max((step.seconds for run in runs for step in run.record.steps), default=None)
        return max(STALL_SECONDS, TIMES_SLOWEST * slowest) if slowest is not None and config != single else None


def _shortened(devices: Sequence[str]) -> list[str]:
    """`cpu, cpu, cuda:0` as cpu-2, cuda:0."""
    groups = [(name, len(list(same))) for name, same in groupby(devices)]
    return [f"{name}-{num}" if num > 1 else name for name, num in groups]
