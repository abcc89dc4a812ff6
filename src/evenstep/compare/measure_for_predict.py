"""A few short blocks of a task on what is there, from which `predict` calculates the rest."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

from evenstep.compare.compare_strategies import TRIAL, BlockRunner, CompareRequest
from evenstep.compare.layer_costs import LookRequest, look_at_model
from evenstep.compare.measure import Block
from evenstep.distributed.devices import choose_devices, facts
from evenstep.errors import EvenstepError, PlanError, Preempted, TaskError
from evenstep.launcher.launch import run_in_processes, variant
from evenstep.launcher.prepare import Prepared, free_name, label_of, load_strategies, prepare
from evenstep.plan import RUNS
from evenstep.predict.forecast import MICRO_BATCHES_A_STAGE, gpu_to_scale
from evenstep.predict.model_division import FILE, ModelDivision
from evenstep.record import Record
from evenstep.report.comparison import marking_stop
from evenstep.strategy_facts import DEFAULT, REFERENCE, STRATEGIES, StrategyFacts
from evenstep.task import has_several
from evenstep.verify import Configuration
from evenstep.verify.configurations import named_strategies

SMALLER = 4
"""The second batch is this much smaller: the part of a step that does not shrink shows in it."""
SECONDS = 1.5
LEAST_STEPS, MOST_STEPS = 12, 300


def measure_baseline(
    request: CompareRequest, log: Callable[[str], None] = lambda line: None, ranks: Sequence[int] = ()
) -> tuple[list[Record], Path]:
    """One device at two batch sizes, and each strategy on two devices; the Records, and the folder they are in.

    Strategies that divide a model are looked at too: for `ranks` of a replica, and as they run on two.
    """
    load_strategies(request.strategies, request.source, request.choices.get("seed"))
    configs = _configs(request.strategies)
    label = label_of(request.source, request.choices.get("options", {}))
    name = request.choices.get("name") or free_name(label, "predict", request.choices.get("out") or RUNS)
    first = {"strategy": REFERENCE, "devices": list(configs[0].devices), "name": name}
    if configs[0].devices[0] == "cpu":
        # One thread a process, on one device as on several: else a device would change with their number.
        first["threads"] = request.choices.get("threads") or 1
    base = prepare(request.source, {**request.choices, **first})
    with marking_stop(base.folder):
        return _measured(base, configs, request, log, ranks), base.folder


def refuse_gpu(gpu: str) -> None:
    """Refuse a GPU to which what would be measured here cannot be scaled."""
    gpu_to_scale(gpu, choose_devices(1)[0].partition(":")[0], facts()["cards"])


def _measured(
    base: Prepared,
    configs: Sequence[Configuration],
    request: CompareRequest,
    log: Callable[[str], None],
    ranks: Sequence[int],
) -> list[Record]:
    runner = BlockRunner(base, configs[0], log)
    block = _block(runner, configs[0])
    found = []
    for config, batch in _blocks([_divided(config, base.plan.batch, request) for config in configs], base.plan.batch):
        log(f"measuring {config.label}, batch {batch}")
        taken = runner.run(config, f"batch-{batch}", block, batch=batch)
        found += [taken.record] if taken is not None else []
    names = named_strategies(request.strategies) if request.strategies else []
    _look(base, [STRATEGIES[name] for name in names if STRATEGIES[name].model_axis is not None], ranks, log)
    return found


def _divided(config: Configuration, batch: int, request: CompareRequest) -> Configuration:
    """With as many micro-batches as are predicted."""
    facts = STRATEGIES[config.strategy]
    if facts.model_axis is None:
        return config
    usual = MICRO_BATCHES_A_STAGE * len(config.devices) if facts.schedules else 1
    accumulate = request.accumulate if request.accumulate > 1 else min(usual, batch)
    return replace(config, accumulate=accumulate, schedule=request.schedules if facts.schedules else None)


def _look(base: Prepared, dividing: Sequence[StrategyFacts], ranks: Sequence[int], log: Callable[[str], None]) -> None:
    """Write how the model can be divided beside the Records, in a process of its own."""
    if not dividing:
        return
    log("looking at how the model can be divided")
    tensors = sorted({2, *ranks}) if any(not one.schedules for one in dividing) else []
    request = LookRequest(
        samples=max(1, base.plan.batch // SMALLER),
        ranks=[num for num in tensors if num > 1],
        blocks=any(one.schedules for one in dividing),
    )
    work = partial(look_at_model, request=request)
    folder = base.folder / "look"
    try:
        if has_several(base.task):
            raise TaskError("several models are not looked at; only a task of one model is predicted so")
        for _ in run_in_processes(variant(base, folder, steps=1), work):
            pass
        (folder / FILE).replace(base.folder / FILE)
    except Preempted:
        raise
    except EvenstepError as error:
        # Other strategies are predicted still.
        why = ": ".join(str(error).splitlines()[:2])
        ModelDivision(why_no_blocks=why, why_no_tensors={str(num): why for num in tensors}).write(base.folder)
    shutil.rmtree(folder, ignore_errors=True)


def _configs(strategies: str | None) -> list[Configuration]:
    """`single`, and others on two devices where there are two."""
    names = named_strategies(strategies) if strategies else [DEFAULT]
    single = Configuration(REFERENCE, choose_devices(1))
    try:
        two = choose_devices(2)
    except PlanError:
        return [single]
    return [single, *(Configuration(name, two) for name in names if name != REFERENCE)]


def _blocks(configs: list[Configuration], batch: int) -> list[tuple[Configuration, int]]:
    single, *others = configs
    smaller = [(single, batch // SMALLER)] if batch >= SMALLER else []
    return [(single, batch), *smaller, *((config, batch) for config in others)]


def _block(runner: BlockRunner, config: Configuration) -> Block:
    runner.log(f"trying {config.label}")
    trial = runner.run(config, "trial", TRIAL)
    assert trial is not None, "the reference raises its error"
    usual = median(trial.measurement.step_seconds)
    shutil.rmtree(trial.folder)
    steps = min(MOST_STEPS, max(LEAST_STEPS, int(SECONDS / max(usual, 1e-6))))
    return Block(warm_up=max(3, steps // 5), steps=steps, special=max(4, steps // 4))
