"""Reading data: whatever holds it, every sample once an epoch, and each augmented the same way everywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from evenstep.errors import TaskError
from evenstep.order import InOrder, Shuffled
from evenstep.worker.loader import Batch, Loader, Piece
from evenstep.worker.source import open_source, to_device
from evenstep.worker.world import World

IDS = np.array([3, 0, 2])
X = torch.arange(12.0).reshape(4, 3)
Y = torch.arange(4)


class Samples(Dataset[Any]):
    """A map-style dataset of what a function makes of an id."""

    def __init__(self, make: Callable[[int], Any], length: int = 4) -> None:
        self.make = make
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, id_: int) -> Any:
        return self.make(id_)


class ManyAtOnce(Samples):
    def __getitems__(self, ids: list[int]) -> list[Any]:
        return [self.make(id_) for id_ in ids]


class Forgetful(Samples):
    def __getitems__(self, ids: list[int]) -> list[Any]:
        return [self.make(id_) for id_ in ids[1:]]


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(4)


class NoLength(Dataset[int]):
    def __getitem__(self, id_: int) -> int:
        return id_


class LengthNotWritten(NoLength):
    def __len__(self) -> int:
        raise NotImplementedError


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


def memory_map() -> np.memmap[Any, Any]:
    X.numpy().tofile("x.bin")
    return np.memmap("x.bin", dtype=np.float32, mode="r", shape=(4, 3))


def fetch(data: Any, collate: Callable[[list[Any]], Any] | None = None) -> Any:
    source = open_source(data, collate)
    assert source.num_samples == 4
    return source.fetch(IDS)


@pytest.mark.parametrize(
    "make",
    [
        lambda: (X, Y),
        lambda: (X.numpy(), Y.numpy()),
        lambda: (X, Y.numpy()),
        lambda: (memory_map(), Y),
        lambda: TensorDataset(X, Y),
        lambda: Samples(lambda id_: (X[id_], id_)),
        lambda: ManyAtOnce(lambda id_: (X[id_], id_)),
        lambda: [(X[id_], id_) for id_ in range(4)],
    ],
    ids=["tensors", "arrays", "both", "memory map", "TensorDataset", "Dataset", "__getitems__", "samples"],
)
def test_a_batch_is_the_samples_in_the_order_asked_for(make: Callable[[], Any]) -> None:
    x, y = fetch(make())
    assert torch.equal(x, X[[3, 0, 2]])
    assert y.tolist() == [3, 0, 2]


def test_a_list_is_a_list_of_samples_even_if_they_are_tensors() -> None:
    assert torch.equal(fetch([X[id_] for id_ in range(4)]), X[[3, 0, 2]])


def test_one_tensor_alone_gives_a_tensor_and_a_dict_gives_a_dict() -> None:
    assert torch.equal(fetch(X), X[[3, 0, 2]])
    assert torch.equal(fetch(X.numpy()), X[[3, 0, 2]])
    batch = fetch({"x": X, "y": Y.numpy()})
    assert list(batch) == ["x", "y"]
    assert batch["y"].tolist() == [3, 0, 2]


def test_a_read_only_memory_map_stays_on_disk_and_the_batch_can_be_written() -> None:
    data = memory_map()
    batch = fetch(data)
    batch += 100
    assert torch.equal(torch.from_numpy(np.array(data)), X)
    assert torch.equal(fetch((data,), lambda samples: torch.stack([row for (row,) in samples])), X[[3, 0, 2]])


def test_nested_samples_and_words_are_collated_as_torch_would() -> None:
    batch = fetch(Samples(lambda id_: {"picture": {"pixels": X[id_]}, "name": f"sample {id_}", "size": (id_, 1.5)}))
    assert torch.equal(batch["picture"]["pixels"], X[[3, 0, 2]])
    assert batch["name"] == ["sample 3", "sample 0", "sample 2"]
    assert batch["size"][0].tolist() == [3, 0, 2]


def test_a_collate_of_the_users_joins_what_torch_cannot() -> None:
    lengths = fetch(Samples(lambda id_: torch.ones(id_)), collate=lambda samples: [len(sample) for sample in samples])
    assert lengths == [3, 0, 2]
    assert fetch((X, Y), collate=lambda samples: [int(y) for _, y in samples]) == [3, 0, 2]


def test_tensors_move_however_they_are_nested() -> None:
    data = {"a": [X, "word"], "b": Pair(X, Y), "c": 3}
    moved = to_device(data, lambda tensor: tensor + 1)
    assert torch.equal(moved["a"][0], X + 1)
    assert moved["a"][1] == "word"
    assert isinstance(moved["b"], Pair)
    assert torch.equal(moved["b"].right, Y + 1)
    assert moved["c"] == 3


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "the train data is empty; it needs at least one sample"),
        ((X[:0], Y[:0]), "the train data is empty; it needs at least one sample"),
        (Samples(int, length=0), "the train data is empty"),
        ((X, Y[:3]), "the train data has columns of [4, 3] samples; all need the same number"),
        ({"x": X, "y": Y[:3].numpy()}, "the train data has columns of [4, 3] samples"),
        ((X, torch.tensor(1.0)), "the train data holds a tensor with no dimensions; the first one counts samples"),
        ((X, np.array(["a", "b", "c", "d"])), "the train data has an array of <U1, which no tensor can hold"),
        (Endless(), "the train data is a Endless; give a dataset with __len__ and __getitem__, or a tuple"),
        (iter([1, 2]), "the train data is a list_iterator; give a dataset"),
        (None, "the train data is a NoneType; give a dataset"),
        (NoLength(), "the train data (NoLength) has no length; give it a __len__"),
        (LengthNotWritten(), "the train data (LengthNotWritten) has no length; give it a __len__"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_data_that_cannot_be_counted_is_refused(data: Any, message: str) -> None:
    with pytest.raises(TaskError) as refused:
        open_source(data, None)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda id_: torch.ones(3 if id_ else 5), ["sample 3 is (3,)", "sample 0 is (5,)"]),
        (
            lambda id_: (torch.ones(2, id_ // 3), id_),
            ["sample 3 is ((2, 1), 'int')", "sample 0 is ((2, 0), 'int')"],
        ),
        (
            lambda id_: {"a": {"b": torch.ones(id_ // 2)}},
            ["sample 3 is {'a': {'b': (1,)}}", "sample 0 is {'a': {'b': (0,)}}"],
        ),
    ],
    ids=["tensor", "tuple", "nested"],
)
@pytest.mark.parametrize("kind", [Samples, ManyAtOnce])
def test_samples_of_different_shapes_are_named(
    kind: type[Samples], make: Callable[[int], Any], said: list[str]
) -> None:
    with pytest.raises(TaskError) as refused:
        fetch(kind(make))
    for part in [*said, "make them alike, or give the Task a collate that can join them"]:
        assert part in str(refused.value)


def test_samples_that_are_no_data_are_refused() -> None:
    with pytest.raises(TaskError, match=r"samples cannot be made into a batch: .*object.*; give the Task a collate"):
        fetch(Samples(lambda _: object()))


def broken(id_: int) -> int:
    return 1 // id_


@pytest.mark.parametrize(("kind", "ids"), [(Samples, "sample 0"), (ManyAtOnce, "samples 3, 0, 2")])
def test_a_sample_that_raises_is_named_with_the_users_line(kind: type[Samples], ids: str) -> None:
    line = broken.__code__.co_firstlineno + 1
    with pytest.raises(TaskError, match=rf"{ids} cannot be read: ZeroDivisionError: .*test_sources\.py:{line}\)"):
        fetch(kind(broken))


def test_a_dataset_that_gives_too_few_samples_is_refused() -> None:
    with pytest.raises(TaskError, match="__getitems__ gave 2 samples for 3 ids; it must give one for each"):
        fetch(Forgetful(lambda id_: X[id_]))


def test_a_collate_that_raises_is_named_with_its_line() -> None:
    with pytest.raises(TaskError, match=r"the Task's collate cannot join samples 3, 0, 2: TypeError.*test_sources"):
        fetch((X, Y), collate=lambda samples: sum(samples))


# From here on: which process reads what.

CPU = torch.device("cpu")


def worlds(size: int, seats: int = 1) -> list[World]:
    return [World(rank, size, (CPU,) * seats) for rank in range(size)]


def loaders(num: int, batch: int, team: list[World], accumulate: int = 1, seed: int = 0) -> list[Loader]:
    source = open_source(torch.arange(num), None)
    return [Loader(source, Shuffled(num, seed), world, batch, accumulate=accumulate, seed=seed) for world in team]


def pieces(batch: Batch) -> list[Piece]:
    return [piece for micro_batch in batch.micro_batches for piece in micro_batch]


def step_ids(batches: tuple[Batch, ...]) -> list[int]:
    """The ids that all ranks together read in one step."""
    for batch in batches:
        batch.finish()
    return sorted(id_ for batch in batches for piece in pieces(batch) for id_ in piece.ids.tolist())


def epoch(team: list[Loader]) -> Iterator[list[int]]:
    return map(step_ids, zip(*team, strict=True))


sizes = st.integers(1, 5)
accumulations = st.integers(1, 3)


@given(num=st.integers(1, 60), batch=st.integers(1, 70), size=sizes, seats=st.integers(1, 3), accumulate=accumulations)
def test_all_ranks_together_read_every_sample_once(
    num: int, batch: int, size: int, seats: int, accumulate: int
) -> None:
    team = loaders(num, batch, worlds(size, seats), accumulate)
    for _ in range(2):
        assert sorted(id_ for step in epoch(team) for id_ in step) == list(range(num))


@given(num=st.integers(1, 60), batch=st.integers(1, 70), size=sizes, accumulate=accumulations)
def test_every_rank_runs_as_many_micro_batches_and_none_is_without_data(
    num: int, batch: int, size: int, accumulate: int
) -> None:
    for batches in zip(*loaders(num, batch, worlds(size), accumulate), strict=True):
        assert len({len(one.micro_batches) for one in batches}) == 1
        for piece in (piece for one in batches for piece in pieces(one)):
            assert piece.num_samples == len(piece.ids)
            assert len(piece.data) == max(1, piece.num_samples)
            assert not piece.num_samples or piece.data.tolist() == piece.ids.tolist()


@given(
    num=st.integers(1, 60),
    batch=st.integers(1, 20),
    size=sizes,
    later_size=sizes,
    accumulate=accumulations,
    data=st.data(),
)
def test_an_epoch_cut_anywhere_goes_on_with_another_number_of_processes(
    num: int, batch: int, size: int, later_size: int, accumulate: int, data: st.DataObject
) -> None:
    (alone,) = loaders(num, batch, worlds(1))
    undisturbed = list(epoch([alone])) + list(epoch([alone]))
    cut = data.draw(st.integers(0, len(undisturbed) - 1), label="steps before the cut")
    first, later = loaders(num, batch, worlds(size), accumulate), loaders(num, batch, worlds(later_size))
    done: list[list[int]] = []
    while len(done) < cut:
        done += islice(epoch(first), cut - len(done))
    for loader in later:
        loader.load_state_dict(first[0].state_dict())
    assert len(later[0]) == -(-(num - first[0].position % num) // min(batch, num))
    while len(done) < len(undisturbed):
        done += list(epoch(later))
    assert done == undisturbed


# Augmentation.


def noise(sample: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return sample + torch.rand(3, generator=generator)


def augmented(
    team: list[World], batch: int, seed: int = 0, start: int = 0, accumulate: int = 1
) -> dict[int, list[float]]:
    """What became of each sample in the epoch that holds position `start`."""
    source = open_source(torch.zeros(10, 3), None)
    seen = {}
    for world in team:
        loader = Loader(source, Shuffled(10, seed), world, batch, accumulate=accumulate, augment=noise, seed=seed)
        loader.position = start
        for piece in (piece for one in loader for piece in pieces(one)):
            seen |= dict(zip(piece.ids.tolist(), piece.data.tolist(), strict=False))
    return seen


@pytest.mark.parametrize("batch", [1, 3, 10])
@pytest.mark.parametrize("team", [worlds(1), worlds(2), worlds(3), worlds(1, seats=4)], ids=["1", "2", "3", "dp-4"])
def test_a_sample_is_augmented_the_same_way_whoever_reads_it_in_whatever_batch(team: list[World], batch: int) -> None:
    assert augmented(team, batch, accumulate=2) == augmented(worlds(1), 5)


def test_a_sample_is_augmented_the_same_way_after_a_restart() -> None:
    whole, rest = augmented(worlds(1), 5, start=10), augmented(worlds(2), 2, start=14)
    assert len(rest) == 6
    assert rest == {id_: whole[id_] for id_ in rest}


def test_epochs_seeds_and_samples_are_augmented_differently() -> None:
    first, second, other_seed = (
        augmented(worlds(1), 5),
        augmented(worlds(1), 5, start=10),
        augmented(worlds(1), 5, seed=1),
    )
    every = [tuple(value) for seen in (first, second, other_seed) for value in seen.values()]
    assert len(set(every)) == 30


def test_augmentation_does_not_touch_the_data_nor_torchs_own_generator() -> None:
    before = torch.get_rng_state()
    source = open_source((X, Y), None)
    loader = Loader(
        source, InOrder(4), worlds(1)[0], 4, augment=lambda sample, generator: (noise(sample[0], generator), sample[1])
    )
    (batch,) = loader
    assert not torch.equal(pieces(batch)[0].data[0], X)
    assert torch.equal(X, torch.arange(12.0).reshape(4, 3))
    assert torch.equal(torch.get_rng_state(), before)


def test_an_array_on_disk_is_read_by_id(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X.numpy())
    assert torch.equal(fetch(np.load(tmp_path / "x.npy", mmap_mode="r")), X[[3, 0, 2]])
