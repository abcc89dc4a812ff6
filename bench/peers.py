"""How each racer takes a step: torch by hand, accelerate, Fabric, Lightning, Ignite, and evenstep.

All get the same batches: the first epoch in evenstep's own order, so that what they learned can be compared; then
`torch.randperm`, drawn inside the clock. `default` is what a racer's documentation shows first, with torch's Adam as it
comes; `best` has everything that is documented to make it faster.
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from typing import Any

import torch
from models import Columns, Work
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel

from evenstep.sampling.order import Span
from evenstep.sampling.samplers import Shuffled
from evenstep.training.team import Team

warnings.filterwarnings("ignore")  # peers warn of settings that are meant
TUNED = {"gradient_as_bucket_view": True, "static_graph": True, "broadcast_buffers": False}
NUM_COMPARED = 8
CLOSE_ENOUGH = 1e-5
"""Steps after which losses are compared, and how far apart they may be, of the loss: ranks that send nothing are a
hundred times further apart."""


@dataclass(frozen=True)
class Place:
    """Which of so many ranks this one is."""

    rank: int = 0
    size: int = 1


@dataclass(frozen=True)
class Steps:
    """A racer that is built and ready: takes so many steps, and tells its loss."""

    run: Callable[[int], None]
    loss: Callable[[], float]


class Feed:
    """This rank's part of every batch, for ever: `X[index]` with a slice of a permutation."""

    def __init__(self, work: Work, place: Place = Place()) -> None:  # noqa: B008
        self.work, self.place = work, place
        self.columns = work.columns()

    def __len__(self) -> int:
        return 10**9  # Lightning reads one batch ahead of what has no length.

    def __iter__(self) -> Iterator[Columns]:
        x, y = self.columns
        batch, share = self.work.batch, self.work.batch // self.place.size
        generator = torch.Generator().manual_seed(1)
        order = torch.from_numpy(Shuffled().order(len(x), 0, batch).ids(Span(0, 0, len(x))))
        while True:
            for start in range(self.place.rank * share, len(x), batch):
                index = order[start : start + share]
                yield x[index], y[index]
            order = torch.randperm(len(x), generator=generator)


Backward = Callable[[Tensor], object]


def looped(work: Work, feed: Feed, model: Any, optimizer: Any, backward: Backward = Tensor.backward) -> Steps:
    """The loop that people write by hand."""
    batches = iter(feed)

    def run(num: int) -> None:
        for batch in islice(batches, num):
            backward(work.loss(model, batch))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return Steps(run, lambda: probe(work, feed, model))


def probe(work: Work, feed: Feed, model: Any) -> float:
    """The loss on the same few samples for everybody."""
    x, y = feed.columns
    with torch.no_grad():
        return work.loss(model, (x[:64], y[:64])).item()


def raw(work: Work, place: Place, is_best: bool) -> Steps:
    """No wrapper at all; of several ranks, each goes its own way."""
    model = work.model()
    return looped(work, Feed(work, place), model, work.optimizer(model, is_best))


def ddp(work: Work, place: Place, is_best: bool) -> Steps:
    model = DistributedDataParallel(work.model(), **(TUNED if is_best else {}))
    return looped(work, Feed(work, place), model, work.optimizer(model, is_best))


def ddp_silent(work: Work, place: Place, is_best: bool) -> Steps:
    """Tuned DDP whose buckets are not sent."""
    model = DistributedDataParallel(work.model(), **(TUNED if is_best else {}))
    model.register_comm_hook(None, noop_hook)
    return looped(work, Feed(work, place), model, work.optimizer(model, is_best))


def accelerated(work: Work, place: Place, is_best: bool) -> Steps:
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs

    handlers = [DistributedDataParallelKwargs(**TUNED)] if is_best else []
    accelerator = Accelerator(cpu=True, kwargs_handlers=handlers)
    model = work.model()
    model, optimizer = accelerator.prepare(model, work.optimizer(model, is_best))
    return looped(work, Feed(work, place), model, optimizer, accelerator.backward)


def fabric(work: Work, place: Place, is_best: bool) -> Steps:
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy

    several = DDPStrategy(**TUNED) if is_best else "ddp"
    made = Fabric(accelerator="cpu", devices=place.size, strategy=several if place.size > 1 else "auto")
    made.launch()
    model = work.model()
    model, optimizer = made.setup(model, work.optimizer(model, is_best))
    return looped(work, Feed(work, place), model, optimizer, made.backward)


class Handed:
    """A loop that insists on owning its thread: it gets one, and waits in its batches until its turn comes."""

    def __init__(self, feed: Feed, loop: Callable[[Iterable[Columns]], object]) -> None:
        self._feed, self._loop = feed, loop
        self._left = 0
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._error: BaseException | None = None
        threading.Thread(target=self._own, daemon=True).start()
        # It sets itself up with collectives of its own; another racer's must not come between them.
        self._wait()

    def run(self, num: int) -> None:
        self._left = num
        self._go.release()
        self._wait()

    def _wait(self) -> None:
        self._done.acquire()
        if self._error is not None:
            raise self._error

    def __len__(self) -> int:
        return len(self._feed)

    def __iter__(self) -> Iterator[Columns]:
        self._done.release()
        self._go.acquire()
        for batch in self._feed:
            yield batch
            self._left -= 1
            if self._left == 0:
                self._done.release()
                self._go.acquire()

    def _own(self) -> None:
        torch.set_num_threads(1)  # OpenMP counts threads for each thread that starts some
        try:
            self._loop(self)
            raise RuntimeError("the loop ended before its batches did")
        except BaseException as error:
            self._error = error
            self._done.release()


def trainer(work: Work, place: Place, is_best: bool) -> Steps:
    """Lightning's Trainer, with bars, logs and checkpoints off at both levels."""
    import lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = work.model()

        def training_step(self, batch: Columns, batch_idx: int) -> Tensor:
            return work.loss(self.network, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return work.optimizer(self.network, is_best)

    from lightning.pytorch.strategies import DDPStrategy

    module, feed = Module(), Feed(work, place)
    several = DDPStrategy(**TUNED) if is_best else "ddp"
    made = lightning.Trainer(
        accelerator="cpu",
        devices=place.size,
        strategy=several if place.size > 1 else "auto",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    handed = Handed(feed, lambda batches: made.fit(module, batches))
    return Steps(handed.run, lambda: probe(work, feed, module.network))


def ignite(work: Work, place: Place, is_best: bool) -> Steps:
    from ignite.engine import Engine

    model = work.model()
    optimizer = work.optimizer(model, is_best)
    feed = Feed(work, place)

    def update(engine: Engine, batch: Columns) -> Tensor:
        model.train()
        loss = work.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    handed = Handed(feed, lambda batches: Engine(update).run(batches, max_epochs=1, epoch_length=len(feed)))
    return Steps(handed.run, lambda: probe(work, feed, model))


def ours(team: Team, work: Work, is_best: bool) -> Steps:
    """evenstep's five verbs, reading through its own loader."""
    feed = Feed(work)
    loader = team.loader(feed.columns, batch=work.batch)
    model = team.wrap(work.model())
    optimizer = work.optimizer(model, is_best)  # type: ignore[arg-type]
    batches = endless(loader)

    def run(num: int) -> None:
        for batch in islice(batches, num):
            team.backward(work.loss, model, batch)
            team.step(optimizer)

    x, y = feed.columns
    return Steps(run, lambda: team.infer(lambda network: work.loss(network, (x[:64], y[:64])).item(), model))


def endless(loader: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from loader


@dataclass(frozen=True)
class Peer:
    """Somebody to race against, and the package that has to be there."""

    package: str
    build: Callable[[Work, Place, bool], Steps]


FRAMEWORKS = {
    "accelerate": Peer("accelerate", accelerated),
    "Fabric": Peer("lightning", fabric),
    "Lightning": Peer("lightning", trainer),
    "Ignite": Peer("ignite", ignite),
}


def build(
    names: Iterable[str], work: Work, place: Place, levels: tuple[str, ...] = ("default", "best")
) -> tuple[dict[str, Steps], dict[str, str]]:
    """Frameworks that are there, at each level; and why not the others."""
    built, absent = {}, {}
    for name in names:
        peer = FRAMEWORKS[name]
        if find_spec(peer.package) is None:
            absent[name] = f"{peer.package} is not installed here (make bench-setup)"
            continue
        for level in levels:
            built[f"{name}, {level}"] = peer.build(work, place, level == "best")
    return built, absent


def learned_the_same(racers: dict[str, Steps], expected: str) -> dict[str, str]:
    """After a few steps on the same samples: who has another loss than `expected`, and so is not in the race."""
    losses = {}
    for name, racer in racers.items():
        racer.run(NUM_COMPARED)
        losses[name] = racer.loss()
    right = losses[expected]
    return {
        name: f"learned something else: loss {loss:.5f}, not {right:.5f}"
        for name, loss in losses.items()
        if abs(loss - right) > CLOSE_ENOUGH * abs(right)
    }
