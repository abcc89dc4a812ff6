"""N5: predicted steps at other rates and numbers of hosts, beside measured ones.

Known: steps of one and two ranks of this machine. Predicted: 2, 3 and 4 hosts with a rank each, by the rate of their
links. The formula alone: computing, and then 2 (n - 1) / n of the gradients at the nominal rate.

All hosts share the cores of this machine: with more hosts than cores, a rank computes that much longer, which is no
property of a network. So what is known of one rank is scaled by that before anything is predicted from it.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import harness
from c8_predict import KNOWN, NETWORKS, WARM_UP, Network, is_input, measured, source_of
from tests.faults.hosts import Host, hosts

from evenstep.distributed.devices import facts
from evenstep.predict.calibration import Calibration, calibrate, read_records
from evenstep.predict.communication_cost import gbit
from evenstep.predict.forecast import Forecaster, Question
from evenstep.record import Record
from evenstep.strategy_facts import STRATEGIES

POINTS = ((2, 1000), (2, 300), (2, 100), (3, 300), (4, 100))
"""Hosts, and megabits a second."""
CHOSEN = ("simple_net", "encoder", "wide_mlp")
ROUNDS = 2
GOAL = "goal: median 5 %, worst 15 %"


def n5(is_quick: bool) -> dict[str, Any]:
    networks = [one for one in NETWORKS if one.name in (CHOSEN[:1] if is_quick else CHOSEN)]
    points = POINTS[2:4] if is_quick else POINTS
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        for network in networks:
            known = measured(network, Path(temporary), 1 if is_quick else ROUNDS, network.steps // 2, KNOWN)
            calibration = calibrate(
                [one for one in read_records(known) if is_input(network.batch, one)], parameters=_parameters(network)
            )
            for num, mbit in points:
                folder = Path(temporary) / f"{network.name}-{num}-{mbit}"
                formula = formula_seconds(network, calibration, num, mbit)
                seconds = step_seconds(_short(network, formula), num, mbit, folder)
                rows.append(_row(network, calibration, (num, mbit), {"measured": seconds, "formula": formula}))
    cells = [
        [row["network"], f"{row['hosts']} hosts, {row['mbit']} Mbit", *(f"{1e3 * row[key]:.1f}" for key in SECONDS)]
        + [f"{row[f'{key}_error']:+.1%}" for key in SECONDS[1:]]
        for row in rows
    ]
    heads = ["network", "point", "measured, ms", "predicted", "formula", "error", "of the formula"]
    harness.show("", heads, cells)
    figures = {key: _figures([abs(row[f"{key}_error"]) for row in rows]) for key in SECONDS[1:]}
    for key, found in figures.items():
        print(f"  {key}: median {found['median']:.1%}, worst {found['worst']:.1%} ({GOAL})")
    return {"rows": rows, **figures}


SECONDS = ("measured", "predicted", "formula")


def _short(network: Network, seconds: float) -> Network:
    """With as many steps as take ten seconds, but some."""
    return replace(network, capped_steps=max(4, min(network.capped_steps, round(10 / seconds))))


def _slower(num: int) -> float:
    return max(1.0, num / int(facts()["cores"]))


def formula_seconds(network: Network, calibration: Calibration, num: int, mbit: int) -> float:
    """Computing, and then sending."""
    single = [one for one in calibration.observed if one.devices == 1 and one.samples == network.batch]
    alone = median(network.batch / one.rate for one in single)
    sent = 2 * (num - 1) / num * calibration.work.gradient_bytes
    return _slower(num) * alone / num + 8 * sent / (mbit * 1e6)


def _row(network: Network, calibration: Calibration, point: tuple[int, int], known: dict[str, float]) -> dict[str, Any]:
    num, mbit = point
    slower, work = _slower(num), calibration.work
    shared = replace(
        calibration,
        work=replace(
            work,
            fixed_seconds=slower * work.fixed_seconds,
            sample_seconds=slower * work.sample_seconds,
            optimizer_seconds=slower * work.optimizer_seconds,
        ),
    )
    question = Question(devices=[num], machines=[num], links=[gbit(mbit / 1000)], batch=network.batch)
    rate = Forecaster(shared, question).forecast_one(STRATEGIES["ddp"], num).samples_per_second
    found = {**known, "predicted": network.batch / rate.middle}
    errors = {f"{key}_error": found[key] / found["measured"] - 1 for key in SECONDS[1:]}
    inside = rate.low <= network.batch / found["measured"] <= rate.high
    return {"network": network.name, "hosts": num, "mbit": mbit, **found, **errors, "is_inside": inside}


def _figures(errors: list[float]) -> dict[str, float]:
    return {"median": median(errors), "worst": max(errors)}


def _parameters(network: Network) -> int:
    import parts

    return sum(weight.numel() for weight in getattr(parts, network.name)().model().parameters())


def step_seconds(network: Network, num: int, mbit: int, folder: Path) -> float:
    """Of a training on that many hosts, with a rank each."""
    with hosts(num) as machines:
        for machine in machines:
            machine.cap(mbit)
        started = [_train(machine, machines[0], network, folder, num) for machine in machines]
        if any(process.wait(300) for process in started):
            sys.exit("\n".join(machine.said() for machine in machines))
    steps = Record.read(folder / machines[0].name / "runs" / "capped").steps
    return median(step.seconds for step in steps[WARM_UP:])


def _train(host: Host, head: Host, network: Network, folder: Path, num: int) -> Any:
    own, shared = folder / host.name, folder / "work"
    for one in (own, shared):
        one.mkdir(parents=True, exist_ok=True)
    # All work in a folder of the same name, as machines do; each sees its own.
    inside = ["sh", "-c", 'mount --bind "$1" "$2" && cd "$2" && shift 2 && exec "$@"', "sh", str(own), str(shared)]
    where = ["--machines", str(num), "--rendezvous", f"{head.address}:29400", "--strategy", "ddp", "--devices", "cpu"]
    size = ["--batch", str(network.batch), "--threads", "1", "--steps", str(network.capped_steps + WARM_UP)]
    command = [sys.executable, "-m", "evenstep", "train", source_of(network), *where, *size, "--name", "capped"]
    return host.start([*inside, *command, "--quiet"], env={"EVENSTEP_TOKEN": "what all hosts know"})
