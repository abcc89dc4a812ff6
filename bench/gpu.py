"""G1 to G4: steps as users run them, input, GPT-2 124M and the cost of wrappers, on one CUDA card, in about 6 minutes.

PYTHONPATH=src python3 bench/gpu.py --out gpu.json           all of them
PYTHONPATH=src python3 bench/gpu.py --only G1,G4 --out ...   some, in that order
python bench/gpu.py --device cpu --tiny                      small, on the CPU: only to see that it runs

Same weights, batches, order, type and optimizer for all; the data lies on the card. Losses are compared first
(gpu_race.py says how). Blocks by turns, A B C C B A, the card synchronised before every clock; ratios are medians over
the rounds with a bootstrap 95 % interval; "again" is a racer against itself: no claim smaller than its spread. "Start"
is what the first steps took beyond what as many later ones take: compiling and capturing. Inductor's cache is empty at
first and is not emptied between racers: ours compiles first and pays for all; its peers' start is too small, if
anything. Peak memory is what a racer adds to those that are there already.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

# Before torch is asked to compile anything: what another run left there would make compiling look cheap.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", tempfile.mkdtemp(prefix="gpu-bench-"))

import gpu_racers as racers
import gpu_works as works
import harness
import torch
from gpu_race import Field, Goal, free
from gpu_works import Work

import evenstep

HEADS = ("racer", "ms a step", "/ ours", "95 %", "loss after", "peak MiB", "start s")
EAGER, FUSED = "raw eager", "raw eager, fused"
OURS, OURS_OFF, OURS_COMPILED = "ours", "ours, fast off", "ours, compiled"
LIMIT, COMPILED_LIMIT = "limit: bare step as a graph", "limit: compiled, as a graph"
BY_HAND = "graph by hand, with input"
COMPILED, REDUCE = "raw compiled", "raw compiled, reduce-overhead"
EAGER_PEERS = [EAGER, FUSED, "accelerate", "Fabric", "Lightning"]
COMPILED_PEERS = [COMPILED, REDUCE]
CONTROL = {f"{FUSED}, again": FUSED, f"{OURS}, again": OURS}
MATRIX = 8192
ROUNDS = 6


@dataclass
class Bench:
    """What was asked for, and what was found so far."""

    device: torch.device
    tiny: bool
    rounds: int
    seconds: float
    out: str | None
    results: dict[str, Any] = field(default_factory=dict)
    began: float = field(default_factory=time.perf_counter)

    def add(self, part: str, name: str, values: object) -> None:
        """Keep a result, and write all there are: the run may be cut off."""
        self.results.setdefault(part, {})[name] = values
        if self.out is not None:
            harness.write(self.out, f"python bench/gpu.py {' '.join(sys.argv[1:])}".strip(), self.results)

    def say(self, text: str) -> None:
        print(f"[{time.perf_counter() - self.began:5.0f} s] {text}", flush=True)

    def field(self, work: Work) -> Field:
        return Field(work, self.rounds, self.seconds)

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help="some of G1,G2,G3,G4, in the order to run them in")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="small sizes, two rounds: only to see that it runs")
    parser.add_argument("--seconds", type=float, default=12.0, help="of timed blocks in a race, about")
    parser.add_argument("--out", help="where the JSON goes")
    given = parser.parse_args()
    chosen = given.only.split(",")
    if set(chosen) - set(PARTS):
        parser.error(f"--only {given.only}: allowed are {', '.join(PARTS)}")
    quiet()
    seconds = min(given.seconds, 1.0) if given.tiny else given.seconds
    if given.device == "cpu":
        torch.set_num_threads(1)
    bench = Bench(torch.device(given.device), given.tiny, 2 if given.tiny else ROUNDS, seconds, given.out)
    bench.add("card", "driver", driver())
    for name in chosen:
        began = time.perf_counter()
        try:
            PARTS[name](bench)
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            bench.add(name, "error", f"{type(error).__name__}: {error}")
        free()
        bench.add("seconds", name, time.perf_counter() - began)
    bench.say("done")


def driver() -> str:
    """The version of the card's driver, as nvidia-smi tells it."""
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True, timeout=30).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        return f"not known ({type(error).__name__})"


def quiet() -> None:
    """The peers' own advice would bury the tables."""
    warnings.simplefilter("ignore")
    for name in ("lightning", "lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)


def same_numbers() -> None:
    """fp32 is fp32 for everybody, not tf32 in convolutions alone, as torch has it by default."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def report(bench: Bench, part: str, entered: Field, names: Sequence[str], goals: Sequence[Goal | str]) -> None:
    """A race's table and its goals, and the same as JSON; ratios are to ours."""
    again = [name for name in entered.entries if name.endswith(", again")]
    harness.show(f"\n{part}  {entered.work.name}, {bench.device}", HEADS, entered.rows([*names, *again], OURS))
    for goal in goals:
        print("   ", goal if isinstance(goal, str) else goal.line(), flush=True)
    judged = [goal if isinstance(goal, str) else goal.to_json() for goal in goals]
    bench.add(part, entered.work.name, {**entered.to_json(OURS), "goals": judged})


def steps(bench: Bench) -> None:
    """G1."""
    wanted: dict[Callable[..., Work], tuple[float | None, float | None]] = {
        works.mlp: (8.0, None),
        works.small_gpt: (6.0, 2.0),
        works.resnet18: (2.1, 1.02),
        works.cifar_net: (None, None),
    }
    for make, (eager_goal, compiled_goal) in wanted.items():
        same_numbers()
        work = make(bench.device, bench.tiny)
        bench.say(f"G1 {work.name}")
        entered = bench.field(work)
        try:
            race_eager(bench, entered, eager_goal)
            # Compiling ResNet-18 for two CPU cores takes minutes.
            if compiled_goal is not None and (bench.is_cuda or make is works.small_gpt):
                race_compiled(bench, entered, compiled_goal)
        finally:
            entered.close()


def enter_ours(entered: Field) -> list[str]:
    """evenstep, with its fast path and without, where there is one."""
    entered.enter(OURS, lambda: racers.ours(entered.work))
    if not racers.HAS_FAST:
        return [OURS]
    entered.enter(OURS_OFF, lambda: racers.ours(entered.work, fast="off"))
    return [OURS, OURS_OFF]


def race_eager(bench: Bench, entered: Field, wanted: float | None) -> None:
    work = entered.work
    entered.enter(FUSED, lambda: racers.raw(work))
    entered.enter(EAGER, lambda: racers.raw(work, fused=None))
    entered.enter("accelerate", lambda: racers.accelerated(work))
    entered.enter("Fabric", lambda: racers.fabric(work))
    entered.enter("Lightning", lambda: racers.lightning(work))
    mine = enter_ours(entered)
    entered.enter(BY_HAND, lambda: racers.graph(work, with_input=True))
    entered.enter(LIMIT, lambda: racers.graph(work, with_input=False), is_checked=False)
    names = [*EAGER_PEERS, *mine, BY_HAND, LIMIT]
    entered.race(names, CONTROL)
    best = entered.best(EAGER_PEERS)
    goals = [entered.goal(f"{best} / ours, the best eager peer", wanted or 1.0, OURS, best)]
    goals.append(entered.goal("bare graph / ours, the share of the limit", 0.95, OURS, LIMIT))
    report(bench, "G1", entered, names, goals)


def race_compiled(bench: Bench, entered: Field, wanted: float) -> None:
    work = entered.work
    racers.wake_compiler(bench.device)
    entered.enter(OURS_COMPILED, lambda: racers.ours(work, compile_=True))
    entered.enter(COMPILED, lambda: racers.compiled(work))
    entered.enter(REDUCE, lambda: racers.compiled(work, "reduce-overhead"))
    if bench.is_cuda:
        entered.enter(COMPILED_LIMIT, lambda: racers.graph(work, False, compile_=True), is_checked=False)
    names = [FUSED, OURS, *COMPILED_PEERS, OURS_COMPILED, COMPILED_LIMIT]
    entered.race(names, CONTROL)
    best = entered.best(COMPILED_PEERS)
    goals = [
        entered.goal(f"{best} / ours, the best compiled peer", wanted, OURS_COMPILED, best),
        entered.goal("compiled graph / ours, the share of the limit", 0.95, OURS_COMPILED, COMPILED_LIMIT),
        *break_even(entered, [*COMPILED_PEERS, OURS_COMPILED]),
    ]
    report(bench, "G1 compiled", entered, names, goals)


def break_even(entered: Field, names: Sequence[str]) -> list[str]:
    """After how many steps compiling has paid, against what the same loop does without."""
    lines = []
    for name in names:
        without = OURS if name.startswith(OURS) else FUSED
        ratio = entered.compared(name, without)
        if ratio is None:
            continue
        seconds = entered.entries[name].start_seconds
        saved_ms = ratio.second - ratio.first
        when = f"pays after {seconds * 1e3 / saved_ms:,.0f} steps" if saved_ms > 0 else "never pays"
        lines.append(f"{name}: {seconds:.1f} s to start; {when}, against {without}")
    return lines


def input_path(bench: Bench) -> None:
    """G2."""
    if not bench.is_cuda and torch.cuda.is_available():
        raise ValueError("input_gpu.py chooses the card where there is one; on the CPU run it where there is none")
    import input_gpu

    # The pictures of input_gpu.py first, then those of the MLP in their place: it reads them from its globals.
    race_input(bench, input_gpu, "pictures 3 x 32 x 32")
    free()
    num, batch = (100, 16) if input_gpu.SMOKE else (60_000, 512)
    input_gpu.NUM_SAMPLES, input_gpu.BATCH = num, batch
    input_gpu.images = torch.randint(0, 256, (num, 28, 28), dtype=torch.uint8, generator=input_gpu.generator)
    input_gpu.labels = torch.randint(0, 10, (num,), generator=input_gpu.generator)
    race_input(bench, input_gpu, "pictures 28 x 28")


def race_input(bench: Bench, inputs: Any, what: str) -> None:
    """Samples a second delivered on the card, without training."""
    bench.say(f"G2 {what}")
    team = evenstep.join("single", (str(bench.device),))
    every = inputs.configs(team)
    theirs = [name for name in every if name.startswith("DataLoader")]
    limit = "limit: pinned copies to the device"
    opened = {name: every[name] for name in (inputs.DEFAULT, inputs.DEFAULT_AGAIN, "resident", *theirs)}
    inputs.check(opened)
    blocks = {name: lambda config=config: inputs.images_per_second(config) for name, config in opened.items()}
    blocks[limit] = inputs.copied_per_second
    rates = harness.interleaved(blocks, min(4, bench.rounds))
    best = max(theirs, key=lambda name: statistics.median(rates[name]))
    ratios = {name: harness.compared(rates[best], rates[name]) for name in rates}
    harness.show(
        f"\nG2  {what}, {inputs.NUM_SAMPLES:,} samples, batch {inputs.BATCH}, {bench.device}",
        ("input", "samples/s", "/ best DataLoader", "95 %"),
        ((name, f"{row.second:,.0f}", f"{row.ratio:.3f}", row.interval) for name, row in ratios.items()),
    )
    goals = [Goal(f"resident / {best}", 3.0, ratios["resident"])]
    for name in theirs:
        goals.append(Goal(f"{inputs.DEFAULT} / {name}", 3.0, harness.compared(rates[name], rates[inputs.DEFAULT])))
    share = harness.compared(rates[limit], rates[inputs.DEFAULT])
    for goal in goals:
        print("   ", goal.line())
    print(f"    {share.ratio:.1%} ({share.interval}) of the copy rate", flush=True)
    rows = {name: row.figures("samples_per_second") for name, row in ratios.items()}
    judged = [{**asdict(goal), "is_met": goal.is_met} for goal in goals]
    found = {"against the best DataLoader": rows, "rates": rates, "of the limit": asdict(share), "goals": judged}
    bench.add("G2", what, found)
    # Ours end their threads and processes here; a DataLoader's workers end with its last reference.
    for config in every.values():
        loader = config()
        if hasattr(loader, "close"):
            loader.close()


def gpt2(bench: Bench) -> None:
    """G3."""
    same_numbers()
    work = works.gpt2(bench.device, bench.tiny)
    bench.say(f"G3 {work.name}")
    rate = matrix_flops(bench)
    entered = bench.field(work)
    accelerated = "accelerate, compiled"
    try:
        entered.enter(FUSED, lambda: racers.raw(work))
        entered.enter(OURS, lambda: racers.ours(work))
        racers.wake_compiler(bench.device)
        entered.enter(OURS_COMPILED, lambda: racers.ours(work, compile_=True))
        entered.enter(COMPILED, lambda: racers.compiled(work))
        entered.enter(accelerated, lambda: racers.accelerated(work, compile_=True))
        names = [FUSED, COMPILED, accelerated, OURS, OURS_COMPILED]
        entered.race(names, {f"{COMPILED}, again": COMPILED, f"{OURS_COMPILED}, again": OURS_COMPILED})
        peer, mine = entered.best([FUSED, COMPILED, accelerated]), entered.best([OURS, OURS_COMPILED]) or OURS
        goals: list[Goal | str] = [
            entered.goal(f"{peer} / {mine}, the best tuned peer", 1.02, mine, peer),
            entered.goal(f"{FUSED} / {OURS}, both without compiling", 1.0, OURS, FUSED),
            f"the matrix product of {MATRIX} in bf16 here: {rate / 1e12:.0f} TFLOP/s",
        ]
        goals += break_even(entered, [COMPILED, accelerated, OURS_COMPILED])
        raced = [name for name in entered.entries if entered.entries[name].figures]
        speeds = {
            name: {
                "tokens_per_second": work.tokens_a_step / entered.ms(name) * 1e3,
                "share_of_matrix_rate": work.flops_a_step / entered.ms(name) * 1e3 / rate,
            }
            for name in raced
        }
        report(bench, "G3", entered, names, goals)
        harness.show("", ("racer", "tokens/s", "of the matrix rate"), ((n, *(_speed(s))) for n, s in speeds.items()))
        bench.add("G3", "speeds", {"matrix_flops": rate, "flops_a_step": work.flops_a_step, "racers": speeds})
    finally:
        entered.close()


def _speed(speed: dict[str, float]) -> tuple[str, str]:
    return f"{speed['tokens_per_second']:,.0f}", f"{speed['share_of_matrix_rate']:.1%}"


def matrix_flops(bench: Bench) -> float:
    """Floating-point operations a second of a large bf16 product, the median of five blocks."""
    size, repeats = (256, 2) if bench.tiny else (MATRIX, 20)
    first, second = (torch.randn(size, size, device=bench.device, dtype=torch.bfloat16) for _ in range(2))
    rates = []
    for _ in range(6):
        racers.synchronize(bench.device)
        began = time.perf_counter()
        for _ in range(repeats):
            first @ second
        racers.synchronize(bench.device)
        rates.append(2 * size**3 * repeats / (time.perf_counter() - began))
    return statistics.median(rates[1:])


def wrappers(bench: Bench) -> None:
    """G4."""
    for make in (works.mlp, lambda device, tiny: works.resnet18(device, tiny, contiguous=True)):
        same_numbers()
        work = make(bench.device, bench.tiny)
        bench.say(f"G4 {work.name}")
        entered = bench.field(work)
        try:
            race_wrappers(bench, entered)
        finally:
            entered.close()
    work = works.mlp(bench.device, bench.tiny)
    bench.say(f"G4 dp, {work.name}")
    entered = bench.field(work)
    try:
        race_replicas(bench, entered)
    finally:
        entered.close()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def race_wrappers(bench: Bench, entered: Field) -> None:
    """ddp and fsdp of size 1, against none."""
    work = entered.work
    entered.enter(FUSED, lambda: racers.raw(work))
    singles = enter_ours(entered)
    pairs = []
    for strategy in ("ddp", "fsdp"):
        for single in singles:
            fast = "off" if single == OURS_OFF else "auto"
            name = f"ours {strategy}{', fast off' if fast == 'off' else ''}"
            entered.enter(name, lambda strategy=strategy, fast=fast: racers.ours(work, strategy, fast=fast))  # type: ignore[misc]
            pairs.append((name, single))
    # evenstep made the process group, NCCL's on a card; the raw ones use it.
    entered.enter("raw DDP", lambda: racers.distributed(work))
    entered.enter("raw fully_shard", lambda: racers.fully_sharded(work))
    names = [FUSED, *singles, *(name for name, _ in pairs), "raw DDP", "raw fully_shard"]
    entered.race(names, CONTROL)
    goals: list[Goal | str] = []
    for name, single in pairs:
        goals.append(entered.goal(f"{name} / {single}", 1.01, single, name, is_least=False))
        goals.append(entered.goal(f"{name} / {FUSED}", 1.01, FUSED, name, is_least=False))
    goals.append(entered.goal(f"raw DDP / {FUSED}, beside", 1.01, FUSED, "raw DDP", is_least=False))
    goals.append(entered.goal(f"raw fully_shard / {FUSED}, beside", 1.01, FUSED, "raw fully_shard", is_least=False))
    report(bench, "G4", entered, names, goals)


def race_replicas(bench: Bench, entered: Field) -> None:
    """dp over one card twice, against nn.DataParallel."""
    work = entered.work
    outside, inside = "nn.DataParallel", "nn.DataParallel, loss inside"
    entered.enter(FUSED, lambda: racers.raw(work))
    if bench.is_cuda:
        entered.enter(outside, lambda: racers.data_parallel(work, loss_inside=False))
        entered.enter(inside, lambda: racers.data_parallel(work, loss_inside=True))
    else:
        entered.absent |= dict.fromkeys((outside, inside), "needs CUDA devices")
    # Under the name that ratios are made to.
    entered.enter(OURS, lambda: racers.ours(work, "dp", num_devices=2))
    names = [FUSED, outside, inside, OURS]
    entered.race(names, CONTROL)
    best = entered.best([outside, inside])
    goals = [
        entered.goal(f"{outside} / ours", 1.5, OURS, outside),
        entered.goal(f"{best} / ours, the best of the two", 1.5, OURS, best),
    ]
    report(bench, "G4 dp", entered, names, goals)


# Input first: its workers are forked, and nothing that compiles or communicates has threads yet. Wrappers last: the
# watchdog of their process group would be there for all that follow.
PARTS: dict[str, Callable[[Bench], None]] = {"G2": input_path, "G1": steps, "G3": gpt2, "G4": wrappers}


if __name__ == "__main__":
    main()
