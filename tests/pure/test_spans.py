"""One announcement of what a process does, and those who listen to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from evenstep.distributed.heartbeat import BACKWARD, FORWARD, INPUT, SAVING
from evenstep.distributed.step_spans import Listener, Spans, lane
from evenstep.profiling.step_parts import Timer
from evenstep.training.team import Team, join


class Written(Listener):
    """What was heard, and in which lane."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, str]] = []

    def part(self, name: str) -> None:
        self.heard.append((lane(), name))

    def leave(self) -> None:
        self.heard.append((lane(), "left"))

    def send(self, name: str, tensors: Sequence[torch.Tensor], waits: bool) -> Callable[[], None]:
        self.heard.append((lane(), f"sends {name}"))
        return lambda: self.heard.append((lane(), f"{name} arrived"))


def take_step(team: Team, **options: Any) -> None:
    model = team.wrap(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = next(iter(team.loader((torch.ones(8, 2),), batch=8, **options)))
    team.backward(lambda model, batch: model(batch[0]).sum(), model, batch)
    team.step(optimizer)


def test_the_heartbeat_and_every_listener_hear_of_a_phase() -> None:
    spans, first, second = Spans(), Written(), Written()
    with spans.listening(first), spans.listening(second):
        spans.begin(INPUT)
        spans.part("reduce")
    assert first.heard == second.heard == [("host", "input"), ("host", "reduce")]
    assert spans.heartbeat.read().phase == INPUT
    spans.begin(FORWARD)
    assert len(first.heard) == 2


def test_the_previous_phase_continues_after_a_save() -> None:
    spans, listener = Spans(), Written()
    spans.begin(BACKWARD)
    with spans.listening(listener), spans.during(SAVING):
        assert spans.heartbeat.read().phase == SAVING
    assert spans.heartbeat.read().phase == BACKWARD
    assert [name for _, name in listener.heard] == ["saving a checkpoint", "backward"]


def test_without_listeners_nothing_is_made_for_what_is_sent() -> None:
    spans = Spans()
    assert spans.send("a", []) is spans.send("b", [], waits=True)


def test_a_step_of_one_replica_is_heard_in_order() -> None:
    team, listener = join("single", ["cpu"]), Written()
    with team.world.spans.listening(listener):
        take_step(team, accumulate=2)
    names = [name for _, name in listener.heard]
    assert names == ["input", "forward", "forward", "backward", "forward", "backward", "optimizer"]


def test_the_threads_of_dp_have_lanes_and_leave_them() -> None:
    team, listener = join("dp", ["cpu", "cpu"]), Written()
    with team.world.spans.listening(listener):
        take_step(team)
    for replica in ("replica 0", "replica 1"):
        assert [name for where, name in listener.heard if where == replica] == ["forward", "backward", "left"]
    host = [name for where, name in listener.heard if where == "host"]
    assert host[:6] == ["input", "forward", "replicate", "sends parameters", "forward", "reduce"]
    assert host[-2:] == ["backward", "optimizer"]


def test_the_timer_counts_what_is_sent_and_a_wait_for_it_is_communication() -> None:
    spans, timer = Spans(), Timer([torch.device("cpu")])
    with spans.listening(timer):
        spans.begin(INPUT)
        spans.begin(FORWARD)
        arrived = spans.send("buffers", [torch.zeros(3)], waits=True)
        arrived()
        timer.stop()
        # Outside of a step, a wait belongs to nothing.
        spans.send("buffers", [torch.zeros(3)], waits=True)()
    found = timer.read()
    assert timer.sent_bytes == 24
    assert [name for name, _, _ in found.host] == ["input", "forward", "communication", "forward"]
    assert [name for name, _, _ in found.network] == ["buffers", "buffers"]
    ((begin, end),) = found.steps
    assert sum(found.parts(begin, end).values()) == pytest.approx(end - begin)
