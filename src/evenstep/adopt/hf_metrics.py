"""`compute_metrics` and `metric_for_best_model` of a Trainer of transformers, as scores of a Task."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from evenstep.checkpoint.shards import is_sharded

PADDING = -100
"""What a Trainer fills shorter sequences up with."""


class TrainerMetrics:
    """Predicts as the evaluation of a Trainer does, and calls its compute_metrics with all predictions."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._ignored = {"loss", *getattr(trainer.model.config, "keys_to_ignore_at_inference", ["past_key_values"])}

    @classmethod
    def of(cls, trainer: Any) -> TrainerMetrics | None:
        """Those of this Trainer, if it has any that can be taken over."""
        is_used = trainer.compute_metrics is not None and trainer.eval_dataset is not None
        return cls(trainer) if is_used and not why_left_out(trainer) else None

    def predict(self, model: nn.Module, batch: Any) -> tuple[Any, Any]:
        """(logits, labels), each with one entry per sample."""
        trainer = self._trainer
        if getattr(trainer.args, "predict_with_generate", False):
            logits, labels = self._generated(model, batch)
        else:
            logits, labels = self._computed(model, batch)
        if trainer.preprocess_logits_for_metrics is not None:
            logits = trainer.preprocess_logits_for_metrics(logits, labels)
        return _per_sample(logits), _per_sample(labels)

    def _computed(self, model: nn.Module, batch: Any) -> tuple[Any, Any]:
        """What the model returns for the inputs and the labels."""
        trainer = self._trainer
        labels = tuple(batch[name] for name in trainer.label_names)
        # A copy: label smoothing takes the labels out.
        _, outputs = trainer.compute_loss(model, dict(batch), return_outputs=True)
        is_named = isinstance(outputs, Mapping)
        logits = (
            tuple(value for name, value in outputs.items() if name not in self._ignored)
            if is_named
            else tuple(outputs[1:])
        )
        return _only(logits), _only(labels)

    def _generated(self, model: nn.Module, batch: Any) -> tuple[Any, Any]:
        """What Seq2SeqTrainer generates for the inputs; the model may be one of several, in threads."""
        args = self._trainer.args
        # Ranks that hold shards of one model generate as long as the slowest.
        given = {"synced_gpus": any(map(is_sharded, model.parameters()))}
        lengths = {"max_length": args.generation_max_length, "num_beams": args.generation_num_beams}
        given |= {name: value for name, value in lengths.items() if value is not None}
        trainer = copy.copy(self._trainer)
        trainer.model, trainer._prepare_inputs = model, dict
        _, tokens, labels = trainer.prediction_step(model, dict(batch), False, None, **given)
        return tokens, labels

    @property
    def score(self) -> Any:
        """compute_metrics as a score: of all predictions, or batch by batch."""
        return BatchedMetrics(self._trainer) if self._trainer.args.batch_eval_metrics else self.compute

    def compute(self, predictions: Any, label_ids: Any) -> Mapping[str, float]:
        """What compute_metrics returns for the whole validation set."""
        from transformers import EvalPrediction

        given = EvalPrediction(predictions=_as_array(predictions), label_ids=_as_array(label_ids))
        found: Mapping[str, float] = self._trainer.compute_metrics(given)
        return found


class BatchedMetrics:
    """`batch_eval_metrics=True`: compute_metrics gets one batch at a time, and returns the result with the last."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._held: tuple[Any, Any] | None = None
        """The last batch, until another one comes."""

    def __deepcopy__(self, memo: dict[int, Any]) -> BatchedMetrics:
        return BatchedMetrics(self._trainer)

    def reset(self) -> None:
        self._held = None

    def update(self, predictions: Any, label_ids: Any) -> None:
        if self._held is not None:
            self._call(compute_result=False)
        self._held = predictions, label_ids

    def compute(self) -> Mapping[str, float]:
        """What it returns for the last batch."""
        found: Mapping[str, float] = self._call(compute_result=True)
        return found

    def _call(self, compute_result: bool) -> Any:
        from transformers import EvalPrediction

        assert self._held is not None
        predictions, label_ids = map(_as_tensor, self._held)
        given = EvalPrediction(predictions=predictions, label_ids=label_ids)
        return self._trainer.compute_metrics(given, compute_result=compute_result)


def why_left_out(trainer: Any) -> str:
    """Why its compute_metrics cannot be taken over; empty if it can."""
    import transformers

    known = (transformers.Trainer.prediction_step, transformers.Seq2SeqTrainer.prediction_step)
    if type(trainer).prediction_step not in known:
        return f"{type(trainer).__name__}.prediction_step predicts in its own way"
    if trainer.args.include_for_metrics:
        return "TrainingArguments(include_for_metrics=...)"
    return "" if hasattr(trainer.model, "config") else "the model has no config"


def best_of(trainer: Any, metrics: TrainerMetrics | None) -> str | None:
    """`metric_for_best_model`, as `--best` takes it, where an evaluation has it."""
    given = trainer.args.metric_for_best_model
    metric = given.removeprefix("eval_") if given else ""
    if not metric or trainer.eval_dataset is None or (metric != "loss" and metrics is None):
        return None
    is_larger = trainer.args.greater_is_better
    is_larger = not metric.endswith("loss") if is_larger is None else is_larger
    return f"{metric}:{'max' if is_larger else 'min'}"


def left_out(trainer: Any, metrics: TrainerMetrics | None) -> Iterator[str]:
    """What a task of this Trainer does not do, and what to use instead."""
    args = trainer.args
    if trainer.compute_metrics is not None and trainer.eval_dataset is not None and metrics is None:
        yield (
            f"compute_metrics of the Trainer is not taken over ({why_left_out(trainer)}); use "
            "dataclasses.replace(task, predict=..., scores={'f1': ...})"
        )
        if args.metric_for_best_model not in (None, "loss", "eval_loss"):
            yield "metric_for_best_model is not taken over; add it to scores, and use --best"
    if args.load_best_model_at_end:
        yield "load_best_model_at_end is not taken over; the best model is in checkpoints/best of the run"


def _only(values: tuple[Any, ...]) -> Any:
    return values[0] if len(values) == 1 else values


def _per_sample(value: Any) -> Any:
    """Tensors of sequences become lists: their lengths differ from batch to batch."""
    if isinstance(value, tuple | list):
        return tuple(_per_sample(one) for one in value)
    return list(value) if isinstance(value, torch.Tensor) and value.ndim > 1 else value


def _as_array(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_as_array(one) for one in value)
    return _as_tensor(value).numpy()


def _as_tensor(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_as_tensor, value))
    return (
        nn.utils.rnn.pad_sequence(value, batch_first=True, padding_value=PADDING) if isinstance(value, list) else value
    )
