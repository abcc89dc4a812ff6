"""verify finds what was planted and names it, and has nothing against what is sound."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from evenstep.launcher.prepare import prepare
from evenstep.verify import Configuration, Depth, Verdict, check

ROOT = Path(__file__).parents[2]
MISTAKES = Path(__file__).parent / "mistakes"
TWO = ("cpu", "cpu")

PLANTED = {
    # name: (strategy, cause, words of the reason)
    "batch_norm": ("ddp", "batchnorm", "normalizes by the statistics of each part"),
    "centred": ("ddp", "batch-dependent", "depends on the other samples of its batch"),
    "contrastive": ("ddp", "batch-dependent", "in-batch negatives"),
    "gathered_without_gradient": ("ddp", "gather", "is that of the whole batch, but its gradients are not"),
    "mixtral": ("dp", "batch-dependent", "a router's load over the batch"),
    "token_mean": ("ddp", "mean-of-means", "weighs 1.18 times as much as its samples"),
    "padded_gpt2": ("dp", "mean-of-means", "a mean over something other than samples (tokens, boxes)"),
    "summed": ("ddp", "sum", "a sum over the batch, not a mean"),
    "worst_metric": ("ddp", "metric", "the metric worst changes with the number of devices: it is not a mean"),
    "noise": ("ddp", "draws", "x + 0.1 * torch.randn_like(x)"),
    "python_noise": ("ddp", "draws", "Python's generator"),
    "opt": ("dp", "draws", "dropout_probability = torch.rand([]))"),
    "unseeded": ("ddp", "not-repeatable", "the task is not reproducible, not even on one device"),
    "unseeded_start": ("ddp", "start", "building the model twice gives different weights: 0.weight"),
    "clocked": ("ddp", "not-repeatable", "ddp x 2 is not reproducible: the same run twice gives different results"),
    "drawing_batch": ("ddp", "reading", "augment_batch draws from a global generator"),
    "divided": ("ddp", "rank", "the loss is 0.5 times that of single"),
    "by_rank": ("ddp", "rank", "the loss is 1 and 2 times that of single"),
    "scaled_rate": ("ddp", "settings", "learning rate depends on the rank or the world size: 0.1 on single"),
    "other_data": ("ddp", "other-data", "for the same ids, rank 1 reads other samples"),
    "few_digits": ("ddp", "precision", "in float64 ddp x 2 and single agree"),
    "few_digits_and_jumps": ("ddp", "precision", "perturbing the weights of single does not move it as far"),
    "reducing_hook": ("ddp", "gradients-by-rank", "2 times that of single for the same samples"),
    "clipping_hook": ("ddp", "gradient-hook", "the gradient of 2.weight is changed (by a hook or a custom backward)"),
    "around": ("ddp", "captured-model", "the loss does not use the model that it is given"),
    "same_data": ("ddp", "same-data", "ranks 0 and 1 read the same data"),
    "queue": ("ddp", "buffer", "forward changes the buffer 1.seen"),
    "quantized": ("ddp", "buffer", "activation_post_process.scale by the samples that it sees, and the loss reads it"),
    "counted_samples": ("ddp", "buffer", "forward counts samples in the buffer 1.seen"),
    "forgetful": ("ddp", "forgotten", "neither a parameter nor a buffer"),
}
ALSO_ELSEWHERE = {
    "batch_norm": ("dp", "batchnorm", "normalizes by the statistics of each part"),
    "noise": ("dp", "draws", "torch's generator"),
    "divided": ("fsdp", "rank", "0.5 times"),
    "queue": ("fsdp", "buffer", "1.seen"),
    "summed": ("dp", "sum", "not a mean"),
}
QUICK = ("token_mean",)
CASES = [*PLANTED.items(), *ALSO_ELSEWHERE.items()]

SOUND = {
    "digits": "digits",
    **{
        name: f"{MISTAKES / 'sound.py'}:{name}"
        for name in (
            "mnist",
            "fashion_mnist",
            "cifar10",
            "cifar10_resnet18",
            "shakespeare",
            "gpt2",
            "bert",
            "mlp",
            "cnn",
            "gpt",
            "tied",
            "lstm",
            "attentive",
            "weighted",
            "stream",
            "rows",
            "augmented",
            "augmented_batch",
            "uneven",
            "sentences",
            "hard_coded",
            "complex_weights",
            "nadam",
            "asgd",
            "adafactor",
            "gathered",
            "gathered_by_evenstep",
            "averaged",
            "frozen_norm",
            "unused",
            "experts",
        )
    },
}
MORE = {
    "gathered": ("--strategies", "ddp,fsdp"),
    # torch's optimizers leave complex parameters as they are where fsdp shards them.
    "complex_weights": ("--strategies", "dp,ddp"),
    # A ResNet's batches are normalized over all processes, which dp cannot.
    "cifar10_resnet18": ("--sync-batchnorm", "--strategies", "ddp,fsdp", "--batch", "8", "--steps", "2"),
    "cifar10": ("--batch", "16"),
    "shakespeare": ("--batch", "4"),
}


def verdict_of(name: str, strategy: str, depth: Depth | None = None) -> Verdict:
    base = prepare(f"{MISTAKES / 'planted.py'}:{name}", {})
    config = Configuration(strategy, TWO)
    return check(base, [config], base.folder / "verify", depth)[config]


def verify(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "evenstep", "verify", *arguments]
    # This checkout before the installed one; ROOT is for tests.small_tasks.
    more: Mapping[str, str] = {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", **environment}
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **more}, timeout=550)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "strategy", "cause", "words"),
    [
        pytest.param(
            name, *rest, id=f"{name}-{rest[0]}", marks=() if name in QUICK and rest[0] == "ddp" else pytest.mark.slow
        )
        for name, rest in CASES
    ],
)
def test_finds_what_was_planted_and_names_the_cause(name: str, strategy: str, cause: str, words: str) -> None:
    verdict = verdict_of(name, strategy)
    assert not verdict.is_same
    assert verdict.cause == cause
    assert words in verdict.why


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_offers_synchronised_batch_norm_and_shows_that_it_helps() -> None:
    verdict = verdict_of("batch_norm", "ddp")
    assert verdict.advice == "Train with --sync-batchnorm."
    assert "; with --sync-batchnorm, by " in verdict.evidence[0]
    assert verdict_of("batch_norm", "ddp", Depth(sync_batchnorm=True)).is_same


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("steps", "words"), [(2, "in fp16 nothing was compared"), (12, "in one run only")])
def test_steps_that_the_scaler_skips_are_not_mistaken_for_others(steps: int, words: str) -> None:
    base = prepare(f"{MISTAKES / 'planted.py'}:overflowing", {"precision": "fp16"})
    config = Configuration("ddp", TWO)
    verdict = check(base, [config], base.folder / "verify", Depth(steps=steps))[config]
    assert verdict.is_same, verdict
    assert any(words in note for note in verdict.notes), verdict.notes


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_rounding_that_turns_decisions_is_no_difference() -> None:
    verdict = verdict_of("deciding", "ddp")
    assert verdict.is_same, verdict
    assert any("rounding flips a decision there" in note for note in verdict.notes), verdict.notes


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_counter_in_a_buffer_differs_only_where_micro_batches_count_twice() -> None:
    base = prepare(f"{MISTAKES / 'planted.py'}:counter", {})
    spread, cut = Configuration("ddp", TWO), Configuration("single", ("cpu",), 2)
    verdicts = check(base, [spread, cut], base.folder, Depth(own_precision=False))
    assert verdicts[spread].is_same
    assert verdicts[cut].cause == "buffer"


@pytest.mark.slow
def test_says_where_a_way_first_differs_and_ends_with_1() -> None:
    done = verify(f"{MISTAKES / 'planted.py'}:scaled_rate", "--strategies", "ddp", "--devices", "2", "--json")
    assert done.returncode == 1, done.stderr
    (line,) = done.stdout.splitlines()
    (config,) = json.loads(line)["ways"]
    assert (config["first_step"], config["first_tensor"], config["cause"]) == (1, "0.weight", "settings")
    assert 0.01 < config["difference"] < 0.1
    assert config["parts"]["gradients"]["is_same"] is False
    assert config["parts"]["samples"]["is_same"] is True
    assert not Path("runs").exists()


def test_a_sound_task_passes() -> None:
    verdict = verdict_of("sound", "ddp", Depth(steps=2, own_precision=False))
    assert verdict.is_same, verdict
    assert all(part.is_same and part.difference is not None for part in verdict.parts.values())


@pytest.mark.slow
def test_a_metric_in_float32_is_sound() -> None:
    verdict = verdict_of("float_metric", "ddp", Depth(steps=2, own_precision=False))
    assert verdict.is_same, verdict


@pytest.mark.slow
def test_a_sound_task_passes_and_leaves_nothing_behind() -> None:
    task = f"{MISTAKES / 'planted.py'}:sound"
    done = verify(task, "--strategies", "single,dp,ddp", "--devices", "2", "--accumulate", "2", "--steps", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all strategies match single (batch 16" in done.stdout
    assert done.stdout.count("✗") == 0
    assert not Path("runs").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SOUND)
def test_has_nothing_against_a_sound_task(name: str) -> None:
    done = verify(SOUND[name], "--devices", "2", "--json", *MORE.get(name, ()))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("link", "note"), [("local:1", ""), ("powersgd:1", "--link powersgd:1 is not exact"), ("bf16", "not exact")]
)
def test_a_link_is_judged_by_what_it_promises(tmp_path: Path, link: str, note: str) -> None:
    command = [sys.executable, "-m", "evenstep", "verify", "digits", "--strategies", "ddp", "--devices", "2"]
    done = subprocess.run([*command, "--link", link], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"link {link}" in done.stdout
    assert note in done.stdout
