"""Scores: values of all predictions and targets at once, such as AUC, F1 and BLEU, which are no means over samples.

Rank 0 gets the predictions of each global batch, every sample once and in the order of the data, so that a score is
computed from the same values by the same calls on any number of devices.
"""

from __future__ import annotations

import copy
import inspect
import io
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from evenstep.data.loader import Batch as LoadedBatch
from evenstep.data.loader import MicroBatch
from evenstep.data.nested import map_tensors
from evenstep.distributed.world import World
from evenstep.errors import TaskError
from evenstep.strategies.base import DistributedModel, on, one_after_another
from evenstep.task import Batch, Model, Task, describe
from evenstep.training.evaluation import Evaluator

if TYPE_CHECKING:
    from evenstep.training.team import Team

TARGETS_FIRST = ("y_true", "labels_true", "target", "targets", "labels", "truth", "references")
"""First parameters of functions, most of them scikit-learn's, that take the targets before the predictions."""
UPDATED = ("update", "compute", "reset")
"""The methods of an object such as those of torchmetrics."""


class Scores:
    """The scores of a task during one evaluation after another."""

    def __init__(self, predict: Callable[[Model, Batch], tuple[Any, Any]], scores: Mapping[str, Any]) -> None:
        self._predict = predict
        self._evaluate = Evaluator()
        self._scores = scores
        self._objects = {name: alone(one) for name, one in scores.items() if is_updated(one)}
        self._pairs: list[tuple[Any, Any]] = []
        """Of all batches so far, on rank 0, where there are functions."""

    def reset(self) -> None:
        """Before an evaluation."""
        self._pairs.clear()
        for one in self._objects.values():
            one.reset()

    def add(self, team: Team, model: DistributedModel, batch: LoadedBatch) -> None:
        """Predict a global batch, and add it to the scores; all ranks call this."""
        pairs = self._pairs_of(team, model, batch)
        if team.world.size > 1:
            pairs = [
                pair
                for of_rank in team.world.collect(_packed(pairs if team.world.counts else []))
                for pair in _unpacked(of_rank)
            ]
        if team.world.is_main:
            self._update(pairs)

    def names(self, pair: tuple[Any, Any]) -> list[str]:
        """The names of all values, from the predictions and targets of a few samples."""
        self.reset()
        self._update([pair])
        return list(self._computed())

    def _update(self, pairs: Sequence[tuple[Any, Any]]) -> None:
        predictions, targets = joined(pairs)
        for name, one in self._objects.items():
            _explained(name, one.update, predictions, targets)
        if len(self._objects) < len(self._scores):
            self._pairs.append((predictions, targets))

    def _pairs_of(self, team: Team, model: DistributedModel, batch: LoadedBatch) -> list[tuple[Any, Any]]:
        """Predictions and targets of this process's samples, in the order of the data."""

        def of_replica(replica: int, micro_batch: MicroBatch) -> tuple[Any, Any] | None:
            device = team.world.devices[replica]

            def predict() -> tuple[Any, Any]:
                with team.precision.autocast(device):
                    pair: tuple[Any, Any] = model.loss_modules[replica](self._predict, micro_batch.inputs)
                    return pair

            with on(device):
                found = self._evaluate(predict)
            # A replica without samples predicts a placeholder; of several ranks that compute one, the last one has it.
            return as_pair_of_tensors(found) if micro_batch.num_samples and team.world.counts else None

        found = []
        for index, per_replica in enumerate(batch.micro_batches):
            # The first replica decides for all whether gradients are needed.
            run = team.runner(model) if self._evaluate.has_succeeded else one_after_another
            found.append(run(team.seeded(of_replica, batch, index), list(enumerate(per_replica))))
        return [pair for of_one in zip(*found, strict=True) for pair in of_one if pair is not None]

    def compute(self, world: World) -> dict[str, float]:
        """The scores by name, the same on all ranks; all ranks call this."""
        found: dict[str, float] = world.gather(self._computed() if world.is_main else None)[0]
        return found

    def _computed(self) -> dict[str, float]:
        values: dict[str, float] = {}
        predictions, targets = joined(self._pairs) if self._pairs else (None, None)
        for name, one in self._scores.items():
            if name in self._objects:
                values |= as_numbers(name, _explained(name, one.compute))
            else:
                pair = (targets, predictions) if takes_targets_first(one) else (predictions, targets)
                values |= as_numbers(name, _explained(name, one, *pair))
        self._pairs.clear()
        return values


def scores_of(task: Task) -> Scores | None:
    """The scores of a task, if it has any; raises TaskError if they cannot be computed."""
    if task.predict is None and task.scores is None:
        return None
    if task.predict is None:
        raise TaskError("scores need predict(model, batch) -> (predictions, targets); add it: Task(..., predict=...)")
    if not task.scores:
        raise TaskError("predict is for scores, and the task has none; add them: Task(..., scores={'auc': ...})")
    for name, one in task.scores.items():
        if isinstance(one, type) or not (callable(one) or is_updated(one)):
            raise TaskError(
                f"the score {name!r} is {'the class ' * isinstance(one, type)}{getattr(one, '__name__', repr(one))}; "
                "give a function of (predictions, targets), or an object with update, compute and reset"
            )
    return Scores(task.predict, task.scores)


def names_of(scores: Mapping[str, Any], pair: tuple[Any, Any]) -> list[str]:
    """The names of the values that the scores have, tried on the predictions and targets of a few samples.

    A score that fails on so few, as an AUC of one class does, is known by its own name.
    """
    names: list[str] = []
    for name, one in scores.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                names += Scores(lambda *_: pair, {name: copy.deepcopy(one)}).names(pair)
            except Exception as error:
                if isinstance(error, TaskError) and error.__cause__ is None:
                    raise
                names.append(name)
    return names


def is_updated(score: object) -> bool:
    """Whether it is an object that is updated batch by batch."""
    return not isinstance(score, type) and all(callable(getattr(score, method, None)) for method in UPDATED)


def alone(score: Any) -> Any:
    """The object on the host, not waiting for other ranks: those of torchmetrics would, and rank 0 alone computes."""
    for one in score.cpu().modules() if isinstance(score, nn.Module) else ():
        if hasattr(one, "distributed_available_fn"):
            vars(one)["distributed_available_fn"] = _is_alone
    return score


def _is_alone() -> bool:
    return False


def takes_targets_first(function: Callable[..., Any]) -> bool:
    """Whether its first parameter is for the targets, as in scikit-learn.

    >>> takes_targets_first(lambda y_true, y_score: 0), takes_targets_first(lambda predictions, targets: 0)
    (True, False)
    """
    try:
        first = next(iter(inspect.signature(function).parameters), "")
    except (TypeError, ValueError):  # of a built-in function
        return False
    return first in TARGETS_FIRST


def joined(pairs: Sequence[Any]) -> Any:
    """Tensors and lists one behind the other; in tuples and dicts, field by field.

    >>> joined([({"a": [1]}, [2]), ({"a": [3, 4]}, [5])])
    ({'a': [1, 3, 4]}, [2, 5])
    """
    first = pairs[0]
    if isinstance(first, tuple):
        return tuple(joined(parts) for parts in zip(*pairs, strict=True))
    if isinstance(first, Mapping):
        return {name: joined([one[name] for one in pairs]) for name in first}
    if isinstance(first, list):
        return [entry for one in pairs for entry in one]
    if not isinstance(first, torch.Tensor) or first.ndim == 0:
        raise TaskError(
            f"predict returned a {type(first).__name__} that is no batch; return tensors or lists with one entry per "
            "sample"
        )
    shapes = {tuple(one.shape[1:]) for one in pairs}
    if len(shapes) > 1:
        raise TaskError(
            f"predict returned samples of different shapes ({', '.join(map(str, sorted(shapes)[:2]))}); return a list "
            "with one entry per sample: list(predictions)"
        )
    return torch.cat(list(pairs))


def as_numbers(name: str, value: Any) -> dict[str, float]:
    """A score by its name; of several in a dict, those that are one number, as name/key (or key, without a name)."""
    if isinstance(value, Mapping):
        return {f"{name}/{key}".lstrip("/"): float(one) for key, one in value.items() if _is_number(one)}
    if not _is_number(value):
        num = f" of {value.numel()} numbers" if isinstance(value, torch.Tensor) else ""
        raise TaskError(
            f"the score {name!r} is a {type(value).__name__}{num}; it must be one number, or a dict of numbers (of "
            "torchmetrics, ClasswiseWrapper makes one)"
        )
    return {name: float(value)}


def _is_number(value: Any) -> bool:
    size = value.numel() if isinstance(value, torch.Tensor) else getattr(value, "size", 1)
    return isinstance(value, torch.Tensor | np.ndarray | np.generic | int | float) and size == 1


def _explained(name: str, function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except TaskError:
        raise
    except Exception as error:
        raise TaskError(f"the score {name!r} cannot be computed: {describe(error)}") from error


def as_pair_of_tensors(pair: Any) -> tuple[Any, Any]:
    """What predict returned, if it is a pair, with its numbers as tensors of the host."""
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        what = f"{len(pair)} values" if isinstance(pair, tuple | list) else f"a {type(pair).__name__}"
        raise TaskError(f"predict returned {what}; return a pair: (predictions, targets)")
    return _as_tensors(pair[0]), _as_tensors(pair[1])


def _as_tensors(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        # An array of texts becomes a list.
        value = torch.as_tensor(value) if value.dtype.kind in "biufc" else value.tolist()
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        # NumPy has no bfloat16, and sums of float16 overflow.
        return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
    if isinstance(value, Mapping):
        return {name: _as_tensors(one) for name, one in value.items()}
    if isinstance(value, tuple):
        return tuple(_as_tensors(one) for one in value)
    return [_as_tensors(one) for one in value] if isinstance(value, list) else value


def _packed(pairs: Sequence[tuple[Any, Any]]) -> bytes:
    buffer = io.BytesIO()
    # Copies: of a view, the tensor that it is a view of would be written.
    torch.save(map_tensors(list(pairs), torch.clone), buffer)
    return buffer.getvalue()


def _unpacked(data: bytes) -> list[tuple[Any, Any]]:
    found: list[tuple[Any, Any]] = torch.load(io.BytesIO(data), weights_only=True)
    return found
