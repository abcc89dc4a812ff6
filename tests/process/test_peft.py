"""LoRA by peft: adapters train on several devices as on one, frozen weights stay, and a Trainer of one is adopted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from evenstep.record import Record
from tests.fleet import furthest, newest_weights
from tests.marks import first_is_quick

pytest.importorskip("peft")
pytest.importorskip("transformers")

TASK = """
import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel
import evenstep
from evenstep import Task

ids = torch.randint(0, 50, (37, 8), generator=torch.Generator().manual_seed(0))

def make_model():
    sizes = {"vocab_size": 50, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
    model = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    return get_peft_model(model, lora)

def loss(model, batch):
    logits = model(input_ids=batch[0]).logits[:, :-1]
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[0][:, 1:].flatten(), reduction="sum")
    return losses, batch[0][:, 1:].numel()

def task() -> Task:
    return Task(
        model=make_model,
        train=(ids,),
        valid=(ids[:11],),
        loss=loss,
        optimizer=lambda model: torch.optim.AdamW(
            [weight for weight in model.parameters() if weight.requires_grad], lr=1e-2, weight_decay=0.1
        ),
        batch=9,
    )

def adopted() -> Task:
    return evenstep.adopt.trainer(make_trainer)

def make_trainer():
    from transformers import Trainer, TrainingArguments
    torch.manual_seed(0)
    args = TrainingArguments(output_dir="out", report_to=[], use_cpu=True, disable_tqdm=True, learning_rate=1e-2)
    data = [{"input_ids": one, "labels": one} for one in ids]
    return Trainer(model=make_model(), args=args, train_dataset=data)
"""


def run(*words: str) -> str:
    command = [sys.executable, "-m", "evenstep", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("strategy", first_is_quick(["ddp", "dp", "fsdp"]))
def test_adapters_train_as_on_one_device_and_the_rest_stays(strategy: str) -> None:
    Path("lora.py").write_text(TASK)
    usual = ("--steps", "7", "--precision", "fp64", "--checkpoint-every", "2", "--keep", "9")
    run("train", "lora.py", "--name", "one", *usual)
    run("train", "lora.py", "--name", "two", "--strategy", strategy, "--devices", "cpu,cpu", *usual)
    one, two = (Record.read(Path("runs", name)) for name in ("one", "two"))
    # GPT-2 computes parts of attention in float32.
    assert two.losses == pytest.approx(one.losses, rel=1e-6)
    weights = newest_weights(Path("runs/two"))
    assert furthest(weights, newest_weights(Path("runs/one"))) < 1e-6
    earlier = load_file("runs/two/checkpoints/step-00000002/weights.safetensors")
    changed = {name for name, value in weights.items() if not torch.equal(value, earlier[name])}
    assert changed == {name for name in weights if "lora_" in name}
    assert len(changed) == 4


@pytest.mark.slow
def test_a_trainer_of_a_peft_model_is_adopted() -> None:
    Path("lora.py").write_text(TASK)
    assert run("adopt", "lora.py:adopted", "--steps", "5").endswith("bit for bit\n")
