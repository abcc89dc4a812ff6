"""Experiments on a task in one process: each tests one possible cause of a difference between strategies.

Every rank runs them on the same samples and weights, without communication, and writes its findings; the parent
compares them. So a difference between ranks lies in the task.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from evenstep.data.consistency_check import digest
from evenstep.plan import Plan
from evenstep.strategies.base import copied
from evenstep.task import Task, describe
from evenstep.training.loss_amount import as_sum
from evenstep.training.loss_context import called_outside
from evenstep.training.team import join
from evenstep.training.trainer import Event, set_up_torch
from evenstep.verify.differences import METRIC_ROUNDING
from evenstep.verify.one_batch import SUBSETS, WHOLE, Outcome, Workbench, cut_up
from evenstep.verify.recorder import DrawDetector, DropoutOff, as_real

FOLDER = "examined"
MOST_ELEMENTS = 2_000
MOST_SLOPES = 3
MOST_SEEDS = 40
MOST_SECONDS = 10.0
"""Limits of the search for a seed that changes the result."""
Findings = dict[str, Any]


def perform_examination(
    plan: Plan, task: Task, run_folder: Path, *, is_rough: bool, tests: Sequence[str]
) -> Iterator[Event]:
    """Run some of TESTS in this process, and write the findings to the run folder.

    `is_rough`: the task computes in lower precision than float64.
    """
    set_up_torch(plan)
    team = join(plan.strategy, plan.devices, plan.precision, plan.seed)
    bench = Workbench(plan, task, team, DropoutOff(), is_rough)
    findings = examine(bench, tests)
    folder = run_folder / FOLDER
    folder.mkdir(exist_ok=True)
    (folder / f"rank{team.world.rank}.json").write_text(json.dumps(findings))
    team.world.barrier()
    yield from ()


def examine(bench: Workbench, tests: Sequence[str]) -> Findings:
    """Run the tests; one that fails on this task is listed under `problems`."""
    findings: Findings = {}
    for name in tests:
        try:
            findings[name] = TESTS[name](bench)
        except Exception as error:
            findings[name] = None
            findings.setdefault("problems", {})[name] = describe(error)
    return findings


def _batch(bench: Workbench) -> Findings:
    """What the same samples give: compared between ranks, and with one device."""
    outcome = bench.compute()
    without = [n for n, w in bench.model.named_parameters() if w.requires_grad and n not in outcome.gradients]
    return {"data": digest(bench.data()), "loss": outcome.loss, "gradients": outcome.norms, "without": without}


def _settings(bench: Workbench) -> list[dict[str, Any]]:
    return [
        {name: plain(value) for name, value in group.items() if name not in ("params", "param_names")}
        for group in bench.optimizer.param_groups
    ]


def plain(value: Any) -> Any:
    """A setting as JSON can hold it: Adam's betas, a learning rate that is a tensor."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, tuple | list):
        return [plain(one) for one in value]
    return value if value is None or isinstance(value, int | float | str) else type(value).__name__


def _warned(bench: Workbench) -> list[str]:
    """Operations that torch knows not to be deterministic here."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            bench.compute()
    finally:
        torch.use_deterministic_algorithms(before)
    return [str(one.message).partition(". ")[0] for one in caught if "determinis" in str(one.message)][:3]


def _draws(bench: Workbench) -> Findings:
    """Does the loss draw random numbers, and does the result depend on them?"""
    seen = DrawDetector()
    one = bench.compute(seed=1, watch=seen.watching())
    by_itself = _furthest(one, bench.compute(seed=1))
    largest, skips, begun = 0.0, False, time.monotonic()
    # A layer that is skipped once in ten times is not seen by one seed more.
    for seed in range(2, MOST_SEEDS + 2) if seen.generators else ():
        other = bench.compute(seed=seed)
        largest, skips = max(largest, _furthest(one, other)), one.gradients.keys() != other.gradients.keys()
        if largest > bench.tolerance or time.monotonic() - begun > MOST_SECONDS:
            break
    found = {"generators": seen.generators, "places": seen.lines}
    return {**found, "apart": largest, "by_itself": by_itself, "skips": skips}


def _captured(bench: Workbench) -> list[str]:
    """Parameters of the original that get a gradient when the loss is given a copy."""
    other = copied(bench.model)
    for weight in (*bench.model.parameters(), *other.parameters()):
        weight.grad = None
    with suppress(RuntimeError):
        bench.backward(other, bench.data())
    return [name for name, weight in bench.model.named_parameters() if weight.grad is not None]


def _reading(bench: Workbench) -> Findings:
    """Is a sample the same when it is read again, and when the batch is cut up?"""
    first, again = digest(bench.data()), digest(bench.data())
    return {"repeats": first == again, "is_cut_alike": bench.is_cut_alike(), "code": sorted(bench.drawing_code)}


def _cut(bench: Workbench) -> Findings:
    """Are loss and gradients of the whole the means of those of its parts?"""
    sizes = [len(part) for part in bench.thirds()]
    with bench.without_batch_statistics():
        outcomes = {chosen: bench.compute(bench.union(chosen)) for chosen in SUBSETS}
        given = {chosen: replace(one, gradients=_thinned(one.gradients)) for chosen, one in outcomes.items()}
        found = cut_up(given, sizes, bench.rounding())
        has_slope = _is_slope(bench, found.unlike, outcomes[WHOLE].norms)
    more = {"sizes": sizes, "has_slope": has_slope, "gathers": "gather" in called_outside}
    if outcomes[WHOLE].count is None:
        return {**asdict(found), **more}
    # With a (sum, count) pair a sum over samples is correct.
    total = sum(outcomes[part,].loss for part in range(3))
    kind = "sound" if found.kind == "sum" else "pair"
    return {**asdict(found), "kind": kind, "by_parts": total, **more}


def _is_slope(bench: Workbench, unlike: Sequence[str], norms: Mapping[str, float]) -> bool | None:
    """Whether gradients are the slope of the loss, by the largest of them: small ones are hidden by rounding."""
    largest = sorted(unlike, key=lambda name: -norms.get(name, 0.0))[:MOST_SLOPES]
    found = [bench.has_slope(name) for name in largest]
    return False if False in found else True if True in found else None


def _thinned(gradients: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Some elements of each: seven of them are held at once."""
    return {name: gradient[:: -(-gradient.numel() // MOST_ELEMENTS) or 1] for name, gradient in gradients.items()}


def _metrics(bench: Workbench) -> dict[str, str]:
    """How each value of an evaluation adds up."""
    sizes = [len(part) for part in bench.thirds()]
    parts = [bench.measure(part) for part in bench.thirds()]
    whole = bench.measure(bench.union([0, 1, 2]))
    kinds = {}
    for name, amount in whole.items():
        total = as_sum(amount, sum(sizes), name).double()
        by_parts = torch.stack(
            [as_sum(part[name], size, name).double() for part, size in zip(parts, sizes, strict=True)]
        ).sum(0)
        tolerance = bench.tolerance if name == "loss" else max(bench.tolerance, METRIC_ROUNDING)
        is_near = bool(((total - by_parts).abs() <= tolerance * total.abs().clamp(min=1e-12)).all())
        kinds[name] = "sound" if is_near else "mixed"
    return kinds


def _buffers(bench: Workbench) -> Findings:
    """Buffers (of BatchNorm none) that forward changes, how, and whether the loss reads them."""
    parts = [*bench.thirds(), bench.ids]
    start, after = bench.buffers_before(), [bench.buffers_after(part) for part in parts]
    changed = [name for name in start if any(not torch.equal(one[name], start[name]) for one in after)]
    by_data = [name for name in changed if any(not torch.equal(one[name], after[0][name]) for one in after)]
    grown = {
        name: [as_real(one[name]).double() - as_real(start[name]).double() for one in after]
        for name in by_data
        if all(one[name].shape == start[name].shape for one in after)
    }
    summed = [name for name in grown if _adds_up(grown[name])]
    counts = [name for name in summed if _is_count(grown[name], [len(part) for part in parts])]
    is_read = bool(changed) and bench.reads_buffers()
    return {"changed": changed, "by_data": by_data, "summed": summed, "counts": counts, "read": is_read}


def _adds_up(grown: Sequence[torch.Tensor]) -> bool:
    """Whether it grew by the whole batch as much as by the parts before it; an observer begins at infinity."""
    *by_parts, by_whole = grown
    return torch.equal(torch.stack(by_parts).sum(0), by_whole) and bool(by_whole.isfinite().all())


def _is_count(grown: Sequence[torch.Tensor], sizes: Sequence[int]) -> bool:
    return all(bool((one == size).all()) for one, size in zip(grown, sizes, strict=True))


def _furthest(one: Outcome, other: Outcome) -> float:
    """The largest relative difference of loss and gradients; one that is missing in one of them alone is all of it."""
    sizes = [abs(one.loss - other.loss) / max(abs(one.loss), abs(other.loss), 1e-300)]
    largest = max((float(gradient.abs().max()) for gradient in one.gradients.values()), default=0.0)
    for name in one.gradients.keys() & other.gradients.keys():
        scale = max(float(one.gradients[name].abs().max()), 1e-6 * largest, 1e-300)
        sizes.append(float((one.gradients[name] - other.gradients[name]).abs().max()) / scale)
    return 1.0 if one.gradients.keys() != other.gradients.keys() else max(sizes)


BY_RANK = ("batch", "settings")
"""Tests that every rank runs; the others give the same on all ranks."""
TESTS: dict[str, Callable[[Workbench], Any]] = {
    "batch": _batch,
    "settings": _settings,
    "norms": lambda bench: bench.batch_norms,
    "warned": _warned,
    "draws": _draws,
    "captured": _captured,
    "reading": _reading,
    "cut": _cut,
    "metrics": _metrics,
    "buffers": _buffers,
}
