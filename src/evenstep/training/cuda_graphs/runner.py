"""Decides automatically whether to replay steps as CUDA graphs: where that is safe, equal and faster.

The first steps are eager. If they are alike, the next one is taken twice from the same state: eagerly, and captured and
replayed. If both results agree, replays and eager steps take turns for a while, and the faster of the two are taken
from then on. Other shapes of batches that come often get a graph each; the graphs share their memory.
"""

from __future__ import annotations

import math
from collections import Counter
from functools import partial

import psutil
import torch
import torch.distributed as dist

from evenstep.data.loader import Batch
from evenstep.distributed.devices import free_gpu_bytes
from evenstep.distributed.heartbeat import BACKWARD, FORWARD
from evenstep.strategies.base import forget
from evenstep.training.cuda_graphs.capture_checks import (
    Kinds,
    ReplayTrial,
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
from evenstep.training.cuda_graphs.graph import Captured, Choices, Pending, Shapes, SharedByGraphs, shapes_of
from evenstep.training.deferred_loss import LateSteps
from evenstep.training.loss_weighting import LossTotal, MeanLoss
from evenstep.training.step import Done, Recipe, Taken, agreed_when_read

WARM_UP = 6
WARM_UP_DDP = 12
"""DDP times its first ten steps on the GPU, which cannot be captured."""
GAPS_OF_GRAPH = 1.3
"""Its memory, with gaps, over that of its tensors: at 1.0, 3 of 108 trainings with little memory ran out of it."""
AGREED_AT = (20, 40, 60, 80, 100, 120, 160, 200, 240, 280, 320, 400)
"""Steps at which ranks agree on whether all of them can capture the next one."""
MOST_GRAPHS = 8
"""Shapes of batches that get a graph each."""
RECURS = 3
"""Times that a shape must have come before it gets one."""
LEAST_SHARE = 1 / 64
"""Of all steps; a shape that comes less often stays eager."""
MOST_OBSERVED = 600
"""Eager steps that are compared with earlier ones of their shape; after that, no new shape gets a graph."""
TOLERANCE = {"fp64": 1e-9, "fp32": 1e-3, "tf32": 1e-2, "bf16": 3e-2, "fp16": 3e-2}
"""Allowed difference to the eager step, relative to a step's usual change; most replays are bit-equal."""
LOSS_TOLERANCE = {"fp64": 1e-12, "fp32": 1e-5, "tf32": 1e-3, "bf16": 1e-2, "fp16": 1e-2}
LEAST_GAIN = 1.0


def can_be_fast(recipe: Recipe) -> bool:
    """Whether steps can be captured: all devices are GPUs, and communication is NCCL only."""
    world = recipe.team.world
    if not recipe.team.facts.cuda_graphs or any(device.type != "cuda" for device in world.devices):
        return False
    if recipe.model.is_wrapped:
        return "cuda:nccl" in str(dist.get_backend_config())
    return world.size == 1


class Fast:
    """Takes eager steps until replaying graphs proves faster, one for each shape of batches that comes often."""

    def __init__(self, recipe: Recipe) -> None:
        self.messages: list[str] = []
        self._recipe = recipe
        self._eager = LateSteps(recipe)
        self._eager.observes = True
        self.lag = self._eager.lag
        self._world = recipe.team.world
        self._needed = WARM_UP_DDP if recipe.model.is_wrapped else WARM_UP
        self._shared: SharedByGraphs | None = None
        self._graphs: dict[Shapes, Captured] = {}
        self._is_over = False
        self._num_graphs = 0
        """The same on all ranks, though each may give its graphs up alone."""
        self._num_steps = 0
        self._counts: Counter[Shapes | None] = Counter()
        """Eager steps of each shape."""
        self._observed: dict[Shapes | None, tuple[Choices, Seen]] = {}
        """Of the last eager step of shapes that came again: the optimizer's options, and the Python state it read."""
        self._reached: list[bool] | None = None
        """Which parameters had a gradient in the previous step."""
        self._alike = 0
        """Eager steps that were like the one before them of their shape."""
        self._trial: ReplayTrial | None = None
        self._rechecks = False
        """Whether the next step is compared with the captured one, as the first of an epoch is."""

    def recheck(self) -> None:
        self._rechecks = True
        self._eager.recheck()

    def take(self, batch: Batch) -> Taken:
        if batch.checked is not None or self._world.spans.listeners or self._world.communication.is_off:
            return self._eager.take(batch)
        self._num_steps += 1
        shapes = None if self._is_over else shapes_of(batch)
        captured = self._graphs.get(shapes) if shapes is not None else None
        self._rechecks |= batch.span.start == 0
        if self._is_time(shapes, captured):
            assert shapes is not None
            return agreed_when_read(self._recipe.team.requests, partial(self._try, batch, shapes))
        if self._is_over:
            return self._eager.take(batch)
        replays = captured is not None and self._can_replay(captured)
        if self._trial is not None:
            return self._timed(self._trial, batch, captured if replays else None)
        if captured is not None and replays:
            return self._replayed(captured, batch)
        return self._observed_step(batch, shapes)

    def _is_time(self, shapes: Shapes | None, captured: Captured | None) -> bool:
        """Whether to capture this step. Ranks agree on it, all at the same steps."""
        count = self._counts[shapes]
        is_ready = (
            not self._is_over
            and captured is None
            and shapes in self._observed
            and self._alike >= self._needed
            and count >= max(RECURS, LEAST_SHARE * self._num_steps)
            and self._num_graphs < MOST_GRAPHS
        )
        if self._world.size == 1:
            return is_ready
        return self._num_graphs < MOST_GRAPHS and self._num_steps in AGREED_AT and self._all(is_ready)

    def _observed_step(self, batch: Batch, shapes: Shapes | None) -> Taken:
        """An eager step, compared with the one before it of its shape."""
        self._counts[shapes] += 1
        if self._counts.total() > MOST_OBSERVED:
            self._stop_observing()
        if not self._eager.observes or (self._graphs and self._counts[shapes] > RECURS + 1):
            return self._eager.take(batch)
        taken = self._eager.take(batch)
        self._compare(shapes)
        return taken

    def _stop_observing(self) -> None:
        self._eager.observes = False
        self._observed = {}
        self._counts.clear()
        if not self._graphs and not self._alike:
            self._give_up("the optimizer's options change from step to step")
        elif not self._graphs:
            self._give_up("no shape of batches comes often enough")

    def _can_replay(self, captured: Captured) -> bool:
        recipe = self._recipe
        # A scheduler may change more than the learning rate.
        if recipe.scheduler is not None and Choices.of(recipe.optimizer) != captured.choices:
            return False
        return not (self._rechecks and self._has_changed(captured))

    def _timed(self, trial: ReplayTrial, batch: Batch, captured: Captured | None) -> Taken:
        """A step of the trial, in which replays and eager steps take turns."""
        replays = captured is not None and trial.replays
        if captured is not None and replays:
            taken = self._replayed(captured, batch)
        else:
            taken = self._eager.take(batch) if captured is not None else self._observed_step(batch, shapes_of(batch))
        trial.add(captured.shapes if captured is not None else None, replays)
        if trial.is_over and self._trial is not None:
            self._judge(trial)
        return taken

    def _replayed(self, captured: Captured, batch: Batch) -> Taken:
        return self._replay_whole(captured, batch) if captured.is_whole else self._replay_half(captured, batch)

    def _replay_half(self, captured: Captured, batch: Batch) -> Taken:
        recipe, eager = self._recipe, self._eager
        if eager.is_late:
            compute = partial(self._compute, captured, batch)
            return eager.finish(recipe.team.launch_gradients((recipe.model,), batch, compute, is_late=True))
        return agreed_when_read(recipe.team.requests, partial(self._replay_early, captured, batch))

    def _replay_early(self, captured: Captured, batch: Batch) -> Taken:
        self._eager.settle()
        loss = self._replay_backward(captured, batch)
        return Done(loss, self._eager.update())

    def _replay_backward(self, captured: Captured, batch: Batch) -> MeanLoss:
        """`Team.backward` by replaying the captured forward and backward of every replica."""
        compute = partial(self._compute, captured, batch)
        return self._recipe.team.compute_gradients((self._recipe.model,), batch, compute)

    def _compute(self, captured: Captured, batch: Batch, totals: LossTotal) -> None:
        world = self._world
        world.spans.begin(BACKWARD)
        captured.fill(batch, totals.request_code)
        if world.size > 1:
            world.heartbeat.collective()
        with self._recipe.model.sync_gradients(is_last=True):
            captured.replay_backward(batch, totals)

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
        spans.begin(BACKWARD)
        batch.finish()
        self._recipe.advance()
        pending = Pending(self._recipe, captured, batch, slot, request_code)
        self._eager.ahead.add(pending)
        return pending

    def _compare(self, shapes: Shapes | None) -> None:
        """Compare the eager step that was just taken with the one before it of the same shape."""
        before, self._reached = self._reached, self._eager.reached
        called = self._recipe.team.called_in_loss
        now = Choices.of(self._recipe.optimizer), seen(self._recipe.loss, self._recipe.model.module)
        earlier = self._observed.get(shapes)
        # Not of shapes that come once: each of them would hold all of it.
        if not self._observed or self._counts[shapes] > 1:
            self._observed[shapes] = now
        if shapes is None:
            self._give_up("a batch holds more than tensors in tuples, lists and dicts")
        elif len(self._world.devices) > 1 and "gather" in called:
            self._give_up("in evenstep.gather replicas wait for each other, which a graph of one of them cannot")
        elif not {"log", "progress"}.isdisjoint(called):
            (name, *_) = sorted({"log", "progress"} & called)
            self._give_up(f"the loss calls evenstep.{name}, which a replay would not call again")
        elif drew_on_host():
            self._give_up("it draws random numbers on the host, which a replay would not draw again")
        elif before not in (None, self._reached):
            self._give_up("the parameters that have a gradient change from step to step")
        elif earlier is not None and now[0] == earlier[0]:
            changed = first_change(earlier[1], now[1])
            if changed is not None and self._alike:
                self._give_up(f"{changed} changes from step to step, which a replay would not see")
            self._alike += 1
        elif earlier is not None:
            self._alike = 0

    def _has_changed(self, captured: Captured) -> bool:
        """At the start of an epoch: whether the Python state differs from that at capture."""
        self._rechecks = False
        now = seen(self._recipe.loss, self._recipe.model.module)
        draws = ("Python's random numbers", "NumPy's random numbers")
        changed = first_change(*({k: v for k, v in one.items() if k not in draws} for one in (captured.seen, now)))
        if changed is None and self._recipe.scheduler is None:
            is_same = Choices.of(self._recipe.optimizer) == captured.choices
            changed = None if is_same else "an option of the optimizer"
        if changed is not None:
            self._forget_graphs()
            if self._world.size > 1:
                # The other ranks keep replaying, and would not take part in another capture.
                self._give_up(f"{changed} changed")
            else:
                self.messages.append(f"{changed} changed; re-capturing the CUDA graph")
        return changed is not None

    def _forget_graphs(self) -> None:
        self._graphs.clear()
        self._observed.clear()
        self._counts.clear()
        self._reached, self._alike, self._trial = None, 0, None
        self._eager.observes = True
        if self._world.size == 1:
            self._num_graphs = self._num_steps = 0

    def _try(self, batch: Batch, shapes: Shapes) -> Taken:
        """Take this step eagerly; capture it, replay it from the same state, and compare the results."""
        recipe, state = self._recipe, changed_by(self._recipe)
        self._eager.settle()
        if not self._all(self._has_memory(num_bytes(state))):
            return self._refused(shapes, "not enough GPU memory for a CUDA graph", self._eager.take(batch))
        before = copied(state)
        loss = self._eager.backward(batch)
        update = recipe.team.step(recipe.optimizer, clip=recipe.clip)
        after = copied(state)
        draws = any(torch.cuda.default_generators[d.index].get_offset() for d in self._world.devices)
        captured, problem = self._capture(batch)
        if self._all(captured is not None):
            assert captured is not None
            put(state, before)
            captured.draws, captured.seen = draws, self._observed[shapes][1]
            replayed = self._once(captured, batch)
            problem = self._difference(loss, replayed) or self._state_difference(before, after, state)
            put(state, after)
        is_good = self._all(captured is not None and problem is None)
        recipe.advance(bool(update))
        if captured is None or not is_good:
            return self._refused(shapes, problem or "another rank could not capture its step", Done(loss, update))
        self._keep(shapes, captured)
        return Done(loss, update)

    def _keep(self, shapes: Shapes, captured: Captured) -> None:
        self._num_graphs += 1
        self._graphs[shapes] = captured
        self._observed.pop(shapes)
        if self._num_graphs == 1:
            self._trial = ReplayTrial()
        elif self._trial is None:
            self.messages.append(f"fast: captured another batch shape; {len(self._graphs)} CUDA graphs in use")

    def _refused(self, shapes: Shapes, why: str, taken: Taken) -> Taken:
        """Without a graph for this shape; if there is none at all, without any."""
        # Not tried again.
        self._num_graphs = MOST_GRAPHS
        if not self._graphs:
            self._give_up(why)
        else:
            self.messages.append(f"fast: batches of other shapes stay eager: {why}")
        return taken

    def _has_memory(self, state_bytes: int) -> bool:
        """Whether graphs fit next to an eager step (the short last batch is one), and the copies on the host."""
        device = self._world.device
        now = torch.cuda.memory_allocated(device)
        # An eager step takes what torch reserves for it, with the gaps between tensors.
        eager = torch.cuda.max_memory_reserved(device) - now
        of_graph = GAPS_OF_GRAPH * (torch.cuda.max_memory_allocated(device) - now)
        return eager + of_graph < free_gpu_bytes(device) and 3 * state_bytes < psutil.virtual_memory().available

    def _capture(self, batch: Batch) -> tuple[Captured | None, str | None]:
        """Capture the step; or why that failed."""
        devices = self._world.devices
        try:
            if self._shared is None:
                pools = [torch.cuda.graph_pool_handle() for _ in devices]
                self._shared = SharedByGraphs(self._eager.guard, torch.cuda.Stream(self._world.device), pools)
            return Captured(self._recipe, batch, self._shared), None
        except Exception as error:
            for device in devices:
                torch.cuda.synchronize(device)
                _free_generator(device)
            for bound in self._recipe.model.loss_modules:
                forget(bound.parameters())
            return None, f"it cannot be captured ({_shortened(error)})"

    def _once(self, captured: Captured, batch: Batch) -> float:
        """Replay this batch and return its loss; changes the weights, not the loader's position."""
        recipe = self._recipe
        if not captured.is_whole:
            replayed = self._replay_backward(captured, batch)
            recipe.team.step(recipe.optimizer, clip=recipe.clip)
            return replayed
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

    def _judge(self, trial: ReplayTrial) -> None:
        """Keep the graphs if they are not slower; each rank decides alone: eager and replayed steps can be mixed."""
        eager, replayed = trial.seconds()
        self._trial = None
        gain = eager / replayed
        was = f"{eager * 1e3:.2f} to {replayed * 1e3:.2f} ms"
        if gain < LEAST_GAIN:
            self._give_up(f"as a CUDA graph it would be no faster ({was})")
            return
        captured, *more = self._graphs.values()
        what = "the whole step is" if captured.is_whole else "forward and backward are"
        ends = "bit-equal" if self._is_equal else "equal within rounding"
        also = f", batches of {1 + len(more)} shapes" if more else ""
        self.messages.append(
            f"fast: {what} replayed as a CUDA graph, {ends} to the eager step, {gain:.1f} x ({was}){also}"
        )

    def _give_up(self, why: str) -> None:
        self._is_over, self._eager.observes = True, False
        self._graphs.clear()
        self._observed.clear()
        self._trial = None
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
