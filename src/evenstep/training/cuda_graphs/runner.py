"""Decides automatically whether to replay steps as CUDA graphs: where that is safe, equal and faster.

The first steps are eager. If they are alike, the next one is taken twice from the same state: eagerly, and captured and
replayed. If both results agree, later steps are replayed, except for batches of another shape.
"""

from __future__ import annotations

import math
from collections import deque

import psutil
import torch
import torch.distributed as dist

from evenstep.data.loader import Batch
from evenstep.distributed.heartbeat import BACKWARD, FORWARD
from evenstep.distributed.preemption import Requests
from evenstep.strategies.base import forget
from evenstep.training.cuda_graphs.capture_checks import (
    Clock,
    Kinds,
    Seen,
    are_equal,
    changed_by,
    copied,
    drew_on_host,
    first_apart,
    first_change,
    num_bytes,
    put,
    seen,
)
from evenstep.training.cuda_graphs.graph import SLOTS, Captured, Choices, Pending, shapes_of
from evenstep.training.loss import LossTotal, MeanLoss
from evenstep.training.step import Done, Eager, Recipe, Taken

WARM_UP = 6
WARM_UP_DDP = 12
"""DDP times its first ten steps on the GPU, which cannot be captured."""
AGREED_AT = (20, 60, 200)
"""Eager steps after which ranks agree on whether all of them can capture the next one."""
TIMED = 4
"""Steps before the capture that are timed."""
LAG = 2
"""Steps that the host runs ahead of the GPU."""
assert LAG + 1 < SLOTS
JUDGED = 10
"""Replayed steps that are timed, to decide whether they are faster."""
LEAST_GAIN = 1.0
TOLERANCE = {"fp64": 1e-9, "fp32": 1e-3, "tf32": 1e-2, "bf16": 3e-2, "fp16": 3e-2}
"""Allowed difference to the eager step, relative to a step's usual change; most replays are bit-equal."""
LOSS_TOLERANCE = {"fp64": 1e-12, "fp32": 1e-5, "tf32": 1e-3, "bf16": 1e-2, "fp16": 1e-2}


def can_be_fast(recipe: Recipe) -> bool:
    """Whether steps can be captured: all devices are GPUs, and communication is NCCL only."""
    world = recipe.team.world
    if not recipe.team.facts.cuda_graphs or any(device.type != "cuda" for device in world.devices):
        return False
    if recipe.model.is_wrapped:
        return "cuda:nccl" in str(dist.get_backend_config())
    return world.size == 1


class AgreedLater:
    """A step whose requests count when it is read: other ranks replay the same step, and learn of them only then."""

    def __init__(self, taken: Taken, requests: Requests) -> None:
        self._taken, self._requests, self._agreed = taken, requests, requests.agreed

    def read(self) -> MeanLoss:
        self._requests.agreed = self._agreed
        return self._taken.read()


class Fast:
    """Takes eager steps until replaying a graph proves faster."""

    lag = LAG

    def __init__(self, recipe: Recipe) -> None:
        self.messages: list[str] = []
        self._recipe = recipe
        self._eager = Eager(recipe)
        self._world = recipe.team.world
        self._needed = WARM_UP_DDP if recipe.model.is_wrapped else WARM_UP
        self._captured: Captured | None = None
        self._is_over = False
        self._had_graph = False
        """The same on all ranks, though each may give its graph up alone: from then on no capture is agreed on."""
        self._before: tuple[object, Choices, Seen] | None = None
        """The previous step: the shapes of its batch, the optimizer's options, and the Python state it read."""
        self._reached: list[bool] | None = None
        """Which parameters had a gradient in the previous step."""
        self._alike = 0
        self._num_eager = 0
        self._clock = Clock(self._world.devices)
        self._eager_seconds = math.inf
        self._under_way: deque[Pending] = deque()
        self._side: torch.cuda.Stream | None = None
        self._rechecks = False
        """Whether the next step is compared with the captured one, as the first of an epoch is."""

    def recheck(self) -> None:
        self._rechecks = True

    def take(self, batch: Batch) -> Taken:
        requests = self._recipe.team.requests
        before = requests.agreed
        taken = self._take(batch)
        if isinstance(taken, Done):
            taken = AgreedLater(taken, requests)
        requests.agreed = before
        return taken

    def _take(self, batch: Batch) -> Taken:
        if batch.checked is not None or self._world.spans.listeners or self._world.communication.is_off:
            return self._take_eagerly(batch)
        if self._captured is not None:
            return self._replayed(batch)
        if self._is_time(batch):
            self._eager_seconds = self._clock.stop()
            return self._try(batch)
        if self._is_over:
            return self._take_eagerly(batch)
        if self._alike == self._needed - TIMED:
            self._clock.start()
        with self._clock:
            loss = self._eager.backward(batch)
            reached = [weight.grad is not None for weight in self._recipe.model.weights]
            update = self._eager.update()
        self._compare(batch, reached)
        return Done(loss, update)

    def _is_time(self, batch: Batch) -> bool:
        """Whether to capture this step. Ranks agree on it, all at the same steps."""
        self._num_eager += 1
        is_ready = not self._is_over and self._alike >= self._needed and shapes_of(batch) == self._shapes_before()
        if self._world.size == 1:
            return is_ready
        return not self._had_graph and self._num_eager in AGREED_AT and self._all(is_ready)

    def _shapes_before(self) -> object:
        return self._before[0] if self._before is not None else None

    def _take_eagerly(self, batch: Batch) -> Taken:
        """An eager step, after the pending replays have been checked."""
        while self._under_way:
            self._under_way.popleft().read()
        return self._eager.take(batch)

    def _replayed(self, batch: Batch) -> Taken:
        captured, recipe = self._captured, self._recipe
        assert captured is not None
        if shapes_of(batch) != captured.shapes:
            return self._take_eagerly(batch)
        # A scheduler may change more than the learning rate.
        if recipe.scheduler is not None and Choices.of(recipe.optimizer) != captured.choices:
            return self._take_eagerly(batch)
        if (batch.span.start == 0 or self._rechecks) and self._has_changed():
            return self._take_eagerly(batch)
        replay = self._replay_whole if captured.is_whole else self._replay_half
        if not self._clock.is_on:
            return replay(captured, batch)
        with self._clock:
            taken = replay(captured, batch)
        if self._clock.count == JUDGED:
            self._judge()
        return taken

    def _replay_half(self, captured: Captured, batch: Batch) -> Taken:
        recipe = self._recipe
        loss = self._replay_backward(captured, batch)
        update = recipe.team.step(recipe.optimizer, clip=recipe.clip)
        recipe.advance(bool(update))
        return Done(loss, update)

    def _replay_backward(self, captured: Captured, batch: Batch) -> MeanLoss:
        """`Team.backward` by replaying the captured forward and backward of every replica."""
        world, model = self._world, self._recipe.model

        def replay(totals: LossTotal) -> None:
            world.spans.begin(BACKWARD)
            captured.fill(batch, totals.request_code)
            if world.size > 1:
                world.heartbeat.collective()
            with model.sync_gradients(is_last=True):
                captured.replay_backward(batch, totals)

        return self._recipe.team.compute_gradients((model,), batch, replay)

    def _fill(self, captured: Captured, batch: Batch) -> float:
        """Seed and fill a captured whole step; returns this process's request to stop or to save."""
        team = self._recipe.team
        team.start_batch(batch, seeds=captured.draws)
        request_code = team.requests.encode()
        captured.fill(batch, request_code)
        return request_code

    def _replay_whole(self, captured: Captured, batch: Batch) -> Taken:
        spans = self._world.spans
        spans.begin(FORWARD)
        request_code = self._fill(captured, batch)
        if self._world.size > 1:
            spans.heartbeat.collective()
        self._recipe.model.note_replay()
        slot = captured.replay_whole()
        is_full = len(self._under_way) > LAG
        event = self._under_way.popleft().event if is_full else torch.cuda.Event()
        event.record()
        spans.begin(BACKWARD)
        batch.finish()
        self._recipe.advance()
        pending = Pending(self._recipe, captured, batch, slot, event, request_code)
        self._under_way.append(pending)
        if len(self._under_way) > LAG:
            # The host waits here, for less than a step, and not where a loss is read.
            self._under_way[0].arrive()
        return pending

    def _compare(self, batch: Batch, reached: list[bool]) -> None:
        """Compare this step with the previous one."""
        before, self._reached = self._reached, reached
        shapes = shapes_of(batch)
        now = (shapes, Choices.of(self._recipe.optimizer), seen(self._recipe.loss, self._recipe.model.module))
        if shapes is None:
            self._give_up("a batch holds more than tensors in tuples, lists and dicts")
        elif len(self._world.devices) > 1 and "gather" in self._recipe.team.called_in_loss:
            self._give_up("in evenstep.gather replicas wait for each other, which a graph of one of them cannot")
        elif not {"log", "progress"}.isdisjoint(self._recipe.team.called_in_loss):
            (name, *_) = sorted({"log", "progress"} & self._recipe.team.called_in_loss)
            self._give_up(f"the loss calls evenstep.{name}, which a replay would not call again")
        elif drew_on_host():
            self._give_up("it draws random numbers on the host, which a replay would not draw again")
        elif before not in (None, reached):
            self._give_up("the parameters that have a gradient change from step to step")
        elif self._before is not None and now[:2] == self._before[:2]:
            changed = first_change(self._before[2], now[2])
            if changed is not None and self._alike:
                self._give_up(f"{changed} changes from step to step, which a replay would not see")
            self._alike += 1
        else:
            self._alike = 0
        self._before = now

    def _has_changed(self) -> bool:
        """At the start of an epoch: whether the Python state differs from that at capture."""
        assert self._before is not None
        self._rechecks = False
        now = seen(self._recipe.loss, self._recipe.model.module)
        draws = ("Python's random numbers", "NumPy's random numbers")
        changed = first_change(*({k: v for k, v in one.items() if k not in draws} for one in (self._before[2], now)))
        if changed is None and self._recipe.scheduler is None and Choices.of(self._recipe.optimizer) != self._before[1]:
            changed = "an option of the optimizer"
        if changed is not None:
            self._captured, self._before, self._reached, self._alike = None, None, None, 0
            if self._world.size > 1:
                # The other ranks keep replaying, and would not take part in another capture.
                self._give_up(f"{changed} changed")
            else:
                self.messages.append(f"{changed} changed; re-capturing the CUDA graph")
        return changed is not None

    def _try(self, batch: Batch) -> Taken:
        """Take this step eagerly; capture it, replay it from the same state, and compare the results."""
        recipe, state = self._recipe, changed_by(self._recipe)
        if not self._all(self._has_memory(num_bytes(state))):
            self._give_up("GPU memory does not hold the step twice")
            return self._eager.take(batch)
        before = copied(state)
        loss = recipe.team.backward(recipe.loss, recipe.model, batch)
        update = recipe.team.step(recipe.optimizer, clip=recipe.clip)
        after = copied(state)
        draws = any(torch.cuda.default_generators[d.index].get_offset() for d in self._world.devices)
        problem = self._capture(batch)
        if self._all(problem is None):
            put(state, before)
            assert self._captured is not None
            self._captured.draws = draws
            replayed = self._once(self._captured, batch)
            problem = self._difference(loss, replayed) or self._state_difference(before, after, state)
            put(state, after)
        self._had_graph = self._all(problem is None)
        if not self._had_graph:
            self._captured = None
            self._give_up(problem or "another rank could not capture its step")
        recipe.advance(bool(update))
        self._clock.start()
        return Done(loss, update)

    def _has_memory(self, state_bytes: int) -> bool:
        """Whether graphs fit next to an eager step (the short last batch is one), and the copies on the host."""
        device = self._world.device
        used = torch.cuda.memory_allocated(device)
        of_a_step = torch.cuda.max_memory_allocated(device) - used
        free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - used
        return 2 * of_a_step < free and 3 * state_bytes < psutil.virtual_memory().available

    def _capture(self, batch: Batch) -> str | None:
        """Capture the step; returns why that failed, or None."""
        try:
            # One for all captures: torch has few streams, and reuses them.
            self._side = self._side or torch.cuda.Stream(self._world.device)
            self._captured = Captured(self._recipe, batch, self._side)
        except Exception as error:
            for device in self._world.devices:
                torch.cuda.synchronize(device)
                _free_generator(device)
            for bound in self._recipe.model.loss_modules:
                forget(bound.parameters())
            return f"it cannot be captured ({_shortened(error)})"
        return None

    def _once(self, captured: Captured, batch: Batch) -> float:
        """Replay this batch and return its loss; changes the weights, not the loader's position."""
        recipe = self._recipe
        if not captured.is_whole:
            loss = self._replay_backward(captured, batch)
            recipe.team.step(recipe.optimizer, clip=recipe.clip)
            return loss
        self._fill(captured, batch)
        slot = captured.replay_whole()
        torch.cuda.synchronize(self._world.device)
        values = captured.read(slot)
        total, count = (math.fsum(column) for column in zip(*captured.pairs(values), strict=True))
        return total / count if count else 0.0

    def _difference(self, loss: float, replayed: float) -> str | None:
        limit = LOSS_TOLERANCE[self._recipe.team.precision.name]
        if math.isclose(loss, replayed, rel_tol=limit, abs_tol=limit):
            return None
        return f"a replay gives a loss of {replayed:.6g} instead of {loss:.6g}"

    def _state_difference(self, before: Kinds, after: Kinds, now: Kinds) -> str | None:
        self._is_equal = are_equal(now, after)
        kind = first_apart(before, after, now, TOLERANCE[self._recipe.team.precision.name])
        return f"a replay changes {kind} differently" if kind is not None else None

    def _judge(self) -> None:
        """Keep the graph if it is not slower; each rank decides alone, since eager and replayed steps can be mixed."""
        seconds = self._clock.stop()
        gain = self._eager_seconds / seconds
        was = f"{self._eager_seconds * 1e3:.2f} to {seconds * 1e3:.2f} ms"
        if gain < LEAST_GAIN:
            self._captured = None
            self._give_up(f"as a CUDA graph it would be no faster ({was})")
            return
        assert self._captured is not None
        what = "the whole step is" if self._captured.is_whole else "forward and backward are"
        ends = "bit-equal" if self._is_equal else "equal within rounding"
        self.messages.append(f"fast: {what} replayed as a CUDA graph, {ends} to the eager step, {gain:.1f} x ({was})")

    def _give_up(self, why: str) -> None:
        self._is_over = True
        self.messages.append(f"fast: steps stay eager: {why}")

    def _all(self, is_so: bool) -> bool:
        """Whether it is true on every rank."""
        return all(self._world.gather(is_so))


def _free_generator(device: torch.device) -> None:
    """A failed capture leaves torch's generator in capture mode; give it a new state."""
    fresh = torch.Generator(device)
    torch.cuda.default_generators[device.index].graphsafe_set_state(fresh.graphsafe_get_state())


def _shortened(error: Exception) -> str:
    first_line, *_ = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {first_line[:100]}"
