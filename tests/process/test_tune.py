"""`evenstep tune` through its command: trials are runs, the best go on exactly, and whatever is killed goes on."""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.numpy import load_file

from evenstep.distributed.devices import num_cores
from evenstep.record import Record
from evenstep.tune import optuna_sampler
from evenstep.tune.study import read_study
from evenstep.tune.successive_halving import Study
from tests.pure.conftest import Ended, evenstep
from tests.waiting import wait_until

__all__ = ["evenstep"]

optuna = pytest.importorskip("optuna", reason="Optuna is not installed: pip install 'evenstep[tune]'")

TASK = Path(__file__).with_name("tuned_task.py")
SEARCH = ("--search", "lr", "--search", "width=2,4,8")
HALVING = (*SEARCH, "--devices", "cpu,cpu", "--trials", "4", "--rungs", "1,2,4", "--name", "s")


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "evenstep", *words]


def evenstep_(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*words), capture_output=True, text=True, timeout=300)


def tune(*words: str) -> subprocess.CompletedProcess[str]:
    return evenstep_("tune", str(TASK), *words)


def results(study: Study) -> dict[str, Any]:
    """What must not depend on when trials ran."""
    return {
        "suggestions": [(trial.number, trial.options) for trial in study.trials.values()],
        "values": {
            trial.number: [(row.rung, row.value, row.step, row.values) for row in trial.reached]
            for trial in study.trials.values()
        },
        "failed": {trial.number: trial.failed.why for trial in study.trials.values() if trial.failed is not None},
    }


@pytest.fixture(scope="module")
def halved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished study that nobody disturbed."""
    folder = tmp_path_factory.mktemp("halved")
    done = subprocess.run(
        command("tune", str(TASK), *HALVING, "--json"), cwd=folder, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    (folder / "stderr").write_text(done.stderr)
    (folder / "stdout").write_text(done.stdout)
    return folder


def test_the_best_go_on_from_rung_to_rung_and_every_trial_is_a_run(halved: Path) -> None:
    study = read_study(halved / "runs/s")
    assert study.is_over
    assert [len(study.ranking(rung)) for rung in range(3)] == [4, 2, 1]
    for rung in (0, 1):
        best = study.ranking(rung)[: study.request.quotas[rung + 1]]
        assert {trial.number for trial in best} == {trial.number for trial in study.ranking(rung + 1)}
    found = json.loads((halved / "stdout").read_text())
    assert found["steps"] == 4 * (4 * 1 + 2 * 1 + 1 * 2)
    assert found["whole_steps"] == 4 * 4 * 4
    for trial in study.trials.values():
        record = Record.read(halved / "runs/s/trials" / trial.folder)
        assert record.plan.options == {**trial.options}
        assert len(record.steps) == trial.steps == len({step.step for step in record.steps})
    lines = (halved / "stderr").read_text()
    assert lines.startswith("runs/s: 4 trials, 2 at a time; 4, 2, 1 of them reach epochs 1, 2, 4\n")
    assert re.search(r"^trial 1 reached epoch 1: best loss \d\.\d{4} \(step 4\)", lines, re.MULTILINE)
    assert "goes on to epoch 4" in lines


def same_as_a_fresh_run(study: Path) -> Record:
    """Whether the Record and the checkpoint of the winner are those of its plan, run once; returns the winner's."""
    best = read_study(study).best
    assert best is not None
    run = study / "trials" / best.folder
    done = evenstep_("train", str(TASK), "--plan", str(run / "plan.json"), "--name", "fresh", "--quiet")
    assert done.returncode == 0, done.stderr
    once, resumed = Record.read("runs/fresh"), Record.read(run)
    for name in ("step", "epoch", "loss", "samples", "lr"):
        assert [getattr(step, name) for step in once.steps] == [getattr(step, name) for step in resumed.steps]
    assert [one.values for one in once.evaluations] == [one.values for one in resumed.evaluations]
    for file in ("weights", "optimizer"):
        ours, theirs = (
            load_file(folder / f"checkpoints/latest/{file}.safetensors") for folder in (Path("runs/fresh"), run)
        )
        assert ours.keys() == theirs.keys()
        assert all((ours[name] == theirs[name]).all() for name in ours)
    return resumed


def test_the_winner_is_bit_equal_to_a_fresh_run_of_its_plan(halved: Path) -> None:
    assert len(same_as_a_fresh_run(halved / "runs/s").restarts) == 2


@pytest.mark.slow
def test_with_virtual_replicas_the_last_trial_goes_on_on_all_devices_with_the_same_bits() -> None:
    done = tune(*HALVING, "--virtual-replicas", "2")
    assert done.returncode == 0, done.stderr
    assert "goes on to epoch 4 on 2 devices" in done.stderr
    same_as_a_fresh_run(Path("runs/s"))
    best = read_study(Path("runs/s")).best
    assert best is not None
    assert [len(row.devices) for row in best.began] == [1, 1, 2]


@pytest.mark.slow
def test_trials_of_two_devices_each() -> None:
    done = tune("--search", "lr", "--trials", "2", "--devices", "cpu,cpu", "--per-trial", "2", "--name", "p")
    assert done.returncode == 0, done.stderr
    for number in (1, 2):
        record = Record.read(f"runs/p/trials/000{number}")
        assert (record.plan.devices, len(record.steps)) == (("cpu", "cpu"), 16)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("pruner", ["median", "hyperband"])
def test_a_trial_that_optuna_prunes_is_paused_at_its_checkpoint(pruner: str) -> None:
    done = tune(*SEARCH, "--devices", "2", "--trials", "12", "--rungs", "1,2,4", "--prune", pruner, "--name", "s")
    assert done.returncode == 0, done.stderr
    assert f"compared at epochs 1, 2, 4 by Optuna's {pruner} pruner" in done.stderr
    study = read_study(Path("runs/s"))
    paused = [one for one in study.trials.values() if one.decisions.get(len(one.reached) - 1) is False]
    assert paused
    assert all(len(one.reached) == 3 for one in study.trials.values() if one not in paused)
    # Nothing is lost: it goes on to its end, from where it was.
    folder = Path("runs/s/trials") / paused[0].folder
    went_on = evenstep_("train", str(TASK), "--resume", str(folder), "--out", "runs", "--name", "more")
    assert went_on.returncode == 0, went_on.stderr
    assert [row.step for row in Record.read(Path("runs/more")).steps][-1] == 16


@pytest.mark.parametrize("per_device", ["2", pytest.param("auto", marks=pytest.mark.slow)])
def test_trials_share_a_device(per_device: str) -> None:
    done = tune("--trials", "3", "--devices", "1", "--per-device", per_device, "--epochs", "1", "--name", "s")
    assert done.returncode == 0, done.stderr
    slots = 2 if per_device == "2" else num_cores()
    assert f"3 trials, {slots} at a time" in done.stderr
    assert ("per device: each needs" in done.stderr) is (per_device == "auto")
    study = read_study(Path("runs/s"))
    spans = [(one.began[0].at, one.reached[0].at) for one in study.trials.values()]
    at_once = max(sum(begin <= at < end for begin, end in spans) for at, _ in spans)
    assert at_once == min(slots, 3)
    assert not list(Path("runs").glob("*fit*"))


def test_show_and_the_journal_hold_the_same_trials(halved: Path) -> None:
    study = read_study(halved / "runs/s")
    shown = evenstep_("tune", "--show", str(halved / "runs/s"))
    assert shown.returncode == 0, shown.stderr
    best = study.best
    assert best is not None
    assert best.last is not None
    assert f"best       trial {best.number}: loss {best.last.value:.4f}" in shown.stdout
    checkpoint = halved / "runs/s/trials" / best.folder / "checkpoints/best"
    assert json.loads((halved / "stdout").read_text())["checkpoint"] == str(checkpoint.relative_to(halved))
    assert f"\ncheckpoint {checkpoint}\nuse it     evenstep checkpoint export {checkpoint} " in shown.stdout
    assert "best by epoch 4" in shown.stdout
    assert (halved / "runs/s/page.html").read_text().count("trials/000") >= 4
    assert 'href="../../page.html"' in (halved / "runs/s/trials/0001/page.html").read_text()
    backend = optuna.storages.journal.JournalFileBackend(str(halved / "runs/s/optuna.journal"))
    mirrored = optuna.load_study(study_name="s", storage=optuna.storages.JournalStorage(backend))
    assert len(mirrored.trials) == 4
    assert mirrored.best_value == best.last.value
    assert [trial.params for trial in mirrored.trials] == [trial.options for trial in study.trials.values()]
    states = [trial.state.name for trial in mirrored.trials]
    assert states.count("COMPLETE") == 1
    assert states.count("PRUNED") == 3


def test_without_optuna_a_study_is_shown_without_importances(
    halved: Path, monkeypatch: pytest.MonkeyPatch, evenstep: Callable[..., Ended]
) -> None:
    shutil.copytree(halved / "runs/s", "s")
    monkeypatch.setattr("evenstep.tune.optuna_sampler.has_optuna", lambda: False)
    monkeypatch.setattr("evenstep.tune.study_page.has_optuna", lambda: False)
    monkeypatch.setitem(sys.modules, "optuna", None)
    shown = evenstep("tune", "--show", "s")
    assert (shown.code, "page       s/page.html" in shown.out) == (0, True), shown
    assert "The importance of options needs Optuna" in Path("s/page.html").read_text()


def test_the_winner_is_found_from_the_study_and_its_card_names_both(
    halved: Path, monkeypatch: pytest.MonkeyPatch, evenstep: Callable[..., Ended]
) -> None:
    monkeypatch.chdir(halved)
    best = read_study(Path("runs/s")).best
    assert best is not None
    assert best.last is not None
    checkpoint = f"runs/s/trials/{best.folder}/checkpoints/best"
    said = f"error: runs/s is a study of many runs, not a checkpoint; that of its best trial is {checkpoint}\n"
    for words in (("checkpoint", "export", "runs/s", "out", "--to", "torch"), ("evaluate", "runs/s")):
        assert evenstep(*words) == Ended(2, "", said)
    assert evenstep("checkpoint", "export", checkpoint, "out", "--to", "torch").err == ""
    card = Path("out/README.md").read_text()
    assert f"# tuned_task.py, trial {best.folder} of s\n" in card
    assert "--best loss:min --threads " in card
    (study,) = json.loads(evenstep("runs", "--json").out)
    assert (study["suggested"], study["trials"]) == (4, 4)
    assert study["best"]["value"] == best.last.value
    assert f"trial 4/4  best loss {best.last.value:.4f}" in evenstep("runs").out


def test_the_latest_checkpoint_of_a_run_is_said_not_to_be_its_best(evenstep: Callable[..., Ended]) -> None:
    import evenstep as library

    library.train(str(TASK), name="one", devices="cpu", epochs=2, best="loss:max", progress=False)
    (best,) = Path("runs/one/checkpoints").glob("best")
    assert best.resolve().name == "step-00000004"
    said = "this is the latest checkpoint of runs/one; its best one is runs/one/checkpoints/best\n"
    assert evenstep("checkpoint", "export", "runs/one", "latest", "--to", "torch").err == said
    assert evenstep("checkpoint", "export", best, "best", "--to", "torch").err == ""
    assert "| checkpoint | step 4 of 8, after 64 samples; the best by loss:max |" in Path("best/README.md").read_text()


def test_help_shows_what_would_be_searched(evenstep: Callable[..., Ended]) -> None:
    shown = evenstep("tune", TASK, "--help").out
    assert re.search(r"lr= +float +default: 0.1 +searched: 1e-3..1:log", shown)
    assert evenstep("tune", "--show", "runs/nothing").err == (
        "error: runs/nothing does not exist; give the folder of a study, such as runs/my_task-tune\n"
    )


@pytest.mark.slow
def test_the_same_command_shows_a_study_that_is_over_and_runs_nothing(halved: Path) -> None:
    shutil.copytree(halved / "runs", "runs")
    before = Path("runs/s/study.jsonl").read_bytes()
    done = tune(*HALVING)
    assert done.returncode == 0, done.stderr
    assert Path("runs/s/study.jsonl").read_bytes() == before


def test_killed_and_started_again_a_study_is_the_one_that_nobody_disturbed(halved: Path) -> None:
    process = subprocess.Popen(command("tune", str(TASK), *HALVING), stderr=subprocess.DEVNULL)
    file = Path("runs/s/study.jsonl")
    wait_until(lambda: file.exists() and file.read_text().count('"reached"') >= 3, seconds=60)
    process.kill()
    process.wait()
    done = tune(*HALVING)
    assert done.returncode == 0, done.stderr
    assert "continuing runs/s, " in done.stderr
    assert results(read_study(Path("runs/s"))) == results(read_study(halved / "runs/s"))


def victims(process: Any, kind: str) -> list[Any]:
    """Processes of a study that are there now."""
    with suppress(psutil.NoSuchProcess):
        if kind == "rank":
            return [one for one in process.children(recursive=True) if one.name().startswith("evenstep-rank")]
        if kind == "fork server":
            return [one for one in process.children() if "forkserver" in " ".join(one.cmdline())]
        return [process]
    return []


@pytest.mark.slow
@pytest.mark.fresh
@pytest.mark.timeout(1800)
def test_twenty_random_kills_over_24_trials_change_nothing() -> None:
    luck = random.Random(18)
    words = ("tune", str(TASK), "seconds=0.05", *SEARCH, "--devices", "cpu,cpu", "--trials", "24", "--rungs", "1,3,9")
    undisturbed = evenstep_(*words, "--name", "undisturbed")
    assert undisturbed.returncode == 0, undisturbed.stderr
    file, kinds = Path("runs/killed/study.jsonl"), Counter[str]()
    process: Any = None
    while kinds.total() < 20:
        if process is None or process.poll() is not None:
            assert process is None or process.returncode == -signal.SIGKILL, "it is over before its kills"
            num = file.read_text().count("commandstart") if file.exists() else 0
            process = psutil.Popen(command(*words, "--name", "killed"), stderr=subprocess.DEVNULL)
            wait_until(lambda: file.exists() and file.read_text().count("commandstart") > num, seconds=60)  # noqa: B023
        time.sleep(luck.uniform(0, 2))
        kind = luck.choice(["command", "rank", "fork server"])
        wait_until(lambda: process.poll() is not None or victims(process, kind), seconds=120)  # noqa: B023
        for victim in victims(process, kind)[:1]:
            with suppress(psutil.NoSuchProcess):
                victim.kill()
                kinds[kind] += 1
        if kind == "command":
            process.wait()
    if process.poll() is None:
        process.kill()
        process.wait()
    done = evenstep_(*words, "--name", "killed")
    assert done.returncode == 0, done.stderr
    assert len(kinds) == 3
    assert results(read_study(Path("runs/killed"))) == results(read_study(Path("runs/undisturbed")))


@pytest.mark.slow
def test_a_failed_trial_has_its_first_cause_and_the_study_goes_on() -> None:
    words = ("failing_width=4", "--search", "width=2,4,8", "--sampler", "grid", "--devices", "cpu,cpu", "--name", "f")
    done = tune(*words, "--epochs", "4")
    assert done.returncode == 0, done.stderr
    study = read_study(Path("runs/f"))
    failed = study.trials[2].failed
    assert failed is not None
    assert "ValueError: width 4 does not work" in failed.why
    assert len(study.ranking(0)) == 2
    assert "trial 2 failed: rank 0 failed at step" in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("lr=0.1", "--search", "lr"), "lr is given (lr=0.1) and searched (--search lr); leave one of them out"),
        (("--search", "rate=1..2"), "the task has no such option"),
        (("--search", "lr", "--rungs", "3,1"), "write growing numbers of epochs"),
        (("--search", "lr", "--rungs", "1,3", "--epochs", "5"), "omit --epochs"),
        (
            ("--search", "lr", "--sampler", "annealing"),
            "unknown sampler 'annealing'; choose tpe, gp, cmaes, random or grid",
        ),
        (("--search", "lr", "--sampler", "grid"), "needs choices, and lr is a range"),
        (("--search", "lr", "--devices", "3", "--per-trial", "2"), "3 devices do not divide into trials of 2"),
        (("--search", "lr", "--sampler", "cmaes"), "--sampler cmaes needs 2 ranges of numbers or more"),
        (("--search", "lr", "--prune", "median"), "--prune median compares trials at rungs; give --rungs 1,3,9"),
        (("--search", "lr", "--per-device", "0"), "--per-device is '0'; write a number of trials, such as 2, or auto"),
        (("--search", "lr", "--metric", "speed"), "Write --metric speed:max or --metric speed:min"),
    ],
)
def test_bad_input_is_one_line_and_starts_nothing(words: tuple[str, ...], message: str) -> None:
    from typer.testing import CliRunner

    from evenstep.cli import app

    done = CliRunner().invoke(app, ["tune", str(TASK), *words])
    assert message in str(done.exception)
    assert not Path("runs").exists()


def test_without_optuna_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "optuna" else find(name, *more)
    )
    with pytest.raises(Exception, match=r"needs Optuna, which is not installed; pip install 'evenstep\[tune\]'"):
        optuna_sampler.need_optuna("tpe")


@pytest.mark.slow
def test_ctrl_c_stops_all_trials_with_checkpoints() -> None:
    words = ("seconds=0.05", *SEARCH, "--devices", "cpu,cpu", "--trials", "4", "--name", "c", "--epochs", "40")
    process = subprocess.Popen(command("tune", str(TASK), *words), stderr=subprocess.PIPE, text=True)
    wait_until(lambda: len([*Path(".").glob("runs/c/trials/*/checkpoints/latest")]) == 2, seconds=60)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "stopping: the trials that run save checkpoints\n" in errors
    assert "stopped, with checkpoints; the same command continues the study in runs/c" in errors
    assert not any(trial.failed or trial.reached for trial in read_study(Path("runs/c")).trials.values())
