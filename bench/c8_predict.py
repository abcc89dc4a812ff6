"""C8: predicted steps beside measured ones that the model has not seen.

python bench/c8_predict.py [--quick] [--rounds N] [--out FILE] [--keep FOLDER] [--replay FOLDER]

On the CPU, one thread a process. For each of four networks, one rank at a batch and at a quarter of it, and two ranks
at the batch, are measured and given to `evenstep predict`. Held out: half of the batch on one and two ranks, and three
and four ranks. Then two hosts, which are network namespaces, with links that tc limits to 1 Gbit and 100 Mbit a second:
predicted from one and two ranks of this machine and the link, once by its nominal rate and once as `evenstep doctor`
measures it. Two ranks, since both hosts compute on this machine, whose cores seem to slow each other down.

All blocks are taken in turn, in alternating order; a point is the median of its blocks. What one half of equal blocks
differs by from the other is the noise: no error below it means anything. --replay predicts what --keep left once more,
and measures nothing.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import harness
from harness import Plain, Result
from tests.faults.hosts import Host, hosts, why_no_hosts

from evenstep.compare.measure import Block, measure
from evenstep.launcher.launch import run_in_processes, variant
from evenstep.launcher.prepare import prepare
from evenstep.predict.calibration import calibrate, read_records
from evenstep.predict.communication_cost import Link, gbit
from evenstep.predict.forecast import Forecaster, Question
from evenstep.predict.own_records import replay_records
from evenstep.predict.published import Checked
from evenstep.predict.typical_network import link_of_pair
from evenstep.record import Record
from evenstep.strategy_facts import STRATEGIES


@dataclass(frozen=True)
class Network:
    """A task of bench/parts.py, and how much of it is measured."""

    name: str
    batch: int
    steps: int
    """Of a block: about two seconds."""
    capped_steps: int
    """Over a capped link."""


NETWORKS = [
    Network("simple_net", batch=512, steps=400, capped_steps=40),
    Network("small_cnn", batch=128, steps=80, capped_steps=40),
    Network("encoder", batch=64, steps=80, capped_steps=30),
    Network("wide_mlp", batch=64, steps=40, capped_steps=8),
]
ROUNDS = 6
MBIT = (1000, 100)
CAPPED = "capped"
WARM_UP = 3
GOALS = "median error 5 %, worst 12 %, 85 % inside the 90 % interval; over capped links: median 6 %"


KNOWN = 3
"""The first blocks are inputs."""


def blocks(batch: int) -> list[tuple[str, int, int]]:
    """Strategy, ranks and batch of each: inputs and what is held out."""
    known = [("single", 1, batch), ("single", 1, batch // 4), ("ddp", 2, batch)]
    return [*known, ("single", 1, batch // 2), ("ddp", 2, batch // 2), ("ddp", 3, batch), ("ddp", 4, batch)]


def is_input(batch: int, record: Record) -> bool:
    devices = len(record.plan.devices)
    return (devices, record.plan.batch) in ((1, batch), (1, batch // 4), (2, batch))


def source_of(network: Network) -> str:
    return f"{Path(__file__).with_name('parts.py')}:{network.name}"


def measured(network: Network, folder: Path, rounds: int, steps: int, num_blocks: int | None = None) -> Path:
    """The Records of all blocks of a network, or of the first."""
    choices: dict[str, Any] = {"strategy": "single", "devices": ["cpu"], "batch": network.batch, "threads": 1}
    base = prepare(source_of(network), {**choices, "name": network.name, "out": str(folder)})
    block = Block(warm_up=max(WARM_UP, steps // 10), steps=steps, special=max(4, steps // 4))
    chosen = blocks(network.batch)[:num_blocks]
    for number in range(rounds):
        for strategy, num, size in chosen[:: -1 if number % 2 else 1]:
            name = f"{strategy}-{num}-{size}-round-{number}"
            changes = {"strategy": strategy, "devices": ("cpu",) * num, "batch": size}
            one = variant(base, base.folder / name, steps=block.plan_steps, **changes)
            for _ in run_in_processes(one, partial(measure, block=block)):
                pass
    return base.folder


def measure_capped(network: Network, folder: Path, steps: int) -> None:
    """Two hosts with one rank each, for each rate: a training whose Record stays below `capped`."""
    where = folder.absolute() / CAPPED
    with hosts(2) as machines:
        for mbit in MBIT:
            for machine in machines:
                machine.cap(mbit)
            ended = [_train(machine, network, where / machine.name, mbit, steps) for machine in machines]
            if any(process.wait(300) for process in ended):
                sys.exit("\n".join(machine.said() for machine in machines))


def measure_links(folder: Path) -> None:
    """What `evenstep doctor` finds between two hosts at each rate."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "evenstep",
        "doctor",
        "--machines",
        "2",
        "--rendezvous",
        "10.77.0.1:29400",
        "--json",
    ]
    with hosts(2) as machines:
        for mbit in MBIT:
            for machine in machines:
                machine.cap(mbit)
            ended = [machine.start(command, cwd=folder) for machine in machines]
            for process in ended:
                process.wait(120)
            (folder / f"{mbit}mbit.json").write_text(machines[0].said())


def measured_link(folder: Path, mbit: int) -> Link | None:
    """The slowest pair of machines that doctor measured."""
    path = folder / f"{mbit}mbit.json"
    # The log of a host goes on from rate to rate.
    text = [line for line in path.read_text().splitlines() if line.startswith("{")][-1:] if path.exists() else []
    found = [one["numbers"] for line in text for one in json.loads(line)["findings"] if ", gloo" in one["name"]]
    rates = [one for one in found if one.get("bytes_per_second")]
    slowest = min(rates, key=lambda one: one["bytes_per_second"], default=None)
    return link_of_pair(slowest["latency_seconds"], slowest["bytes_per_second"]) if slowest else None


def _train(host: Host, network: Network, where: Path, mbit: int, steps: int) -> subprocess.Popen[bytes]:
    words = ["--strategy", "ddp", "--devices", "cpu", "--machines", "2", "--rendezvous", "10.77.0.1:29400"]
    size = ["--batch", str(network.batch), "--threads", "1", "--steps", str(steps + WARM_UP)]
    command = [sys.executable, "-m", "evenstep", "train", source_of(network), *words, *size]
    # Both work in a folder of the same name, as machines do; each sees its own.
    shared = where.parent / "work"
    for folder in (where, shared):
        folder.mkdir(parents=True, exist_ok=True)
    inside = ["sh", "-c", 'mount --bind "$1" "$2" && cd "$2" && shift 2 && exec "$@"', "sh", str(where), str(shared)]
    token = {"EVENSTEP_TOKEN": "what both hosts know"}
    return host.start([*inside, *command, "--name", f"{mbit}mbit", "--quiet"], env=token)


def capped(network: Network, folder: Path, by_doctor: bool) -> Iterator[Checked]:
    """Predicted from ranks of this machine, and the link: its nominal rate, or what doctor measured."""
    known = [one for one in read_records(folder) if is_input(network.batch, one)]
    calibration = calibrate(known, parameters=_parameters(folder))
    for mbit in MBIT:
        path = folder / CAPPED / "host0" / "runs" / f"{mbit}mbit"
        if not path.exists():
            continue
        seconds = median(step.seconds for step in list(Record.read(path).steps)[WARM_UP:])
        link = measured_link(folder.parent / CAPPED, mbit) if by_doctor else gbit(mbit / 1000)
        if link is None:
            continue
        question = Question(devices=[2], machines=[2], links=[link], batch=network.batch)
        rate = Forecaster(calibration, question).forecast_one(STRATEGIES["ddp"], 2).samples_per_second
        alone = [one for one in calibration.observed if one.devices == 1 and one.samples == network.batch]
        single = median(one.rate for one in alone)
        yield Checked(
            family="capped links",
            name=f"{network.name}: 2 hosts, {mbit:,} Mbit",
            devices=2,
            measured=network.batch / seconds,
            predicted=rate.middle,
            linear=2 * single,
            loss=max(0.0, math.log(2 * single / rate.middle)),
            low=rate.low,
            high=rate.high,
        )


def _parameters(folder: Path) -> int:
    """Of the network, by what two ranks sent."""
    sent = [one.measurement.sent_bytes for one in read_records(folder) if one.measurement is not None]
    return max(sent) // 4


def noise(folder: Path) -> float:
    """By how much the medians of two halves of equal blocks differ; the median over kinds of blocks."""
    rates: dict[str, list[float]] = {}
    for path in sorted(folder.glob("*-round-*/record.jsonl")):
        found = Record.read(path).measurement
        if found is not None:
            rates.setdefault(path.parent.name.rpartition("-round-")[0], []).append(1 / median(found.step_seconds))
    halves = [(median(of[::2]), median(of[1::2])) for of in rates.values() if len(of) > 1]
    return median(max(pair) / min(pair) - 1 for pair in halves) if halves else 0.0


def table(title: str, rows: list[Checked], notes: list[str]) -> Plain:
    cells = [
        [
            *row.name.split(": "),
            harness.number(row.measured),
            harness.number(row.predicted),
            f"{harness.number(row.low)} to {harness.number(row.high)}",
            f"{row.predicted / row.measured - 1:+.1%}",
            f"{row.linear / row.measured - 1:+.1%}",
        ]
        for row in rows
    ]
    heads = ["network", "point", "measured, samples/s", "predicted", "90 % interval", "error", "of linear scaling"]
    return Plain(title, heads, cells, notes)


def figures(rows: list[Checked], name: str) -> dict[str, float]:
    """Of the errors, and what is inside its interval."""
    if not rows:
        return {}
    errors = [row.error for row in rows]
    inside = fmean(row.low <= row.measured <= row.high for row in rows)
    skill = 1 - fmean(errors) / fmean(row.linear_error for row in rows)
    found = {"median": median(errors), "worst": max(errors), "inside": inside, "skill": skill}
    return {f"{name}{key}": value for key, value in found.items()}


def seconds_of_1024(folder: Path) -> float:
    """Until the command that predicts 1,024 devices has printed its tables; its page follows."""
    words = ["predict", str(folder), "--devices", "1024", "--link", "25gbit", "--per-device", "64"]
    began = time.perf_counter()
    with subprocess.Popen([sys.executable, "-m", "evenstep", *words], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        seconds = next(time.perf_counter() - began for line in process.stdout if line.startswith("ddp x 1024"))
        process.stdout.read()
    return seconds


def result_of(folder: Path, networks: list[Network], why_none: str | None) -> Result:
    """All predictions of what lies in the folder."""
    rows: list[Checked] = []
    links: list[Checked] = []
    by_doctor: list[Checked] = []
    noises: dict[str, float] = {}
    for network in networks:
        rows += replay_records(folder / network.name, partial(is_input, network.batch))
        links += capped(network, folder / network.name, by_doctor=False)
        by_doctor += capped(network, folder / network.name, by_doctor=True)
        noises[network.name] = noise(folder / network.name)
    said = [f"halves of equal blocks of {name} differ by {value:.1%}" for name, value in noises.items()]
    tables = [table("Held out: another batch, and more ranks than cores", rows, said)]
    if links:
        tables.append(table("Over capped links, from ranks of this machine and the rate of the link", links, []))
        found = {mbit: measured_link(folder / CAPPED, mbit) for mbit in MBIT}
        notes = [f"{mbit:,} Mbit: {one.bandwidth * 8e-6:,.0f} by doctor" for mbit, one in found.items() if one]
        tables.append(table("Over capped links, from ranks of this machine and what doctor measured", by_doctor, notes))
    else:
        tables[0].notes.append(f"no capped links: {why_none or 'not measured'}")
    seconds = seconds_of_1024(folder / networks[0].name)
    tables[0].notes.append(f"1,024 devices were predicted {seconds:.2f} s after the command was given")
    headline = {
        **figures(rows, ""),
        **figures(links, "capped_"),
        **figures(by_doctor, "doctor_"),
        "noise": median(noises.values()),
    }
    return Result("C8", "predicted steps", GOALS, tables=tables, headline=headline)


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"of all blocks of a network ({ROUNDS})")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="where the Records stay")
    parser.add_argument("--replay", type=Path, metavar="FOLDER", help="predict what lies there, and measure nothing")
    given = parser.parse_args()
    networks = NETWORKS[:1] if given.quick else NETWORKS
    why_none = "left out by --quick" if given.quick else why_no_hosts()
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.replay or given.keep or Path(temporary)
        if why_none is None and not given.replay:
            measure_links(folder / CAPPED)
        for network in [] if given.replay else networks:
            steps = 12 if given.quick else network.steps
            measured(network, folder, 1 if given.quick else given.rounds, steps)
            if why_none is None:
                measure_capped(network, folder / network.name, network.capped_steps)
        harness.finish(result_of(folder, networks, why_none), given.out)


if __name__ == "__main__":
    main()
