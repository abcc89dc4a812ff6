"""Every sampler keeps its promise, and says what is wrong with what it is given."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from evenstep import samplers
from evenstep.data.adapt import adapt, as_sampler
from evenstep.data.augmentation import SampleTransform
from evenstep.data.dataset import SubsetSource, Table
from evenstep.errors import PlanError, TaskError
from evenstep.sampling.order import Lengths, Order, Span

seeds = st.integers(0, 2**40)


def epoch_of(order: Order, epoch: int = 0) -> list[int]:
    length = order.lengths.of(epoch)
    assert length is not None
    return order.ids(Span(epoch, 0, length)).tolist()


def fetch(source: Any, ids: Any) -> Any:
    return source.fetch(ids, ids, SampleTransform(0, 0))


def chi_square(counts: Any, expected: Any) -> float:
    return float(((np.asarray(counts) - np.asarray(expected)) ** 2 / np.asarray(expected)).sum())


# Weighted.


def test_weighted_draws_follow_the_weights() -> None:
    weights = torch.tensor([1.0, 0, 2, 3, 0, 4])
    order = samplers.Weighted(weights, num_samples=60_000).order(6, seed=0, batch=8)
    counts = np.bincount(epoch_of(order), minlength=6)
    assert counts[[1, 4]].tolist() == [0, 0]
    assert chi_square(counts[[0, 2, 3, 5]], [6000, 12000, 18000, 24000]) < 16.3  # 3 degrees of freedom, 1 in 1000
    assert order.repeats


@given(num=st.integers(1, 200), seed=seeds, start=st.integers(0, 150), length=st.integers(1, 50))
def test_weighted_draws_are_a_function_of_their_place(num: int, seed: int, start: int, length: int) -> None:
    weights = np.arange(num) + 1.0
    order = samplers.Weighted(weights, num_samples=200).order(num, seed, batch=8)
    once = order.ids(Span(3, start, start + length)).tolist()
    again = samplers.Weighted(weights, num_samples=200).order(num, seed, batch=9)
    assert epoch_of(again, 3)[start : start + length] == once


@given(
    weights=st.lists(st.sampled_from([0.0, 0.5, 1.0, 7.0]), min_size=1, max_size=60).filter(any),
    seed=seeds,
    data=st.data(),
)
def test_without_replacement_nothing_comes_twice_and_weight_0_never(
    weights: list[float], seed: int, data: st.DataObject
) -> None:
    possible = {id_ for id_, weight in enumerate(weights) if weight}
    num = data.draw(st.integers(1, len(possible)))
    order = samplers.Weighted(weights, num, replacement=False).order(len(weights), seed, batch=8)
    drawn = epoch_of(order)
    assert len(drawn) == len(set(drawn)) == num
    assert set(drawn) <= possible
    assert not order.repeats


def test_without_replacement_the_first_draw_follows_the_weights() -> None:
    sampler = samplers.Weighted([1, 2, 3, 4], replacement=False)
    firsts = [sampler.order(4, seed, batch=1).ids(Span(0, 0, 1)).item() for seed in range(6000)]
    assert chi_square(np.bincount(firsts), [600, 1200, 1800, 2400]) < 16.3


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        (samplers.Weighted([1.0] * 9), "weights has 9 entries and the data 10 samples; give one number for each"),
        (samplers.Weighted(torch.ones(10, 2)), r"weights has shape \(10, 2\) and the data 10 samples"),
        (samplers.Weighted([0.0] * 10), "all weights are 0, so no sample can be drawn"),
        (samplers.Weighted([1.0] * 9 + [-1]), "the weight of sample 9 is -1.0; weights are finite and not below 0"),
        (samplers.Weighted([1.0] * 9 + [float("nan")]), "the weight of sample 9 is nan"),
        (samplers.Weighted([1.0] * 10, num_samples=0), "num_samples is 0; it is an integer from 1 up"),
        (
            samplers.Weighted([1.0] * 5 + [0.0] * 5, num_samples=6, replacement=False),
            "num_samples is 6 without replacement, and 5 samples have a weight above 0",
        ),
        (samplers.Balanced([0] * 11), "labels has 11 entries and the data 10 samples"),
        (samplers.ByLength([1] * 9), "lengths has 9 entries and the data 10 samples"),
        (samplers.ByLength([1] * 10, pool=0), "pool is 0; it is a number of batches from 1 up"),
        (samplers.Curriculum([1.0] * 9), "difficulty has 9 entries and the data 10 samples"),
        (samplers.Curriculum([float("nan")] * 10), "the difficulty of some samples is NaN"),
        (
            samplers.Curriculum([1.0] * 10, pace=(0.0, 1.0)),
            r"pace is \(0.0, 1.0\); give the fraction of",
        ),
        (samplers.Curriculum([1.0] * 10, pace=2), r"pace is \(2,\); give the fraction of the data"),
        (samplers.Weighted([1.0] * 10, num_samples=2.5), "num_samples is 2.5; it is an integer"),  # type: ignore[arg-type]
        (samplers.Weighted(["a"] * 10), "weights holds <U1, not numbers; give one number for each sample"),
        (samplers.ByLength(["10", "9"] * 5), "lengths holds <U2, not numbers"),
        (samplers.Weighted([[1.0], [1.0, 2.0]] * 5), "weights cannot be read as one number for each sample"),
        (samplers.Subset([1, 10]), "the subset gave the id 10, and the data has 10 samples: ids range from 0 to 9"),
        (samplers.Subset([-1]), "the subset gave the id -1"),
        (samplers.Subset([3, 3]), "the subset gave the id 3 2 times in one epoch"),
        (samplers.Subset([]), "a subset is a non-empty list of sample ids, which are integers"),
        (samplers.Subset([0.5]), "a subset is a non-empty list of sample ids, which are integers"),
    ],
)
def test_what_cannot_be_followed_is_refused(sampler: samplers.Sampler, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        sampler.order(10, seed=0, batch=4)


def test_weights_may_be_tensors_of_any_kind() -> None:
    plain = epoch_of(samplers.Weighted([1.0, 2.0, 4.0]).order(3, seed=0, batch=2))
    for tensor in (torch.tensor([1.0, 2, 4], requires_grad=True), torch.tensor([1.0, 2, 4], dtype=torch.bfloat16)):
        assert epoch_of(samplers.Weighted(tensor).order(3, seed=0, batch=2)) == plain


# Balanced.


def test_classes_that_do_not_fit_into_one_epoch_have_their_turn_in_the_next() -> None:
    order = samplers.Balanced(list("abcdefghij"), num_samples=3).order(10, seed=0, batch=2)
    assert Counter(id_ for epoch in range(10) for id_ in epoch_of(order, epoch)) == dict.fromkeys(range(10), 3)


@given(labels=st.lists(st.integers(0, 4), min_size=1, max_size=80), seed=seeds, num=st.integers(1, 120))
def test_classes_come_equally_often_and_so_do_the_samples_of_each(labels: list[int], seed: int, num: int) -> None:
    order = samplers.Balanced(labels, num_samples=num).order(len(labels), seed, batch=8)
    for epochs in (1, 3):
        drawn = Counter(id_ for epoch in range(epochs) for id_ in epoch_of(order, epoch))
        of_class = Counter(dict.fromkeys(labels, 0))
        for id_, count in drawn.items():
            of_class[labels[id_]] += count
        assert max(of_class.values()) - min(of_class.values()) <= 1
        for label in of_class:
            counts = [drawn[id_] for id_ in range(len(labels)) if labels[id_] == label]
            assert max(counts) - min(counts) <= 1


def test_balanced_epochs_are_shuffled_and_differ() -> None:
    labels = [0] * 90 + [1] * 10
    order = samplers.Balanced(labels).order(100, seed=0, batch=10)
    first, second = epoch_of(order, 0), epoch_of(order, 1)
    assert first != second
    halves = [sum(labels[id_] for id_ in part) for part in (first[:50], first[50:])]
    assert sum(halves) == 50
    assert min(halves) > 12
    # Each of the ten rare samples five times an epoch; of the ninety common ones, all but ten within two epochs.
    assert Counter(id_ for id_ in first if id_ >= 90) == dict.fromkeys(range(90, 100), 5)
    assert len({id_ for id_ in first + second if id_ < 90}) == 90


# By length.


@given(num=st.integers(1, 300), batch=st.integers(1, 20), pool=st.integers(1, 6), seed=seeds)
def test_batches_by_length_hold_every_sample_once(num: int, batch: int, pool: int, seed: int) -> None:
    order = samplers.ByLength(np.arange(num) % 17, pool).order(num, seed, batch)
    assert sorted(epoch_of(order)) == list(range(num))


def test_batches_by_length_hold_samples_of_like_length_in_no_order() -> None:
    lengths = np.random.default_rng(0).integers(1, 1000, 1280)
    order = samplers.ByLength(lengths, pool=10).order(1280, seed=0, batch=32)
    batches = lengths[epoch_of(order)].reshape(-1, 32)
    padded = (batches.max(1) * 32).sum() / lengths.sum()
    shuffled = lengths[epoch_of(samplers.Shuffled().order(1280, 0, 32))].reshape(-1, 32)
    assert padded < 1.12 < 1.7 < (shuffled.max(1) * 32).sum() / lengths.sum()
    means = batches.mean(1)[:10]
    assert sorted(means) != list(means) != sorted(means, reverse=True)


# Curriculum.


@given(num=st.integers(1, 200), pace=st.lists(st.floats(0.01, 1), max_size=4), seed=seeds, epoch=st.integers(0, 6))
def test_a_curriculum_uses_the_easiest_part_each_sample_once(
    num: int, pace: list[float], seed: int, epoch: int
) -> None:
    difficulty = np.random.default_rng(1).permutation(num)
    order = samplers.Curriculum(difficulty, pace).order(num, seed, batch=8)
    part = pace[epoch] if epoch < len(pace) else 1.0
    in_use = max(1, round(part * num))
    assert order.lengths.of(epoch) == in_use
    assert sorted(difficulty[epoch_of(order, epoch)]) == list(range(in_use))


def test_a_curriculum_shuffles_what_is_in_use() -> None:
    order = samplers.Curriculum(np.arange(100)).order(100, seed=0, batch=8)
    assert [order.lengths.of(epoch) for epoch in range(5)] == [25, 50, 75, 100, 100]
    assert epoch_of(order, 0) != sorted(epoch_of(order, 0))
    assert epoch_of(order, 3) != epoch_of(order, 4)


# Subset.


@given(ids=st.lists(st.integers(0, 99), min_size=1, unique=True), seed=seeds)
def test_a_subset_holds_its_samples_once(ids: list[int], seed: int) -> None:
    assert sorted(epoch_of(samplers.Subset(ids).order(100, seed, 8))) == sorted(ids)
    assert epoch_of(samplers.Subset(torch.tensor(ids), shuffle=False).order(100, seed, 8)) == ids


# torch's, and the user's own.


class Mine(Sampler[int]):
    """Draws from every generator there is."""

    def __init__(self, num: int, generator: torch.Generator | None = None) -> None:
        self.num = num
        self.generator = generator

    def __len__(self) -> int:
        return self.num

    def __iter__(self) -> Iterator[int]:
        ids = torch.randperm(self.num, generator=self.generator).tolist()
        random.shuffle(ids)
        yield from np.random.permutation(ids).tolist()


class Told(Mine):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter((np.arange(self.num) + self.epoch) % self.num)


class Stubborn(Mine):
    """Has a state of its own, which nothing can put back."""

    asked = 0

    def __iter__(self) -> Iterator[int]:
        self.asked += 1
        return iter((np.arange(self.num) + self.asked) % self.num)


class Shrinking(Told):
    def __iter__(self) -> Iterator[int]:
        return iter(range(self.num - self.epoch))


@pytest.mark.parametrize("generator", [None, torch.Generator()])
def test_a_sampler_of_ones_own_depends_on_seed_and_epoch_alone(generator: torch.Generator | None) -> None:
    order = as_sampler(Mine(50, generator)).order(50, seed=3, batch=8)
    first, second = epoch_of(order, 0), epoch_of(order, 1)
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    random.random(), np.random.rand(), torch.rand(1)
    again = as_sampler(Mine(50, generator)).order(50, seed=3, batch=8)
    assert [epoch_of(again, 1), epoch_of(again, 0)] == [second, first]
    assert epoch_of(as_sampler(Mine(50, generator)).order(50, seed=4, batch=8)) != first


def test_listing_a_sampler_disturbs_no_generator() -> None:
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    as_sampler(Mine(50)).order(50, seed=3, batch=8)
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before


def test_a_sampler_is_told_its_epoch() -> None:
    order = as_sampler(Told(4)).order(4, seed=0, batch=2)
    assert [epoch_of(order, epoch) for epoch in (0, 3, 1)] == [[0, 1, 2, 3], [3, 0, 1, 2], [1, 2, 3, 0]]


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        (Stubborn(5), "Stubborn gives a different order when it is iterated twice for the same epoch"),
        ([0, 1, 1, 2], "list gave the id 1 2 times in one epoch; if that is intended, use sampler=samplers.Custom"),
        ([0, 12], "list gave the id 12, and the data has 10 samples: ids range from 0 to 9"),
        ([[0, 1], [2, 3]], r"list gave \[0, 1\]; a sampler gives one sample id at a time"),
        ([], "list is empty; it must give at least one id"),
        ([*range(8), 8.7], r"list gave 8.7; a sampler gives one sample id at a time, an integer"),
        (BatchSampler(range(10), 2, False), "a BatchSampler was given as the sampler; give a sampler of single ids"),
        (7, "the sampler is a int; give one of evenstep.samplers, or a torch Sampler"),
        ((id_ for id_ in range(3)), "generator has no length; give it a __len__"),
    ],
)
def test_samplers_that_cannot_be_followed_are_refused(sampler: Any, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        as_sampler(sampler).order(10, seed=0, batch=2)


def test_a_sampler_whose_length_changes_is_refused_when_it_does() -> None:
    order = as_sampler(Shrinking(5)).order(5, seed=0, batch=2)
    with pytest.raises(TaskError, match="Shrinking gave 3 ids in epoch 3 and its length is 5; make them agree"):
        epoch_of(order, 2)


def test_a_sampler_that_says_so_may_repeat() -> None:
    order = samplers.Custom([0, 1, 1, 2], repeats=True).order(3, seed=0, batch=2)
    assert epoch_of(order) == [0, 1, 1, 2]
    assert order.repeats


DATA = torch.arange(10)


@pytest.mark.parametrize(
    ("given", "like"),
    [
        (SequentialSampler(DATA), samplers.Sequential()),
        (RandomSampler(DATA), samplers.Shuffled()),
        (RandomSampler(DATA, num_samples=4), samplers.Weighted([1.0] * 10, 4, replacement=False)),
        (RandomSampler(DATA, replacement=True, num_samples=30), samplers.Weighted([1.0] * 10, 30)),
        (SubsetRandomSampler([3, 5, 9]), samplers.Subset([3, 5, 9])),
        (WeightedRandomSampler([0.0, 1.0] * 5, 20), samplers.Weighted([0.0, 1.0] * 5, 20)),
        (WeightedRandomSampler([0.0, 1.0] * 5, 3, False), samplers.Weighted([0.0, 1.0] * 5, 3, replacement=False)),
        (DistributedSampler(DATA, 2, 1), samplers.Shuffled()),  # type: ignore[arg-type]
        (DistributedSampler(DATA, 2, 1, shuffle=False), samplers.Sequential()),  # type: ignore[arg-type]
    ],
    ids=lambda value: type(value).__name__,
)
def test_torchs_samplers_become_ours(given: Any, like: samplers.Sampler) -> None:
    ours, reference = as_sampler(given).order(10, seed=5, batch=2), like.order(10, seed=5, batch=2)
    assert epoch_of(ours, 2) == epoch_of(reference, 2)
    assert ours.repeats == reference.repeats


def test_a_distributed_sampler_says_only_whether_to_shuffle_and_its_batch_is_everybodys() -> None:
    adopted = adapt(DataLoader(DATA, 4, sampler=DistributedSampler(DATA, 2, 1, shuffle=False)))  # type: ignore[arg-type]
    assert isinstance(adopted.sampler, samplers.Sequential)
    assert adopted.batch == 4
    assert adopted.notes == [
        "the train DataLoader's DistributedSampler is not needed: each rank gets its share of the global batch, and "
        "batch_size=4 is the global batch of all ranks"
    ]


def test_a_sampler_that_goes_round_again_is_refused() -> None:
    with pytest.raises(TaskError, match="gives some of them twice in an epoch; train for more epochs instead"):
        as_sampler(RandomSampler(DATA, num_samples=15))


# DataLoaders.


def joined(samples: list[Any]) -> Any:
    return torch.stack([image for image, _ in samples]), [label for _, label in samples]


PAIRS = [(torch.full((2,), float(id_)), id_) for id_ in range(10)]


def test_a_dataloader_is_taken_apart() -> None:
    loader = DataLoader(PAIRS, 4, sampler=SubsetRandomSampler([1, 2, 3]), num_workers=2, collate_fn=joined)  # type: ignore[arg-type]
    adopted = adapt(loader)
    order = adopted.order(seed=0, batch=2)
    assert order is not None
    assert sorted(epoch_of(order)) == [1, 2, 3]
    assert (adopted.batch, adopted.workers, adopted.notes) == (4, 2, [])
    assert fetch(adopted.source, np.array([5, 6]))[1] == [5, 6]


@pytest.mark.parametrize(("shuffle", "name"), [(True, "shuffled"), (False, "in order")])
def test_a_dataloaders_shuffling_is_taken_over(shuffle: bool, name: str) -> None:
    order = adapt(DataLoader(PAIRS, 4, shuffle=shuffle)).order(0, 4)  # type: ignore[arg-type]
    assert order is not None
    assert order.name == name


def test_what_the_task_says_goes_before_what_the_dataloader_says() -> None:
    loader = DataLoader(PAIRS, 4, shuffle=True, collate_fn=joined)  # type: ignore[arg-type]
    adopted = adapt(loader, collate=len, sampler=samplers.Sequential())  # type: ignore[arg-type]
    assert fetch(adopted.source, np.array([5, 6])) == 2
    order = adopted.order(0, 4)
    assert order is not None
    assert order.name == "in order"


def test_a_dataloader_with_torchs_own_batch_sampler_is_taken_apart_too() -> None:
    inner = SubsetRandomSampler([1, 2, 3])
    adopted = adapt(DataLoader(PAIRS, batch_sampler=BatchSampler(inner, 4, False)))  # type: ignore[arg-type]
    order = adopted.order(seed=0, batch=2)
    assert order is not None
    assert sorted(epoch_of(order)) == [1, 2, 3]
    assert adopted.batch == 4


class Sorted(Mine):
    """Has something called `order` of its own."""

    order = (2, 1, 0)

    def __iter__(self) -> Iterator[int]:
        yield from torch.tensor(self.order)


def test_a_sampler_may_have_an_order_of_its_own_and_give_tensors() -> None:
    assert epoch_of(as_sampler(Sorted(3)).order(3, seed=0, batch=2)) == [2, 1, 0]


@pytest.mark.parametrize("how", [{"drop_last": True}, {"batch_sampler": True}], ids=["drop_last", "batch sampler"])
def test_the_short_last_batch_is_dropped_in_training_and_an_evaluation_counts_all(how: dict[str, Any]) -> None:
    if "batch_sampler" in how:
        loader = DataLoader(PAIRS, batch_sampler=BatchSampler(range(10), 4, drop_last=True))  # type: ignore[arg-type]
    else:
        loader = DataLoader(PAIRS, 4, **how)  # type: ignore[arg-type]
    train, valid = adapt(loader), adapt(loader, what="valid")
    assert (train.drop_last, train.notes) == (True, [])
    assert valid.notes == ["the valid DataLoader's drop_last is ignored: an evaluation counts every sample"]
    order = train.order(seed=0, batch=4)
    assert order is not None
    assert (order.lengths, order.dropped) == (Lengths(8), Lengths(2))


def test_dropping_nothing_changes_nothing_and_dropping_all_is_refused() -> None:
    order = samplers.Shuffled().order(12, seed=0, batch=4)
    assert order.drop_last(4) is order
    with pytest.raises(
        PlanError, match="drop_last leaves nothing of an epoch of 12 samples with a global batch of 13; "
    ):
        order.drop_last(13)
    growing = samplers.Curriculum(range(12), pace=(0.25,)).order(12, seed=0, batch=4)
    with pytest.raises(
        PlanError, match="leaves nothing of an epoch of 3 samples with a global batch of 4; use --batch 3"
    ):
        growing.drop_last(4)


class ByTwos(BatchSampler):
    pass


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (
            DataLoader(PAIRS, batch_sampler=ByTwos(range(10), 2, False)),  # type: ignore[arg-type]
            r"has a custom batch_sampler \(ByTwos\), but evenstep forms the batches",
        ),
        (DataLoader(PAIRS, batch_size=None), "has batch_size=None: its dataset returns batches; let it return samples"),  # type: ignore[arg-type]
    ],
)
def test_dataloaders_that_cannot_be_taken_over_say_why(loader: DataLoader[Any], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        adapt(loader)


def test_a_split_of_tensors_is_still_read_a_batch_at_a_time() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(20.0), torch.arange(20))
    part, _ = torch.utils.data.random_split(data, [12, 8], torch.Generator().manual_seed(0))
    source = adapt(part).source
    assert isinstance(source, SubsetSource)
    assert isinstance(source._source, Table)
    ids = np.array([4, 0, 11])
    assert fetch(source, ids)[1].tolist() == [part.indices[id_] for id_ in ids]
    assert not source.is_slow(augments=False)


def test_the_same_order_has_the_same_name_and_another_one_has_not() -> None:
    orders = [
        samplers.Shuffled(),
        samplers.Sequential(),
        samplers.Weighted([1.0, 2] * 5),
        samplers.Weighted([2.0, 1] * 5),
        samplers.Balanced([0, 1] * 5),
        samplers.ByLength([0, 1] * 5),
        samplers.Curriculum([0, 1] * 5),
        samplers.Curriculum([1, 0] * 5),
        samplers.Subset([1, 2]),
        samplers.Subset([2, 1]),
    ]
    names = [[(order.name, order.identity) for one in orders for order in [one.order(10, 0, 4)]] for _ in range(2)]
    assert names[0] == names[1]
    assert len(set(names[0])) == len(orders)
