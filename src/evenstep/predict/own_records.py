"""How wrong the model is on own Records: measured on up to two devices, predicted on more."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

from evenstep.predict.calibration import Observation, calibrate, observe, read_records
from evenstep.predict.forecast import Forecaster, Question
from evenstep.predict.published import Checked
from evenstep.record import Record


def on_two_devices(record: Record) -> bool:
    """What is an input, if nothing else is said."""
    return len(record.plan.devices) <= 2


def replay_records(folder: str | Path, is_input: Callable[[Record], bool] = on_two_devices) -> Iterator[Checked]:
    """Predict what is no input from what is; nothing, if there is no such Record."""
    records = read_records(folder)
    known = [record for record in records if is_input(record)]
    others = [observe(record) for record in records if not is_input(record)]
    if not known or not others:
        return
    calibration = calibrate(known)
    for one in others:
        # Several processes of this machine, as they were measured.
        question = Question(devices=[one.devices], machines=[1], batch=round(one.samples))
        yield _checked(one, Forecaster(calibration, question), Path(folder).name)


def _checked(one: Observation, forecaster: Forecaster, folder: str) -> Checked:
    row = forecaster.forecast_one(one.strategy, one.devices)
    first = min(forecaster.calibration.observed, key=lambda seen: seen.devices)
    linear = first.rate / first.devices * one.devices
    rate = row.samples_per_second.middle
    return Checked(
        family=f"own, {one.kind}",
        name=f"{folder}: {row.label}, batch {one.samples:g}",
        devices=one.devices,
        measured=one.rate,
        predicted=rate,
        linear=linear,
        loss=max(0.0, math.log(linear / rate)),
    )
