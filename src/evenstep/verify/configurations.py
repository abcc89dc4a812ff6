"""Configurations from the command line: which strategies on which devices `verify` and `compare` run."""

from __future__ import annotations

import difflib
from dataclasses import replace
from typing import get_args

import torch

from evenstep.distributed.devices import check_devices, choose_devices
from evenstep.errors import MAX_CHARACTERS, PlanError
from evenstep.link_method import parse_link
from evenstep.mesh import has_axes, refuse_axes
from evenstep.plan import Plan, ScheduleName, parse_devices, parse_shares
from evenstep.sampling.batch_shares import Shares
from evenstep.strategy_facts import DEFAULT, DEFAULT_IN_ONE_PROCESS, REFERENCE, STRATEGIES, one_of, usual_strategies
from evenstep.typed_values import check_choice
from evenstep.verify.verdict_table import Configuration


def configs_of(
    strategies: str | None, devices: str | None, accumulate: int, shares: str | None = None
) -> list[Configuration]:
    """Every strategy on every set of devices; one device, without accumulation, is what they are compared with."""
    sets = device_sets(devices) if devices is not None else [_all_devices()]
    names = named_strategies(strategies) if strategies is not None else None
    configs = [
        Configuration(name, chosen[:1] if name == REFERENCE else chosen, accumulate)
        for chosen in sets
        for name in names or usual_on(chosen)
    ]
    configs = [config for config in dict.fromkeys(configs) if (config.strategy, config.accumulate) != (REFERENCE, 1)]
    if not configs:
        raise PlanError(
            f"{REFERENCE} is the reference that others are compared with; name another strategy, such as "
            f"--strategies {DEFAULT}, or add --accumulate 2"
        )
    if shares is None:
        return configs
    _numbers(shares)
    return [config if config.strategy == REFERENCE else replace(config, shares=shares) for config in configs]


def with_mesh(configs: list[Configuration], mesh: str | None) -> list[Configuration]:
    """Those configurations whose strategies have these axes, with this mesh."""
    if mesh is None:
        return configs
    able = [config for config in configs if has_axes(mesh, STRATEGIES[config.strategy])]
    if not able:
        for config in configs:
            refuse_axes(mesh, STRATEGIES[config.strategy])
        rows = [row for row in STRATEGIES.values() if row.axes]
        names = one_of([row for row in rows if has_axes(mesh, row)] or rows)
        raise PlanError(f"--mesh {mesh} is for strategies with these axes; name one: --strategies {names}")
    return [replace(config, mesh=mesh) if config in able else config for config in configs]


def with_schedules(configs: list[Configuration], schedules: str | None) -> list[Configuration]:
    """Those that are pipelines, once with each of these schedules, such as `1f1b,zero-bubble`."""
    if schedules is None:
        return configs
    names = list(dict.fromkeys(name.strip() for name in schedules.split(",")))
    for name in names:
        check_choice("schedule", name, get_args(ScheduleName), PlanError)
    able = [config for config in configs if STRATEGIES[config.strategy].schedules]
    if not able:
        rows = one_of(row for row in STRATEGIES.values() if row.schedules)
        raise PlanError(
            f"--pipeline-schedule {schedules} is for {rows}, which is not among these; use --strategies {rows}"
        )
    others = [config for config in configs if config not in able]
    return [*others, *(replace(config, schedule=name) for config in able for name in names)]


def with_accumulation(configs: list[Configuration], accumulate: int) -> list[Configuration]:
    """All but the first, with which they are compared, with this number of micro-batches."""
    return [configs[0], *(replace(config, accumulate=accumulate) for config in configs[1:])]


def with_link(configs: list[Configuration], link: str | None) -> list[Configuration]:
    """Those that can send gradients by another method, with it."""
    if link is None:
        return configs
    if parse_link(link).is_local:
        raise PlanError(
            f"--link {link} does not match one device by design; see what it does to the loss: "
            f"evenstep compare TASK --links none,{link}"
        )
    able = [config for config in configs if STRATEGIES[config.strategy].links and len(config.devices) > 1]
    if not able:
        names = one_of(row for row in STRATEGIES.values() if row.links)
        raise PlanError(f"--link is how {names} sends gradients, which is not among these; use --strategies {names}")
    return [replace(config, link=link) for config in able]


def _numbers(shares: str) -> Shares:
    numbers = parse_shares(shares)
    if numbers is None:
        raise PlanError(
            "--shares auto needs more steps than verify takes; give the numbers that train --shares auto finds"
        )
    return numbers


def with_shares(configs: list[Configuration], shares: str) -> list[Configuration]:
    """Those configurations that these shares fit, with them."""
    numbers = _numbers(shares)
    fitting = [config for config in configs if len(config.devices) == len(numbers) > 1]
    able = [config for config in fitting if "shares" not in STRATEGIES[config.strategy].refusals]
    if not able:
        raise PlanError(f"--shares {shares} is for {len(numbers)} devices, which none of these has; see --devices")
    return [replace(config, shares=shares) for config in able]


def named_strategies(text: str) -> list[str]:
    """Those of a list such as `dp,ddp`."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if name not in STRATEGIES]
    if unknown or not names:
        close = difflib.get_close_matches(unknown[0][:MAX_CHARACTERS], STRATEGIES, n=1) if unknown else []
        raise PlanError(
            f"unknown strategy {', '.join(unknown) or text!r}; choose from {', '.join(STRATEGIES)}, "
            f"several with commas: {DEFAULT_IN_ONE_PROCESS},{DEFAULT}{f'; did you mean {close[0]}?' if close else ''}"
        )
    return names


def usual_on(devices: tuple[str, ...]) -> list[str]:
    """Strategies that are compared on several devices if none is named; some need a GPU for each process."""
    shares_gpu = devices[0].startswith("cuda") and len(set(devices)) < len(devices)
    return [row.name for row in usual_strategies() if row.shares_gpu or not shares_gpu]


def device_sets(text: str) -> list[tuple[str, ...]]:
    """The sets that `--devices` names: counts (`1,2`), or lists with a slash between them (`cuda:0/cuda:0,cuda:1`)."""
    parts = [part.strip() for part in text.split("/" if "/" in text else ",")]
    counts = [parse_devices(part) for part in parts]
    if all(isinstance(count, int) for count in counts):
        return [choose_devices(count) for count in counts if isinstance(count, int)]
    lists = parts if "/" in text else [text]
    sets = [tuple(name.strip() for name in part.split(",")) for part in lists]
    for one in sets:
        check_devices(one)
    return sets


def plan_of(plan: Plan, config: Configuration) -> Plan:
    """The plan of a configuration; raises PlanError before anything is started."""
    return Plan.from_json(
        {
            **plan.to_json(),
            "strategy": config.strategy,
            "devices": config.devices,
            "accumulate": config.accumulate,
            "virtual_replicas": config.virtual_replicas
            if config.virtual_replicas is not None
            else plan.virtual_replicas,
            "shares": config.shares,
            "link": config.link,
            "mesh": config.mesh,
            "pipeline_schedule": config.schedule or plan.pipeline_schedule,
        }
    )


def _all_devices() -> tuple[str, ...]:
    num_gpus = torch.cuda.device_count()
    return ("cuda:0", "cuda:0") if num_gpus == 1 else choose_devices(max(2, num_gpus))


def find_configs(
    strategies: str | None, devices: str, virtual_replicas: int | None = None, shares: str | None = None
) -> list[Configuration]:
    """Each strategy on each set of devices on which it makes sense; `single` first, with which others are compared.

    `devices` are counts (`1,2`), or lists with a slash between them (`cuda:0/cuda:0,cuda:1`). With `replicas`, each is
    there a second time, with as many virtual replicas, if it can have such; with `shares`, with these, if they fit.
    """
    sets = device_sets(devices)
    if len({len(one) for one in sets}) < len(sets):
        raise PlanError(f"{devices!r} names two lists of the same length; compare those in two commands")
    named = named_strategies(strategies) if strategies is not None else None
    configs = [Configuration(REFERENCE, (sets[0][0],))]
    for one in sets:
        configs += [
            config for config in (Configuration(name, one) for name in _on(one, named)) if config not in configs
        ]
    if named == [REFERENCE]:
        raise PlanError(f"{REFERENCE} alone has nothing to be compared with; write --strategies {REFERENCE},{DEFAULT}")
    uneven = with_shares(configs, shares) if shares is not None else []
    if virtual_replicas is not None:
        able = [config for config in configs if STRATEGIES[config.strategy].virtual_replicas]
        configs += [replace(config, virtual_replicas=virtual_replicas) for config in able]
    return configs + uneven


def _on(devices: tuple[str, ...], named: list[str] | None) -> list[str]:
    """Strategies for these devices; one device needs the reference only, unless others are named."""
    if len(devices) == 1:
        return [name for name in named or (REFERENCE,) if not STRATEGIES[name].needs_several_devices]
    kinds = {name.split(":")[0] for name in devices}
    baselines = [row.name for row in STRATEGIES.values() if row.is_baseline and kinds <= set(row.device_kinds)]
    return [name for name in named or (*usual_on(devices), *baselines) if name != REFERENCE]
