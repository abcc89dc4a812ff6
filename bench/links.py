"""N1 to N4: two hosts with two ranks each, over links that tc limits. Linux, as root.

python bench/links.py [--quick] [--parts n1,n2,n4] [--out FILE]

Hosts are network namespaces; tbf limits what each sends. A bridge joins them, or a process that delays packets by
10 ms, which makes 20 ms there and back (tests/faults/delayed_switch.py).

n1  Seconds of a step at 100 Mbit, 1 Gbit and without a limit: torch's DDP, gradients sent once for each machine in
    buckets of three sizes, what --link auto chose, bf16 and PowerSGD. All are in the same processes and take turns.
    Exposed: what a step takes more than one that sends nothing, as a part of it.
n1-20ms  The same at 100 Mbit and 1 Gbit, with 20 ms there and back.
n2  Time to the same loss at 100 Mbit: whole trainings by `evenstep train`, --link none and local:25, five seeds.
n4  Micro-batches 1, 2, 4 and 8 at 1 Gbit: torch's DDP and the default.

N5, predictions at other rates, is in c8_predict.py.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import harness
import torch
from tests.faults.hosts import Host, hosts, why_no_hosts
from torch import nn

WIDTH, LAYERS = 512, 8
"""2.1 million parameters: 8.4 MB of gradients."""
RATES: dict[str, tuple[float, float]] = {
    "100 Mbit": (100, 0),
    "1 Gbit": (1000, 0),
    "no limit": (0, 0),
}
"""Megabits a second, and milliseconds from one host to the other."""
DELAYED: dict[str, tuple[float, float]] = {"100 Mbit, 20 ms": (100, 10), "1 Gbit, 20 ms": (1000, 10)}
SWEEP = {"torch's DDP": None, "once, 1 MB": 1.0, "once, 4 MB": 4.0, "once, 25 MB": 25.0}
LOSSY = ("bf16", "powersgd:2")
TRIAL_STEPS = 32
"""After which --link auto has chosen among the most plans that it tries."""
PORT = 29700


def worker(spec: dict[str, Any]) -> None:
    """One rank: blocks of every entrant in turn."""
    import torch.distributed as dist

    import evenstep

    torch.set_num_threads(1)
    team = evenstep.join("ddp", ["cpu", "cpu"])
    entrants = _entrants(team.world, spec["links"])
    x = torch.randn(spec["batch"], WIDTH, generator=torch.Generator().manual_seed(team.world.rank))
    figures: dict[str, list[float]] = {}
    for model, _ in entrants.values():
        _steps(model, x, 3, 1)
    if "auto" in entrants:
        _steps(entrants["auto"][0], x, TRIAL_STEPS, 1)
    for number in range(spec["rounds"]):
        for name in list(entrants)[:: 1 if number % 2 == 0 else -1]:
            for micro in spec["micro"]:
                for is_off in (False, True) if micro == 1 else (False,):
                    team.world.communication.is_off = is_off
                    dist.barrier()
                    began = time.perf_counter()
                    _steps(entrants[name][0], x, spec["steps"], micro)
                    key = f"{name}, {micro} micro-batches" if micro > 1 else name
                    key += ", nothing sent" * is_off
                    figures.setdefault(key, []).append((time.perf_counter() - began) / spec["steps"])
                    team.world.communication.is_off = False
    dist.barrier()
    if team.world.is_main:
        notes = entrants["auto"][0].notes if "auto" in entrants else []
        Path(spec["out"]).write_text(json.dumps({"seconds": figures, "notes": notes}))
    dist.barrier()


def _entrants(world: Any, links: Sequence[str]) -> dict[str, tuple[Any, None]]:
    from evenstep.strategies.ddp import DDP, DDPModel, Sending, _machine_sum

    sums = _machine_sum(_network(), world)
    assert sums is not None, "two hosts with two ranks each, and the C library"
    found: dict[str, tuple[Any, None]] = {
        name: (DDPModel(_network(), world, Sending(sums, size) if size else None), None) for name, size in SWEEP.items()
    }
    for link in links:
        world.communication.link = link
        found[link] = DDP().wrap(_network(), world), None
    return found


def _network() -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*layers)


def _steps(model: Any, x: torch.Tensor, num: int, micro: int) -> None:
    for _ in range(num):
        model.sync_replicas(is_training=True)
        for number in range(micro):
            with model.sync_gradients(number == micro - 1):
                model.replicas[0](lambda net: net(x).square().mean()).backward()
        for weight in model.weights:
            weight.grad = None


def on_hosts(machines: Sequence[Host], spec: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What two ranks on each of the hosts measured."""
    global PORT
    PORT += 1
    spec = {**spec, "out": str(folder / "figures.json")}
    at = {"MASTER_ADDR": machines[0].address, "MASTER_PORT": str(PORT), "WORLD_SIZE": "4", "GLOO_SOCKET_IFNAME": "eth0"}
    started = [
        machines[rank // 2].start(
            [sys.executable, str(Path(__file__).resolve()), "--worker", json.dumps(spec)],
            env={**at, "RANK": str(rank), "LOCAL_RANK": str(rank % 2), "OMP_NUM_THREADS": "1"},
        )
        for rank in range(4)
    ]
    for process in started:
        if process.wait(timeout=600):
            raise SystemExit("".join(machine.said() for machine in machines)[-3000:])
    found: dict[str, Any] = json.loads(Path(spec["out"]).read_text())
    return found


def steps_at(rate: tuple[float, float], spec: dict[str, Any]) -> dict[str, Any]:
    mbit, delay_ms = rate
    with tempfile.TemporaryDirectory() as folder, hosts(2, delay_ms=delay_ms) as machines:
        for machine in machines if mbit else ():
            machine.cap(mbit)
        return on_hosts(machines, spec, Path(folder))


def n1(is_quick: bool, rates: Mapping[str, tuple[float, float]] = RATES) -> dict[str, Any]:
    results = {}
    for rate in list(rates)[1:2] if is_quick else rates:
        slow = rates[rate][0] == 100
        shape = {"rounds": 2 if is_quick else 6 if not slow else 3, "steps": 3 if slow else 6}
        found = steps_at(rates[rate], {"links": ["auto", *LOSSY], "micro": [1], "batch": 32, **shape})
        results[rate] = _judged(found)
        print(f"\n{rate}")
        for name, row in results[rate]["rows"].items():
            print(f"  {name:<14} {1e3 * row['seconds']:8.1f} ms  {row['gain']:.2f} x DDP  exposed {row['exposed']:.0%}")
        print(f"  auto is {results[rate]['auto_over_best']:.3f} x the best exact plan\n  {results[rate]['notes']}")
    return results


def n1_delayed(is_quick: bool) -> dict[str, Any]:
    if missing := why_no_hosts(are_delayed=True):
        raise SystemExit(missing)
    return n1(is_quick, DELAYED)


def _judged(found: dict[str, Any]) -> dict[str, Any]:
    seconds = found["seconds"]
    plain = seconds["torch's DDP"]
    rows = {}
    for name, values in seconds.items():
        if not name.endswith("nothing sent"):
            # torch's DDP sends also while communication is off.
            alone = median(seconds["once, 4 MB, nothing sent" if name in SWEEP else f"{name}, nothing sent"])
            gain = harness.compared(values, plain)
            exposed = max(0.0, 1 - alone / median(values))
            figures = {"gain": gain.ratio, "low": gain.low, "high": gain.high}
            rows[name] = {"seconds": median(values), "least": min(values), "exposed": exposed, **figures}
    best = min(rows[name]["seconds"] for name in SWEEP)
    return {"rows": rows, "auto_over_best": rows["auto"]["seconds"] / best, "notes": found["notes"], "raw": seconds}


def n4(is_quick: bool) -> dict[str, Any]:
    found = steps_at(
        RATES["1 Gbit"], {"links": [], "micro": [1, 2, 4, 8], "batch": 32, "rounds": 2 if is_quick else 4, "steps": 4}
    )
    for name, values in found["seconds"].items():
        print(f"  {name:<34} {1e3 * median(values):8.1f} ms")
    return found


TASK = """
import math, torch
from torch import nn
from evenstep import Task

generator = torch.Generator().manual_seed(0)
teacher = [torch.randn(shape, generator=generator) * 2 / math.sqrt(64) for shape in ((64, 64), (64, 10))]
x = torch.randn(164000, 64, generator=generator)
y = torch.multinomial(torch.softmax(torch.tanh(x @ teacher[0]) @ teacher[1], 1), 1, generator=generator)[:, 0]


def task() -> Task:
    return Task(
        model=lambda: nn.Sequential(
            nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
        ),
        train=(x[:160000], y[:160000]),
        valid=(x[160000:], y[160000:]),
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        scheduler=lambda optimizer, steps: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps),
        batch=256,
    )
"""
IN_ITS_OWN_FOLDER = 'mkdir -p "$1" && cd "$1" && shift && exec "$@"'


def n2(is_quick: bool) -> dict[str, Any]:
    """Whole trainings: seconds of their steps until the smoothed loss is within 1 % of what --link none ends with."""
    from evenstep.compare.link_methods import judged_links, link_lines

    seeds, steps = (2, 100) if is_quick else (5, 600)
    links = ("none", "local:25")
    records: dict[str, list[Any]] = {link: [] for link in links}
    with tempfile.TemporaryDirectory() as folder, hosts(2) as machines:
        for machine in machines:
            machine.cap(100)
        for seed in range(seeds):
            for link in links:
                records[link].append(_train(machines, Path(folder), link, seed, steps))
    valid = {link: [record.evaluations[-1].values["loss"] for record in found] for link, found in records.items()}
    apart = [one / other - 1 for one, other in zip(valid["local:25"], valid["none"], strict=True)]
    reached = judged_links("noisy teacher", ["cpu"] * 4, records, None).target
    # The same loss within 1 %.
    comparison = judged_links("noisy teacher", ["cpu"] * 4, records, 1.01 * reached)
    for cells in link_lines(comparison):
        print("  " + "  ".join(cells))
    print(f"  final validation loss: {fmean(apart):+.2%} ({min(apart):+.2%} to {max(apart):+.2%})")
    rows = [vars(row) for row in comparison.rows]
    return {"target": comparison.target, "rows": rows, "valid": valid, "valid_difference": apart}


def _train(machines: Sequence[Host], folder: Path, link: str, seed: int, steps: int) -> Any:
    from evenstep.record import Record

    global PORT
    PORT += 1
    name = f"{link.replace(':', '-')}-{seed}"
    options = ["--machines", "2", "--rendezvous", f"{machines[0].address}:{PORT}", "--devices", "cpu,cpu"]
    options += ["--steps", str(steps), "--seed", str(seed), "--link", link, "--name", name, "--threads", "1"]
    started = []
    for machine in machines:
        own = folder / machine.name
        own.mkdir(exist_ok=True)
        (own / "my_task.py").write_text(TASK)
        command = [
            "sh",
            "-c",
            IN_ITS_OWN_FOLDER,
            "sh",
            str(own),
            sys.executable,
            "-m",
            "evenstep",
            "train",
            "my_task.py",
        ]
        started.append(machine.start([*command, *options], env={"EVENSTEP_TOKEN": "what both hosts of a bench know"}))
    for process in started:
        if process.wait(timeout=600):
            raise SystemExit("".join(machine.said() for machine in machines)[-3000:])
    return Record.read(folder / machines[0].name / "runs" / name)


PARTS: dict[str, Callable[[bool], dict[str, Any]]] = {"n1": n1, "n1-20ms": n1_delayed, "n2": n2, "n4": n4}


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--parts", default="n1,n2,n4")
    parser.add_argument("--worker", help="one rank, by this bench itself")
    arguments = parser.parse_args()
    if arguments.worker:
        worker(json.loads(arguments.worker))
        return
    if missing := why_no_hosts():
        raise SystemExit(missing)
    results = {}
    for part in arguments.parts.split(","):
        began = time.monotonic()
        print(f"\n{part}")
        results[part] = PARTS[part](arguments.quick)
        print(f"  {time.monotonic() - began:.0f} s")
        if arguments.out:
            harness.write(arguments.out, f"python bench/links.py --parts {arguments.parts}", results)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
