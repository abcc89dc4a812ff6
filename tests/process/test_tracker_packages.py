"""MLflow, W&B and trackio: written by their own packages, read back by their own clients.

One training crashes twice and is resumed; another loses its server in the middle.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any

import pytest

from evenstep.record import Record
from evenstep.trackers.tracker_process import read_state
from tests.process.watched import RUN, evenstep_command, start_training, train

# Warnings are those of the packages among each other.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]
for package in ("mlflow", "sqlalchemy", "alembic", "wandb", "trackio"):
    pytest.importorskip(package, reason=f"no {package} here; pip install 'evenstep[trackers]'")

RESUMED = Path("runs/two")
STEPS = list(range(1, 21))
DDP = ("--strategy", "ddp", "--devices", "cpu,cpu")


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a training that crashed twice, ended, and was resumed with more epochs."""
    folder = tmp_path_factory.mktemp("told")
    with chdir(folder), pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACKIO_DIR", str(folder / "trackio"))
        # Both are local, whatever they would do by themselves.
        patch.setenv("TRACKIO_SERVER_URL", "http://127.0.0.1:9/?write_token=none")
        patch.setenv("WANDB_MODE", "online")
        options = (*DDP, "--restarts", "2", "--checkpoint-every", "2", "--log", "mlflow,wandb,trackio")
        ended = train(*options, "--name", "one", MISHAP="kill twice")
        assert "restart 2 of 2" in ended.stderr
        assert "warning" not in ended.stderr
        more = evenstep_command("train", "--resume", str(RUN), "--epochs", "5", "--name", "two")
        assert more.returncode == 0, more.stderr
        assert "warning" not in more.stderr
        again = evenstep_command("report", "--to", "mlflow,wandb,trackio", str(RESUMED))
        assert again.returncode == 0, again.stderr
        assert len(again.stdout.splitlines()) == 3
    return folder


def losses_of_both(folder: Path) -> list[float]:
    return [*Record.read(folder / RUN).losses, *Record.read(folder / RESUMED).losses]


def test_mlflow_has_each_step_once(told: Path) -> None:
    client, run = mlflow_run(f"sqlite:///{told / 'runs/mlflow.db'}", told / RESUMED)
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [one.step for one in history] == STEPS
    assert [one.value for one in history] == pytest.approx(losses_of_both(told))
    assert [one.step for one in client.get_metric_history(run.info.run_id, "valid/accuracy")] == [4, 8, 12, 16, 20]
    assert (run.info.status, run.data.tags["outcome"]) == ("FINISHED", "done")
    assert run.data.params["batch"] == "50"
    # MLflow keeps the parameters of the first start.
    assert (run.data.params["epochs"], run.data.tags["resumed.epochs"]) == ("3", "5")
    assert run.data.tags["machine.torch"] == Record.read(told / RUN).machine["torch"]
    assert [one.path for one in client.list_artifacts(run.info.run_id)] == ["page.html"]
    assert read_state(told / RUN, "mlflow").id == run.info.run_id


def mlflow_run(uri: str, run: Path) -> tuple[Any, Any]:
    """A client, and the only run of its experiment."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("task")
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.run_id == read_state(run, "mlflow").id
    return client, client.get_run(found.info.run_id)


def test_wandb_has_each_step_once(told: Path) -> None:
    rows, others = read_wandb(told / RESUMED)
    assert [row["_step"] for row in rows] == STEPS
    assert [row["train/loss"] for row in rows] == pytest.approx(losses_of_both(told))
    assert [row["_step"] for row in rows if "valid/accuracy" in row] == [4, 8, 12, 16, 20]
    (started,) = [one.run for one in others if one.WhichOneof("record_type") == "run"]
    assert (started.run_id, started.project) == (read_state(told / RUN, "wandb").id, "task")
    config = {one.key: json.loads(one.value_json) for one in started.config.update}
    assert (config["batch"], config["epochs"]) == (50, 5)
    assert config["machine"]["torch"] == Record.read(told / RUN).machine["torch"]


def read_wandb(run: Path) -> tuple[list[dict[str, Any]], list[Any]]:
    """Rows of the history, and all other entries, of the only offline run of a run folder."""
    from wandb.proto.wandb_internal_pb2 import Record as Entry

    (file,) = (run / "wandb").glob("offline-run-*/*.wandb")
    entries = [Entry.FromString(one) for one in _entries(file.read_bytes())]
    histories = [one.history for one in entries if one.WhichOneof("record_type") == "history"]
    rows = [{item.key or item.nested_key[0]: json.loads(item.value_json) for item in one.item} for one in histories]
    return rows, [one for one in entries if one.WhichOneof("record_type") != "history"]


def _entries(data: bytes) -> Iterator[bytes]:
    """Of a log in LevelDB's format: blocks of 32 KiB, in which an entry is one part or several."""
    at, entry = 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        entry += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            yield entry
            entry = b""


def test_trackio_has_each_step_once(told: Path) -> None:
    name = read_state(told / RUN, "trackio").id
    assert name == read_state(told / RESUMED, "trackio").id == "one"
    losses = trackio_values(told, name, "train/loss")
    assert [one["step"] for one in losses] == STEPS
    assert [one["value"] for one in losses] == pytest.approx(losses_of_both(told))
    assert [one["step"] for one in trackio_values(told, name, "valid/accuracy")] == [4, 8, 12, 16, 20]
    config = trackio(told, "get", "run", "--project", "task", "--run", name)["config"]
    assert (config["batch"], config["machine"]["torch"]) == (50, Record.read(told / RUN).machine["torch"])


def trackio_values(folder: Path, run: str, metric: str) -> list[dict[str, Any]]:
    found = trackio(folder, "get", "metric", "--project", "task", "--run", run, "--metric", metric)
    values: list[dict[str, Any]] = found["values"]
    return values


def trackio(folder: Path, *words: str) -> dict[str, Any]:
    """What trackio's own command answers."""
    command = [sys.executable, "-m", "trackio.cli", *words, "--json"]
    environment = {**os.environ, "TRACKIO_DIR": str(folder / "trackio")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@contextmanager
def mlflow_server(folder: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """A real server, in a session of its own."""
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{folder / 'server.db'}"]
    command += ["--artifacts-destination", str(folder / "artifacts")]
    with (folder / "server.log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, cwd=folder)
    try:
        _wait_for_port(port, folder / "server.log")
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_for_port(port: int, log: Path) -> None:
    # A server imports for a minute where all cores are busy.
    for _ in range(3000):
        with socket.socket() as connection:
            if connection.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise TimeoutError(log.read_text())


def test_a_server_that_is_killed_costs_one_line_and_gets_the_rest_later(tmp_path: Path) -> None:
    pytest.importorskip("flask", reason="mlflow-skinny has no server; pip install mlflow")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    uri = f"http://127.0.0.1:{port}"
    with mlflow_server(tmp_path, port):
        options = ("--devices", "cpu", "--name", "one", "--log", "mlflow")
        training = start_training(*options, MISHAP="hold", MLFLOW_TRACKING_URI=uri)
        wait_for_rows(uri)
    Path("go").touch()
    _, shown = training.communicate(timeout=100)
    assert training.returncode == 0, shown
    (warning,) = [line for line in shown.splitlines() if "warning" in line]
    assert "mlflow may lack rows of this run" in warning
    assert warning.endswith("send them with evenstep report --to mlflow runs/one")
    assert len(Record.read(RUN).steps) == 12
    with mlflow_server(tmp_path, port):
        for _ in range(2):
            sent = evenstep_command("report", "--to", "mlflow", str(RUN), MLFLOW_TRACKING_URI=uri)
            assert sent.returncode == 0, sent.stderr
            client, run = mlflow_run(uri, RUN)
            history = client.get_metric_history(run.info.run_id, "train/loss")
            assert [one.step for one in history] == list(range(1, 13))
            assert [one.value for one in history] == pytest.approx(Record.read(RUN).losses)
        assert run.info.status == "FINISHED"


def wait_for_rows(uri: str) -> None:
    """Until the server has some of a run, and not all."""
    # What sends them gets hardly anything of a core that others use.
    for _ in range(3000):
        run_id = read_state(RUN, "mlflow").id if (RUN / "trackers").is_dir() else None
        if run_id is not None and mlflow_run(uri, RUN)[1].data.metrics.get("train/loss") is not None:
            return
        time.sleep(0.1)
    raise TimeoutError("no rows")
