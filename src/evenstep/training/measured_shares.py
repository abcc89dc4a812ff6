"""`--shares auto`: every device's part of a global batch, in proportion to the speed at which it computes the loss.

The forward is timed, where a rank waits for no other one, in the first steps of a run; then all ranks compute the same
shares from the numbers of all. CUDA graphs are captured afterwards: the shapes of batches change once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from evenstep.data.loader import Batch, Loader
from evenstep.plan import AUTO, PLAN_FILE, Plan, parse_shares, read_plan, write_plan_file
from evenstep.record import MeasuredShares
from evenstep.sampling.batch_shares import Shares, in_proportion, smallest_micro_batch
from evenstep.sampling.order import Lengths
from evenstep.task import Amount
from evenstep.training.loss_context import current_replica
from evenstep.training.step import Eager, Recipe, Stepper, Taken

WARM_UP_STEPS = 5
MEASURED_STEPS = 30
"""At least; and then as many again, until the slowest device has computed for ENOUGH_SECONDS."""
MOST_STEPS = 240
ENOUGH_SECONDS = 1.0
"""A device that has a part of the CPU's time is fast and stands still in turn, for a tenth of a second each."""
ALIKE = 1.1
"""Devices whose speeds differ by less than this factor get equal shares: it may be noise."""
PRECISION = 1_000_000
"""Speeds are rounded to this part of the greatest one."""


class MeasuredSteps:
    """The usual steps; in the first ones every device's forward is timed, and then the shares are chosen."""

    def __init__(
        self, recipe: Recipe, usual: Callable[[Recipe], Stepper], plan: Plan, loaders: Sequence[Loader]
    ) -> None:
        self.row: MeasuredShares | None = None
        """What was measured, once; the reader clears it."""
        self._recipe, self._usual, self._plan, self._loaders = recipe, usual, plan, loaders
        self._world = recipe.team.world
        self._loss = TimedLoss(recipe.loss, self._world.devices)
        timed = replace(recipe, loss=self._loss)
        self._is_cpu = self._world.device.type == "cpu"
        self._stepper = usual(timed) if self._is_cpu else Eager(timed)
        self.lag, self.messages = self._stepper.lag, self._stepper.messages
        self._num_taken = 0
        self._num_samples = [0 for _ in self._world.devices]

    def recheck(self) -> None:
        self._stepper.recheck()

    def take(self, batch: Batch) -> Taken:
        if not self._loss.is_timed:
            return self._stepper.take(batch)
        taken = self._stepper.take(batch)
        self._num_taken += 1
        if self._num_taken == WARM_UP_STEPS:
            self._loss.clear()
        elif self._num_taken > WARM_UP_STEPS:
            for per_replica in batch.micro_batches:
                for replica, micro_batch in enumerate(per_replica):
                    self._num_samples[replica] += micro_batch.num_samples
        num_measured = self._num_taken - WARM_UP_STEPS
        if num_measured > 0 and num_measured % MEASURED_STEPS == 0:
            self._choose(batch, is_last=num_measured >= MOST_STEPS)
        return taken

    def share_out(self, shares: Shares) -> None:
        """Use these from the next step on, and measure no more; all ranks call this together."""
        self._loss.is_timed = False
        if not self._is_cpu:
            self._stepper = self._usual(self._recipe)
            self._stepper.messages += self.messages
            self.lag, self.messages = self._stepper.lag, self._stepper.messages
        for loader in self._loaders:
            loader.share_out(shares)

    def _choose(self, batch: Batch, is_last: bool) -> None:
        own = list(zip(self._loss.seconds(), self._num_samples, strict=True))
        every = [one for of_rank in self._world.gather(own) for one in of_rank]
        if max(seconds for seconds, _ in every) < ENOUGH_SECONDS and not is_last:
            return
        seconds = [of_device / (num or 1) for of_device, num in every]
        shares, why = choose_shares(self._plan, seconds, batch.loader.lengths, self._obstacle())
        self.share_out(shares)
        self.row = MeasuredShares(step=batch.loader.num_finished, shares=list(shares), seconds_per_sample=seconds)
        self.messages.append(why)

    def _obstacle(self) -> str:
        """Why speeds are not known; the same on all ranks."""
        if "gather" in self._recipe.team.called_in_loss:
            return "evenstep.gather waits for the other devices in the loss"
        if any(isinstance(layer, nn.SyncBatchNorm) for layer in self._recipe.model.module.modules()):
            return "SyncBatchNorm waits for the other devices in forward"
        return ""


class TimedLoss:
    """A loss; while `is_timed`, it notes how long each call takes on its device."""

    def __init__(self, loss: Callable[[Any, Any], Amount], devices: Sequence[torch.device]) -> None:
        self.is_timed = True
        self._loss, self._devices = loss, devices
        self._calls: list[tuple[int, Timestamp, Timestamp]] = []
        """The replica of this process, and the begin and end of its forward."""

    def __call__(self, model: Any, data: Any) -> Amount:
        if not self.is_timed:
            return self._loss(model, data)
        replica = current_replica()
        begin = _now(self._devices[replica])
        amount = self._loss(model, data)
        self._calls.append((replica, begin, _now(self._devices[replica])))
        return amount

    def clear(self) -> None:
        self._calls.clear()

    def seconds(self) -> list[float]:
        """Of each replica of this process; waits for the devices."""
        found = [0.0 for _ in self._devices]
        for replica, begin, end in self._calls:
            found[replica] += _between(begin, end)
        return found


Timestamp = float | torch.cuda.Event


def _now(device: torch.device) -> Timestamp:
    """On a GPU in the time of the device, which the host runs ahead of."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(begin: Timestamp, end: Timestamp) -> float:
    if isinstance(begin, float) or isinstance(end, float):
        assert isinstance(begin, float)
        assert isinstance(end, float)
        return end - begin
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000


def choose_shares(plan: Plan, seconds: Sequence[float], lengths: Lengths, obstacle: str = "") -> tuple[Shares, str]:
    """Shares of a global batch for devices that take these seconds for a sample, and a line that says why."""
    shares = equal = parts_of(plan, (1,) * len(seconds))
    if obstacle:
        return equal, f"--shares auto: {obstacle}, so their speeds are not known; shares stay equal"
    speeds = f"{1000 * min(seconds):.3g} to {1000 * max(seconds):.3g} ms for a sample in forward"
    if max(seconds) >= ALIKE * min(seconds) > 0:
        shares = parts_of(plan, tuple(max(1, round(PRECISION * min(seconds) / one)) for one in seconds))
    if shares == equal:
        return equal, f"--shares auto: all devices are about equally fast ({speeds}); shares stay equal"
    if _is_alone(plan, shares, lengths) and not _is_alone(plan, equal, lengths):
        # As BatchNorm in training cannot be.
        return equal, "--shares auto: other shares would leave a device with one sample in some step; they stay equal"
    given = f"{','.join(map(str, shares))} {'samples' if plan.virtual_replicas is None else 'virtual replicas'}"
    return shares, f"--shares auto: {given} of each global batch, since devices take {speeds}"


def parts_of(plan: Plan, proportions: Shares) -> Shares:
    """What each device gets of a global batch: samples, at least one for every micro-batch; or virtual replicas."""
    num, least = (plan.batch, plan.accumulate) if plan.virtual_replicas is None else (plan.virtual_replicas, 1)
    sizes = dict.fromkeys(range(len(proportions)), least)
    free = list(sizes)
    while True:
        rest = num - least * (len(sizes) - len(free))
        dealt = dict(zip(free, map(len, in_proportion(rest, tuple(proportions[one] for one in free))), strict=True))
        if min(dealt.values()) >= least:
            return tuple((sizes | dealt).values())
        # The others divide what these leave.
        free = [one for one in free if dealt[one] >= least]


def _is_alone(plan: Plan, shares: Shares, lengths: Lengths) -> bool:
    """Whether a device computes one sample in some step; that of a virtual replica does not depend on shares."""
    return plan.virtual_replicas is None and any(
        smallest_micro_batch(size, shares, plan.accumulate) == 1 for size in plan.batch_sizes(lengths)
    )


def kept_shares(plan: Plan, saved: Mapping[str, Any], num_replicas: int) -> Shares | None:
    """What this run had measured before its checkpoint was saved; None if it is to be measured, once more perhaps."""
    if saved.get("name") != plan.name or saved.get("shares") in (None, AUTO):
        return None
    shares = parse_shares(saved["shares"])
    return shares if shares is not None and len(shares) == num_replicas else None


def keep_in_plan(folder: Path, shares: Sequence[int]) -> None:
    """Write measured shares to the plan.json of a run."""
    if (folder / PLAN_FILE).exists():
        write_plan_file(folder, replace(read_plan(folder), shares=",".join(map(str, shares))))
