"""Every sample once an epoch, in an order that is the same everywhere."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.sampling.batch_shares import share
from evenstep.sampling.order import BLOCK, SORTED_UP_TO, Lengths, Order, Span, permuted
from evenstep.sampling.rng import Draws, sample_uniforms, uniforms
from evenstep.sampling.samplers import Sequential, Shuffled

seeds = st.integers(0, 2**63 - 1)
epochs = st.integers(0, 2**40)
sizes = st.integers(1, 500)


def epoch_of(order: Order, epoch: int = 0) -> list[int]:
    length = order.lengths.of(epoch)
    assert length is not None
    return order.ids(Span(epoch, 0, length)).tolist()


def shuffled(num_samples: int, seed: int) -> Order:
    return Shuffled().order(num_samples, seed, batch=1)


@given(num=st.integers(0, 10_000), num_replicas=st.integers(1, 50))
def test_shares_cover_everything_once_and_are_even(num: int, num_replicas: int) -> None:
    shares = [share(num, replica, num_replicas) for replica in range(num_replicas)]
    assert [place for part in shares for place in part] == list(range(num))
    assert len(shares[0]) == max(map(len, shares))
    assert len(shares[0]) - min(map(len, shares)) <= 1


@given(num_samples=sizes, seed=seeds, epoch=epochs)
def test_an_epoch_is_a_permutation_and_always_the_same_one(num_samples: int, seed: int, epoch: int) -> None:
    once, again = epoch_of(shuffled(num_samples, seed), epoch), epoch_of(shuffled(num_samples, seed), epoch)
    assert once == again
    assert sorted(once) == list(range(num_samples))


@given(num_samples=st.integers(30, 500), seed=seeds, other=seeds, epoch=epochs, later=epochs)
def test_epochs_and_seeds_have_orders_of_their_own(
    num_samples: int, seed: int, other: int, epoch: int, later: int
) -> None:
    order = epoch_of(shuffled(num_samples, seed), epoch)
    assert (order == epoch_of(shuffled(num_samples, other), epoch)) == (seed == other)
    assert (order == epoch_of(shuffled(num_samples, seed), later)) == (epoch == later)


@pytest.mark.parametrize(
    ("num", "epoch", "first"),
    [
        (1000, 0, [887, 535, 753, 631, 201, 630, 807, 34]),
        (1000, 1, [977, 508, 917, 70, 723, 28, 456, 681]),
        (10_000_000, 0, [9957333, 280103, 8877045, 8039027, 2672720, 5591327, 7690356, 6138710]),
        (10_000_000, 1, [5918561, 5731032, 2636437, 974875, 6051292, 5948457, 734760, 2250773]),
    ],
)
def test_the_order_is_the_one_of_all_earlier_releases(num: int, epoch: int, first: list[int]) -> None:
    # A checkpoint holds a position in this order: if these numbers change, old checkpoints repeat and skip samples.
    assert shuffled(num, seed=7).ids(Span(epoch, 0, 8)).tolist() == first


@pytest.mark.parametrize("num", [SORTED_UP_TO + 1, 3 * BLOCK - 7, 200_000])
def test_long_orders_are_permutations_too_though_no_place_knows_of_another(num: int) -> None:
    order = shuffled(num, seed=3)
    spans = [Span(2, start, min(start + 10_007, num)) for start in range(0, num, 10_007)]
    ids = np.concatenate([order.ids(span) for span in spans])
    assert np.array_equal(np.sort(ids), np.arange(num))
    assert np.array_equal(ids, permuted(np.arange(num), num, (3, 2)))
    # Not only a permutation, a random one: neighbours are far apart, and a place says nothing about its id.
    assert abs(np.corrcoef(np.arange(num), ids)[0, 1]) < 0.02
    assert abs(np.abs(np.diff(ids)).mean() / num - 1 / 3) < 0.01


def test_a_billion_samples_cost_one_block() -> None:
    order = shuffled(10**9, seed=0)
    ids = order.ids(Span(0, 999_999_000, 10**9))
    assert len(set(ids.tolist())) == 1000
    assert ids.min() >= 0
    assert ids.max() < 10**9
    assert max(len(block) for block in order._kept.values()) <= BLOCK


def test_a_long_order_fills_the_range_evenly() -> None:
    counts = np.histogram(shuffled(10**7, seed=1).ids(Span(0, 0, 100_000)), bins=100, range=(0, 10**7))[0]
    chi_square = float(((counts - 1000) ** 2 / 1000).sum())
    assert 50 < chi_square < 160  # 99 degrees of freedom


def test_small_orders_are_drawn_from_all_there_are() -> None:
    seen = [tuple(permuted(np.arange(4), 4, (seed, 0)).tolist()) for seed in range(4800)]
    counts = np.array([seen.count(one) for one in set(seen)])
    assert len(counts) == 24
    assert float(((counts - 200) ** 2 / 200).sum()) < 50  # 23 degrees of freedom


@given(start=st.integers(0, 50), length=st.integers(0, 50), key=seeds)
def test_uniform_numbers_are_the_same_however_they_are_asked_for(start: int, length: int, key: int) -> None:
    row = uniforms((key, 0), 0, 100)
    assert np.array_equal(uniforms((key, 0), start, start + length), row[start : start + length])
    assert 0 <= row.min() <= row.max() < 1


def test_numbers_of_a_sample_do_not_depend_on_its_batch() -> None:
    ids = np.arange(20_000)
    all_of_them = sample_uniforms(ids, 2, key=5)
    assert np.array_equal(sample_uniforms(ids[[7, 3]], 2, key=5), all_of_them[[7, 3]])
    assert not np.array_equal(sample_uniforms(ids, 2, key=6), all_of_them)
    counts = np.histogram(all_of_them, bins=40, range=(0, 1))[0]
    assert float(((counts - 1000) ** 2 / 1000).sum()) < 80  # 39 degrees of freedom
    assert abs(np.corrcoef(all_of_them[:, 0], all_of_them[:, 1])[0, 1]) < 0.03


def test_draws_for_a_batch_are_those_of_its_samples() -> None:
    import torch

    def drawn(ids: list[int], epoch: int = 0, seed: int = 0) -> dict[int, tuple[float, float, int]]:
        draws = Draws(np.array(ids), seed, epoch, torch.device("cpu"))
        first, second = draws.uniform().tolist(), draws.uniform(3)[:, 2].tolist()
        return dict(zip(ids, zip(first, second, draws.integers(2, 5).tolist(), strict=True), strict=True))

    whole = drawn([0, 1, 2, 3])
    assert drawn([2, 0]) == {2: whole[2], 0: whole[0]}
    assert len({value for values in (whole, drawn([0, 1], 1), drawn([0, 1], 0, 1)) for value in values.values()}) == 8
    assert {number for _, _, number in drawn(list(range(50))).values()} == {2, 3, 4}


def test_without_shuffling_the_order_is_the_data() -> None:
    order = Sequential().order(5, seed=0, batch=2)
    assert epoch_of(order, 0) == epoch_of(order, 3) == [0, 1, 2, 3, 4]
    assert order.ids(Span(0, 0, 5)).dtype == shuffled(5, 0).ids(Span(0, 0, 5)).dtype == np.int64


@given(
    rest=sizes,
    first=st.lists(st.integers(1, 60), max_size=4),
    batch=st.integers(1, 600),
    cut=st.integers(0, 2000),
)
def test_spans_walk_each_epoch_once_and_never_cross_into_the_next(
    rest: int, first: list[int], batch: int, cut: int
) -> None:
    lengths = Lengths(rest, tuple(first))
    position = cut
    first_epoch, first_place = lengths.locate(cut)
    assert lengths.begin(first_epoch) + first_place == cut
    places: list[tuple[int, int]] = []
    while position < lengths.begin(first_epoch + 2):
        span = lengths.span(position, batch)
        assert 1 <= len(span) <= batch
        assert lengths.begin(span.epoch) + span.start == position
        places += [(span.epoch, place) for place in range(span.start, span.stop)]
        position += len(span)
    every = [(epoch, place) for epoch in (first_epoch, first_epoch + 1) for place in range(lengths.of(epoch) or 0)]
    assert places == every[first_place:]


def test_the_beginning_of_an_epoch_can_be_computed_ahead_once() -> None:
    requested = []
    order = shuffled(100, seed=1)
    find = order.find
    counted = replace(order, find=lambda *where: (requested.append(where), find(*where))[1], _kept={})
    counted.prepare(3)
    assert requested == [(3, 0, 100)]
    assert epoch_of(counted, 3) == epoch_of(order, 3)
    assert len(requested) == 1
    # An order whose epochs may depend on what happens before them is left until it is requested.
    replace(counted, in_blocks=False).prepare(4)
    assert len(requested) == 1
