"""Eager steps beside a plain fused loop, with virtual replicas, and text of six lengths with and without CUDA graphs.

PYTHONPATH=src python3 bench/eager_step.py --out bench/results/DATE-eager-h200.json     # about two minutes
PYTHONPATH=src python3 bench/eager_step.py --profile resnet18                           # where the host's time goes

In the first four, ours runs with `fast="off"`: the steps of a run whose shapes vary or whose graph was refused. The
plain loop neither reads its loss nor writes it down; ours does both.
"""

from __future__ import annotations

import cProfile
import io
import pstats
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import gpu_race
import gpu_racers as racers
import gpu_works as works
import harness
import torch
from gpu_race import Field, free
from gpu_works import Work
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import evenstep
from evenstep import Task, samplers
from evenstep.data.prefetch import MAX_WORKERS
from evenstep.plan import Plan
from evenstep.sampling.order import Span
from evenstep.training.loop import train
from evenstep.training.trainer import Trainer

RAW, OURS = "raw eager, fused", "ours, eager"
RAW_AGAIN, OURS_AGAIN = f"{RAW}, built again", f"{OURS}, built again"
RAW_BOTH, OURS_BOTH = f"{RAW}, both", f"{OURS}, both"
CONTROL = "control: raw eager, fused, again"
AS_IT_IS = "ours"
ROUNDS, BLOCK_SECONDS = 8, 0.6
STEPS_AN_EPOCH = 195
"""As CIFAR-10 has: at the end of an epoch, our host waits for its last loss, which the plain loop does not."""
LONG_BLOCK_SECONDS = 2.0
"""Where the GPU is the limit: it waits for the host before the first step of a block, which is no part of a step."""


class ViT(nn.Module):
    def __init__(self, depth: int, width: int, heads: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.positions = nn.Parameter(0.02 * torch.randn(1, 64, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.out = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patches(images.float() / 255).flatten(2).transpose(1, 2) + self.positions
        return self.out(self.layers(tokens).mean(1))


class LSTM(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, width)
        self.layers = nn.LSTM(width, width, 2, batch_first=True)
        self.out = nn.Linear(width, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.layers(self.embedding(tokens))[0])


class Tables(nn.Module):
    """Categories by tables of vectors, then an MLP."""

    def __init__(self, num_tables: int, rows: int, width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(num_tables))
        self.layers = nn.Sequential(
            nn.Linear(num_tables * width, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10)
        )

    def forward(self, categories: Tensor) -> Tensor:
        found = [table(column) for table, column in zip(self.tables, categories.unbind(1), strict=True)]
        return self.layers(torch.cat(found, 1))


def vit(device: torch.device) -> Work:
    return Work(
        "ViT 4 x 384, 32 px, batch 256, fp32",
        lambda: ViT(4, 384, 6),
        works._pictures(256 * STEPS_AN_EPOCH, device),
        256,
        "fp32",
    )


def lstm(device: torch.device) -> Work:
    data = works._texts(64 * STEPS_AN_EPOCH, 128, torch.arange(64, device=device))
    return Work("LSTM 2 x 512, 128 tokens, batch 64, fp32", lambda: LSTM(512), data, 64, "fp32")


def tables(device: torch.device) -> Work:
    generator = torch.Generator(device).manual_seed(0)
    categories = torch.randint(0, 100_000, (1024 * STEPS_AN_EPOCH, 26), device=device, generator=generator)
    labels = categories[:, 0] % 10
    return Work(
        "26 embeddings of 100,000 x 32 + MLP, batch 1024, fp32",
        lambda: Tables(26, 100_000, 32),
        (categories, labels),
        1024,
        "fp32",
    )


WORKS: dict[str, tuple[Callable[[torch.device], Work], float]] = {
    "vit": (vit, 1.0),
    "lstm": (lstm, 0.97),
    "tables": (tables, 0.97),
    "resnet18": (works.resnet18, 0.97),
}
"""Each with the least ratio: where the GPU is the limit, and where the host is."""


def raced(name: str, device: torch.device, quick: bool) -> dict[str, Any]:
    make, wanted = WORKS[name]
    work = make(device)
    rounds = 4 if quick else ROUNDS
    seconds = gpu_race.MOST_BLOCK_SECONDS = LONG_BLOCK_SECONDS if wanted == 1.0 else BLOCK_SECONDS
    field = Field(work, rounds, rounds * 6 * seconds)
    # Each twice, in the order A B B A: where the allocator put weights and activations changes the time of a step by as
    # much as our host work does, and a racer keeps its memory from block to block.
    field.enter(RAW, lambda: racers.raw(work))
    field.enter(OURS, lambda: racers.ours(work, fast="off"))
    field.enter(OURS_AGAIN, lambda: racers.ours(work, fast="off"))
    field.enter(RAW_AGAIN, lambda: racers.raw(work))
    if name == "vit":
        # The graph that was once judged by another clock than the run's.
        field.enter(AS_IT_IS, lambda: racers.ours(work))
    names = [RAW, OURS, OURS_AGAIN, RAW_AGAIN, AS_IT_IS]
    field.race(names, {CONTROL: RAW})
    harness.show(
        f"\n{work.name}",
        ["", "ms", f"/ {RAW}", "95 %", "loss", "MiB", "start s"],
        field.rows([*names, CONTROL], RAW),
    )
    field.pool(RAW_BOTH, [RAW, RAW_AGAIN])
    field.pool(OURS_BOTH, [OURS, OURS_AGAIN])
    goal = field.goal(f"{work.name}: {RAW} / {OURS}, two of each", wanted, OURS_BOTH, RAW_BOTH)
    print(goal if isinstance(goal, str) else goal.line(), flush=True)
    said = field.entries[AS_IT_IS].racer.messages if AS_IT_IS in field.entries else []
    print("\n".join(said), flush=True)
    found = {**field.to_json(RAW), "said": list(said), "goal": goal if isinstance(goal, str) else goal.to_json()}
    field.close()
    free()
    return found


TEXT_STEPS = 60
LENGTHS = (32, 64, 96, 128, 160, 192)


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(1000, 256), nn.Linear(256, 10)
        layer = nn.TransformerEncoderLayer(256, 4, 1024, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.layers(self.embedding(tokens)).mean(1))


def padded(rows: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    longest = max(len(tokens) for tokens, _ in rows)
    length = next(one for one in LENGTHS if one >= longest)
    tokens = torch.zeros(len(rows), length, dtype=torch.int64)
    for row, (of_row, _) in enumerate(rows):
        tokens[row, : len(of_row)] = of_row
    return tokens, torch.tensor([label for _, label in rows])


def text_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def text() -> Task:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(LENGTHS[0] // 2, LENGTHS[-1] + 1, (16 * 256,), generator=generator).tolist()
    rows = [(torch.randint(1, 1000, (one,), generator=generator), one % 10) for one in lengths]
    return Task(
        model=Reader,
        train=rows,
        collate=padded,
        sampler=samplers.ByLength(lengths),
        loss=text_loss,
        optimizer=lambda weights: torch.optim.AdamW(weights, lr=3e-4),
        batch=16,
    )


class OurText:
    """Our Trainer on text."""

    def __init__(self, fast: str) -> None:
        plan = Plan(batch=16, devices=("cuda:0",), steps=racers.ENDLESS, precision="bf16", fast=fast)  # type: ignore[arg-type]
        self._folder = tempfile.TemporaryDirectory()
        self.job = Trainer(plan, text(), Path(self._folder.name), evenstep.join("single", ("cuda:0",), "bf16"))
        self._steps = train(self.job.run, self.job.stepper, plan, self.job._peak_bytes)

    def advance(self, num: int) -> None:
        for _ in islice(self._steps, num):
            pass


class RawText:
    """A plain loop over the same batches, read by torch's DataLoader with as many workers."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        made = text()
        self._model = made.model().cuda()
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=3e-4, fused=True)
        order = made.sampler.order(len(made.train), 0, 16)
        ids = order.ids(Span(0, 0, len(made.train))).reshape(-1, 16).tolist()
        self._loader = DataLoader(
            made.train,
            batch_sampler=ids,
            collate_fn=padded,
            num_workers=MAX_WORKERS,
            pin_memory=True,
            persistent_workers=True,
        )
        self._batches = self._forever()

    def _forever(self) -> Iterator[Any]:
        while True:
            yield from self._loader

    def advance(self, num: int) -> None:
        for batch in islice(self._batches, num):
            on_gpu = [one.to("cuda:0", non_blocking=True) for one in batch]
            with torch.autocast("cuda", torch.bfloat16):
                loss = text_loss(self._model, on_gpu)
            loss.backward()
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)


def raced_text(quick: bool) -> dict[str, Any]:
    ours, eager, raw = OurText("auto"), OurText("off"), RawText()
    for one in (raw, eager, ours):
        one.advance(300 if one is ours else 50)
    said = list(ours.job.stepper.messages)
    print("\n".join(said), flush=True)

    def block(racer: Any) -> Callable[[], float]:
        def run() -> float:
            torch.cuda.synchronize()
            began = time.perf_counter()
            racer.advance(TEXT_STEPS)
            torch.cuda.synchronize()
            return (time.perf_counter() - began) / TEXT_STEPS * 1e3

        return run

    blocks = {
        "ours": block(ours),
        "ours, eager": block(eager),
        RAW: block(raw),
        "control: ours, eager, again": block(eager),
    }
    figures = harness.interleaved(blocks, 4 if quick else ROUNDS)
    found = {name: {"ms": statistics.median(of), "figures_ms": of} for name, of in figures.items()}
    for first, second in (
        ("ours", "ours, eager"),
        ("ours", RAW),
        ("ours, eager", RAW),
        ("ours, eager", "control: ours, eager, again"),
    ):
        ratio = harness.compared(figures[first], figures[second])
        found[f"{second} / {first}"] = ratio.figures("ms")  # type: ignore[assignment]
        print(
            f"text of 6 lengths: {second} / {first}: {ratio.first:.3f} and {ratio.second:.3f} ms, "
            f"{ratio.ratio:.3f} ({ratio.interval})",
            flush=True,
        )
    for one in (ours, eager):
        one.job.close()
    return {"work": "text of 6 lengths, transformer 6 x 256, batch 16, bf16", "said": said, "rows": found}


REPLICAS = 4


def raced_replicas(name: str, device: torch.device, quick: bool) -> dict[str, Any]:
    """What `--virtual-replicas 4` costs beside plain accumulation into 4 micro-batches."""
    work = WORKS[name][0](device)
    rounds = 4 if quick else ROUNDS
    gpu_race.MOST_BLOCK_SECONDS = BLOCK_SECONDS
    plain, virtual, again = f"{REPLICAS} micro-batches", f"V = {REPLICAS}", "control: micro-batches, again"
    field = Field(work, rounds, rounds * 3 * BLOCK_SECONDS)
    field.enter(plain, lambda: racers.ours(work, fast="off", accumulate=REPLICAS))
    # Their dropout and BatchNorm may differ, and so what was learned.
    field.enter(virtual, lambda: racers.ours(work, virtual_replicas=REPLICAS), is_checked=False)
    field.race([plain, virtual], {again: plain})
    header = ["", "ms", f"/ {plain}", "95 %", "loss", "MiB", "start s"]
    harness.show(f"\n{work.name}", header, field.rows([plain, virtual, again], plain))
    goal = field.goal(f"{work.name}: {virtual} / {plain}", 1.05, plain, virtual, is_least=False)
    print(goal if isinstance(goal, str) else goal.line(), flush=True)
    found = {**field.to_json(plain), "goal": goal if isinstance(goal, str) else goal.to_json()}
    field.close()
    free()
    return found


def profiled(name: str, device: torch.device, steps: int = 300) -> None:
    """What Python does in our eager step, and in the plain one."""
    work = WORKS[name][0](device)
    for title, racer in (("ours", racers.ours(work, fast="off")), ("raw", racers.raw(work))):
        racer.advance(100)
        torch.cuda.synchronize()
        began = time.perf_counter()
        racer.advance(steps)
        host = time.perf_counter() - began
        torch.cuda.synchronize()
        profile = cProfile.Profile()
        profile.enable()
        racer.advance(steps)
        profile.disable()
        torch.cuda.synchronize()
        out = io.StringIO()
        pstats.Stats(profile, stream=out).strip_dirs().sort_stats("tottime").print_stats(32)
        print(f"\n{title}: {work.name}: {host / steps * 1e3:.3f} ms of the host a step; profile of {steps} steps")
        print("\n".join(line for line in out.getvalue().splitlines()[4:] if line.strip()), flush=True)
        racer.close()


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--only", nargs="*", default=[*WORKS, "text"])
    parser.add_argument("--virtual-replicas", choices=list(WORKS), nargs="*", default=[])
    parser.add_argument("--profile", choices=list(WORKS), nargs="*")
    given = parser.parse_args()
    device = torch.device("cuda:0")
    for name in given.profile or ():
        profiled(name, device)
    if given.profile:
        return
    results = {}
    for name in given.only:
        results[name] = raced_text(given.quick) if name == "text" else raced(name, device, given.quick)
    for name in given.virtual_replicas:
        results[f"{name}, virtual replicas"] = raced_replicas(name, device, given.quick)
    if given.out:
        command = shlex.join(["python", f"bench/{Path(sys.argv[0]).name}", *sys.argv[1:]])
        harness.write(given.out, command, results)


if __name__ == "__main__":
    main()
