"""How wrong the model is on own Records: measured on up to two devices, predicted on more."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median

from evenstep.predict.calibration import Observation, calibrate, divides, observe, read_records
from evenstep.predict.forecast import Forecaster, Question
from evenstep.predict.published import Checked
from evenstep.record import Record

UNCHECKED = (
    "rows on one or two devices are predicted from, and rows on more, of strategies that do not divide a model, are "
    "checked; this needs both"
)
"""Why a comparison may have no row to check."""


def on_two_devices(record: Record) -> bool:
    """What is an input, if nothing else is said."""
    return len(record.plan.devices) <= 2


def replay_records(folder: str | Path, is_input: Callable[[Record], bool] = on_two_devices) -> Iterator[Checked]:
    """Predict each configuration that is no input from those that are; nothing, if there is none."""
    records = read_records(folder)
    known = [record for record in records if is_input(record)]
    others = [observe(record) for record in records if not is_input(record) and not divides(record)]
    if not known or not others:
        return
    calibration = calibrate(known)
    points: dict[tuple[str, int, float], list[Observation]] = {}
    for one in others:
        points.setdefault((one.strategy.name, one.devices, one.samples), []).append(one)
    for seen in points.values():
        # Several processes of this machine, as they were measured.
        question = Question(devices=[seen[0].devices], machines=[1], batch=round(seen[0].samples))
        yield _checked(seen, Forecaster(calibration, question), Path(folder).name)


def _checked(seen: Sequence[Observation], forecaster: Forecaster, folder: str) -> Checked:
    """Of one configuration: the median of its Records beside its prediction."""
    one = seen[0]
    row = forecaster.forecast_one(one.strategy, one.devices)
    observed = forecaster.calibration.observed
    fewest = min(each.devices for each in observed)
    largest = max(each.samples for each in observed if each.devices == fewest)
    alone = [each.rate for each in observed if (each.devices, each.samples) == (fewest, largest)]
    linear = median(alone) / fewest * one.devices
    rate = row.samples_per_second
    return Checked(
        family=f"own, {one.kind}",
        name=f"{folder}: {row.label}, batch {one.samples:g}",
        devices=one.devices,
        measured=median(each.rate for each in seen),
        predicted=rate.middle,
        linear=linear,
        loss=max(0.0, math.log(linear / rate.middle)),
        low=rate.low,
        high=rate.high,
    )
