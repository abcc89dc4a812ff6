"""Adopted trainers: the first steps are those of the original, and several devices train the same model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import evenstep
from evenstep.errors import PlanError, TaskError
from tests.lazy import Lazy, needs
from tests.process.test_scripts import no_ranks

pytestmark = needs("transformers", "lightning")
transformers = Lazy("transformers")
lightning_task, seq2seq_task, trainer_task = (
    Lazy(f"tests.process.{name}_task") for name in ("lightning", "seq2seq", "trainer")
)
SLOW = pytest.mark.slow
TRAINER, LIGHTNING = (str(Path(__file__).with_name(f"{name}_task.py")) for name in ("trainer", "lightning"))


def command(*words: str) -> subprocess.CompletedProcess[str]:
    run = [sys.executable, "-m", "evenstep", *words]
    return subprocess.run(run, capture_output=True, text=True, env=no_ranks(), timeout=110)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", pytest.param("bert", marks=SLOW)])
def test_the_first_steps_are_those_of_the_trainer_bit_for_bit(kind: str) -> None:
    done = command("adopt", TRAINER, f"kind={kind}")
    assert done.returncode == 0, done.stdout + done.stderr
    said = "20 steps: losses and weights equal those of transformers.Trainer, bit for bit\n"
    assert done.stdout.endswith(said)


@pytest.mark.slow
def test_a_difference_from_the_trainer_is_named() -> None:
    text = Path(TRAINER).read_text()
    own = "evenstep.adopt.trainer(lambda: make_trainer(kind, dropout))"
    assert own in text
    changed = f"__import__('dataclasses').replace({own}, scheduler=None)"
    Path("changed.py").write_text(text.replace(own, changed))
    done = command("adopt", "changed.py", "--steps", "3")
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("step 2: the loss is "), done.stdout
    assert "weight differs after the last step (max relative difference" in done.stdout


UNSEEDED = """
import torch, evenstep
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

data = [{"input_ids": torch.randint(60, (9,)), "labels": number % 2} for number in range(60)]

def make_trainer():
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    args = TrainingArguments(output_dir="out", report_to=[], use_cpu=True)
    model = BertForSequenceClassification(BertConfig(vocab_size=64, **sizes))
    return Trainer(model=model, args=args, train_dataset=data)
"""
TASK = "\ndef task():\n    return evenstep.adopt.trainer(make_trainer)\n"


@pytest.mark.slow
def test_a_trainer_that_does_not_seed_starts_equal_and_one_that_draws_a_seed_is_named() -> None:
    Path("unseeded.py").write_text(UNSEEDED + TASK)
    done = command("adopt", "unseeded.py", "--steps", "3")
    assert done.stdout.endswith("bit for bit\n"), done.stdout + done.stderr
    Path("drawn.py").write_text(UNSEEDED.replace("    sizes", "    torch.seed()\n    sizes") + TASK)
    done = command("adopt", "drawn.py", "--steps", "3")
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("the models differ before the first step: bert."), done.stdout


@pytest.mark.slow
def test_a_script_with_a_trainer_and_no_task_is_shown_the_task() -> None:
    Path("script.py").write_text(UNSEEDED)
    done = command("adopt", "script.py")
    assert done.returncode == 2
    assert "def task(): return evenstep.adopt.trainer(make_trainer)" in done.stderr


@pytest.mark.parametrize("kind", ["gpt2", pytest.param("bert", marks=SLOW)])
def test_metrics_and_the_best_are_those_of_the_trainer(kind: str) -> None:
    more = {"load_best_model_at_end": True, "metric_for_best_model": "hits", "eval_strategy": "epoch"}
    more |= {"save_strategy": "epoch"}
    task = evenstep.adopt.trainer(lambda: trainer_task.make_trainer(kind, **more))
    assert task.best == "hits:max"
    record = evenstep.train(task, strategy="single", devices="cpu", steps=10, progress=False)
    trainer = trainer_task.make_trainer(kind)
    trainer.model.load_state_dict(record.model(task=task).state_dict())
    assert record.evaluations[-1].values["hits"] == pytest.approx(trainer.evaluate()["eval_hits"], rel=1e-9)
    assert record.summary is not None
    assert record.summary.best is not None
    assert record.summary.best.metric == "hits"


def check_seq2seq(strategy: str, num: int, **more: Any) -> None:
    """Predictions and metrics of an adopted Seq2SeqTrainer are those of the original."""
    task = evenstep.adopt.trainer(lambda: seq2seq_task.make_trainer(**more))
    devices = ",".join(["cpu"] * num)
    record = evenstep.train(task, strategy=strategy, devices=devices, steps=8, threads=1, progress=False)
    trainer = seq2seq_task.make_trainer(**more)
    trainer.model.load_state_dict(record.model(task=task).state_dict())
    expected, found = trainer.evaluate(), record.evaluations[-1].values
    # The Trainer's own eval_loss is a mean of means.
    for name in ("hits", "length"):
        assert found[name] == pytest.approx(expected[f"eval_{name}"], rel=1e-9)


@pytest.mark.parametrize(
    ("strategy", "num"),
    [("ddp", 2), *(pytest.param(*one, marks=SLOW) for one in [("single", 1), ("dp", 2), ("fsdp", 2)])],
)
def test_a_seq2seq_trainer_generates_as_the_original(strategy: str, num: int) -> None:
    check_seq2seq(strategy, num, predict_with_generate=True)


@pytest.mark.parametrize("generates", [True, pytest.param(False, marks=SLOW)])
def test_metrics_that_are_computed_batch_by_batch_are_those_of_the_trainer(generates: bool) -> None:
    check_seq2seq("single", 1, predict_with_generate=generates, batch_eval_metrics=True)


def test_what_is_left_out_is_said_with_what_to_use_instead() -> None:
    task = evenstep.adopt.trainer(lambda: trainer_task.make_trainer(base=trainer_task.Predicting))
    said = r"compute_metrics of the Trainer is not taken over \(Predicting.prediction_step .*dataclasses.replace\(task"
    with pytest.raises(PlanError, match=said):
        evenstep.train(task, best="hits:max", strategy="single", devices="cpu", steps=2, progress=False)


STRATEGY = pytest.mark.parametrize(
    "strategy", [pytest.param("dp", marks=SLOW), "ddp", pytest.param("fsdp", marks=SLOW)]
)


@SLOW
@STRATEGY
def test_an_adopted_trainer_trains_the_same_model_on_two_devices(strategy: str) -> None:
    how: dict[str, Any] = {"options": {"dropout": 0.0}, "steps": 8, "progress": False, "threads": 1}
    alone = evenstep.train(TRAINER, strategy="single", devices="cpu", **how)
    both = evenstep.train(TRAINER, strategy=strategy, devices="cpu,cpu", **how)
    # GPT-2 computes its loss in float32.
    assert both.losses == pytest.approx(alone.losses, rel=1e-5)
    assert [step.count for step in both.steps] == [step.count for step in alone.steps]
    assert both.evaluations[-1].values == pytest.approx(alone.evaluations[-1].values, rel=1e-5)
    assert (alone.plan.batch, alone.plan.clip, alone.plan.epochs) == (6, 1.0, None)


def with_callback(callback: Any) -> Any:
    made = trainer_task.make_trainer()
    made.add_callback(callback)
    return made


PLATEAU = {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch"}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: trainer_task.make_trainer(base=trainer_task.Stepping),
            r"Stepping\.training_step changes how a step is computed",
        ),
        (lambda: with_callback(trainer_task.Freezing), "the callback Freezing may change the training"),
        (lambda: with_callback(transformers.EarlyStoppingCallback()), "leave it out, and use --stop-after"),
        (
            lambda: trainer_task.make_trainer(neftune_noise_alpha=5.0),
            r"TrainingArguments\(neftune_noise_alpha",
        ),
        (lambda: trainer_task.make_trainer(**PLATEAU), "its learning rate scheduler"),
        (lambda: 3, "takes a transformers.Trainer, or a function that makes one; got 3"),
    ],
    ids=["training_step", "callback", "early stopping", "noise", "plateau", "no Trainer"],
)
def test_what_cannot_be_adopted_is_refused_by_name(make: Any, said: str) -> None:
    with pytest.raises(TaskError, match=said):
        evenstep.adopt.trainer(make)


def test_the_first_steps_are_those_of_a_lightning_trainer_bit_for_bit() -> None:
    done = command("adopt", LIGHTNING)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "20 steps: losses and weights equal those of a Lightning Trainer, bit for bit\n"


@pytest.mark.slow
@STRATEGY
def test_an_adopted_module_trains_the_same_model_on_two_devices(strategy: str) -> None:
    how: dict[str, Any] = {
        "options": {"dropout": 0.0},
        "epochs": 2,
        "progress": False,
        "threads": 1,
        "precision": "fp64",
    }
    alone = evenstep.train(LIGHTNING, strategy="single", devices="cpu", **how)
    both = evenstep.train(LIGHTNING, strategy=strategy, devices="cpu,cpu", **how)
    assert both.losses == pytest.approx(alone.losses, rel=1e-9)
    assert [step.lr for step in both.steps] == [0.01] * 6 + [0.005] * 6
    assert [step.logged for step in both.steps] == [pytest.approx(step.logged) for step in alone.steps]
    for ours, theirs in zip(both.evaluations, alone.evaluations, strict=True):
        assert ours.values == pytest.approx(theirs.values, rel=1e-9)
        assert set(ours.values) == {"loss", "val_loss", "val_accuracy"}


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("Manual", "Manual optimizes manually"),
        ("TwoOptimizers", "configure_optimizers returned 2 optimizers"),
        ("Hooked", r"Hooked\.on_after_backward is called by Lightning's Trainer alone"),
        ("Epochs", r"Epochs\.training_step uses self\.current_epoch: use evenstep\.progress\(\)\.epoch"),
        ("Indexed", r"Indexed\.training_step uses the index of its batch"),
    ],
)
def test_modules_that_cannot_be_adopted_are_refused_by_name(kind: str, said: str) -> None:
    with pytest.raises(TaskError, match=said):
        evenstep.adopt.lightning(getattr(lightning_task, kind)(), lightning_task.Points())


def test_a_task_of_its_own_has_no_original() -> None:
    done = command("adopt", "digits")
    assert done.returncode == 2
    assert done.stderr.startswith("error: digits was not adopted: it has no original")
