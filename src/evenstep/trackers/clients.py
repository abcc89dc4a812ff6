"""The trackers: where each keeps a run, and how it gets every step of it once."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, count, islice
from pathlib import Path
from typing import Any, Protocol

from evenstep.plan import Plan
from evenstep.record import Start
from evenstep.trackers.once_per_step import (
    OncePerStep,
    Outcome,
    Point,
    Redone,
    hyperparameters,
    machine_facts,
    whole_history,
)

MOST_METRICS, MOST_PARAMS = 1000, 100
"""Of one request to MLflow."""


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is given to find or make its run."""

    folders: list[Path]
    """Of this run, after those of the runs that it continues."""
    start: Start
    """The last one."""
    id: str | None
    """Of the tracker's run, where there is one already."""
    began: float
    """In seconds since 1970; times in the tracker count from here."""
    alive: Callable[[], None]
    """To be called while much is sent: whoever waits for it goes on waiting."""

    @property
    def folder(self) -> Path:
        return self.folders[-1]

    @property
    def plan(self) -> Plan:
        return Plan.from_json(self.start.plan)


class Client(Protocol):
    """One run in a tracker. What was given twice is there once."""

    id: str
    view: str
    """How to look at it: a command."""

    def add(self, points: Iterable[Point | Redone]) -> None:
        """Send what the tracker lacks."""

    def finish(self, outcome: Outcome, page: Path | None) -> None:
        """Send how the run ended, and its page; returns when the tracker has all of it."""


def project_of(plan: Plan) -> str:
    """Runs of one task are compared.

    >>> [project_of(Plan(batch=1, epochs=1, task=task)) for task in ("digits", "/my/task.py:small", "lib.mine:task")]
    ['digits', 'task', 'lib-mine']
    """
    name = os.path.basename(plan.task.partition(":")[0]).removesuffix(".py")
    return re.sub(r"[^\w-]+", "-", name).strip("-") or "evenstep"


class TensorBoard:
    """Event files in the run folder, written again from the first row; a step that is taken again replaces itself."""

    SUFFIX = ".evenstep"

    continues_runs = False

    @staticmethod
    def destination(plan: Plan) -> str:
        return ""

    def __init__(self, run: TrackedRun) -> None:
        from tensorboard.plugins.hparams import summary_v2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._began = run.began
        self._hyperparameters = hyperparameters(run.plan)
        folder = run.folder / "tensorboard"
        self.id, self.view = run.plan.name, f"tensorboard --logdir {run.folder.parent}"
        # The run folder itself must exist.
        folder.mkdir(exist_ok=True)
        had_events = any(folder.glob("events.out.tfevents.*"))
        for path in folder.glob(f"events.out.tfevents.*{self.SUFFIX}"):
            path.unlink()
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}{self.SUFFIX}"
        self._path = folder / name
        self._writer = RecordWriter(self._path.open("wb"))
        self._event(0.0, file_version="brain.Event:2")
        if had_events:
            self._forget_from(0)
        self._summary(summary_v2.hparams_pb(self._hyperparameters, trial_id=run.plan.name))
        self._text("machine", machine_facts(run.start))

    def add(self, points: Iterable[Point | Redone]) -> None:
        for point in points:
            if isinstance(point, Redone):
                # From the start again, the evaluation before the first step comes again too.
                self._forget_from(point.step + 1 if point.step else 0)
            else:
                self._point(point)
        self._writer.flush()
        if not self._path.exists():
            raise FileNotFoundError(f"{self._path} is gone")

    def finish(self, outcome: Outcome, page: Path | None) -> None:
        self._text("outcome", {"state": outcome})
        self._writer.close()

    def _point(self, point: Point) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary as Values
        from tensorboard.plugins.hparams import summary_v2

        if point.kind == "final":
            names = [summary_v2.HParam(name) for name in self._hyperparameters]
            metrics = [summary_v2.Metric(name) for name in point.values]
            self._summary(summary_v2.hparams_config_pb(names, metrics))
        values = [Values.Value(tag=name, simple_value=value) for name, value in point.values.items()]
        self._event(point.seconds, step=point.step, summary=Values(value=values))

    def _forget_from(self, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog

        self._event(0.0, step=step, session_log=SessionLog(status=SessionLog.START))

    def _text(self, name: str, facts: Mapping[str, str]) -> None:
        """A table in the TEXT tab."""
        from tensorboard.compat.proto.summary_pb2 import Summary as Values
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
        from tensorboard.plugins.text.metadata import create_summary_metadata

        lines = ["| | |", "|-|-|", *(f"| {key} | {text} |" for key, text in facts.items())]
        tensor = TensorProto(dtype="DT_STRING", string_val=["\n".join(lines).encode()], tensor_shape=TensorShapeProto())
        metadata = create_summary_metadata(display_name=name, description="")
        self._summary(Values(value=[Values.Value(tag=name, metadata=metadata, tensor=tensor)]))

    def _summary(self, summary: Any) -> None:
        self._event(0.0, summary=summary)

    def _event(self, seconds: float, **what: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.write(Event(wall_time=self._began + seconds, **what).SerializeToString())


class MLflow:
    """One run of an experiment; MLflow ignores a value whose step and time it has, and cannot replace any."""

    continues_runs = True

    @staticmethod
    def destination(plan: Plan) -> str:
        return os.environ.get("MLFLOW_TRACKING_URI", "")

    def __init__(self, run: TrackedRun) -> None:
        # An unreachable server is tried again by us, and mlflow's usage reports are not ours to send.
        for name, value in (
            ("MLFLOW_DISABLE_TELEMETRY", "true"),
            ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0"),
            ("MLFLOW_HTTP_REQUEST_TIMEOUT", "10"),
        ):
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient

        # By default beside the run folders, in one database: MLflow compares what is in one.
        uri = self.destination(run.plan) or f"sqlite:///{run.folder.parent / 'mlflow.db'}"
        self._run = run
        self._client = MlflowClient(tracking_uri=uri)
        is_file = uri.startswith("sqlite:")
        self.view = f"mlflow ui --backend-store-uri {uri}" if is_file else uri
        self.id = self._found(run.id) or self._made(is_file)
        self._new = OncePerStep(self._last_step)
        self._describe()

    def add(self, points: Iterable[Point | Redone]) -> None:
        from mlflow.entities import Metric

        batch: list[Any] = []
        for point in self._new.of(points):
            at = int((self._run.began + point.seconds) * 1000)
            metrics = [Metric(_plain(name), value, at, point.step) for name, value in point.values.items()]
            # A batch is written as a whole: it holds whole points, where they are small enough.
            if len(batch) + len(metrics) > MOST_METRICS:
                self._send(batch)
                batch = []
            batch += metrics
        self._send(batch)

    def finish(self, outcome: Outcome, page: Path | None) -> None:
        if page is not None:
            self._client.log_artifact(self.id, str(page))
        self._client.set_tag(self.id, "outcome", outcome)
        status = {"done": "FINISHED", "failed": "FAILED"}.get(outcome, "KILLED")
        if outcome != "running":
            self._client.set_terminated(self.id, status)

    def _send(self, metrics: list[Any]) -> None:
        for chunk in _chunks(metrics, MOST_METRICS):
            self._client.log_batch(self.id, metrics=chunk)
            self._run.alive()

    def _found(self, run_id: str | None) -> str | None:
        """The run, if it is still there."""
        from mlflow.exceptions import MlflowException

        if run_id is None:
            return None
        try:
            self._client.update_run(run_id, status="RUNNING")
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None
        return run_id

    def _made(self, is_file: bool) -> str:
        from mlflow.exceptions import MlflowException

        run, name = self._run, os.environ.get("MLFLOW_EXPERIMENT_NAME") or project_of(self._run.plan)
        artifacts = (run.folder.parent / "mlflow-artifacts").absolute().as_uri() if is_file else None
        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            try:
                self._client.create_experiment(name, artifact_location=artifacts)
            except MlflowException as error:
                # Another run may have been faster.
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
            experiment = self._client.get_experiment_by_name(name)
        assert experiment is not None
        made = self._client.create_run(
            experiment.experiment_id, start_time=int(run.began * 1000), run_name=run.plan.name
        )
        return str(made.info.run_id)

    def _describe(self) -> None:
        """Parameters cannot be changed: those that a resumed run changed become tags."""
        from mlflow.entities import Param, RunTag

        given = {_plain(name): str(value) for name, value in hyperparameters(self._run.plan).items()}
        known = self._client.get_run(self.id).data.params
        params = [Param(name, value) for name, value in given.items() if name not in known]
        for chunk in _chunks(params, MOST_PARAMS):
            self._client.log_batch(self.id, params=chunk)
        changed = {f"resumed.{name}": value for name, value in given.items() if known.get(name, value) != value}
        facts = {f"machine.{name}": text for name, text in machine_facts(self._run.start).items()}
        tags = {**facts, **changed, "run_folder": str(self._run.folder)}
        self._client.log_batch(self.id, tags=[RunTag(_plain(name), text) for name, text in tags.items()])

    def _last_step(self, name: str) -> int:
        history = self._client.get_metric_history(self.id, _plain(name))
        return max((metric.step for metric in history), default=-1)


def _plain(name: str) -> str:
    """A name that MLflow accepts.

    >>> _plain("train/top@5 (%)")
    'train/top_5 ___'
    """
    return re.sub(r"[^\w\-. /:]", "_", name)


def _chunks(values: list[Any], size: int) -> Iterator[list[Any]]:
    rest = iter(values)
    while chunk := list(islice(rest, size)):
        yield chunk


class WeightsAndBiases:
    """An offline run in the run folder, which is written when the run ends, from its whole Record: wandb keeps every
    row that it is ever given offline.
    """

    continues_runs = True

    @staticmethod
    def destination(plan: Plan) -> str:
        return os.environ.get("WANDB_PROJECT") or project_of(plan)

    def __init__(self, run: TrackedRun) -> None:
        self._run = run
        self.id = run.id or secrets.token_hex(4)
        self.view = f"wandb sync {run.folder / 'wandb'}/offline-run-*"

    def add(self, points: Iterable[Point | Redone]) -> None:
        for _ in points:
            pass

    def finish(self, outcome: Outcome, page: Path | None) -> None:
        import wandb

        run = self._run
        before = set((run.folder / "wandb").glob(f"offline-run-*-{self.id}"))
        config = {**hyperparameters(run.plan), "machine": machine_facts(run.start)}
        settings = wandb.Settings(
            mode="offline", console="off", silent=True, x_disable_stats=True, disable_git=True, disable_code=True
        )
        written = wandb.init(
            project=self.destination(run.plan),
            id=self.id,
            name=run.plan.name,
            dir=str(run.folder),
            config=config,
            settings=settings,
        )
        for number, (step, values) in enumerate(whole_history(run.folders)):
            written.log(values, step=step)
            if number % MOST_METRICS == 0:
                run.alive()
        written.summary["outcome"] = outcome
        if page is not None:
            artifact = wandb.Artifact(f"{self.id}-page", type="report")
            artifact.add_file(str(page))
            written.log_artifact(artifact)
        folder = Path(written.settings.sync_dir)
        written.finish(exit_code=0 if outcome == "done" else 1)
        for path in before - {folder}:
            shutil.rmtree(path)
        self.view = f"wandb sync {folder}"


class Trackio:
    """One run of a local project, which `trackio sync` can upload; trackio cannot replace a row."""

    continues_runs = True

    @staticmethod
    def destination(plan: Plan) -> str:
        return project_of(plan)

    def __init__(self, run: TrackedRun) -> None:
        for name in ("TRACKIO_SERVER_URL", "TRACKIO_SPACE_ID"):
            os.environ.pop(name, None)
        import trackio

        self._project = self.destination(run.plan)
        self.id = run.id or self._unused(run.plan.name)
        self.view = f"trackio show --project {self._project}"
        self._writer = trackio.init(
            project=self._project,
            name=self.id,
            resume="allow",
            config={**hyperparameters(run.plan), "machine": machine_facts(run.start)},
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        self._new = OncePerStep(self._last_step)
        self._sent: dict[str, int] = {}

    def add(self, points: Iterable[Point | Redone]) -> None:
        for point in self._new.of(points):
            self._writer.log(dict(point.values), step=point.step)
            self._sent[[*point.values][-1]] = point.step

    def finish(self, outcome: Outcome, page: Path | None) -> None:
        if page is not None:
            self._writer.log_artifact(page, name=f"{self.id}-page", type="report")
        self._writer.finish()
        # It reports no error: rows are written by a thread, and what fails there is lost.
        lost = [name for name, step in self._sent.items() if self._last_step(name) < step]
        if lost:
            raise OSError(f"trackio has not written the last rows of {', '.join(lost)}")

    def _unused(self, name: str) -> str:
        """A name of its own: runs of other folders may have the same one, and trackio would join them."""
        from trackio.sqlite_storage import SQLiteStorage

        taken = SQLiteStorage.get_runs(self._project)
        return next(one for one in chain([name], (f"{name}-{number}" for number in count(2))) if one not in taken)

    def _last_step(self, name: str) -> int:
        from trackio.sqlite_storage import SQLiteStorage

        values = SQLiteStorage.get_metric_values(self._project, self.id, name)
        return max((int(value["step"]) for value in values), default=-1)


CLIENTS: dict[str, type[TensorBoard] | type[WeightsAndBiases] | type[MLflow] | type[Trackio]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
    "trackio": Trackio,
}
