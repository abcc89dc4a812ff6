"""N1 to N5: hosts with two ranks each, over slow links. Linux, as root.

python bench/links.py [--quick] [--parts n1,n1-20ms,n2,n2-text,n3,n4,n5] [--out FILE]

Hosts are network namespaces; tbf limits what each sends. A bridge joins them, or a process that delays packets by
10 ms, which makes 20 ms there and back (tests/faults/delayed_switch.py). Each part takes two to six minutes, in which
nothing else may run. Results go to bench/results/DATE-links-PARTS.json, unless --out or --quick is given.

n1  Seconds of a step at 100 Mbit, 1 Gbit and without a limit: torch's DDP, gradients sent once for each machine in
    buckets of three sizes, what --link auto chose, bf16 and PowerSGD. All are in the same processes and take turns.
    Exposed: what a step takes more than one that sends nothing, as a part of it.
n1-20ms  The same at 100 Mbit and 1 Gbit, with 20 ms there and back.
n2  Time to the same loss at 100 Mbit, five seeds: DDP, PowerSGD, torch's post-local SGD, local and diloco; n2-text is a
    harder work (links_loss.py).
n3  Communication that is not hidden behind backward, at 1 Gbit and 100 Mbit: DDP, tuned DDP, the default, --link auto.
n4  Micro-batches 1, 2, 4 and 8 at 1 Gbit: DDP, accelerate, Lightning, evenstep; the same gradients (links_peers.py).
n5  Steps predicted at other rates and numbers of hosts, beside measured ones and the formula alone (links_predict.py).
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import harness
import torch
import torch.distributed as dist
from links_hosts import on_hosts
from links_loss import n2, n2_text, train_all
from links_peers import accumulate_all, n4
from links_predict import n5
from tests.faults.hosts import hosts, why_no_hosts
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel

import evenstep

WIDTH, LAYERS = 512, 8
"""2.1 million parameters: 8.4 MB of gradients."""
Rate = tuple[float, float]
"""Megabits a second, and milliseconds from one host to the other."""
RATES: dict[str, Rate] = {"100 Mbit": (100, 0), "1 Gbit": (1000, 0), "no limit": (0, 0)}
DELAYED: dict[str, Rate] = {"100 Mbit, 20 ms": (100, 10), "1 Gbit, 20 ms": (1000, 10)}
SWEEP = {"torch's DDP": None, "once, 1 MB": 1.0, "once, 4 MB": 4.0, "once, 25 MB": 25.0}
LOSSY = ("bf16", "powersgd:2")
TRIAL_STEPS = 32
"""After which --link auto has chosen among the most plans that it tries."""
Steps = Callable[[int], None]


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*layers)


def inputs(rank: int, batch: int) -> torch.Tensor:
    return torch.randn(batch, WIDTH, generator=torch.Generator().manual_seed(rank))


def ours(model: Any, x: torch.Tensor) -> Steps:
    """Steps without an optimizer of a wrapped model."""

    def run(num: int) -> None:
        for _ in range(num):
            model.sync_replicas(is_training=True)
            with model.sync_gradients(True):
                model.replicas[0](lambda net: net(x).square().mean()).backward()
            for weight in model.weights:
                weight.grad = None

    return run


def torchs(x: torch.Tensor, is_silent: bool = False, **options: Any) -> Steps:
    """The same, by DistributedDataParallel itself."""
    model = DistributedDataParallel(network(), **options)
    if is_silent:
        model.register_comm_hook(None, noop_hook)

    def run(num: int) -> None:
        for _ in range(num):
            model(x).square().mean().backward()
            model.zero_grad(set_to_none=True)

    return run


def sendings(world: Any) -> dict[str, Any]:
    """Wrapped models for each plan of the sweep, each with connections of its own."""
    from evenstep.strategies.ddp import DDPModel, Sending, _machine_sum

    found = {}
    for name, size in SWEEP.items():
        sums = _machine_sum(network(), world) if size else None
        assert size is None or sums is not None, "two hosts with two ranks each, and the C library"
        found[name] = DDPModel(network(), world, Sending(sums, size) if size else None)
    return found


def linked(world: Any, link: str) -> Any:
    from evenstep.strategies.ddp import DDP

    world.communication.link = link
    return DDP().wrap(network(), world)


def turns(blocks: Mapping[str, Steps], rounds: int, num: int) -> dict[str, list[float]]:
    """Seconds of a step, for each block and round."""

    def block(steps: Steps) -> float:
        # TCP starts slowly after a pause, and others had their turns.
        steps(1)
        return harness.timed(steps, num, is_together=True) / 1e3

    return harness.interleaved({name: partial(block, steps) for name, steps in blocks.items()}, rounds)


def sweep(spec: dict[str, Any]) -> dict[str, Any] | None:
    """One rank of n1."""
    world = evenstep.join("ddp", ["cpu", "cpu"]).world
    models = {**sendings(world), **{link: linked(world, link) for link in ("auto", *LOSSY)}}
    x = inputs(world.rank, 32)
    steps = {name: ours(model, x) for name, model in models.items()}
    for run in steps.values():
        run(3)
    steps["auto"](TRIAL_STEPS)
    silent = {f"{name}, nothing sent": _silently(world, run) for name, run in steps.items()}
    figures = turns({**steps, **silent}, spec["rounds"], spec["steps"])
    return {"seconds": figures, "notes": models["auto"].notes} if world.is_main else None


def _silently(world: Any, run: Steps) -> Steps:
    def silent(num: int) -> None:
        world.communication.is_off = True
        run(num)
        world.communication.is_off = False

    return silent


def steps_at(rate: Rate, spec: dict[str, Any]) -> dict[str, Any]:
    mbit, delay_ms = rate
    with tempfile.TemporaryDirectory() as folder, hosts(2, delay_ms=delay_ms) as machines:
        for machine in machines if mbit else ():
            machine.cap(mbit)
        return on_hosts(machines, spec, Path(folder))


def n1(is_quick: bool, rates: Mapping[str, Rate] = RATES) -> dict[str, Any]:
    results = {}
    for rate in list(rates)[1:2] if is_quick else rates:
        slow = rates[rate][0] == 100
        shape = {"rounds": 2 if is_quick else 6 if not slow else 3, "steps": 3 if slow else 6}
        results[rate] = _judged(steps_at(rates[rate], {"work": "sweep", **shape}))
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


TUNED = {"gradient_as_bucket_view": True, "static_graph": True, "broadcast_buffers": False}
TUNED_MB = (1, 4)
OURS, SILENT, ALONE = "evenstep, default", "nothing sent", "sent alone"


def overlap(spec: dict[str, Any]) -> dict[str, Any] | None:
    """One rank of n3: steps, steps that send nothing, and the same bytes sent while nothing is computed."""
    from evenstep.distributed.machines import Message

    world = evenstep.join("ddp", ["cpu", "cpu"]).world
    x, models = inputs(world.rank, spec["batch"]), sendings(world)
    sums = models["once, 4 MB"]._sending.sums
    gradients = torch.cat([weight.detach().flatten() for weight in models["once, 4 MB"].weights])

    def send(num: int) -> None:
        for _ in range(num):
            for sent in [sums.start(Message(part)) for part in gradients.split(2**20)]:
                sent.wait()

    def send_by_torch(num: int) -> None:
        for _ in range(num):
            for work in [dist.all_reduce(part, async_op=True) for part in gradients.split(25 * 2**18)]:
                work.wait()

    steps = {"DDP": torchs(x), OURS: ours(models["once, 4 MB"], x), "--link auto": ours(linked(world, "auto"), x)}
    steps |= {f"DDP, tuned, {size} MB": torchs(x, bucket_cap_mb=size, **TUNED) for size in TUNED_MB}
    silent = {f"DDP, {SILENT}": torchs(x, is_silent=True), f"{OURS}, {SILENT}": _silently(world, steps[OURS])}
    for run in (*steps.values(), *silent.values()):
        run(3)
    steps["--link auto"](TRIAL_STEPS)
    alone = {f"DDP, {ALONE}": send_by_torch, f"{OURS}, {ALONE}": send}
    figures = turns({**steps, **silent, **alone}, spec["rounds"], spec["steps"])
    return {"seconds": figures} if world.is_main else None


def n3(is_quick: bool) -> dict[str, Any]:
    short = {"rounds": 2, "steps": 3}
    shapes = {"1 Gbit": short if is_quick else {"rounds": 8, "steps": 6}}
    if not is_quick:
        shapes["100 Mbit"] = {"rounds": 3, "steps": 3}
    results = {}
    for rate, shape in shapes.items():
        seconds = steps_at(RATES[rate], {"work": "overlap", "batch": 256, **shape})["seconds"]
        rows = not_hidden({name: median(values) for name, values in seconds.items()})
        heads = [rate, "step, ms", "not hidden, ms", "of communication", "of DDP's ms", "of DDP's share (goal 0.7)"]
        harness.show("", heads, [_overlap_cells(name, row) for name, row in rows.items()])
        for name in seconds.keys() - rows.keys():
            print(f"  {name}: {1e3 * median(seconds[name]):.1f} ms")
        results[rate] = {"rows": rows, "raw": seconds}
    return results


def not_hidden(seconds: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """What a step takes more than one that sends nothing; as a part of what sending takes alone; and beside DDP's."""
    rows: dict[str, dict[str, float]] = {}
    for name, step in seconds.items():
        if not name.endswith((SILENT, ALONE)):
            own = "DDP" if name.startswith("DDP") else OURS
            exposed = max(0.0, step - seconds[f"{own}, {SILENT}"])
            rows[name] = {"seconds": step, "exposed": exposed, "share": exposed / seconds[f"{own}, {ALONE}"]}
    of_ddp = {key: max(rows["DDP"][key], 1e-9) for key in ("exposed", "share")}
    return {name: {**row, **{f"{key}_of_ddps": row[key] / of_ddp[key] for key in of_ddp}} for name, row in rows.items()}


def _overlap_cells(name: str, row: Mapping[str, float]) -> list[str]:
    times = [f"{1e3 * row[key]:.1f}" for key in ("seconds", "exposed")]
    return [name, *times, f"{row['share']:.0%}", *(f"{row[f'{key}_of_ddps']:.2f}" for key in ("exposed", "share"))]


WORKS: dict[str, Callable[[dict[str, Any]], dict[str, Any] | None]] = {
    "sweep": sweep,
    "overlap": overlap,
    "trainings": train_all,
    "accumulation": accumulate_all,
}
PARTS: dict[str, Callable[[bool], dict[str, Any]]] = {
    "n1": n1,
    "n1-20ms": n1_delayed,
    "n2": n2,
    "n2-text": n2_text,
    "n3": n3,
    "n4": n4,
    "n5": n5,
}


def worker(spec: dict[str, Any]) -> None:
    """One rank; the first writes what it found."""
    torch.set_num_threads(1)
    found = WORKS[spec["work"]](spec)
    if found is not None:
        Path(spec["out"]).write_text(json.dumps(found))
    dist.barrier()


def results_file(parts: str) -> str:
    today = datetime.date.today().isoformat()
    return str(Path(__file__).with_name("results") / f"{today}-links-{parts.replace(',', '-')}.json")


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--worker", help="one rank, by this bench itself")
    arguments = parser.parse_args()
    if arguments.worker:
        worker(json.loads(arguments.worker))
        return
    if missing := why_no_hosts():
        raise SystemExit(missing)
    unknown = set(arguments.parts.split(",")) - PARTS.keys()
    if unknown:
        raise SystemExit(f"--parts has {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    out = arguments.out or (None if arguments.quick else results_file(arguments.parts))
    results = {}
    for part in arguments.parts.split(","):
        began = time.monotonic()
        print(f"\n{part}", flush=True)
        results[part] = PARTS[part](arguments.quick)
        print(f"  {time.monotonic() - began:.0f} s", flush=True)
        if out:
            harness.write(out, f"python bench/links.py --parts {arguments.parts}", results)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
