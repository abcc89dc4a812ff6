"""Reading data: whatever holds it, every sample once an epoch, and each augmented the same way everywhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from evenstep.data.adapt import adapt
from evenstep.data.augmentation import SampleTransform
from evenstep.data.dataset import IdsOnDevice, open_source
from evenstep.data.nested import map_tensors
from evenstep.errors import TaskError
from evenstep.sampling.order import Span
from evenstep.sampling.samplers import Shuffled

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
    return source.fetch(IDS, IDS, SampleTransform(0, 0))


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
    moved = map_tensors(data, lambda tensor: tensor + 1)
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
        (
            iter([1, 2]),
            "the train data is an iterator (list_iterator), which can be iterated over only once; give an object",
        ),
        (None, "the train data is a NoneType; give a dataset"),
        (NoLength(), "the train data (NoLength) has no length; give it a __len__"),
        (LengthNotWritten(), "the train data (LengthNotWritten) has no length; give it a __len__"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_data_that_cannot_be_counted_is_refused(data: Any, message: str) -> None:
    with pytest.raises(TaskError) as refused:
        adapt(data)
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
    with pytest.raises(TaskError, match=rf"{ids} cannot be read: ZeroDivisionError: .*test_dataset\.py:{line}\)"):
        fetch(kind(broken))


def test_a_dataset_that_gives_too_few_samples_is_refused() -> None:
    with pytest.raises(TaskError, match="__getitems__ gave 2 samples for 3 ids; it must give one for each"):
        fetch(Forgetful(lambda id_: X[id_]))


def test_a_collate_that_raises_is_named_with_its_line() -> None:
    with pytest.raises(TaskError, match=r"the Task's collate cannot join samples 3, 0, 2: TypeError.*test_dataset"):
        fetch((X, Y), collate=lambda samples: sum(samples))


def test_an_array_on_disk_is_read_by_id(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X.numpy())
    assert torch.equal(fetch(np.load(tmp_path / "x.npy", mmap_mode="r")), X[[3, 0, 2]])


def test_ids_of_a_block_are_copied_to_the_device_once() -> None:
    on_device = IdsOnDevice(torch.device("meta"))
    block = np.random.default_rng(0).permutation(1000)
    first, second = on_device.find(block[100:300]), on_device.find(block[300:310])
    assert first.shape == (200,)
    assert second._base is not None
    assert second._base is first._base
    assert (first.storage_offset(), second.storage_offset()) == (100, 300)
    # Another block, and the first again.
    assert on_device.find(block.copy()[5:7])._base is not first._base
    assert on_device.find(block[:3])._base is not first._base


@pytest.mark.parametrize("num", [1000, 70_000])
def test_batches_of_an_order_are_slices_of_a_block(num: int) -> None:
    order = Shuffled().order(num, 0, 64)
    on_device = IdsOnDevice(torch.device("meta"))
    first, second = (on_device.find(order.ids(Span(0, start, start + 64))) for start in (64, 128))
    assert first._base is not None
    assert second._base is first._base


def test_ids_on_a_device_are_those_that_were_asked_for() -> None:
    on_device = IdsOnDevice(torch.device("cpu"))
    generator = np.random.default_rng(0)
    blocks = [generator.permutation(1000) for _ in range(3)]
    rows = generator.permutation(20).reshape(4, 5)
    slices = [blocks[i % 3][slice(*sorted(generator.integers(0, 1001, 2)))] for i in range(40)]
    others = [blocks[0][::2], blocks[1][::-1], rows[1], rows[:, 2], rows.ravel()[3:7], blocks[2], blocks[0][[5, 1]]]
    narrow = np.arange(10, dtype=np.int32)[2:5]
    for ids in (*slices, *(other.copy() if other.strides[0] < 0 else other for other in others), narrow):
        assert on_device.find(ids).tolist() == ids.tolist()
