"""`--log tensorboard`: events written by real trainings, read back by TensorBoard's own reader."""

from __future__ import annotations

import importlib.util
import io
import re
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

import evenstep
from evenstep.errors import PlanError
from evenstep.launcher.prepare import check_log
from evenstep.plan import Plan
from evenstep.profiling import trackers
from evenstep.profiling.trackers import TrackerStart, Tracking
from evenstep.record import Step
from tests.process import traced_task
from tests.process.traced_task import task
from tests.process.watched import RUN, train

LOGGED: dict[str, Any] = {"log": "tensorboard", "name": "one", "threads": 1, "devices": "cpu"}


def events(run: Path = RUN) -> EventAccumulator:
    return EventAccumulator(str(run / trackers.FOLDER)).Reload()


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


def test_the_numbers_of_the_record_are_in_tensorboard() -> None:
    record = evenstep.train(task, progress=False, **LOGGED)
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


def test_the_plan_is_the_hyperparameters_and_the_last_values_their_metrics() -> None:
    record = evenstep.train(task, progress=False, **LOGGED)
    read = events()
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
    plan = Plan(batch=8, steps=6, log="tensorboard")
    RUN.mkdir(parents=True)
    for redone_from, first, loss in ((None, 1, 0.5), (4, 4, 0.25)):
        tracking = Tracking(TrackerStart(plan, RUN, redone_from))
        for step in range(first, 7):
            assert not list(tracking.log(a_step(step, loss)))
        tracking.close()
    losses = events().Scalars("train/loss")
    assert [(one.step, one.value) for one in losses] == [(step, 0.5 if step < 4 else 0.25) for step in range(1, 7)]


@pytest.mark.slow
def test_after_a_crash_each_step_is_there_once_and_rank_0_alone_has_written() -> None:
    options = ("--strategy", "ddp", "--devices", "cpu,cpu", "--name", "one", "--log", "tensorboard")
    ended = train(*options, "--restarts", "1", "--checkpoint-every", "2", MISHAP="kill")
    assert "restart 1 of 1" in ended.stderr
    assert "warning" not in ended.stderr
    assert steps_of(events(), "train/loss") == list(range(1, 13))
    assert len(list((RUN / trackers.FOLDER).iterdir())) == 2


def warnings_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if "warning" in line]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of TensorBoard's thread
def test_a_folder_that_goes_away_gives_one_warning_and_the_training_ends_well(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(traced_task, "MISHAP", "folder gone")
    record = evenstep.train(task, **LOGGED)
    assert len(record.steps) == 12
    assert record.summary is not None
    (warning,) = warnings_of(capfd.readouterr().err)
    # The writer's thread may look between the folder's end and the file in its place.
    cause = r"(FileNotFound|NotADirectory)Error: .+"
    assert re.fullmatch(rf"warning: tensorboard is off \({cause}\); training continues", warning)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of TensorBoard's thread
def test_a_full_disk_gives_one_warning_and_the_training_ends_well(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(io, "open", full_disk(io.open))
    record = evenstep.train(task, **LOGGED)
    assert len(record.steps) == 12
    (warning,) = warnings_of(capfd.readouterr().err)
    assert warning == "warning: tensorboard is off (OSError: [Errno 28] No space left on device); training continues"


def full_disk(usual: Any) -> Any:
    """Events go to Linux's own full disk."""

    def opened(path: Any, *how: Any, **more: Any) -> Any:
        return usual("/dev/full" if "tfevents" in str(path) else path, *how, **more)

    return opened


def test_a_tracker_that_cannot_start_gives_one_warning() -> None:
    tracking = Tracking(TrackerStart(Plan(batch=8, steps=6, log="tensorboard"), Path("nowhere")))
    first, *more = [list(tracking.log(a_step(step))) for step in (1, 2, 3)]
    assert first[0].startswith("warning: tensorboard is off (FileNotFoundError: ")
    assert more == [[], []]
    tracking.close()


def test_without_the_package_it_is_refused_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "tensorboard" else usual(name))
    with pytest.raises(PlanError, match=r"needs tensorboard.*pip install 'evenstep\[tensorboard\]'"):
        evenstep.train(task, **LOGGED)
    assert not Path("runs").exists()
    check_log(None)


def test_an_unknown_tracker_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(PlanError, match=r"log is 'tensorbord'; the only choice is tensorboard; did you mean"):
        Plan(batch=8, steps=1, log="tensorbord")


def test_a_profile_of_no_steps_is_refused() -> None:
    with pytest.raises(PlanError, match="profile is 0; it must be a whole number, 1 or more"):
        Plan(batch=8, steps=1, profile=0)


def test_workers_without_log_do_not_import_tensorboard() -> None:
    train("--strategy", "ddp", "--devices", "cpu,cpu", "--name", "one", "--steps", "2", MISHAP="none, but who is here")
    assert [Path(f"imported{rank}").read_text() for rank in (0, 1)] == ["False", "False"]
    assert not (RUN / trackers.FOLDER).exists()
