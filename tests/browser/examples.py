"""Comparisons and Records to make pages of: plausible ones, and nasty ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evenstep.plan import Plan
from evenstep.record import Evaluation, Lane, Measurement, Record, RecordWriter, Step, Summary, Timeline
from evenstep.report.comparison import Comparison, Parity, Range, Row
from evenstep.tune.space import Dimension
from evenstep.tune.study_rows import Began, CommandStart, Reached, StudyRequest, SuggestedTrial, TrialFailed
from evenstep.tune.successive_halving import Study

NASTY = "<script>window.ran=1</script>\"'`</script><img src=x onerror=window.ran=1>$$x^2$$ {{7*7}} 训练 " + "long" * 40
MACHINE = {"python": "3.11.7", "torch": "2.13.0+cpu", "system": "Linux x86_64", "cores": 8, "memory_bytes": 2**35}
PEAKS = {
    "single": {"cpu": 330 << 20},
    "dp": {"cpu": 336 << 20},
    "ddp": {"rank0 cpu": 212 << 20, "rank1 cpu": 210 << 20},
    "fsdp": {"rank0 cpu": 289 << 20, "rank1 cpu": 287 << 20},
}
PARTS = {
    "single": {"input": 0.2, "forward": 3.1, "backward": 6.0, "communication": 0.0, "optimizer": 0.8},
    "dp": {"input": 0.2, "forward": 2.4, "backward": 3.4, "communication": 1.9, "optimizer": 0.8},
    "ddp": {"input": 0.1, "forward": 1.6, "backward": 3.1, "communication": 0.35, "optimizer": 0.8},
    "fsdp": {"input": 0.1, "forward": 1.9, "backward": 3.4, "communication": 0.9, "optimizer": 0.4},
}


def plan(strategy: str = "single", num_devices: int = 1, name: str = "run", task: str = "digits") -> Plan:
    """A plan like any other."""
    devices = ("cpu",) * num_devices
    return Plan(batch=64, task=task, strategy=strategy, devices=devices, epochs=3, name=name)  # type: ignore[arg-type]


def step(number: int, loss: float, seconds: float = 0.01) -> Step:
    """One step of 64 samples."""
    wait = seconds * (0.05 + 0.03 * math.sin(number))
    peak = {"rank0 cpu": (200 << 20) + 4096 * number}
    return Step(
        step=number,
        epoch=number // 50,
        loss=loss,
        samples=64,
        count=64.0,
        seconds=seconds,
        input_seconds=wait,
        lr=0.001,
        peak_bytes=peak,
    )


def losses(num: int) -> list[float]:
    """Falling, and a little restless."""
    return [2.3 * math.exp(-number / (num / 4)) + 0.05 + 0.04 * math.sin(number * 1.7) for number in range(num)]


def timeline(strategy: str, num_devices: int) -> Timeline:
    """A step as the strategy would spend it."""
    parts = {name: ms / 1000 for name, ms in PARTS[strategy].items()}
    if strategy == "dp":
        return Timeline(step=12, lanes=_dp_lanes(num_devices))
    lanes: list[Lane] = []
    for rank in range(num_devices):
        now, spans = 0.0001 * rank, []
        for name in ("input", "forward", "backward", "communication", "optimizer"):
            if parts[name]:
                spans.append((name, now, now + parts[name]))
                now += parts[name]
        lanes.append(Lane(rank=rank, name="host", spans=spans))
        if num_devices > 1:
            begin = spans[2][1]
            sent = [(f"bucket {one}", begin + 0.0008 * (one + 1), begin + 0.0008 * one + 0.0014) for one in range(4)]
            lanes.append(Lane(rank=rank, name="network", spans=sent))
    return Timeline(step=12, lanes=lanes)


def _dp_lanes(num_devices: int) -> list[Lane]:
    host = [
        ("input", 0.0, 0.0002),
        ("replicate", 0.0002, 0.0011),
        ("reduce", 0.0069, 0.0079),
        ("optimizer", 0.0079, 0.0087),
    ]
    replicas = [
        Lane(rank=0, name=f"replica {replica}", spans=[("forward", 0.0011, 0.0035), ("backward", 0.0035, 0.0069)])
        for replica in range(num_devices)
    ]
    return [Lane(rank=0, name="host", spans=host), *replicas]


def record(strategy: str, num_devices: int, num_steps: int = 60, name: str = "run", task: str = "digits") -> Record:
    """A block of a comparison."""
    parts = {part: ms / 1000 for part, ms in PARTS[strategy].items()}
    whole = sum(parts.values())
    times = [whole * (1 + 0.08 * abs(math.sin(number * 2.1)) ** 3) for number in range(num_steps)]
    found = Record(plan(strategy, num_devices, name, task), machine=dict(MACHINE))
    found.steps = [step(number + 1, loss, times[number]) for number, loss in enumerate(losses(num_steps))]
    found.timelines = [timeline(strategy, num_devices)]
    found.measurement = Measurement(
        first_step_at=0.0,
        samples=64 * num_steps,
        seconds=sum(times),
        step_seconds=times,
        timed_seconds=whole,
        parts=parts,
        without_input_seconds=whole - parts["input"],
        without_communication_seconds=None,
        sent_bytes=0,
        peak_bytes=PEAKS[strategy],
    )
    return found


def finished(found: Record) -> Record:
    """The same run with evaluations and an end."""
    for one in found.steps[19::20]:
        values = {"loss": one.loss * 1.1, "accuracy": 1 - one.loss / 3}
        found.evaluations.append(Evaluation(step=one.step, epoch=one.epoch, values=values, samples=359, seconds=0.03))
    found.summary = Summary(
        strategy=found.plan.strategy,
        devices=list(found.plan.devices),
        steps=len(found.steps),
        samples=64 * len(found.steps),
        train_loss=found.steps[-1].loss if found.steps else None,
        valid={},
        samples_per_second=6400.0,
        seconds=1.0,
        peak_bytes={"rank0 cpu": 212 << 20},
        checkpoint=None,
        run="runs/run",
    )
    return found


def write_record(found: Record, folder: Path) -> Path:
    """As the file that a run would have left."""
    folder.mkdir(parents=True, exist_ok=True)
    writer = RecordWriter(folder, found.plan, found.machine)
    rows: list[Any] = [*found.steps, *found.evaluations, *found.timelines, found.measurement, found.summary]
    for row in rows:
        if row is not None:
            writer.append(row)
    writer.close()
    return folder


def spread(middle: float) -> Range:
    """Three rounds that differ by a few per cent."""
    return Range.of([middle * 0.97, middle, middle * 1.02])


def row(strategy: str, num_devices: int, parity: Parity = "same", why: str = "", runs: Sequence[str] = ()) -> Row:
    """A row of a comparison with these numbers of its strategy."""
    parts = {name: ms / 1000 * 2 / max(2, num_devices) for name, ms in PARTS[strategy].items()}
    whole = sum(parts.values())
    bare = None if strategy == "single" else spread(whole - parts["communication"])
    return Row(
        strategy=strategy,
        devices=["cpu"] * num_devices,
        samples_per_second=spread(64 / whole),
        step_seconds=spread(whole),
        parts=parts,
        without_input_seconds=spread(whole - parts["input"]),
        without_communication_seconds=bare,
        sent_bytes=0 if strategy in ("single", "dp") else 4_412_000,
        peak_bytes=PEAKS[strategy],
        start_seconds=spread(2.1),
        parity=parity,
        why=why,
        runs=list(runs),
    )


def comparison(folder: Path, task: str = "digits", why: str = "") -> Comparison:
    """Four strategies, measured, with their Records below the folder."""
    rows = []
    for strategy, num_devices in (("single", 1), ("dp", 2), ("ddp", 2), ("fsdp", 2)):
        run = f"{strategy}-{num_devices}-0"
        write_record(record(strategy, num_devices, name=run, task=task), folder / run)
        parity: Parity = "reference" if strategy == "single" else "same"
        why_here = why or ("" if strategy == "single" else "losses and weights equal within 1e-9 (float64)")
        rows.append(row(strategy, num_devices, parity, why_here, [run]))
    rows.append(row("ddp", 4, "differs", why or "BatchNorm sees each device's own share; try --sync-batchnorm"))
    made = Comparison(
        task=task,
        batch=64,
        precision="fp32",
        steps=60,
        rounds=3,
        rows=rows,
        machine=dict(MACHINE),
        left_out={"fsdp x 4": why or "4 devices were requested and this machine has 2"},
        command=f"evenstep compare {task} --devices 1,2",
        created="2026-11-15 12:00",
        advice=[
            "ddp: 1.70x on 2 devices, even memory; dp 1.16x, device 0 holds all the gradients.",
            "Next: communication that is not hidden takes 6 % of the step; without it, ddp would give 1.81x.",
            *([why] if why else []),
        ],
    )
    made.write(folder)
    return made


def study(folder: Path) -> Study:
    """Of twelve trials with rungs, of which one has failed and one has a Record."""
    space = [
        Dimension("lr", "1e-4..1e-1:log", "float", 1e-4, 1e-1, True),
        Dimension("width", "16,32,64", "choice", choices=(16, 32, 64)),
        Dimension("kind", "nasty", "choice", choices=(NASTY, "relu")),
    ]
    request = StudyRequest(
        task=f"/somewhere/{NASTY}",
        space=space,
        trials=12,
        rungs=[1, 3, 9],
        metric="loss:min",
        sampler="tpe",
        seed=0,
        slots=2,
        per_trial=1,
        command="evenstep tune my_task.py --search lr=1e-4..1e-1:log",
    )
    found = Study(request)
    found.add(CommandStart(devices=["cpu", "cpu"], at=0.0))
    for number in range(1, 13):
        options = {"lr": 1e-4 * 1.7**number, "width": 16 << number % 3, "kind": (NASTY, "relu")[number % 2]}
        found.add(SuggestedTrial(trial=number, options=options))
        found.add(Began(trial=number, rung=0, devices=["cpu"], at=float(number)))
        if number == 5:
            found.add(TrialFailed(trial=5, rung=0, why=f"ValueError: {NASTY}", step=3, at=number + 1.9))
            continue
        value = abs(math.log10(1e-4 * 1.7**number) + 2.2) + 0.1 * (number % 3)
        found.add(Reached(trial=number, rung=0, value=value, step=23, epoch=1, at=number + 1.9))
    for rung, step_, epoch in ((1, 69, 3), (2, 207, 9)):
        for one in found.promoted(rung - 1):
            value = one.reached[-1].value * 0.6
            found.add(Reached(trial=one.number, rung=rung, value=value, step=step_, epoch=epoch, at=20.0 + rung))
    write_record(finished(record("single", 1, name="0001")), folder / "trials" / "0001")
    return found
