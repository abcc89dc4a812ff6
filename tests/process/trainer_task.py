"""Two Trainers of transformers, adopted."""

from __future__ import annotations

from typing import Any, Literal

import torch
import transformers
from transformers import Trainer, TrainingArguments

import evenstep
from evenstep import Task

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
Kind = Literal["bert", "gpt2"]


class Sentences(torch.utils.data.Dataset[dict[str, Any]]):
    def __init__(self, kind: Kind, num: int) -> None:
        self.kind = kind
        self.ids = torch.randint(5, 60, (num, 9), generator=torch.Generator().manual_seed(num))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = self.ids[index]
        if self.kind == "bert":
            return {"input_ids": ids, "labels": int(ids[0] > 30)}
        labels = ids.clone()
        labels[: index % 5] = -100
        return {"input_ids": ids, "labels": labels}


def model_of(kind: Kind, dropout: float) -> torch.nn.Module:
    if kind == "bert":
        sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
        return transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=64, **sizes))
    size = {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
    drops = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**size, **drops))


def compute_metrics(given: transformers.EvalPrediction) -> dict[str, float]:
    counts = given.label_ids != -100
    return {"hits": float((given.predictions.argmax(-1) == given.label_ids)[counts].mean())}


def make_trainer(kind: Kind = "gpt2", dropout: float = 0.1, base: type[Trainer] = Trainer, **more: Any) -> Trainer:
    torch.manual_seed(0)
    given = {"learning_rate": 5e-3, "warmup_steps": 5, "weight_decay": 0.1, "per_device_train_batch_size": 6}
    args = TrainingArguments(
        output_dir="out",
        num_train_epochs=3,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
        **{**given, **more},
    )
    data, valid = Sentences(kind, 45), Sentences(kind, 13)
    given_data = {"train_dataset": data, "eval_dataset": valid, "compute_metrics": compute_metrics}
    return base(model=model_of(kind, dropout), args=args, **given_data)


def task(kind: Kind = "gpt2", dropout: float = 0.1) -> Task:
    return evenstep.adopt.trainer(lambda: make_trainer(kind, dropout))


class Predicting(Trainer):
    def prediction_step(self, *arguments: Any, **named: Any) -> Any:
        return super().prediction_step(*arguments, **named)


class Stepping(Trainer):
    def training_step(self, *arguments: Any, **named: Any) -> torch.Tensor:
        return super().training_step(*arguments, **named)


class Freezing(transformers.TrainerCallback):
    pass
