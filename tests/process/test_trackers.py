"""`--log tensorboard`: events of real trainings, read back by TensorBoard's own reader; and what all trackers share."""

from __future__ import annotations

import importlib.util
import json
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

import evenstep
from evenstep.errors import PlanError
from evenstep.plan import Plan
from evenstep.record import RecordWriter, Step
from evenstep.trackers import check_installed, how_to_look
from evenstep.trackers.once_per_step import whole_history
from evenstep.trackers.tracker_process import Feed, is_followed, read_state, start_follower
from tests.process import traced_task
from tests.process.traced_task import task
from tests.process.watched import RUN, evenstep_command, start_training, train

LOGGED: dict[str, Any] = {"log": "tensorboard", "name": "one", "threads": 1, "devices": "cpu"}


def events(run: Path = RUN) -> EventAccumulator:
    return EventAccumulator(str(run / "tensorboard")).Reload()


def steps_of(read: EventAccumulator, tag: str) -> list[int]:
    return [one.step for one in read.Scalars(tag)]


def hparams(read: EventAccumulator, tag: str) -> HParamsPluginData:
    return HParamsPluginData.FromString(read.PluginTagToContent("hparams")[tag])


def a_step(step: int, loss: float = 0.5) -> Step:
    return Step(
        step=step,
        epoch=0,
        loss=loss,
        samples=8,
        count=8,
        seconds=0.1,
        input_seconds=0.01,
        lr=0.1,
        peak_bytes={"cpu": 9},
    )


def write_rows(step: int, rows: Sequence[Step], run: Path = RUN, resume: str | None = None) -> None:
    """Rows of a start after `step` steps; the run is killed then."""
    run.mkdir(parents=True, exist_ok=True)
    plan = Plan(batch=8, steps=6, log="tensorboard", name=run.name, resume=resume)
    writer = RecordWriter(run, plan, {"torch": "2.13.0"}, {"step": step})
    for row in rows:
        writer.append(row)
    writer.close()


def test_the_numbers_of_the_record_are_in_tensorboard(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(traced_task, "MISHAP", "none, but who follows")
    record = evenstep.train(task, **LOGGED)
    assert f"runs/one is in tensorboard: tensorboard --logdir {RUN.parent.absolute()}\n" in capfd.readouterr().err
    check_niceness()
    read = events()
    losses = read.Scalars("train/loss")
    assert [one.step for one in losses] == [step.step for step in record.steps]
    assert [one.value for one in losses] == pytest.approx(record.losses)
    for tag in ("train/lr", "train/samples_per_second", "train/input_share"):
        assert len(read.Scalars(tag)) == len(record.steps)
    assert [one.value for one in read.Scalars("valid/accuracy")] == pytest.approx(
        [one.values["accuracy"] for one in record.evaluations]
    )
    assert steps_of(read, "valid/loss") == [4, 8, 12]
    ((device, peak_bytes),) = record.steps[-1].peak_bytes.items()
    assert read.Scalars(f"peak_bytes/{device}")[-1].value == pytest.approx(peak_bytes)
    check_hyperparameters(read, record)
    (machine,) = read.Tensors("machine")
    assert f"| torch | {record.machine['torch']} |" in machine.tensor_proto.string_val[0].decode()


def check_niceness() -> None:
    """Of the process that fed the tracker, against ranks in sessions of their own."""
    has_autogroups = Path("/proc/self/autogroup").exists()
    assert Path("niceness").read_text().endswith("nice 19\n" if has_autogroups else "no autogroups")


def check_hyperparameters(read: EventAccumulator, record: evenstep.Record) -> None:
    """The plan, and the last values as their metrics."""
    chosen = hparams(read, "_hparams_/session_start_info").session_start_info.hparams
    assert chosen["strategy"].string_value == "single"
    assert chosen["batch"].number_value == 50
    assert chosen["devices"].string_value == "cpu"
    assert "clip" not in chosen
    metrics = {info.name.tag for info in hparams(read, "_hparams_/experiment").experiment.metric_infos}
    final_values = {"valid_loss", "valid_accuracy", "best_loss", "train_loss", "samples_per_second"}
    assert metrics == {f"final/{name}" for name in final_values}
    assert record.summary is not None
    (final,) = read.Scalars("final/valid_loss")
    assert final.value == pytest.approx(record.summary.valid["loss"])


def test_steps_that_are_taken_again_take_the_place_of_the_first_ones() -> None:
    write_rows(0, [a_step(step) for step in range(1, 7)])
    feed = Feed("tensorboard", RUN)
    feed.send()
    write_rows(3, [a_step(step, 0.25) for step in range(4, 7)])
    assert feed.finish()
    expected = [(step, 0.5 if step < 4 else 0.25) for step in range(1, 7)]
    assert [(one.step, one.value) for one in events().Scalars("train/loss")] == expected
    # And once more, from the Record alone.
    assert Feed("tensorboard", RUN).finish()
    assert [(one.step, one.value) for one in events().Scalars("train/loss")] == expected
    assert len(list((RUN / "tensorboard").iterdir())) == 1


@pytest.mark.slow
def test_after_a_crash_each_step_is_there_once() -> None:
    options = ("--strategy", "ddp", "--devices", "cpu,cpu", "--name", "one", "--log", "tensorboard")
    ended = train(*options, "--restarts", "1", "--checkpoint-every", "2", MISHAP="kill")
    assert "restart 1 of 1" in ended.stderr
    assert "warning" not in ended.stderr
    assert steps_of(events(), "train/loss") == list(range(1, 13))


def warnings_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if "warning" in line]


def test_a_tracker_that_fails_is_one_line_and_the_rest_can_be_sent_later(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(traced_task, "MISHAP", "no tensorboard")
    record = evenstep.train(task, **LOGGED)
    assert len(record.steps) == 12
    (warning,) = warnings_of(capfd.readouterr().err)
    cause = r"FileExistsError: .+"
    again = "evenstep report --to tensorboard runs/one"
    assert re.fullmatch(rf"warning: tensorboard may lack rows of this run \({cause}\); send them with {again}", warning)
    failed = evenstep_command("report", "--to", "tensorboard", str(RUN))
    assert failed.returncode == 1
    assert failed.stderr.startswith("error: tensorboard may lack rows of runs/one: FileExistsError")
    (RUN / "tensorboard").unlink()
    sent = evenstep_command("report", "--to", "tensorboard", str(RUN))
    assert (sent.returncode, sent.stdout) == (
        0,
        f"runs/one is in tensorboard: tensorboard --logdir {RUN.parent.absolute()}\n",
    )
    assert steps_of(events(), "train/loss") == list(range(1, 13))
    assert read_state(RUN, "tensorboard").error is None
    assert not is_followed(RUN, "tensorboard")


def followers_of(process: int) -> list[psutil.Process]:
    children = psutil.Process(process).children()
    return [child for child in children if "evenstep.trackers.tracker_process" in child.cmdline()]


def wait_until(what: Callable[[], object]) -> None:
    # A follower gets hardly anything of a core that others use.
    for _ in range(3000):
        if what():
            return
        time.sleep(0.1)
    raise TimeoutError


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("killed", ["follower", "command"])
def test_kill_9_of_a_follower_or_of_the_command_loses_no_row_for_good(killed: str) -> None:
    options = ("--devices", "cpu", "--name", "one", "--log", "tensorboard")
    training = start_training(*options, MISHAP="hold")
    wait_until(lambda: list((RUN / "tensorboard").glob("*.evenstep")))
    (follower,) = followers_of(training.pid)
    (follower if killed == "follower" else training).kill()
    Path("go").touch()
    _, shown = training.communicate(timeout=100)
    if killed == "follower":
        assert training.returncode == 0
        (warning,) = warnings_of(shown)
        assert "(its process ended with code -9)" in warning
        sent = evenstep_command("report", "--to", "tensorboard", str(RUN))
        assert sent.returncode == 0, sent.stderr
    wait_until(lambda: not follower.is_running())
    record = evenstep.Record.read(RUN)
    assert steps_of(events(), "train/loss") == [step.step for step in record.steps]


def test_a_follower_is_nice_until_the_run_has_ended() -> None:
    write_rows(0, [a_step(1)])
    follower = start_follower("tensorboard", RUN)
    watched = psutil.Process(follower.process.pid)
    wait_until(lambda: watched.nice() == 19 and autogroup_of(watched) in ("19", None))
    # As one that cannot restore its own niceness, since it imports a library.
    watched.suspend()
    follower.end()
    assert autogroup_of(watched) in ("0", None)
    watched.resume()
    assert follower.wait(60) is None
    assert steps_of(events(), "train/loss") == [1]


def autogroup_of(process: psutil.Process) -> str | None:
    """Its niceness against other sessions, where Linux has that."""
    path = Path(f"/proc/{process.pid}/autogroup")
    return path.read_text().split()[-1] if path.exists() else None


def wandb_id(run: Path) -> str | None:
    feed = Feed("wandb", run)
    feed.send()
    feed.close()
    return read_state(run, "wandb").id


def test_a_resumed_run_continues_the_run_of_its_tracker_and_a_second_one_gets_its_own() -> None:
    """W&B's package is not needed for that."""
    write_rows(0, [a_step(step) for step in range(1, 7)])
    ids = [wandb_id(RUN)]
    for name in ("two", "three"):
        resumed = RUN.with_name(name)
        write_rows(4, [a_step(step, 0.25) for step in range(5, 9)], resumed, resume=str(RUN / "checkpoints/step-4"))
        ids.append(wandb_id(resumed))
    assert ids[0] == ids[1] != ids[2]
    assert read_state(RUN, "wandb").continued_by == str(RUN.with_name("two"))
    folders = [*map(Path, read_state(RUN.with_name("two"), "wandb").continues), RUN.with_name("two")]
    losses = [(step, values["train/loss"]) for step, values in whole_history(folders)]
    assert losses == [(step, 0.5 if step < 5 else 0.25) for step in range(1, 9)]


def test_without_the_package_it_is_refused_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = importlib.util.find_spec
    monkeypatch.setattr("evenstep.trackers.find_spec", lambda name: None if name == "tensorboard" else usual(name))
    with pytest.raises(PlanError, match=r"needs tensorboard.*pip install 'evenstep\[tensorboard\]'"):
        evenstep.train(task, **LOGGED)
    assert not Path("runs").exists()


def test_a_folder_of_mlflow_is_refused_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "./mlruns")
    with pytest.raises(PlanError, match=r"MLFLOW_TRACKING_URI is \./mlruns, a folder.*; unset it, or"):
        check_installed(["mlflow"])


def test_an_unknown_tracker_is_refused_with_those_that_are_known() -> None:
    choices = "choose tensorboard, wandb, mlflow or trackio; did you mean tensorboard"
    with pytest.raises(PlanError, match=rf"log is 'tensorbord'; {choices}"):
        Plan(batch=8, steps=1, log="mlflow,tensorbord")
    assert Plan(batch=8, steps=1, log="tensorboard").to_json()["log"] == "tensorboard"


@pytest.mark.parametrize("has_server", [True, False])
def test_mlflow_skinny_is_said_to_have_no_server(monkeypatch: pytest.MonkeyPatch, has_server: bool) -> None:
    monkeypatch.setattr("evenstep.trackers.find_spec", lambda name: name if has_server else None)
    shown = how_to_look("mlflow", "mlflow ui --backend-store-uri sqlite:///runs/mlflow.db")
    assert ("pip install mlflow" in shown) is not has_server
    assert how_to_look("mlflow", "https://tracking") == "https://tracking"


def test_a_profile_of_no_steps_is_refused() -> None:
    with pytest.raises(PlanError, match="profile is 0; it must be a whole number, 1 or more"):
        Plan(batch=8, steps=1, profile=0)


@pytest.mark.parametrize("log", [(), pytest.param(("--log", "tensorboard"), marks=pytest.mark.slow)])
def test_no_rank_imports_a_tracker(log: tuple[str, ...]) -> None:
    options = ("--strategy", "ddp", "--devices", "cpu,cpu", "--name", "one", "--steps", "2", *log)
    train(*options, MISHAP="none, but who is here")
    assert [json.loads(Path(f"imported{rank}").read_text()) for rank in (0, 1)] == [[], []]
    assert (RUN / "tensorboard").exists() == bool(log)
