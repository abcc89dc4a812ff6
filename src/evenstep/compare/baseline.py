"""A few short blocks of a task on what is there, from which `predict` calculates the rest."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from statistics import median

from evenstep.compare import TRIAL, BlockRunner, CompareRequest
from evenstep.compare.measure import Block
from evenstep.distributed.devices import choose_devices
from evenstep.errors import PlanError
from evenstep.launcher.prepare import free_name, label_of, load_strategies, prepare
from evenstep.plan import RUNS
from evenstep.record import Record
from evenstep.strategy_facts import DEFAULT, REFERENCE, STRATEGIES
from evenstep.verify import Configuration
from evenstep.verify.configurations import named_strategies

SMALLER = 4
"""The second batch is this much smaller: the part of a step that does not shrink shows in it."""
SECONDS = 1.5
LEAST_STEPS, MOST_STEPS = 12, 300


def measure_baseline(
    request: CompareRequest, log: Callable[[str], None] = lambda line: None
) -> tuple[list[Record], Path]:
    """One device at two batch sizes, and each strategy on two devices; the Records, and the folder they are in."""
    load_strategies(request.strategies, request.source, request.choices.get("seed"))
    configs = _configs(request.strategies)
    label = label_of(request.source, request.choices.get("options", {}))
    name = request.choices.get("name") or free_name(label, "predict", request.choices.get("out") or RUNS)
    first = {"strategy": REFERENCE, "devices": list(configs[0].devices), "name": name}
    if configs[0].devices[0] == "cpu":
        # One thread a process, on one device as on several: else a device would change with their number.
        first["threads"] = request.choices.get("threads") or 1
    base = prepare(request.source, {**request.choices, **first})
    runner = BlockRunner(base, configs[0], log)
    block = _block(runner, configs[0])
    found = []
    for config, batch in _blocks(configs, base.plan.batch):
        log(f"measuring {config.label}, batch {batch}")
        taken = runner.run(config, f"batch-{batch}", block, batch=batch)
        found += [taken.record] if taken is not None else []
    return found, base.folder


def _configs(strategies: str | None) -> list[Configuration]:
    """`single`, and others on two devices where there are two."""
    names = named_strategies(strategies) if strategies else [DEFAULT]
    single = Configuration(REFERENCE, choose_devices(1))
    try:
        two = choose_devices(2)
    except PlanError:
        return [single]
    return [single, *(Configuration(name, two) for name in names if _is_predicted(name))]


def _is_predicted(name: str) -> bool:
    """Nothing is predicted for models that ranks divide, nor from them."""
    return name != REFERENCE and STRATEGIES[name].model_axis is None


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
