"""`--log tensorboard`: rank 0 logs the rows of its Record. A tracker that fails never stops the training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from evenstep.plan import Plan
from evenstep.record import Evaluation, LayerStatistics, Row, Step, Summary

FOLDER = "tensorboard"
MAX_QUEUE = 10_000
"""Events that may wait to be written: a slow disk does not hold up the training until then."""
FLUSH_SECONDS = 5


@dataclass(frozen=True)
class TrackerStart:
    """What a tracker needs before the first row."""

    plan: Plan
    run_folder: Path
    redone_from: int | None = None
    """The first step that a resumed run repeats in the same folder; what was logged from there on is void."""


class Tracker(Protocol):
    """Where else a run is logged. `log` waits for neither disk nor network."""

    def log(self, row: Row) -> None:
        """Log one row of the Record."""

    def close(self) -> None:
        """Write what is left; raises what went wrong."""


class Tracking:
    """A tracker that is switched off, with one warning, when it fails."""

    def __init__(self, start: TrackerStart) -> None:
        self._name = str(start.plan.log)
        self._tracker: Tracker | None = None
        self._warnings = self._try(lambda: self._start(start))

    def log(self, row: Row) -> Iterator[str]:
        """Pass a row on; yields warnings."""
        warnings, self._warnings = self._warnings, []
        yield from warnings
        if self._tracker is not None:
            yield from self._try(lambda: self._pass_on(row))

    def close(self) -> None:
        """Close the tracker of a run that did not come to its Summary."""
        self._try(self._end)

    def _start(self, start: TrackerStart) -> None:
        self._tracker = TRACKERS[self._name](start)

    def _pass_on(self, row: Row) -> None:
        assert self._tracker is not None
        self._tracker.log(row)
        if isinstance(row, Summary):
            self._end()

    def _end(self) -> None:
        tracker, self._tracker = self._tracker, None
        if tracker is not None:
            tracker.close()

    def _try(self, what: Callable[[], None]) -> list[str]:
        try:
            what()
        # No error of a tracker may end the training.
        except Exception as error:
            with suppress(Exception):
                self._end()
            return [f"warning: {self._name} is off ({type(error).__name__}: {error}); training continues"]
        return []


class TensorBoard:
    """One run in TensorBoard: the plan as hyperparameters, and scalars of each step and evaluation."""

    def __init__(self, start: TrackerStart) -> None:
        from tensorboard.plugins.hparams import summary_v2
        from torch.utils.tensorboard import SummaryWriter

        folder = start.run_folder / FOLDER
        # The run folder itself must exist: SummaryWriter would create it.
        folder.mkdir(exist_ok=True)
        self._writer = SummaryWriter(
            folder, purge_step=start.redone_from, max_queue=MAX_QUEUE, flush_secs=FLUSH_SECONDS
        )
        self._peaks: dict[str, int] = {}
        self._last_step = (start.redone_from or 1) - 1
        self._hyperparameters = hyperparameters(start.plan)
        self._add(summary_v2.hparams_pb(self._hyperparameters, trial_id=start.plan.name))

    def log(self, row: Row) -> None:
        if isinstance(row, Step):
            self._scalars(row.step, self._of_step(row))
        elif isinstance(row, Evaluation):
            self._scalars(row.step, {f"valid/{name}": value for name, value in row.values.items()})
        elif isinstance(row, LayerStatistics):
            self._scalars(row.step, layer_scalars(row))
        elif isinstance(row, Summary):
            self._add_final_values(row)

    def close(self) -> None:
        self._writer.close()

    def _of_step(self, step: Step) -> dict[str, float]:
        grown = {name: size for name, size in step.peak_bytes.items() if self._peaks.get(name) != size}
        self._peaks |= grown
        self._last_step = step.step
        return {
            "train/loss": step.loss,
            "train/lr": step.lr,
            "train/samples_per_second": step.samples / step.seconds,
            "train/input_share": step.input_seconds / step.seconds,
            **({"train/grad_norm": step.grad_norm} if step.grad_norm is not None else {}),
            **{f"train/{name}": value for name, value in step.logged.items()},
            **{f"peak_bytes/{name}": size for name, size in grown.items()},
        }

    def _add_final_values(self, summary: Summary) -> None:
        """Add the metrics by which the HPARAMS tab compares runs."""
        from tensorboard.plugins.hparams import summary_v2

        final = {f"final/valid_{name}": value for name, value in summary.valid.items()}
        if summary.best is not None:
            final[f"final/best_{summary.best.metric}"] = summary.best.value
        if summary.train_loss is not None:
            final["final/train_loss"] = summary.train_loss
        final["final/samples_per_second"] = summary.samples_per_second
        names = [summary_v2.HParam(name) for name in self._hyperparameters]
        self._add(summary_v2.hparams_config_pb(names, [summary_v2.Metric(name) for name in final]))
        self._scalars(self._last_step, final)

    def _scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Add all of them as one event, where `add_scalar` would write one for each."""
        from tensorboard.compat.proto.summary_pb2 import Summary as Values

        self._add(Values(value=[Values.Value(tag=name, simple_value=value) for name, value in values.items()]), step)

    def _add(self, summary: Any, step: int | None = None) -> None:
        assert self._writer.file_writer is not None
        self._writer.file_writer.add_summary(summary, step)


def layer_scalars(row: LayerStatistics) -> dict[str, float]:
    """`gradients/0.weight/norm` and the like."""
    kinds = {"parameters": row.parameters, "gradients": row.gradients, "outputs": row.outputs}
    return {
        f"{kind}/{name or 'model'}/{what}": value
        for kind, layers in kinds.items()
        for name, values in layers.items()
        for what, value in vars(values).items()
    }


TRACKERS: dict[str, Callable[[TrackerStart], Tracker]] = {"tensorboard": TensorBoard}


def hyperparameters(plan: Plan) -> dict[str, bool | int | float | str]:
    """The plan as values that TensorBoard accepts; fields that are None are left out."""
    values = {**plan.to_json(), "devices": ", ".join(plan.devices)}
    options = {name: str(value) if isinstance(value, list) else value for name, value in values.pop("options").items()}
    return {name: value for name, value in {**options, **values}.items() if value is not None}
