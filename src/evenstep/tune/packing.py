"""How many trials share a device: a number that was given, or as many as their memory allows."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from evenstep.distributed.devices import check_devices, choose_devices, num_cores
from evenstep.errors import BadInput, shorten
from evenstep.launcher.prepare import free_name, label_of, prepare
from evenstep.plan import RUNS, OptionValue, parse_devices
from evenstep.tune.space import Dimension

MOST_PER_DEVICE = 8
"""Trials that --per-device auto puts on a GPU: its kernels take turns, and more of them seldom get more done."""


def find_devices(text: str, per_trial: int) -> tuple[str, ...]:
    """The devices of a study, which divide into trials."""
    parsed = parse_devices(text)
    devices = choose_devices(parsed) if isinstance(parsed, int) else parsed
    check_devices(devices)
    if len(devices) % per_trial:
        raise BadInput(f"{len(devices)} devices do not divide into trials of {per_trial}; change --per-trial")
    return devices


def parse_per_device(text: str) -> int | None:
    """None is `auto`.

    >>> parse_per_device("2"), parse_per_device("auto")
    (2, None)
    """
    if text == "auto":
        return None
    if not re.fullmatch(r"[1-9]\d?", text):
        raise BadInput(f"--per-device is {shorten(repr(text))}; write a number of trials, such as 2, or auto")
    return int(text)


def largest(space: Sequence[Dimension]) -> dict[str, OptionValue]:
    """The options of the trial that needs most, where more of a number needs more memory.

    >>> largest([Dimension("width", "64,128", "choice", choices=(64, 128)), Dimension("n", "1..4", "int", 1, 4)])
    {'width': 128, 'n': 4}
    """
    return {one.name: _largest(one) for one in space}


def _largest(one: Dimension) -> OptionValue:
    if one.kind != "choice":
        return int(one.high) if one.kind == "int" else one.high
    return max(one.choices, key=_amount)


def _amount(choice: OptionValue) -> float:
    if isinstance(choice, list):
        return sum(map(_amount, choice))
    return choice if isinstance(choice, int | float) else 0.0


def fitting(task: str, devices: Sequence[str], per_trial: int, plan_fields: Mapping[str, Any]) -> tuple[int, str]:
    """As many trials of the largest options as fit on each device, and a line that says why."""
    from evenstep.launcher.fit_micro_batch import runs_per_device

    out = plan_fields.get("out") or RUNS
    name = free_name(label_of(task, plan_fields["options"]), "fit", out)
    prepared = prepare(task, {**plan_fields, "devices": list(devices[:per_trial]), "name": name})
    try:
        num, why = runs_per_device(prepared, len(devices))
    finally:
        shutil.rmtree(prepared.folder, ignore_errors=True)
    is_gpu = devices[0].startswith("cuda")
    most = MOST_PER_DEVICE if is_gpu else max(1, num_cores() // len(devices))
    chosen = min(num, most)
    limit = f"; at most {most}, by {'--per-device auto' if is_gpu else 'the number of cores'}" if num > most else ""
    return chosen, f"{chosen} trial{'s' * (chosen > 1)} per device: {why}{limit}"
