"""Which process reads what: every sample as often as its sampler promises, however the batch is cut up."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

import evenstep
from evenstep import samplers
from evenstep.data.adapt import adapt, per_rank
from evenstep.data.loader import Batch, Loader, MicroBatch
from evenstep.data.prefetch import LoaderOptions
from evenstep.distributed.world import World
from evenstep.errors import PlanError, TaskError
from evenstep.plan import Plan
from evenstep.sampling.batch_shares import smallest_micro_batch
from evenstep.sampling.order import Lengths
from tests.marks import first_is_quick, num_examples

CPU = torch.device("cpu")


def worlds(size: int, replicas: int = 1) -> list[World]:
    return [World(rank, size, (CPU,) * replicas) for rank in range(size)]


def open_loader(data: Any, world: World, batch: int, sampler: Any = None, **how: Any) -> Loader:
    adopted = adapt(data, how.pop("collate", None), sampler)
    reading = LoaderOptions(**{"workers": 0, **how})
    return Loader(adopted.source, adopted.order(reading.seed, batch), world, batch, reading)


def loaders(data: Any, batch: int, team: list[World], sampler: Any = None, **how: Any) -> list[Loader]:
    return [open_loader(data, world, batch, sampler, **how) for world in team]


def per_replica(batch: Batch) -> list[MicroBatch]:
    return [micro_batch for micro_batch in batch.micro_batches for micro_batch in micro_batch]


def step_ids(batches: tuple[Batch, ...]) -> list[int]:
    """The ids that all ranks together read in one step, in the global order."""
    for batch in batches:
        batch.finish()
    return [id_ for batch in batches for id_ in batch.ids.tolist()]


def epoch(team: list[Loader]) -> Iterator[list[int]]:
    return map(step_ids, zip(*team, strict=True))


class Numbers(IterableDataset[Any]):
    """0 to n - 1, one after the other."""

    def __init__(self, num: int) -> None:
        self.num = num

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.arange(self.num)


def weights(num: int) -> np.ndarray[Any, Any]:
    return (np.arange(num) % 7 + 0.5).astype(np.float64)


SAMPLERS: dict[str, Callable[[int], Any]] = {
    "shuffled": lambda num: samplers.Shuffled(),
    "in order": lambda num: samplers.Sequential(),
    "weighted": lambda num: samplers.Weighted(weights(num)),
    "weighted once": lambda num: samplers.Weighted(weights(num), replacement=False),
    "balanced": lambda num: samplers.Balanced(np.arange(num) % 5 // 2),
    "by length": lambda num: samplers.ByLength(np.arange(num) % 11, pool=3),
    "curriculum": lambda num: samplers.Curriculum(-np.arange(num), pace=(0.3, 0.6)),
    "subset": lambda num: samplers.Subset(np.arange(0, num, 2)),
    "own": lambda num: list(reversed(range(num))),
}
sizes = st.integers(1, 5)
accumulations = st.integers(1, 3)
kinds = st.sampled_from(sorted(SAMPLERS))


@settings(max_examples=num_examples(150), deadline=None)
@given(
    num=st.integers(1, 5000),
    batch=st.integers(1, 700),
    size=sizes,
    replicas=st.integers(1, 3),
    accumulate=accumulations,
    kind=kinds,
    start_epoch=st.integers(0, 4),
)
def test_all_ranks_together_read_what_one_process_reads_and_what_the_sampler_promises(
    num: int, batch: int, size: int, replicas: int, accumulate: int, kind: str, start_epoch: int
) -> None:
    data = torch.arange(num)
    batch = max(batch, num // 40 + 1)
    team = loaders(data, batch, worlds(size, replicas), SAMPLERS[kind](num), accumulate=accumulate)
    (alone,) = loaders(data, batch, worlds(1), SAMPLERS[kind](num))
    for loader in (alone, *team):
        loader.position = loader.lengths.begin(start_epoch)
    steps = list(epoch(team))
    assert steps == list(epoch([alone]))
    assert {len(step) for step in steps[:-1]} <= {batch}
    counts = Counter(id_ for step in steps for id_ in step)
    order = alone.order
    assert order is not None
    assert counts.total() == order.lengths.of(start_epoch)
    assert order.repeats or set(counts.values()) == {1}
    if kind in ("shuffled", "in order", "by length", "own", "weighted once"):
        assert counts.keys() == set(range(num))
    if kind == "subset":
        assert counts.keys() == set(range(0, num, 2))
    if kind == "curriculum":
        in_use = order.lengths.of(start_epoch) or 0
        assert counts.keys() == set(range(num - in_use, num))


@settings(max_examples=num_examples(100), deadline=None)
@given(num=st.integers(8, 500), batch=st.integers(1, 60), size=sizes, kind=kinds, cut=st.integers(0, 30))
def test_dropping_the_last_batch_leaves_whole_ones_in_the_same_order_also_after_a_restart(
    num: int, batch: int, size: int, kind: str, cut: int
) -> None:
    data, batch = torch.arange(num), min(batch, num // 4)
    whole = DataLoader(data, batch, sampler=SAMPLERS["own"](num), drop_last=True)  # type: ignore[arg-type]
    team = loaders(whole, batch, worlds(size), SAMPLERS[kind](num))
    (alone,) = loaders(data, batch, worlds(1), SAMPLERS[kind](num))
    steps = [step for _ in range(2) for step in epoch(team)]
    assert steps == [step for _ in range(2) for step in epoch([alone]) if len(step) == batch]
    assert [loader.epoch for loader in team] == [2] * size
    before, on = loaders(whole, batch, worlds(1) * 2, SAMPLERS[kind](num))
    taken = list(islice(epoch([before]), cut))
    on.load_state_dict(before.state_dict())
    while on.epoch < 2:
        taken += epoch([on])
    assert taken == steps


@settings(max_examples=num_examples(100), deadline=None)
@given(
    num=st.integers(1, 300),
    part=st.integers(1, 40),
    size=st.integers(2, 4),
    accumulate=accumulations,
    kind=kinds,
    cut=st.integers(0, 20),
)
def test_every_rank_trains_on_all_of_its_own_data_where_they_are_meant_to_differ(
    num: int, part: int, size: int, accumulate: int, kind: str, cut: int
) -> None:
    def open_own(rank: int) -> Loader:
        adopted = per_rank(adapt(1000 * rank + torch.arange(num), None, SAMPLERS[kind](num)), size)
        reading = LoaderOptions(workers=0, accumulate=accumulate, compare=False)
        return Loader(adopted.source, adopted.order(0, size * part), worlds(size)[rank], size * part, reading)

    before, team = ([open_own(rank) for rank in range(size)] for _ in range(2))
    (alone,) = loaders(torch.arange(num), part, worlds(1), SAMPLERS[kind](num))
    own = [batch.ids.tolist() for _ in range(2) for batch in alone]
    cut = min(cut, len(own) - 1)
    for one, other in zip(before, team, strict=True):
        for _ in range(cut):
            next(iter(one)).finish()
        other.load_state_dict(one.state_dict())
    steps = [batches for _ in range(2 - team[0].epoch) for batches in zip(*team, strict=True)]
    for rank in range(size):
        read = [
            [value for micro_batch in per_replica(batches[rank]) for value in micro_batch.data.tolist()]
            for batches in steps
        ]
        assert [[value - 1000 * rank for value in step] for step in read] == own[cut:]
    assert [batches[0].num_samples for batches in steps] == [size * len(step) for step in own[cut:]]
    everything = [batch.ids.tolist() for batch in team[1].whole_pass()]
    members = alone.order.members if alone.order is not None else None
    assert [id_ - num for step in everything for id_ in step] == (
        np.arange(num) if members is None else members
    ).tolist()


def test_ranks_with_data_of_their_own_share_a_batch_equally() -> None:
    adopted = per_rank(adapt(torch.arange(10)), 3)
    with pytest.raises(PlanError, match=r"batch of 8 does not divide over 3 ranks with separate data; use 6 or 9"):
        adopted.order(0, 8)
    with pytest.raises(PlanError, match=r"batch of 2 does not divide over 3 ranks with separate data; use 3 or 6"):
        adopted.order(0, 2)
    with pytest.raises(TaskError, match="a stream that differs between ranks"):
        per_rank(adapt(Numbers(4)), 2)


@pytest.mark.parametrize("data", [[], torch.zeros(0), Numbers(0)], ids=["list", "tensor", "stream"])
def test_nothing_at_all_is_refused(data: Any) -> None:
    with pytest.raises(TaskError, match="is empty; it needs at least one sample"):
        list(open_loader(data, worlds(1)[0], 4))


@settings(max_examples=num_examples(100), deadline=None)
@given(
    num=st.integers(1, 5000),
    batch=st.integers(1, 500),
    kind=st.sampled_from([*sorted(SAMPLERS), "stream"]),
    cuts=st.lists(st.tuples(st.integers(1, 12), sizes, accumulations), min_size=1, max_size=5),
)
def test_any_chain_of_interruptions_is_the_uninterrupted_order(
    num: int, batch: int, kind: str, cuts: list[tuple[int, int, int]]
) -> None:
    """Each cut: so many steps, by so many processes, with such accumulation; one more step is lost in each crash."""
    batch = max(batch, num // 8 + 1)
    data: Any = Numbers(num) if kind == "stream" else torch.arange(num)
    sampler = None if kind == "stream" else SAMPLERS[kind](num)
    total = sum(steps for steps, _, _ in cuts)
    (alone,) = loaders(data, batch, worlds(1), sampler)
    undisturbed: list[list[int]] = []
    while len(undisturbed) < total:
        undisturbed += islice(epoch([alone]), total - len(undisturbed))
    done: list[list[int]] = []
    state = loaders(data, batch, worlds(1), sampler)[0].state_dict()
    for steps, size, accumulate in cuts:
        team = loaders(data, batch, worlds(size), sampler, accumulate=accumulate)
        for loader in team:
            loader.load_state_dict(state)
        until = len(done) + steps
        while len(done) < until:
            done += islice(epoch(team), until - len(done))
        state = team[0].state_dict()
        next(zip(*team, strict=True), None)  # read, never finished: nobody may miss it
    assert done == undisturbed


@given(num=st.integers(1, 60), batch=st.integers(1, 70), size=sizes, accumulate=accumulations, streams=st.booleans())
def test_every_rank_runs_as_many_micro_batches_and_none_is_without_data(
    num: int, batch: int, size: int, accumulate: int, streams: bool
) -> None:
    data: Any = Numbers(num) if streams else torch.arange(num)
    foreseen = Plan(batch=batch, epochs=1).batch_sizes(Lengths(num))
    for batches in zip(*loaders(data, batch, worlds(size), accumulate=accumulate), strict=True):
        assert len({len(one.micro_batches) for one in batches}) == 1
        assert batches[0].num_samples in foreseen
        smallest = min(len(micro_batch.inputs) for one in batches for micro_batch in per_replica(one))
        assert smallest == smallest_micro_batch(batches[0].num_samples, (1,) * size, accumulate)
        for micro_batch in (micro_batch for one in batches for micro_batch in per_replica(one)):
            assert micro_batch.num_samples == len(micro_batch.ids)
            assert len(micro_batch.inputs) == max(1, micro_batch.num_samples)
            assert micro_batch.data.tolist() == micro_batch.ids.tolist()


def test_ranks_never_see_the_same_stream_of_weighted_samples() -> None:
    seen = [
        [batch.ids.tolist() for batch in one]
        for one in loaders(torch.arange(300), 30, worlds(3), samplers.Weighted(weights(300)))
    ]
    assert len({tuple(map(tuple, of_rank)) for of_rank in seen}) == 3
    assert all(len({tuple(of_rank[step]) for of_rank in seen}) == 3 for step in range(10))


def test_weighted_frequencies_on_three_ranks_match_the_weights_and_one_rank_id_for_id() -> None:
    sampler = samplers.Weighted(weights(50), num_samples=40_000)
    together = [id_ for step in epoch(loaders(torch.arange(50), 500, worlds(3), sampler)) for id_ in step]
    alone = [id_ for step in epoch(loaders(torch.arange(50), 500, worlds(1), sampler)) for id_ in step]
    assert together == alone
    expected = 40_000 * weights(50) / weights(50).sum()
    assert float(((np.bincount(together, minlength=50) - expected) ** 2 / expected).sum()) < 85.4  # 49, 1 in 1000


# Augmentation, and whatever else draws.


def noise(sample: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return sample + torch.rand(3, generator=generator)


class Drawing(Dataset[torch.Tensor]):
    """Draws from every generator that a dataset can reach."""

    def __init__(self, num: int) -> None:
        self.num = num

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, id_: int) -> torch.Tensor:
        return torch.tensor([random.random(), np.random.rand(), torch.rand(()).item()]) + 0 * id_


def shift(batch: torch.Tensor, draws: Any) -> torch.Tensor:
    return batch + draws.uniform(3)


def careless(sample: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Draws from the generators that everybody shares, not from the one it is given."""
    return sample + torch.tensor([random.random(), np.random.randn(), torch.rand(()).item()])


WAYS: dict[str, tuple[Any, dict[str, Any]]] = {
    "augment with draws that everybody shares": (torch.zeros(10, 3), {"augment": careless}),
    "augment": (torch.zeros(10, 3), {"augment": noise}),
    "augment in a stream": (list(torch.zeros(10, 3)), {"augment": noise}),
    "augment_batch": (torch.zeros(10, 3), {"augment_batch": shift}),
    "the dataset itself": (Drawing(10), {}),
}


class Listed(IterableDataset[torch.Tensor]):
    def __init__(self, samples: list[torch.Tensor]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.samples)


def changed(way: str, team: list[World], batch: int, seed: int = 0, start: int = 0, **how: Any) -> dict[int, Any]:
    """What became of each sample in the epoch that holds position `start`."""
    data, more = WAYS[way]
    if "stream" in way:
        data = Listed(data)
    seen = {}
    for world in team:
        loader = open_loader(data, world, batch, seed=seed, **more, **how)
        if "stream" in way:
            loader.load_state_dict({"position": start, "num_finished": 0, "stream": [10] * (start // 10)})
        loader.position = start
        for micro_batch in (micro_batch for one in loader for micro_batch in per_replica(one)):
            seen |= dict(zip(micro_batch.ids.tolist(), micro_batch.data.tolist(), strict=False))
        loader.close()
    return seen


ways = pytest.mark.parametrize("way", WAYS)


@ways
@pytest.mark.parametrize("batch", [1, 3, 10])
@pytest.mark.parametrize("team", [worlds(1), worlds(2), worlds(3), worlds(1, replicas=4)], ids=["1", "2", "3", "dp-4"])
def test_a_sample_is_changed_the_same_way_whoever_reads_it_in_whatever_batch(
    way: str, team: list[World], batch: int
) -> None:
    assert changed(way, team, batch, accumulate=2) == changed(way, worlds(1), 5)


@ways
def test_a_sample_is_changed_the_same_way_by_loader_workers(way: str) -> None:
    assert changed(way, worlds(2), 4, workers=2) == changed(way, worlds(1), 5)


@ways
def test_a_sample_is_changed_the_same_way_after_a_restart(way: str) -> None:
    whole, rest = changed(way, worlds(1), 5, start=10), changed(way, worlds(2), 2, start=14)
    assert len(rest) == 6
    assert rest == {id_: whole[id_] for id_ in rest}


@ways
def test_epochs_seeds_and_samples_are_changed_differently(way: str) -> None:
    seen = [changed(way, worlds(1), 5), changed(way, worlds(1), 5, start=10), changed(way, worlds(1), 5, seed=1)]
    assert len({tuple(value) for one in seen for value in one.values()}) == 30


@ways
@pytest.mark.parametrize("workers", [0, 1])
def test_reading_does_not_touch_the_data_nor_the_generators_of_the_training(way: str, workers: int) -> None:
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    changed(way, worlds(1), 5, workers=workers)
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before
    assert WAYS["augment"][0].abs().sum() == 0


@pytest.mark.parametrize("way", ["augment", "augment_batch", "the dataset itself"])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_that_comes_twice_in_an_epoch_is_changed_in_two_ways(way: str, workers: int) -> None:
    data, how = WAYS[way]
    seen: dict[int, list[tuple[float, ...]]] = {}
    for size in (1, 2):
        told: dict[int, list[tuple[float, ...]]] = {}
        for world in worlds(size):
            loader = open_loader(data, world, 4, samplers.Weighted([1.0] * 10, 40), workers=workers, **how)
            for micro_batch in (micro_batch for batch in loader for micro_batch in per_replica(batch)):
                for id_, value in zip(micro_batch.ids.tolist(), micro_batch.data.tolist(), strict=False):
                    told.setdefault(id_, []).append(tuple(value))
            loader.close()
        assert sum(len(set(values)) for values in told.values()) == 40
        assert not seen or {id_: sorted(values) for id_, values in told.items()} == seen
        seen = {id_: sorted(values) for id_, values in told.items()}


def test_what_collate_draws_is_the_same_after_a_restart_and_by_any_worker() -> None:
    def masked(samples: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(samples) * (torch.rand(len(samples), 3) + random.random() + np.random.randn())

    whole, rest, by_workers = (
        [batch.micro_batches[0][0].data.tolist() for batch in loader]
        for start, workers in ((0, 0), (6, 0), (0, 2))
        for loader in [open_loader(torch.ones(12, 3), worlds(1)[0], 3, collate=masked, workers=workers)]
        if loader.load_state_dict({"position": start, "num_finished": 0}) is None
    )
    assert by_workers == whole
    assert rest == whole[2:]
    assert len({str(batch) for batch in whole}) == 4


# Loader workers.


class Pids(Dataset[int]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, id_: int) -> int:
        return os.getpid()


def test_workers_read_in_turn_and_stay_for_the_next_epoch() -> None:
    loader = open_loader(Pids(), worlds(1)[0], 3, workers=2)
    epochs = [[per_replica(batch)[0].data.tolist() for batch in loader] for _ in range(2)]
    readers = {pid for steps in epochs for step in steps for pid in step}
    assert len(readers) == 2
    assert os.getpid() not in readers
    loader.close()
    for pid in readers:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_leaving_an_epoch_early_and_coming_back_goes_on_with_the_next_step() -> None:
    loader = open_loader(list(range(40)), worlds(1)[0], 4, samplers.Sequential(), workers=2)
    for batch in loader:
        batch.finish()
        if batch.span.start == 8:
            break
    assert next(batch.ids.tolist() for batch in loader) == [12, 13, 14, 15]
    loader.close()


def test_a_pass_over_everything_inside_an_epoch_does_not_disturb_it() -> None:
    loader = open_loader(list(range(24)), worlds(1)[0], 4, samplers.Sequential(), workers=1)
    seen = []
    for batch in loader:
        seen += batch.ids.tolist()
        if batch.span.start == 8:
            assert [id_ for whole in loader.whole_pass() for id_ in whole.ids.tolist()] == list(range(24))
    assert seen == list(range(24))
    loader.close()


def test_of_two_epochs_at_once_by_the_same_workers_the_first_is_told_that_it_ended() -> None:
    loader = open_loader(list(range(40)), worlds(1)[0], 4, workers=1)
    first = iter(loader)
    next(first)
    next(iter(loader))
    with pytest.raises(TaskError, match="a newer iteration of this loader has begun"):
        next(first)
    loader.close()


@pytest.mark.parametrize("kind", ["curriculum", "weighted", "balanced", "shuffled"])
def test_a_pass_over_everything_is_in_order_and_plain(kind: str) -> None:
    loader = open_loader(torch.zeros(10, 3), worlds(1)[0], 4, SAMPLERS[kind](10), augment=noise)
    whole = list(loader.whole_pass())
    assert [id_ for batch in whole for id_ in batch.ids.tolist()] == list(range(10))
    assert torch.cat(list(loader.whole_data())).abs().sum() == 0
    assert loader.position == 0


@pytest.mark.parametrize(
    "spoil",
    [
        lambda sample: lambda: 0,
        lambda sample: sample * torch.ones(1, requires_grad=True),
        lambda sample: (_ for _ in range(2)),
    ],
    ids=["function", "gradient", "generator"],
)
@pytest.mark.timeout(30)
def test_what_cannot_be_sent_from_a_worker_is_said(spoil: Callable[[Any], Any]) -> None:
    loader = open_loader(list(torch.ones(8, 2)), worlds(1)[0], 4, collate=lambda samples: spoil(samples[0]), workers=1)
    with pytest.raises(TaskError, match=r"a batch cannot be sent from a loader worker: .*; return plain tensors"):
        list(loader)
    loader.close()


class Offset(Dataset[int]):
    offset = 0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, id_: int) -> int:
        return id_ + self.offset


def test_a_dataloaders_worker_init_fn_finds_its_dataset() -> None:
    def begin(number: int) -> None:
        info = get_worker_info()
        assert info is not None
        info.dataset.offset = 100

    loader = evenstep.join("single", ("cpu",)).loader(
        DataLoader(Offset(), 4, worker_init_fn=begin, num_workers=1), batch=4
    )
    assert [per_replica(batch)[0].data.tolist() for batch in loader] == [[100, 101, 102, 103], [104, 105, 106, 107]]
    loader.close()


class Spoilt(Dataset[int]):
    def __init__(self, spoil: Callable[[], Any]) -> None:
        self.spoil = spoil

    def __len__(self) -> int:
        return 12

    def __getitem__(self, id_: int) -> int:
        if id_ == 7:
            self.spoil()
        return id_


def divide() -> None:
    raise ZeroDivisionError("no such picture")


@pytest.mark.parametrize("workers", [0, 1])
def test_an_exception_names_the_sample_and_the_users_line(workers: int) -> None:
    loader = open_loader(Spoilt(divide), worlds(1)[0], 4, samplers.Sequential(), workers=workers)
    with pytest.raises(TaskError, match=r"sample 7 cannot be read: ZeroDivisionError: no such picture .*loader.py:\d+"):
        list(loader)
    loader.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_an_exception_in_augment_names_the_sample_and_the_users_line(workers: int) -> None:
    loader = open_loader(torch.zeros(4, 3), worlds(1)[0], 4, augment=lambda sample, _: divide(), workers=workers)
    with pytest.raises(TaskError, match=r"sample \d cannot be augmented: ZeroDivisionError: .*loader.py:\d+"):
        list(loader)
    loader.close()


class Growing(Dataset[int]):
    length = 12

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, id_: int) -> int:
        return id_


def test_a_dataset_whose_length_changes_is_noticed_at_the_next_epoch() -> None:
    data = Growing()
    loader = open_loader(data, worlds(1)[0], 4)
    list(loader)
    data.length = 13
    with pytest.raises(TaskError, match="the train data had 12 samples and now has 13; a dataset must not grow"):
        list(loader)


def test_data_on_the_device_is_read_like_any_other() -> None:
    data = {"x": torch.arange(12.0).reshape(6, 2), "y": np.arange(6)}
    read, resident = (
        [per_replica(batch)[0].data for batch in open_loader(data, worlds(1)[0], 4, resident=resident)]
        for resident in (False, True)
    )
    assert all(torch.equal(a[name], b[name]) for a, b in zip(read, resident, strict=True) for name in data)
    with pytest.raises(PlanError, match="--resident keeps tensors and arrays on the device, without augment"):
        open_loader([1, 2], worlds(1)[0], 2, resident=True)


# Streams.


class Splitting(IterableDataset[torch.Tensor]):
    """Shares itself out among workers, as torch's documentation shows; shuffled anew in every epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info is not None else (0, 1)
        numbers = torch.randperm(23) + 100 * self.epoch
        yield from numbers[first::step]


def values(team: Iterable[Loader]) -> list[list[int]]:
    """What all ranks together read in each step."""
    steps = [
        [value for one in batches for micro_batch in per_replica(one) for value in micro_batch.data.tolist()]
        for batches in zip(*team, strict=True)
    ]
    for loader in team:
        loader.close()
    return steps


@pytest.mark.parametrize(
    ("size", "workers"),
    first_is_quick([(1, 3), (2, 1), (3, 0), (1, 0), (1, 1), (2, 0), (2, 3), (3, 1), (3, 3)], num_quick=3),
)
def test_a_stream_is_the_same_for_any_number_of_ranks_and_workers(size: int, workers: int) -> None:
    team = loaders(Splitting(), 6, worlds(size), workers=workers)
    reference = loaders(Splitting(), 6, worlds(1))
    for number in range(2):
        steps = values(team)
        assert steps == values(reference)
        assert sorted(value - 100 * number for step in steps for value in step) == list(range(23))
        assert [loader.epoch for loader in team] == [number + 1] * size


@pytest.mark.parametrize(("size", "workers"), first_is_quick([(1, 0), (2, 0), (1, 2), (2, 2)], num_quick=2))
@pytest.mark.parametrize(("num", "used"), [(23, 18), (18, 18), (6, 6)])
def test_a_stream_drops_its_short_last_batch_too(size: int, workers: int, num: int, used: int) -> None:
    whole = DataLoader(Numbers(num), 6, drop_last=True)
    team = loaders(whole, 6, worlds(size), workers=workers, drop_last=True)
    for number in range(2):
        assert values(team) == [list(range(start, start + 6)) for start in range(0, used, 6)]
        assert [loader.lengths.first for loader in team] == [(used,) * (number + 1)] * size
    (loader,) = loaders(whole, 6, worlds(1), drop_last=True)
    assert [batch.is_epoch_end for batch in loader] == [False] * (used // 6 - 1) + [True]
    assert sum(len(batch.ids) for batch in loader.whole_pass()) == num


def test_a_stream_of_which_nothing_is_left_is_refused() -> None:
    loader = open_loader(Numbers(5), worlds(1)[0], 6, drop_last=True)
    with pytest.raises(
        TaskError, match="has 5 samples from sample 0 on, and drop_last leaves nothing of them with a gl"
    ):
        list(loader)


def test_a_stream_knows_the_last_step_of_an_epoch_by_then() -> None:
    (loader,) = loaders(Numbers(8), 4, worlds(1))
    assert [batch.is_epoch_end for batch in loader] == [False, True]
    assert loader.is_between_epochs
    assert loader.state_dict()["stream"] == [8]
    with pytest.raises(TypeError, match="a stream has no length before it ends"):
        len(loader)


class Breaking(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(5)
        divide()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_that_fails_says_where(workers: int) -> None:
    loader = open_loader(Breaking(), worlds(1)[0], 2, workers=workers)
    with pytest.raises(TaskError, match=r"the train stream failed at sample 5: ZeroDivisionError: .*loader.py:\d+"):
        list(loader)


def test_a_stream_that_became_shorter_says_so() -> None:
    (loader,) = loaders(Numbers(8), 4, worlds(1))
    loader.load_state_dict({"position": 12, "num_finished": 3})
    with pytest.raises(TaskError, match="the train stream ended before sample 12, from which this run resumes"):
        list(loader)


def test_closing_a_loader_ends_the_workers_of_its_stream() -> None:
    before = set(psutil.Process().children())
    (loader,) = loaders(Numbers(100), 4, worlds(1), workers=2)
    batches = iter(loader)
    next(batches)
    children = set(psutil.Process().children()) - before
    assert len(children) == 2
    loader.close()
    assert psutil.wait_procs(children, timeout=5)[1] == []


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_of_a_stream_is_augmented_once_though_in_place(workers: int) -> None:
    def grow(sample: dict[str, float], generator: torch.Generator) -> dict[str, float]:
        sample["x"] += 1 + 0 * random.random()
        return sample

    class Dicts(IterableDataset[dict[str, float]]):
        def __iter__(self) -> Iterator[dict[str, float]]:
            for _ in range(12):
                yield {"x": 0.0}

    (loader,) = loaders(Dicts(), 4, worlds(1), augment=grow, workers=workers)
    assert [per_replica(batch)[0].data["x"].tolist() for batch in loader] == [[1.0] * 4] * 3
    loader.close()


def test_a_stream_has_no_sampler() -> None:
    with pytest.raises(TaskError, match="the train data is a stream, which comes in its own order"):
        open_loader(Numbers(4), worlds(1)[0], 2, samplers.Shuffled())


def test_samples_of_any_shape_are_joined_by_a_collate() -> None:
    def join(samples: list[dict[str, Any]]) -> dict[str, Any]:
        longest = max(len(sample["tokens"]) for sample in samples)
        padded = torch.tensor([sample["tokens"] + [0] * (longest - len(sample["tokens"])) for sample in samples])
        return {"tokens": padded, "more": {"texts": [sample["text"] for sample in samples], "deep": [(padded, 1)]}}

    data = [{"tokens": list(range(id_ + 1)), "text": "a" * id_} for id_ in range(6)]
    for workers in (0, 1):
        loader = open_loader(data, worlds(1)[0], 4, samplers.Sequential(), collate=join, workers=workers)
        first, second = (per_replica(batch)[0].data for batch in loader)
        assert first["more"]["texts"] == ["", "a", "aa", "aaa"]
        assert second["tokens"].shape == second["more"]["deep"][0][0].shape == (2, 6)
        loader.close()


@pytest.mark.parametrize(("streams", "workers"), [(False, 0), (True, 0), (False, 1)])
def test_shares_may_change_between_two_steps_and_no_sample_is_lost(streams: bool, workers: int) -> None:
    data: Any = Numbers(50) if streams else list(range(50)) if workers else torch.arange(50)
    pair = loaders(data, 10, worlds(2), None if streams else samplers.Sequential(), workers=workers)
    seen: list[int] = []
    sizes: list[list[int]] = []
    for batches in zip(*pair, strict=True):
        seen += step_ids(batches)
        sizes.append([len(batch.ids) for batch in batches])
        if len(sizes) == 2:
            for loader in pair:
                loader.share_out((4, 1))
    assert seen == list(range(50))
    assert sizes == [[5, 5], [5, 5], [8, 2], [8, 2], [8, 2]]
    assert [[len(batch.ids) for batch in batches] for batches in zip(*pair, strict=True)] == [[8, 2]] * 5
    for loader in pair:
        loader.close()
