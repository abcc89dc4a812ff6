"""In which order the ranks of a pipeline compute: forwards, backwards, and gradients of weights apart from them.

A rank has one chunk of the model, or several that are not adjacent (interleaved). All ranks go through their forwards
in one order, and through their backwards in one order: so messages between two ranks arrive in the order in which they
are read, and gradients are summed in the order of micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

ActionName = Literal["forward", "backward", "weights"]
INTERLEAVED = 2
"""Chunks of each rank, where they are interleaved."""


@dataclass(frozen=True)
class Action:
    """What a rank does with a micro-batch; `weights` computes gradients that its backward left out."""

    name: ActionName
    chunk: int
    """Among those of the rank."""
    micro_batch: int


def chunks_of(schedule: str) -> int:
    """How many chunks of the model each rank has."""
    return INTERLEAVED if schedule == "interleaved" else 1


def order_of(schedule: str, stages: int, rank: int, num: int) -> Iterator[Action]:
    """What one of `stages` ranks does with `num` micro-batches.

    >>> " ".join(f"{one.name[0]}{one.micro_batch}" for one in order_of("1f1b", 2, 0, 3))
    'f0 f1 b0 f2 b1 b2'
    >>> " ".join(f"{one.name[0]}{one.micro_batch}" for one in order_of("zero-bubble", 2, 1, 3))
    'f0 b0 f1 b1 w0 f2 b2 w1 w2'
    """
    chunks = chunks_of(schedule)
    forwards = list(_rounds(stages, num, range(chunks)))
    backwards = list(_rounds(stages, num, range(chunks)[::-1]))
    ahead = _ahead(schedule, stages, rank, num)
    for index, (chunk, micro_batch) in enumerate(forwards):
        yield Action("forward", chunk, micro_batch)
        if index >= ahead:
            yield from _backward(schedule, rank, *backwards[index - ahead])
    for one in backwards[len(forwards) - ahead :]:
        yield from _backward(schedule, rank, *one)
    if schedule == "zero-bubble":
        yield from (Action("weights", 0, late) for late in range(max(0, num - rank), num))


def _rounds(stages: int, num: int, chunks: range) -> Iterator[tuple[int, int]]:
    """Chunks and micro-batches: a round of micro-batches through a chunk, then through the next one."""
    first = 0
    for size in _sizes(stages, num):
        yield from ((chunk, micro_batch) for chunk in chunks for micro_batch in range(first, first + size))
        first += size


def _sizes(stages: int, num: int) -> list[int]:
    """Of rounds, the largest first: each has a micro-batch for every stage, where there are as many."""
    rounds = max(1, num // stages)
    return [num // rounds + (index < num % rounds) for index in range(rounds)]


def _ahead(schedule: str, stages: int, rank: int, num: int) -> int:
    """How many forwards come before the first one that a backward follows."""
    behind = stages - 1 - rank
    if schedule == "gpipe":
        return num
    if schedule == "interleaved":
        # A micro-batch comes around to the last chunk when a round has gone through all others.
        return min(INTERLEAVED * num, 2 * behind + (INTERLEAVED - 1) * _sizes(stages, num)[0])
    return min(num, behind)


def _backward(schedule: str, rank: int, chunk: int, micro_batch: int) -> Iterator[Action]:
    yield Action("backward", chunk, micro_batch)
    # The later the stage, the longer it waits in the end, and the more it leaves for that time.
    if schedule == "zero-bubble" and micro_batch >= rank:
        yield Action("weights", chunk, micro_batch - rank)


def most_held(schedule: str, stages: int, rank: int, num: int) -> float:
    """Micro-batches whose activations a rank holds at a time, at most; half of its model counts as half of one.

    >>> [most_held("1f1b", 4, rank, 8) for rank in range(4)], [most_held("interleaved", 2, rank, 8) for rank in (0, 1)]
    ([4.0, 3.0, 2.0, 1.0], [2.5, 1.5])
    """
    last = "weights" if schedule == "zero-bubble" else "backward"
    held = most = 0
    for one in order_of(schedule, stages, rank, num):
        held += (one.name == "forward") - (one.name == last)
        most = max(most, held)
    return most / chunks_of(schedule)


def bubble_share(schedule: str, stages: int, num: int) -> float:
    """The share of a step in which a rank waits for others, if all chunks take as long and sends take no time.

    With as many micro-batches as stages or more, it is (S - 1) / (N + S - 1) for 1f1b and gpipe.

    >>> round(bubble_share("1f1b", 4, 8), 3), round(bubble_share("interleaved", 4, 8), 3)
    (0.273, 0.158)
    >>> round(bubble_share("zero-bubble", 4, 8), 3), round(bubble_share("zero-bubble", 4, 2), 3)
    (0.111, 0.455)
    """
    if num < stages:
        return simulated_bubble(schedule, stages, num)
    parts = {"interleaved": INTERLEAVED * num, "zero-bubble": 3 * num}.get(schedule, num)
    return (stages - 1) / (parts + stages - 1)


def simulated_bubble(schedule: str, stages: int, num: int) -> float:
    """The same, of all ranks played through."""
    chunks = chunks_of(schedule) * stages
    # A forward is 1, and so is each half of a backward: of inputs and of weights.
    costs = StageSeconds((stages / chunks,) * chunks, (2 * stages / chunks,) * chunks, (0.0,) * (chunks - 1))
    return 1 - 3 * num / max(one.end for one in play(schedule, stages, num, costs))


@dataclass(frozen=True)
class StageSeconds:
    """What one micro-batch costs: each stage of the model in order, and each message between two of them."""

    forward: Sequence[float]
    backward: Sequence[float]
    """Of inputs and of weights, which are taken to be half of it each where they are computed apart."""
    sends: Sequence[float]
    """From each stage to the next one, and back."""


@dataclass(frozen=True)
class RankTime:
    """How one rank spends a step: until `end`, the rest of its time is the bubble."""

    forward: float
    backward: float
    communication: float
    """Waiting for a message that was begun."""
    end: float

    @property
    def busy(self) -> float:
        return self.forward + self.backward + self.communication


def play(schedule: str, stages: int, num: int, costs: StageSeconds) -> list[RankTime]:
    """How each rank spends a step of `num` micro-batches, played through.

    A rank goes on when it has sent: messages travel while it computes, one after the other in each direction.
    """
    ends: dict[Action, float] = {}
    arrivals: dict[Action, tuple[float, float]] = {}
    """Begin and end of the message with what an action computed."""
    free: dict[tuple[int, str], float] = {}
    orders = {rank: list(order_of(schedule, stages, rank, num)) for rank in range(stages)}
    waiting = {rank: [_at(one, rank, stages) for one in reversed(order)] for rank, order in orders.items()}
    last = chunks_of(schedule) * stages - 1
    ranks = [RankTime(0.0, 0.0, 0.0, 0.0)] * stages
    while any(waiting.values()):
        for rank, left in waiting.items():
            while left and (ready := _ready(left[-1], last, ends, arrivals)) is not None:
                one = left.pop()
                ranks[rank] = _done(ranks[rank], one, ready, _cost(one, schedule, costs))
                ends[one] = ranks[rank].end
                link = one.chunk - (one.name == "backward")
                if one.name != "weights" and 0 <= link < len(costs.sends):
                    begin = max(ends[one], free.get((rank, one.name), 0.0))
                    free[rank, one.name] = begin + costs.sends[link]
                    arrivals[one] = begin, begin + costs.sends[link]
    return ranks


def _done(rank: RankTime, one: Action, ready: tuple[float, float], cost: float) -> RankTime:
    """The same rank after one more action, for which it waited."""
    begun, there = ready
    waited = max(0.0, there - max(rank.end, begun))
    is_forward = one.name == "forward"
    return RankTime(
        rank.forward + cost * is_forward,
        rank.backward + cost * (not is_forward),
        rank.communication + waited,
        max(rank.end, there) + cost,
    )


def _at(one: Action, rank: int, stages: int) -> Action:
    """The same, with its chunk counted among those of all ranks."""
    return Action(one.name, one.chunk * stages + rank, one.micro_batch)


def _ready(
    one: Action, last: int, ends: Mapping[Action, float], arrivals: Mapping[Action, tuple[float, float]]
) -> tuple[float, float] | None:
    """When the message with what it needs was begun, and when it is there; None if that is not known yet.

    Chunks are counted among those of all ranks, up to the `last`.
    """
    if one.name == "forward":
        return arrivals.get(Action("forward", one.chunk - 1, one.micro_batch)) if one.chunk else (0.0, 0.0)
    if one.name == "backward" and one.chunk < last:
        return arrivals.get(Action("backward", one.chunk + 1, one.micro_batch))
    own = ends.get(Action("forward", one.chunk, one.micro_batch))
    return (own, own) if own is not None else None


def _cost(one: Action, schedule: str, costs: StageSeconds) -> float:
    """Of an action whose chunk is counted among those of all ranks."""
    if one.name == "forward":
        return costs.forward[one.chunk]
    return costs.backward[one.chunk] / (2 if schedule == "zero-bubble" else 1)
