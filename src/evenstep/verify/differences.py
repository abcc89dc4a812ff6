"""Relative differences between two runs of the same training, by tensor; and which of them are rounding."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from safetensors.torch import load_file

from evenstep.checkpoint import files
from evenstep.checkpoint.state_dict import Tensors
from evenstep.record import Evaluation
from evenstep.strategies.base import same_numbers
from evenstep.verify.recorder import STRENGTH, Evidence, Failure, sampled

STEP = "(the step itself)"
"""The name of a step that one run took and the other did not."""
TOGETHER = ("start", "gradient", "weight")
"""Kinds of which the tensors are measured by the largest of them; buffers have nothing to do with each other."""
ADAPTED = ("weight", "optimizer")
"""Kinds that Adam may change by noise alone."""


@dataclass(frozen=True)
class Difference:
    """One number: after `step` steps, `name` of `part` differs by `size`, relative to its largest element."""

    part: str
    step: int
    name: str
    size: float


Limit = Callable[[Difference], float]
"""How large a difference may be: that of a part's tensor at a step."""


@dataclass(frozen=True)
class Guard:
    """What is too small to be compared.

    A gradient whose true value is zero is computed as rounding noise (the bias of attention's keys, which softmax
    cancels). Adam divides noise by its own size and takes full steps with it, so such weights differ a lot
    without meaning.
    """

    element: float
    """Where a gradient's element is below this part of its tensor's largest, weight and state are not judged."""
    tensor: float
    """No tensor is taken to be smaller than this part of the largest of its kind."""


FINE = Guard(1e-6, 1e-6)
COARSE = Guard(1e-2, 1e-3)


class Differ:
    """Compares runs; elements whose gradient was once found to be noise stay excluded."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._noise: dict[str, torch.Tensor] = {}

    @property
    def silent(self) -> list[str]:
        """Parameters of which no element had a true gradient."""
        return [name for name, noise in self._noise.items() if bool(noise.all())]

    def all(self, one: Evidence, other: Evidence) -> list[Difference]:
        """All differences in order of time, from the first step that both runs took.

        After a step that only one run took, nothing more is compared.
        """
        found: list[Difference] = []
        begin = max(one.begin, other.begin)
        for step in sorted(step for step in {*one.losses, *other.losses} if step > begin):
            if step not in one.losses or step not in other.losses:
                return [*found, Difference("optimizer", step, STEP, math.inf)]
            found += [_samples(one, other, step), _loss(one, other, step)]
            taken = [step in run.steps for run in (one, other)]
            if all(taken):
                found += self._step(one.tensors(step), other.tensors(step), step)
            elif any(taken):
                return [*found, Difference("optimizer", step, STEP, math.inf)]
        return [*found, *_evaluations(one, other, begin)]

    def _step(self, one: Tensors, other: Tensors, step: int) -> Iterator[Difference]:
        # A resumed run starts from other weights.
        if _ordered("start", one, {}) and _ordered("start", {}, other):
            for name, size in self._kind("start", one, other):
                yield Difference("weights", 0, name, size)
        for name, size in self._kind("gradient", one, other):
            yield Difference("gradients", step, name, size)
        self._find_noise(one, other)
        for kind, part in (("weight", "weights"), ("buffer", "weights"), ("optimizer", "optimizer")):
            for name, size in self._kind(kind, one, other):
                yield Difference(part, step, name, size)

    def _kind(self, kind: str, one: Tensors, other: Tensors) -> Iterator[tuple[str, float]]:
        """Every tensor of a kind, in the model's order."""
        keys = _ordered(kind, one, other)
        largest = _largest([one[key] for key in keys if key in one]) if kind in TOGETHER else 0.0
        for key in keys:
            name = key.partition("/")[2]
            if key not in one or key not in other:
                yield name, _missing(key, one, other)
                continue
            floor = self._guard.tensor * max(largest, _deviation(key, one))
            sizes = [self._size(kind, name, one[key], other[key], floor)]
            norms = [float(run[f"norm/{key}"]) for run in (one, other) if f"norm/{key}" in run]
            if len(norms) == 2 and not (kind in ADAPTED and self._is_noisy(name)):
                sizes.append(as_size(distance(*norms), max(norms[0], floor)))
            yield name, max(sizes)

    def _size(self, kind: str, name: str, one: torch.Tensor, other: torch.Tensor, floor: float) -> float:
        if one.shape != other.shape:
            return math.inf
        if not one.is_floating_point():
            return 0.0 if torch.equal(one, other) else math.inf
        away = (one.double() - other.double()).abs()
        # Both may hold an infinity, or no number, at the same elements: a mask.
        away = away.masked_fill((one == other) | (one.isnan() & other.isnan()), 0.0)
        noise = self._noise.get(name if kind != "optimizer" else name.rpartition("/")[0])
        if kind in ADAPTED and noise is not None:
            if noise.shape == away.shape:
                away = away.masked_fill(noise, 0.0)
            elif bool(noise.all()):
                # Summed up over the parameter: Adafactor's root mean square of a weight that noise moved.
                return 0.0
        if away.numel() == 0:
            return 0.0
        size = as_size(float(away.max()), max(_largest([one]), _largest([other]), floor))
        return 0.0 if kind == "optimizer" and size <= _digits(one, other) else size

    def _find_noise(self, one: Tensors, other: Tensors) -> None:
        """Note which elements have only noise as their gradient."""
        keys = _ordered("gradient", one, other)
        floor = self._guard.tensor * _largest([one[key] for key in keys if key in one])
        for key in keys:
            if key in one and key in other and one[key].shape == other[key].shape:
                name = key.partition("/")[2]
                most = self._guard.element * max(_largest([one[key]]), floor)
                # What is exactly zero in both moves nothing.
                noise = (one[key].abs() <= most) & (other[key].abs() <= most) & ((one[key] != 0) | (other[key] != 0))
                self._noise[name] = noise | self._noise.get(name, torch.zeros_like(noise))

    def _is_noisy(self, name: str) -> bool:
        noise = self._noise.get(name, self._noise.get(name.rpartition("/")[0]))
        return noise is not None and bool(noise.any())


def _digits(one: torch.Tensor, other: torch.Tensor) -> float:
    """What the type alone hides of a scalar, which an optimizer may keep in float32 beside float64 weights."""
    if one.numel() != 1:
        return 0.0
    eps = max(torch.finfo(tensor.dtype).eps for tensor in (one, other))
    return 0.0 if eps <= torch.finfo(torch.float64).eps else 4 * eps


def distance(one: float, other: float) -> float:
    """The absolute difference; NaN equals NaN."""
    return 0.0 if one == other or (math.isnan(one) and math.isnan(other)) else abs(one - other)


def as_size(distance: float, scale: float) -> float:
    """Relative to `scale`; infinite where it is NaN, so that it exceeds every limit."""
    size = distance / max(scale, 1e-300)
    return size if math.isfinite(size) else math.inf


def saved_as_trained(run: Evidence, step: int) -> list[Difference]:
    """Whether a checkpoint holds the very numbers that the run had at that step: all of them, and no others."""
    if step not in run.steps:
        return []
    trained = run.tensors(step)
    saved = _saved(run, step)
    passing = {f"buffer/{name}" for name in run.facts["passing"]}
    expected = [key for key in trained if key.startswith(("weight/", "buffer/", "optimizer/")) and key not in passing]
    return [
        Difference("checkpoint", step, key.partition("/")[2], 0.0 if _is_kept(key, trained, saved) else math.inf)
        for key in dict.fromkeys([*expected, *saved])
        if not key.endswith("_extra_state")
    ]


def _saved(run: Evidence, step: int) -> Tensors:
    """What a checkpoint holds, under the names that it was trained under."""
    aliases = run.facts["aliases"]
    buffers = {key for key in run.tensors(step) if key.startswith("buffer/")}
    found = {}
    for name, value in load_file(run.checkpoint(step) / files.WEIGHTS).items():
        name = aliases.get(name, name)
        found[f"buffer/{name}" if f"buffer/{name}" in buffers else f"weight/{name}"] = value
    states = load_file(run.checkpoint(step) / files.OPTIMIZER)
    return found | {f"optimizer/{name}": value for name, value in states.items()}


def _is_kept(key: str, trained: Tensors, saved: Tensors) -> bool:
    if key not in trained or key not in saved:
        return False
    kept = sampled(key, saved[key])[key]
    return kept.shape == trained[key].shape and same_numbers(kept, trained[key])


def first_beyond(found: Sequence[Difference], limit: Limit) -> Difference | None:
    """The first difference that is more than rounding."""
    return next((one for one in found if one.size > limit(one)), None)


def _samples(one: Evidence, other: Evidence, step: int) -> Difference:
    is_same = sorted(one.ids.get(step, [])) == sorted(other.ids.get(step, []))
    return Difference("samples", step, "samples", 0.0 if is_same else math.inf)


def _loss(one: Evidence, other: Evidence, step: int) -> Difference:
    largest = max((abs(loss) for loss in one.losses.values() if math.isfinite(loss)), default=0.0)
    return Difference("loss", step, "loss", as_size(distance(one.losses[step], other.losses[step]), largest))


def _missing(key: str, one: Tensors, other: Tensors) -> float:
    """Of a tensor that only one of them has."""
    present, absent = (one, other) if key in one else (other, one)
    kind, _, name = key.partition("/")
    # No gradient and a gradient of zeros are the same; an optimizer makes its state with the first gradient.
    is_zero = kind in ("gradient", "optimizer") and not bool(present[key].any())
    is_unmade = kind == "optimizer" and f"gradient/{name.rpartition('/')[0]}" not in absent
    return 0.0 if is_zero or is_unmade else math.inf


def _deviation(key: str, tensors: Tensors) -> float:
    """What a mean that BatchNorm keeps is measured in: one that is zero in truth is computed as noise."""
    name = key.removesuffix("running_mean")
    variance = tensors.get(f"{name}running_var") if name != key else None
    return math.sqrt(_largest([variance])) if variance is not None else 0.0


def _evaluations(one: Evidence, other: Evidence, begin: int) -> Iterator[Difference]:
    first, second = ({each.step: each for each in run.record.evaluations if each.step > begin} for run in (one, other))
    for step in sorted({*first, *second}):
        if step not in first or step not in second:
            yield Difference("evaluation", step, "outcome (only one of them has one)", math.inf)
        elif first[step].samples != second[step].samples:
            yield Difference("evaluation", step, "number of samples", math.inf)
        else:
            yield from _values(first[step], second[step])


def is_loss(name: str) -> bool:
    """Whether a value of an evaluation is the loss, of the only validation set or of a named one."""
    return name.rpartition("/")[2] == "loss"


METRIC_ROUNDING = 1e-6
"""Metrics are often float32 also where the model is not: `(model(x).argmax(1) == y).float().mean()`."""


def _values(one: Evaluation, other: Evaluation) -> Iterator[Difference]:
    for name in dict.fromkeys([*one.values, *other.values]):
        if name not in one.values or name not in other.values:
            yield Difference("evaluation", one.step, name, math.inf)
            continue
        value, found = one.values[name], other.values[name]
        size = as_size(distance(value, found), max(abs(value), abs(found), 1e-12))
        is_rounding = not is_loss(name) and (size < METRIC_ROUNDING or _is_one_sample(value - found, one.samples))
        yield Difference("evaluation", one.step, name, 0.0 if is_rounding else size)


def _is_one_sample(distance: float, num_samples: int) -> bool:
    """Whether exactly one sample flipped: two scores were equal but for rounding."""
    return abs(abs(distance) * num_samples - 1) < 1e-6


def _ordered(kind: str, one: Tensors, other: Tensors) -> list[str]:
    return [key for key in dict.fromkeys([*one, *other]) if key.startswith(f"{kind}/")]


def _largest(tensors: Sequence[torch.Tensor]) -> float:
    sizes = [tensor[torch.isfinite(tensor)].abs() for tensor in tensors if tensor.is_floating_point()]
    return max((float(size.max()) for size in sizes if size.numel()), default=0.0)


def has_steps(found: Sequence[Difference]) -> bool:
    """Whether there is a step that both of them took."""
    return any(one.part in ("weights", "optimizer") for one in found)


def most(found: Sequence[Difference]) -> float:
    """The largest difference of loss and gradients."""
    return max((one.size for one in found if one.part in ("loss", "gradients")), default=0.0)


def by_rounding(noise: Sequence[Difference]) -> str:
    """Message: how much one device in its own precision differs from float64."""
    known = [one for one in noise if math.isfinite(one.size)]
    if not any(one.part == "gradients" for one in known):
        return "the effect of rounding alone could not be measured"
    return f"rounding alone gives {most(known):.1e} on single"


def tensor_of(first: Difference, found: Sequence[Difference], limit: Limit) -> Difference:
    """The first tensor that differs in that step: it says more than a loss does."""
    of_step = (one for one in found if one.step == first.step and one.part not in ("loss", "samples"))
    return first if first.part == "samples" else next((one for one in of_step if one.size > limit(one)), first)


THINGS = {
    "gradients": "the gradient of {name}",
    "weights": "{name}",
    "optimizer": "the optimizer's {name}",
    "evaluation": "the evaluation's {name}",
    "checkpoint": "{name} of the run resumed from its checkpoint",
    "loss": "the loss",
    "samples": "the set of samples",
}


def same(label: str, largest: float) -> str:
    return f"{label} matches single: max relative difference {largest:.0e}"


def differs(label: str, first: Difference, precision: str) -> str:
    """Message: where a configuration first differs, and by how much."""
    if first.name == STEP:
        return f"{label} does not match single: only one of them took step {first.step} ({precision})"
    thing = THINGS[first.part].format(name=first.name)
    when = f"at step {first.step}" if first.step else "before the first step"
    by = f" by {in_percent(first.size)}" if math.isfinite(first.size) else ""
    return f"{label} does not match single: {when}, {thing} differs{by} ({precision})"


def jumps(first: Difference, moved: float, precision: str) -> str:
    """Note for a difference that tiny perturbations cause on one device, too."""
    thing = THINGS[first.part].format(name=first.name)
    return (
        f"in {precision}, from step {first.step} on, {thing} differs by {in_percent(first.size)}: rounding flips a "
        f"decision there (a ReLU, a max-pool); single itself differs by up to {in_percent(moved)} when its initial "
        f"weights are perturbed by a relative {STRENGTH:.0e}"
    )


def still(moved: float, num_tried: int) -> str:
    """Evidence that perturbations do not explain a difference."""
    return (
        f"single, with its initial weights perturbed by a relative {STRENGTH:.0e} ({num_tried} tries), differs there "
        f"by at most {moved:.1e}"
    )


def fails(label: str, failure: Failure) -> str:
    what = "learns nothing" if "nothing is learned" in failure.message else "fails, and single does not"
    return f"{label} {what}"


def in_percent(size: float) -> str:
    """A relative difference in percent, or in scientific notation if it is tiny."""
    return f"{100 * size:.3g} %" if size >= 1e-4 else f"{size:.1e}"
