"""Which micro-batch fits: a forecast from shapes, then a few probes, each in fresh processes.

A probe in which one rank runs out of memory ends with all of its processes: nothing hangs, and the next one is
smaller for all ranks. `fit` compares strategies; `with_micro_batch` is `train --micro auto`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec

from evenstep.data.prefetch import PREFETCH_FACTOR
from evenstep.distributed.devices import check_devices, choose_devices
from evenstep.errors import EvenstepError, PlanError, Preempted
from evenstep.fit import fake_tensor_pass, memory_probe
from evenstep.fit.device_memory import CONTEXT_BYTES
from evenstep.fit.fit_table import FitResult, FitRow, Remedy, TriedCut
from evenstep.fit.memory_model import (
    Cut,
    Division,
    Placement,
    StepMemory,
    cuts,
    cuts_to_correct_by,
    evaluation_peak,
    fewest_devices,
    in_process,
    largest_fitting,
    needs,
    peak,
    usable,
)
from evenstep.launcher.launch import run_in_processes, variant
from evenstep.launcher.prepare import Prepared, free_name, label_of, load_strategies, prepare
from evenstep.mesh import arrange
from evenstep.plan import PLAN_FILE, RUNS, Plan, parse_devices, write_plan_file
from evenstep.report.terminal import size
from evenstep.sampling.batch_shares import in_proportion
from evenstep.strategy_facts import REFERENCE, STRATEGIES, StrategyFacts, usual_strategies
from evenstep.task import has_several
from evenstep.typed_values import check_choice

MOST_PROBES = 3
ROOMY = 0.6
"""A forecast for one process below this part of the limit is believed without a probe, by --micro auto."""
SMALLER = 0.7
"""The next micro-batch after one that ran out of memory, if nothing better is known."""
GROWTH_MARGIN = 0.1
"""Of what steps add to a process on a CPU, left free too: the same steps take more in another process."""
SIDE_BY_SIDE = 0.8
"""The part of a device that several runs may fill: what one allocator keeps, the others cannot have."""
NOT_OF_PROBES: dict[str, Any] = {
    **dict.fromkeys(("resume", "machines", "rendezvous", "profile", "statistics", "log", "replay_every", "best")),
    **dict.fromkeys(("checkpoint_every", "evaluate_every", "stop_after", "micro", "stall_after")),
    **dict.fromkeys(("audit", "evaluate_first", "requeue"), False),
    "restarts": 0,
}
"""Fields of a plan that a probe leaves out."""

Log = Callable[[str], None]


@dataclass
class MemoryRunner:
    """Forecasts and probes of one prepared task, each in a folder that is removed afterwards."""

    base: Prepared
    log: Log
    limit: int | None = None
    """Bytes of each device that are to be enough, if not all that is there."""
    notes: list[str] = field(default_factory=list)
    division: Division | None = None
    """Of the model, where ranks divide it."""
    _number: int = 0

    def shapes(self, share: int, *, is_tried: bool = False, **changes: Any) -> StepMemory | None:
        """What a step holds on one device; None if that cannot be said without computing it.

        `is_tried`: `corrected` will follow for every strategy.
        """
        if has_several(self.base.task):
            self.notes.append("a task of several models is not forecast, only tried")
            return None
        self.log("forecasting from shapes")
        plan = self.base.plan
        alone: dict[str, Any] = {"strategy": REFERENCE, "devices": plan.devices[:1], "accumulate": 1, "shares": None}
        alone |= {"mesh": None, "cpu_offload": False}
        known: dict[str, Any] = {"share": share, "limit": self.limit, "division": self.division, "is_tried": is_tried}
        measure = partial(fake_tensor_pass.measure_shapes, **known)
        try:
            text = self._run(measure, fake_tensor_pass.FILE, steps=1, **alone, **changes)
        except _Failed as failed:
            self.notes.append(f"no forecast: {str(failed.error).splitlines()[0]}")
            return None
        found = msgspec.json.decode(text, type=StepMemory)
        if self.division is not None and not found.ranks:
            self.notes.append("no forecast: without shapes, parts of a model are not known, only tried")
            return None
        self.notes += [note for note in found.notes if note not in self.notes]
        return found

    def corrected(self, memory: StepMemory, place: Placement, **changes: Any) -> StepMemory:
        """The same on a CPU, with what processes of this strategy hold: torch itself, and what steps take beyond it.

        Each of a few micro-batches is computed in processes of its own, for what one leaves in the heap would change
        what the next one takes.
        """
        if place.kind != "cpu":
            return memory
        self.log(f"correcting the forecast for {place.facts.name} by a few steps")
        try:
            text = self._run(memory_probe.measure_process, memory_probe.PROCESS_FILE, steps=1, accumulate=1, **changes)
        except _Failed:
            # The probe says why.
            return memory
        process = msgspec.json.decode(text, type=memory_probe.ProcessMemory)
        known = in_process(memory, float(process.held_bytes), float(process.available_bytes))
        grown: dict[int, int] = {}
        for cut in cuts_to_correct_by(known, place, limit_of(known, place, self.limit)):
            try:
                done = self._steps(cut, **changes)
            except _Failed:
                break
            if isinstance(done, RanOut):
                known = replace(known, ran_out=cut.size)
                break
            grown[cut.size] = done.growth_bytes
            # What the process of a training holds, with all that it loads for it.
            known = in_process(known, float(done.peak_bytes - done.growth_bytes), float(process.available_bytes))
        forecast = {num: peak(known, place, num).total - known.framework_bytes for num in grown}
        return replace(known, beyond=[(num, grown[num] - forecast[num]) for num in grown])

    def probe(self, cut: Cut, **changes: Any) -> memory_probe.ProbedMemory | RanOut:
        """Real steps with this micro-batch, and an evaluation."""
        self.log(f"trying {changes.get('strategy', self.base.plan.strategy)}, {cut.size} samples at once")
        try:
            return self._steps(cut, **changes)
        except _Failed as failed:
            raise failed.error from None

    def _steps(self, cut: Cut, **changes: Any) -> memory_probe.ProbedMemory | RanOut:
        measure = partial(memory_probe.probe_memory, limit=self.limit)
        try:
            text = self._run(measure, memory_probe.FILE, steps=memory_probe.STEPS, accumulate=cut.accumulate, **changes)
        except _Failed as failed:
            if failed.ran_out:
                return RanOut(failed.available)
            raise
        return memory_probe.ProbedMemory(**json.loads(text))

    def _run(self, measure: Any, file: str, **changes: Any) -> bytes:
        self._number += 1
        folder = self.base.folder / f"fit-{self._number}"
        try:
            for _ in run_in_processes(variant(self.base, folder, **{**NOT_OF_PROBES, **changes}), measure):
                pass
            return (folder / file).read_bytes()
        except Preempted:
            raise
        except EvenstepError as error:
            ran_out = memory_probe.ran_out(folder) or "ran out of memory" in str(error)
            raise _Failed(error, ran_out, memory_probe.read_available(folder)) from None
        finally:
            shutil.rmtree(folder, ignore_errors=True)


class _Failed(Exception):
    """A forecast or a probe did not come to its end."""

    def __init__(self, error: EvenstepError, ran_out: bool, available: int | None) -> None:
        super().__init__(str(error))
        self.error, self.ran_out, self.available = error, ran_out, available


@dataclass(frozen=True)
class RanOut:
    """A probe in which a rank ran out of memory."""

    available: int | None
    """What the rank with the least memory had."""


def placement(plan: Plan, facts: StrategyFacts, num_devices: int) -> Placement:
    """A strategy on devices of the plan's kind, which share its global batch."""
    kind = plan.devices[0].partition(":")[0]
    mesh = arrange(plan.mesh if facts.name == plan.strategy else None, facts, num_devices)
    ranks = mesh.ranks_per_replica if mesh is not None else 1
    shards = plan.num_shards if facts.name == plan.strategy and num_devices == len(plan.devices) else None
    shares = plan.proportions if num_devices == len(plan.devices) and ranks == 1 else (1,) * (num_devices // ranks)
    return Placement(
        division=Division(facts.name, ranks, plan.pipeline_schedule) if ranks > 1 else None,
        facts=facts,
        devices=num_devices,
        kind=kind,
        share=max(len(own) for own in in_proportion(plan.batch, shares)),
        is_resident=plan.resident,
        # The one that is computed, those that wait, and the one that is read.
        input_copies=PREFETCH_FACTOR + 2 if kind == "cuda" else 2,
        num_shards=mesh.num_shards if mesh is not None and ranks > 1 else shards,
        is_offloaded=plan.cpu_offload and facts.offloads,
    )


def limit_of(memory: StepMemory, place: Placement, given: int | None) -> float:
    """Bytes that a device may hold: what was given, as far as it is there, or all that is free."""
    if given is not None:
        return float(given - CONTEXT_BYTES if place.kind == "cuda" else given)
    if memory.rank_bytes is not None:
        return memory.rank_bytes
    if place.kind == "cuda" or not place.facts.processes_per_device:
        return memory.available_bytes
    free = memory.available_bytes - memory.framework_bytes
    return memory.framework_bytes + free / place.devices


@dataclass
class Search:
    """Probes for one placement: the largest micro-batch that fits, then smaller ones that may be faster."""

    runner: MemoryRunner
    place: Placement
    memory: StepMemory | None
    limit: float | None
    """None: whatever does not run out of memory fits."""
    changes: Mapping[str, Any]
    first: int = 1
    """The least number of micro-batches."""
    tried: list[TriedCut] = field(default_factory=list)

    @property
    def least(self) -> int:
        return 2 if self.memory is not None and self.memory.has_batchnorm else 1

    def largest(self) -> Cut | None:
        """The largest micro-batch that was seen to fit; None if none did."""
        cut = self.expected()
        while cut is not None and len(self.tried) < MOST_PROBES:
            if self.take(cut).fits:
                return cut
            cut = self._next(cut)
        return None

    def expected(self) -> Cut | None:
        """The largest micro-batch that is forecast to fit."""
        for cut in cuts(self.place.share, self.least):
            if cut.accumulate >= self.first and self._is_expected(cut):
                return cut
        return None

    def _is_expected(self, cut: Cut, factor: float = 1.0) -> bool:
        """`factor`: of what steps add to a process, which is what a forecast may be wrong about."""
        if self.memory is None or self.limit is None:
            return True
        if self.memory.ran_out is not None and cut.size > SMALLER * self.memory.ran_out:
            return False
        held = self.memory.framework_bytes
        return self._fits(held + factor * (needs(self.memory, self.place, cut.size) - held))

    def _fits(self, total: float) -> bool:
        """Whether this many bytes leave enough of the limit free."""
        if self.memory is None or self.limit is None:
            return True
        margin = GROWTH_MARGIN if self.place.kind == "cpu" else 0.0
        return total + margin * max(0.0, total - self.memory.framework_bytes) <= usable(self.limit)

    def _next(self, failed: Cut) -> Cut | None:
        """After one that did not fit: what is forecast with the error that was seen, or a part of its samples."""
        last = self.tried[-1]
        factor = 1.0
        if last.measured_bytes is not None and last.forecast_bytes and self.memory is not None:
            held = self.memory.framework_bytes
            factor = max(1.0, (last.measured_bytes - held) / max(1.0, last.forecast_bytes - held))
        most = failed.size - 1 if factor > 1 else int(SMALLER * failed.size)
        for cut in cuts(self.place.share, self.least):
            if cut.size <= most and self._is_expected(cut, factor):
                return cut
        return None

    def faster(self) -> None:
        """Try smaller micro-batches as long as they are faster."""
        while len(self.tried) < MOST_PROBES:
            last = self.tried[-1]
            smaller = next(
                (cut for cut in cuts(self.place.share, self.least) if cut.size <= last.micro_batch // 2), None
            )
            if smaller is None:
                return
            done = self.take(smaller)
            if not done.fits or (done.step_seconds or 0.0) >= (last.step_seconds or 0.0):
                return

    def take(self, cut: Cut) -> TriedCut:
        """One probe."""
        done = self.runner.probe(cut, **self.changes)
        forecast = peak(self.memory, self.place, cut.size).total if self.memory is not None else None
        if isinstance(done, RanOut):
            if done.available is not None and self.runner.limit is None and self.limit is not None:
                self.limit = min(self.limit, float(done.available))
            one = TriedCut(micro_batch=cut.size, accumulate=cut.accumulate, fits=False, forecast_bytes=forecast)
        else:
            most = max(done.peak_bytes, done.evaluation_bytes)
            one = TriedCut(
                micro_batch=cut.size,
                accumulate=cut.accumulate,
                fits=self._fits(most),
                forecast_bytes=forecast,
                measured_bytes=done.peak_bytes,
                growth_bytes=done.growth_bytes,
                evaluation_bytes=done.evaluation_bytes,
                step_seconds=done.step_seconds,
            )
        self.tried.append(one)
        return one


@dataclass(frozen=True, kw_only=True)
class FitRequest:
    """What `evenstep fit` is to look at."""

    source: str
    strategy: str | None = None
    """None: one device, and all usual strategies on `devices`."""
    devices: str = "1"
    memory: int | None = None
    """Bytes of each device; None: what is free."""
    choices: Mapping[str, Any] = field(default_factory=dict)


def fit(request: FitRequest, log: Log = lambda line: None) -> FitResult:
    """Forecast every strategy, try what this machine can run, and keep nothing."""
    load_strategies(request.strategy, request.source, request.choices.get("seed"))
    names, num = _devices_of(request.devices)
    rows = _strategies(request.strategy, num)
    label = label_of(request.source, request.choices.get("options", {}))
    name = free_name(label, "fit", request.choices.get("out") or RUNS)
    first = {"strategy": REFERENCE, "devices": list((names or choose_devices(1))[:1]), "name": name}
    base = prepare(request.source, {**request.choices, **first})
    try:
        places = [placement(base.plan, facts, 1 if facts.is_reference else num) for facts in rows]
        runner = MemoryRunner(base, log, request.memory, division=places[0].division)
        _refuse_small_batch(base.plan, places)
        memory = runner.shapes(max(place.share for place in places), is_tried=names is not None)
        found = [_row(runner, place, memory, names) for place in places]
        if memory is not None and memory.has_batchnorm:
            runner.notes.append(BATCHNORM)
        return FitResult(
            task=base.plan.task_name,
            batch=base.plan.batch,
            precision=base.plan.precision,
            device=places[0].kind,
            rows=found,
            notes=runner.notes,
        )
    finally:
        shutil.rmtree(base.folder, ignore_errors=True)


def _devices_of(text: str) -> tuple[tuple[str, ...] | None, int]:
    """Devices of this machine, and how many; None for more than it has, which can be forecast."""
    given = parse_devices(text)
    if not isinstance(given, int):
        check_devices(given)
        return given, len(given)
    try:
        return choose_devices(given), given
    except PlanError:
        if given < 1:
            raise
        return None, given


def _strategies(name: str | None, num: int) -> list[StrategyFacts]:
    if name is not None:
        check_choice("strategy", name, STRATEGIES, PlanError)
        if STRATEGIES[name].is_reference and num > 1:
            raise PlanError(f"{name} runs on one device and --devices is {num}; leave one of them out")
        return [STRATEGIES[name]]
    return [STRATEGIES[REFERENCE], *(usual_strategies() if num > 1 else ())]


def _refuse_small_batch(plan: Plan, places: Sequence[Placement]) -> None:
    most = max(place.devices // (place.division.num if place.division else 1) for place in places)
    if plan.batch < most:
        raise PlanError(f"a global batch of {plan.batch} is too small for {most} devices; use --batch {most} or more")


BATCHNORM = "BatchNorm uses the samples of a micro-batch: with fewer at once, its statistics differ"


def _row(runner: MemoryRunner, place: Placement, memory: StepMemory | None, names: tuple[str, ...] | None) -> FitRow:
    plan = runner.base.plan
    changes = {"strategy": place.facts.name, "devices": (names or ())[: place.devices], "shares": None}
    why_not = _why_not(plan, place, changes, memory, runner.limit)
    if memory is not None and not why_not:
        memory = runner.corrected(memory, place, **changes)
    limit = limit_of(memory, place, runner.limit) if memory is not None else None
    search = Search(runner, place, memory, limit, changes)
    expected = search.expected()
    cut = expected
    if not why_not and expected is not None:
        cut = search.largest()
        if cut is not None:
            search.faster()
    shown = cut or list(cuts(place.share, search.least))[-1]
    is_whole = cut is not None and cut.accumulate == 1
    evaluation = evaluation_peak(memory, place, shown.size) if memory is not None else None
    return FitRow(
        strategy=place.facts.name,
        devices=place.devices,
        share=place.share,
        limit_bytes=search.limit or 0.0,
        micro_batch=cut.size if cut is not None else None,
        accumulate=cut.accumulate if cut is not None else None,
        kinds=peak(memory, place, shown.size).kinds if memory is not None else {},
        # cuBLAS takes its workspaces when the model computes.
        process_bytes=memory.framework_bytes if memory is not None and place.kind == "cpu" else 0.0,
        evaluation_bytes=evaluation.total if evaluation is not None else None,
        tried=search.tried,
        remedies=[] if is_whole or memory is None else _remedies(runner, place, memory, search.limit or 0.0),
        why_not_tried=why_not,
    )


def _why_not(
    plan: Plan, place: Placement, changes: Mapping[str, Any], memory: StepMemory | None, given: int | None
) -> str:
    """Why this machine cannot try a placement; empty if it can."""
    if len(changes["devices"]) < place.devices:
        return f"this machine has fewer than {place.devices} devices"
    if memory is not None and given is not None and given > memory.available_bytes:
        return f"{size(int(memory.available_bytes))} are free here"
    try:
        replace(plan, **changes, **NOT_OF_PROBES)
    except PlanError as error:
        return str(error).splitlines()[0]
    return ""


def _remedies(runner: MemoryRunner, place: Placement, memory: StepMemory, limit: float) -> list[Remedy]:
    """What would let more samples fit at once, forecast."""
    plan = runner.base.plan
    found = []
    if plan.precision in ("fp32", "tf32"):
        found.append(_remedy("--precision bf16", runner.shapes(place.share, precision="bf16"), place, limit))
    if len(memory.unit_bytes) > 1 and not plan.checkpoint_activations:
        checkpointed = runner.shapes(place.share, checkpoint_activations=True)
        found.append(_remedy("--checkpoint-activations", checkpointed, place, limit))
    for facts in (row for row in usual_strategies() if row.shards and not place.facts.shards):
        start = placement(plan, facts, max(2, place.devices))
        num = fewest_devices(memory, start, usable(limit))
        there = placement(plan, facts, num or min(plan.batch, 2 * start.devices))
        found.append(_remedy(f"--strategy {facts.name} over {there.devices} devices", memory, there, limit))
    return [one for one in found if one is not None]


def _remedy(change: str, memory: StepMemory | None, place: Placement, limit: float) -> Remedy | None:
    if memory is None:
        return None
    cut = largest_fitting(memory, place, usable(limit))
    shown = cut or list(cuts(place.share, 1))[-1]
    return Remedy(
        change=change,
        micro_batch=cut.size if cut is not None else None,
        needs_bytes=needs(memory, place, shown.size),
    )


def with_micro_batch(prepared: Prepared, log: Log = lambda line: None) -> Prepared:
    """`--micro auto`: the same run, cut into as few micro-batches as fit; those of a resumed run, if they still do."""
    plan = prepared.plan
    place = placement(plan, STRATEGIES[plan.strategy], len(plan.devices))
    runner = MemoryRunner(prepared, log, division=place.division)
    memory = runner.shapes(place.share, is_tried=True)
    if memory is not None:
        memory = runner.corrected(memory, place)
    limit = limit_of(memory, place, None) if memory is not None else None
    search = Search(runner, place, memory, limit, {}, first=plan.accumulate)
    cut = search.expected()
    if cut is not None and not _is_roomy(memory, place, limit, cut):
        cut = search.largest()
    if cut is None:
        _remove_unused(prepared)
        raise PlanError(_nothing_fits(plan, search))
    chosen = replace(plan, accumulate=cut.accumulate)
    write_plan_file(prepared.folder, chosen)
    notes = [*prepared.notes, *runner.notes, _choice_in_words(plan, cut, search, memory)]
    if memory is not None and memory.has_batchnorm and cut.accumulate > 1:
        notes.append(BATCHNORM)
    return replace(prepared, plan=chosen, notes=notes)


def runs_per_device(prepared: Prepared, num_devices: int, log: Log = lambda line: None) -> tuple[int, str]:
    """How many runs of a plan fit side by side on each of these devices, by the forecast, and why; at least one."""
    plan = prepared.plan
    place = placement(plan, STRATEGIES[plan.strategy], len(plan.devices))
    runner = MemoryRunner(prepared, log, division=place.division)
    memory = runner.shapes(place.share)
    if memory is None:
        return 1, "; ".join(runner.notes)
    own, free = needs(memory, place, -(-place.share // plan.accumulate)), memory.available_bytes
    if place.kind == "cuda":
        # Each process has its context; that of the forecast is gone by then.
        own, free = own + CONTEXT_BYTES, free + CONTEXT_BYTES
    else:
        free /= num_devices
    return max(1, int(SIDE_BY_SIDE * free / own)), f"each needs {size(int(own))} of {size(int(free))}, by the forecast"


def _is_roomy(memory: StepMemory | None, place: Placement, limit: float | None, cut: Cut) -> bool:
    # Other ranks may have less memory than the process that made the forecast.
    if memory is None or limit is None or (place.facts.processes_per_device and not place.is_alone):
        return False
    return needs(memory, place, cut.size) <= ROOMY * limit


def _choice_in_words(plan: Plan, cut: Cut, search: Search, memory: StepMemory | None) -> str:
    parts = f"{cut.accumulate} micro-batch{'es' * (cut.accumulate > 1)} of {cut.size} samples a device"
    done = search.tried[-1].measured_bytes if search.tried else None
    took = f"{size(done)} measured" if done is not None else ""
    if not took and memory is not None:
        took = f"{size(int(needs(memory, search.place, cut.size)))} forecast"
    of = f" of {size(int(search.limit))}" if search.limit is not None else ""
    before = ""
    if plan.accumulate > 1:
        before = ", as before" if cut.accumulate == plan.accumulate else f"; the earlier {plan.accumulate} do not fit"
    return f"--micro auto: {parts} ({took}{of}){before}"


def _nothing_fits(plan: Plan, search: Search) -> str:
    if search.tried:
        sizes = ", ".join(str(one.micro_batch) for one in search.tried)
        forecast = search.tried[-1].forecast_bytes
        why = f"{sizes} samples at once ran out of memory when tried"
        needed = f"the last was forecast to need {size(int(forecast))}" if forecast is not None else ""
    else:
        smallest = list(cuts(search.place.share, search.least))[-1]
        forecast = needs(search.memory, search.place, smallest.size) if search.memory is not None else None
        why = f"even one of {smallest.size} sample{'s' * (smallest.size > 1)} is too large"
        needed = f"needs {size(int(forecast))} by the forecast" if forecast is not None else ""
    free = f"{size(int(usable(search.limit)))} are free for a step" if search.limit is not None else ""
    numbers = ", ".join(part for part in (needed, free) if part)
    return (
        f"--micro auto: no micro-batch fits: {why}{f' ({numbers})' if numbers else ''};\n"
        f"see what would: evenstep fit {plan.task_name} --strategy {plan.strategy} --devices {len(plan.devices)}"
    )


def _remove_unused(prepared: Prepared) -> None:
    """The folder of a run that never began."""
    if {path.name for path in prepared.folder.iterdir()} <= {PLAN_FILE}:
        shutil.rmtree(prepared.folder, ignore_errors=True)
