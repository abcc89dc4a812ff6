"""Every sample once an epoch, in an order that is the same everywhere."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.order import InOrder, Order, Shuffled, Span, share, span_at

seeds = st.integers(0, 2**63 - 1)
epochs = st.integers(0, 2**40)
sizes = st.integers(1, 500)


def epoch_of(order: Order, epoch: int = 0) -> list[int]:
    return order.ids(Span(epoch, 0, order.num_samples)).tolist()


@given(num=st.integers(0, 10_000), num_seats=st.integers(1, 50))
def test_shares_cover_everything_once_and_are_even(num: int, num_seats: int) -> None:
    shares = [share(num, seat, num_seats) for seat in range(num_seats)]
    assert [place for part in shares for place in part] == list(range(num))
    assert len(shares[0]) == max(map(len, shares))
    assert len(shares[0]) - min(map(len, shares)) <= 1


@given(num_samples=sizes, seed=seeds, epoch=epochs)
def test_an_epoch_is_a_permutation_and_always_the_same_one(num_samples: int, seed: int, epoch: int) -> None:
    once, again = epoch_of(Shuffled(num_samples, seed), epoch), epoch_of(Shuffled(num_samples, seed), epoch)
    assert once == again
    assert sorted(once) == list(range(num_samples))


@given(num_samples=st.integers(30, 500), seed=seeds, other=seeds, epoch=epochs, later=epochs)
def test_epochs_and_seeds_have_orders_of_their_own(
    num_samples: int, seed: int, other: int, epoch: int, later: int
) -> None:
    order = epoch_of(Shuffled(num_samples, seed), epoch)
    assert (order == epoch_of(Shuffled(num_samples, other), epoch)) == (seed == other)
    assert (order == epoch_of(Shuffled(num_samples, seed), later)) == (epoch == later)


@pytest.mark.parametrize(
    ("epoch", "first"),
    [(0, [887, 535, 753, 631, 201, 630, 807, 34]), (1, [977, 508, 917, 70, 723, 28, 456, 681])],
)
def test_the_order_is_the_one_of_all_earlier_releases(epoch: int, first: list[int]) -> None:
    # A checkpoint holds a position in this order: if these numbers change, old checkpoints repeat and skip samples.
    assert epoch_of(Shuffled(1000, seed=7), epoch)[:8] == first


def test_without_shuffling_the_order_is_the_data() -> None:
    assert epoch_of(InOrder(5), 0) == epoch_of(InOrder(5), 3) == [0, 1, 2, 3, 4]
    assert InOrder(5).ids(Span(0, 0, 5)).dtype == Shuffled(5, 0).ids(Span(0, 0, 5)).dtype == np.int64


@given(num_samples=sizes, batch=st.integers(1, 600), cut=st.integers(0, 2000))
def test_spans_walk_each_epoch_once_and_never_cross_into_the_next(num_samples: int, batch: int, cut: int) -> None:
    position = cut
    first_epoch = cut // num_samples
    places: list[tuple[int, int]] = []
    while position < (first_epoch + 2) * num_samples:
        span = span_at(position, batch, num_samples)
        assert 1 <= len(span) <= batch
        assert span.epoch * num_samples + span.start == position
        places += [(span.epoch, place) for place in range(span.start, span.stop)]
        position += len(span)
    every = [(epoch, place) for epoch in (first_epoch, first_epoch + 1) for place in range(num_samples)]
    assert places == every[cut % num_samples :]
