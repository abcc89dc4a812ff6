"""The Scaler: scikit-learn's numbers, however the data is cut up, and a part of the model like any other."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.preprocessing import StandardScaler
from torch import nn

from evenstep.data.feature_scaler import Moments, Scaler, unfitted
from evenstep.distributed.world import World
from evenstep.errors import TaskError
from evenstep.sampling.batch_shares import share
from tests.marks import first_is_quick, num_examples

ALONE = World(0, 1, (torch.device("cpu"),))
DOUBLE = torch.float64


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def pictures(dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """Three channels of different brightness."""
    drawn = torch.randint(0, 200, (40, 3, 6, 5), generator=torch.Generator().manual_seed(1))
    return (drawn // torch.tensor([1, 2, 4]).view(3, 1, 1) + 50).to(dtype)


def rows_of(images: torch.Tensor) -> torch.Tensor:
    """Every pixel of every picture is a sample of its channels."""
    return images.movedim(1, -1).reshape(-1, images.shape[1])


TABLES = {
    "random": random(101, 7),
    "uneven columns": random(101, 7) * 10.0 ** torch.arange(-9, 12, 3) + torch.arange(7),
    "one outlier": torch.cat([torch.full((1, 3), 1e8, dtype=DOUBLE), 1 + random(5000, 3)]),
    "a large offset": 1e8 + random(1000, 3),
    "a larger offset": 1e12 + random(1000, 3),
    "constants": torch.tensor([0.0, 0.1, -1e8 / 3, 1e-300, 7.0], dtype=DOUBLE).repeat(1000, 1),
    "constants and others": torch.cat([torch.full((77, 2), 0.1, dtype=DOUBLE), random(77, 2)], 1),
    "one sample": random(1, 4),
    "two samples": random(2, 4),
    "float32": random(101, 7).float(),
    "integers": (random(101, 7) * 1000).long(),
    "bytes": rows_of(pictures()),
}


def cut(x: torch.Tensor, sizes: Sequence[int]) -> Iterator[torch.Tensor]:
    """The rows of `x` in batches of these sizes, over and over."""
    start, number = 0, 0
    while start < len(x):
        yield x[start : start + sizes[number % len(sizes)]]
        start += sizes[number % len(sizes)]
        number += 1


def exact(column: torch.Tensor) -> tuple[float, float]:
    """Mean and population variance in rational numbers, rounded once."""
    values = [Fraction(value) for value in column.double().tolist()]
    mean = sum(values) / len(values)
    return float(mean), float(sum((value - mean) ** 2 for value in values) / len(values))


def check_like_sklearn(scaler: Scaler, rows: torch.Tensor, rel: float = 1e-12) -> None:
    # In float64, as scikit-learn's own statistics are; given float32 it checks its input in float32.
    theirs = StandardScaler().fit(rows.double().numpy())
    np.testing.assert_allclose(scaler.deviation.numpy(), theirs.scale_, rtol=rel, atol=0)
    # A mean near 0 is a difference of larger numbers: what rounding leaves is measured by those.
    size = np.abs(rows.double().numpy()).max(0)
    assert (np.abs(scaler.mean.numpy() - theirs.mean_) <= rel * size).all()
    assert scaler.count.item() == theirs.n_samples_seen_ == len(rows)


@pytest.mark.parametrize(
    "sizes",
    first_is_quick([[7, 1, 30, 2], [10**6], [1], [64]], num_quick=2),
    ids=["uneven", "whole", "singly", "64"],
)
@pytest.mark.parametrize("name", TABLES)
def test_mean_and_deviation_are_scikit_learns(name: str, sizes: list[int]) -> None:
    x = TABLES[name]
    check_like_sklearn(Scaler(x.shape[1]).fit(cut(x, sizes)), x)


@pytest.mark.parametrize("sizes", first_is_quick([[1], [10**6], [64]]), ids=["singly", "whole", "64"])
@pytest.mark.parametrize("name", [name for name in TABLES if "constant" not in name and "one sample" not in name])
def test_mean_and_deviation_are_those_of_exact_arithmetic(name: str, sizes: list[int]) -> None:
    x = TABLES[name]
    scaler = Scaler(x.shape[1]).fit(cut(x, sizes))
    for place in range(x.shape[1]):
        mean, variance = exact(x[:, place])
        size = x[:, place].double().abs().max().item()
        # One rounding of the largest number, no matter how many were merged.
        assert scaler.mean[place].item() == pytest.approx(mean, rel=0, abs=1.2e-16 * size)
        assert scaler.deviation[place].item() ** 2 == pytest.approx(variance, rel=1e-14)


def test_a_mean_of_one_double_would_lose_what_this_one_keeps() -> None:
    x = TABLES["a large offset"]
    kept, lost = Moments.nothing(3), Moments.nothing(3)
    for batch in cut(x, [3]):
        kept = kept.add(batch.T)
        lost = lost.add(batch.T)
        lost = Moments(lost.count, lost.mean, torch.zeros(3, dtype=DOUBLE), lost.squares)
    for place in range(3):
        _, variance = exact(x[:, place])
        assert kept.squares[place].item() / 1000 == pytest.approx(variance, rel=1e-14)
    assert any(abs(lost.squares[place].item() / 1000 / exact(x[:, place])[1] - 1) > 1e-12 for place in range(3))


def test_a_constant_feature_has_deviation_1_and_its_very_value_as_mean() -> None:
    x = TABLES["constants"]
    for sizes in ([10**6], [1], [7, 1, 30, 2]):
        scaler = Scaler(5).fit(cut(x, sizes))
        assert scaler.deviation.tolist() == [1.0] * 5
        assert scaler.mean.tolist() == x[0].tolist()
        assert scaler.double()(x).abs().max() == 0


def test_pictures_have_one_mean_and_deviation_per_channel() -> None:
    images = pictures()
    scaler = Scaler(3, dim=1).fit(images.split(7))
    check_like_sklearn(scaler, rows_of(images))
    same = Scaler(3, dim=-3).fit(images.split(7))
    assert torch.equal(same.mean, scaler.mean)
    scaled = scaler(images)
    assert scaled.shape == images.shape
    np.testing.assert_allclose(
        rows_of(scaled).numpy(), StandardScaler().fit_transform(rows_of(images).double().numpy()), atol=1e-6
    )


def test_pictures_of_one_channel_have_one_of_each_for_everything() -> None:
    images = pictures()[:, 0]
    scaler = Scaler(1, dim=None).fit(images.split(7))
    check_like_sklearn(scaler, images.reshape(-1, 1))
    scaled = scaler(images)
    assert scaled.shape == images.shape
    assert abs(scaled.mean().item()) < 1e-6
    assert scaled.std(correction=0).item() == pytest.approx(1)
    assert torch.equal(scaler(images[0]), scaled[0])


def test_a_great_many_values_at_once_are_those_of_many_batches() -> None:
    x = 1e3 + random(5, 30_000)
    check_like_sklearn(Scaler(5, dim=0).fit([x]), x.T)
    check_like_sklearn(Scaler(30_000).fit([x]), x)


# The square of anything smaller has fewer digits than a double.
values = st.floats(-1e6, 1e6).map(lambda value: value if abs(value) > 1e-100 else 0.0)
features = st.integers(1, 40).flatmap(
    lambda num: st.lists(st.lists(values, min_size=num, max_size=num), min_size=1, max_size=3)
)


@settings(max_examples=num_examples(150))
@given(
    columns=features,
    offset=st.sampled_from([0.0, 1.0, -1e8, 1e12]),
    cuts=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    num_ranks=st.integers(1, 5),
)
def test_batches_and_ranks_do_not_change_the_statistics(
    columns: list[list[float]], offset: float, cuts: list[int], num_ranks: int
) -> None:
    x = torch.tensor(columns, dtype=DOUBLE) + offset
    merged = Moments.nothing(len(x))
    for rank in range(num_ranks):
        own = x.T[list(share(x.shape[1], rank, num_ranks))]
        of_rank = Moments.nothing(len(x))
        for batch in cut(own, cuts):
            of_rank = of_rank.add(batch.T)
        merged = merged.merge(Moments.from_json(of_rank.to_json()))
    whole = Moments.nothing(len(x)).add(x)
    assert merged.count == whole.count == x.shape[1]
    size = x.abs().amax(1)
    assert ((merged.mean - whole.mean).abs() <= 1e-15 * size).all()
    # What rounding leaves of a variance is measured by the numbers' own rounding, where that is larger.
    assert ((merged.squares - whole.squares).abs() <= 1e-12 * whole.squares + merged.count * (1e-22 * size) ** 2).all()
    # The same features are found to be constant.
    torch.testing.assert_close(merged.deviation(), whole.deviation(), rtol=1e-12, atol=0)


def test_moments_travel_as_json_without_losing_a_bit() -> None:
    moments = Moments.nothing(3).add((1e8 + random(3, 10)) / 3)
    back = Moments.from_json(moments.to_json())
    for name in ("count", "mean", "rest", "squares"):
        assert np.array_equal(getattr(back, name), getattr(moments, name))
    assert moments.rest.abs().max() > 0


# Streams, and fitting in several goes.


def test_a_stream_is_read_once_batch_after_batch() -> None:
    x = random(101, 4)
    read: list[int] = []

    def stream() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for number, batch in enumerate(cut(x, [10, 3])):
            read.append(number)
            yield batch, torch.zeros(len(batch))

    check_like_sklearn(Scaler(4).fit(stream(), ALONE), x)
    assert read == list(range(len(read)))


def test_update_adds_to_what_was_seen_and_fit_starts_anew() -> None:
    x = 1e8 + random(100, 4)
    updated = Scaler(4)
    for batch in cut(x, [9, 1]):
        updated.update(batch)
    check_like_sklearn(updated, x)
    for name, statistic in Scaler(4).fit(cut(x, [9, 1])).state_dict().items():
        assert torch.equal(updated.state_dict()[name], statistic)
    updated.fit([x[:30]])
    check_like_sklearn(updated, x[:30])


def test_update_goes_on_from_a_checkpoint_even_for_a_feature_that_was_constant() -> None:
    x = torch.cat([random(50, 2), torch.cat([torch.full((30, 1), 0.1), torch.ones(20, 1)])], 1)
    restored = Scaler(3)
    restored.load_state_dict(Scaler(3).fit([x[:30]]).state_dict())
    assert restored.deviation[2] == 1
    check_like_sklearn(restored.update(x[30:]), x)


def test_an_empty_batch_adds_nothing() -> None:
    x = random(10, 4)
    check_like_sklearn(Scaler(4).fit([x[:0], x, x[:0]]), x)
    assert not Scaler(4).update(x[:0]).is_fitted


def test_data_that_needs_a_gradient_is_fitted_without_one() -> None:
    x = random(10, 4).requires_grad_()
    scaler = Scaler(4).fit([x]).double()
    assert not scaler.mean.requires_grad
    (gradient,) = torch.autograd.grad(scaler(x).sum(), x)
    torch.testing.assert_close(gradient, (1 / scaler.deviation).expand(10, 4))


# What of a batch it takes.


@pytest.mark.parametrize(
    ("make", "of"),
    [
        (lambda x: x, None),
        (lambda x: (x, torch.zeros(len(x))), None),
        (lambda x: [x, torch.zeros(len(x))], None),
        (lambda x: {"y": torch.zeros(len(x)), "x": x}, lambda batch: batch["x"]),
        (lambda x: (torch.zeros(len(x)), x), lambda batch: batch[1]),
    ],
    ids=["tensor", "tuple", "list", "dict", "second"],
)
def test_what_is_fitted_is_the_batch_or_its_first_or_what_one_says(make: Any, of: Any) -> None:
    x = random(20, 4)
    check_like_sklearn(Scaler(4, of=of).fit(make(part) for part in x.split(6)), x)


@pytest.mark.parametrize(
    ("scaler", "batch", "said"),
    [
        (Scaler(2), {"x": 1, "y": 2}, r"a dict of 'x', 'y', .* name it:\nScaler\(2, of=lambda batch: batch\['x'\]\)"),
        (Scaler(2), {}, "a batch is a dict of"),
        (Scaler(2), ("word", torch.ones(2)), r"its first item, here a str; it needs a tensor:\nScaler\(2, of="),
        (Scaler(2), [], "here a list; it needs a tensor"),
        (Scaler(2, of=lambda batch: 3), torch.ones(2), "`of` gave the Scaler a int; it needs a tensor"),
        (Scaler(2), torch.ones(5, 3), r"Scaler\(2, dim=-1\) got a tensor of shape \(5, 3\); dimension -1 must have 2"),
        (Scaler(3, dim=1), torch.ones(5), r"Scaler\(3, dim=1\) got a tensor of shape \(5,\)"),
        (Scaler(2), torch.tensor(1.0), r"got a tensor of shape \(\)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_batch_that_does_not_fit_is_refused(scaler: Scaler, batch: Any, said: str) -> None:
    with pytest.raises(TaskError, match=said):
        scaler.fit([batch])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e200])
def test_a_number_that_is_not_finite_is_refused_and_its_feature_named(bad: float) -> None:
    x = random(30, 4)
    scaler = Scaler(4).fit([x])
    before = copy.deepcopy(scaler.state_dict())
    spoilt = x.clone()
    spoilt[17, 2] = bad
    for fit in (scaler.update, lambda x: scaler.fit([x])):
        with pytest.raises(TaskError, match="feature 2 of 4 has NaN, infinity or a number too large to be squared; a"):
            fit(spoilt)
    spoilt[3] = bad
    with pytest.raises(TaskError, match=r"feature 0 of 4 has .*, and so have 3 others;"):
        scaler.update(spoilt)
    for name, statistic in before.items():
        assert torch.equal(scaler.state_dict()[name], statistic)


@pytest.mark.parametrize("world", [None, ALONE])
def test_no_data_at_all_is_refused(world: World | None) -> None:
    for batches in ([], [torch.ones(0, 4)]):
        with pytest.raises(TaskError, match="nothing to be fitted to: no process has a sample"):
            Scaler(4).fit(batches, world)


@pytest.mark.parametrize(("num", "dim"), [(0, -1), (-3, 1), (3, None)])
def test_a_scaler_that_makes_no_sense_is_refused(num: int, dim: int | None) -> None:
    with pytest.raises(TaskError, match=rf"Scaler\({num}, dim={dim}\): give the number .*: Scaler\(1, dim=None\)"):
        Scaler(num, dim=dim)


# A part of the model.


def test_before_it_is_fitted_it_changes_nothing_but_the_type() -> None:
    scaler = Scaler(4)
    assert not scaler.is_fitted
    assert (scaler.mean.tolist(), scaler.deviation.tolist(), scaler.count.item()) == ([0.0] * 4, [1.0] * 4, 0.0)
    x = random(3, 4).float()
    assert torch.equal(scaler(x), x)


def test_the_unfitted_scalers_of_a_model_are_found_once_each() -> None:
    fitted, one, two = Scaler(4).fit([random(5, 4)]), Scaler(4), Scaler(4)
    model = nn.Sequential(one, nn.ModuleDict({"a": fitted, "b": two, "c": one}), nn.Linear(4, 1))
    assert unfitted(model) == [one, two]
    assert unfitted(one) == [one]
    assert unfitted(nn.Linear(4, 1)) == unfitted(fitted) == []


TYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
]


@pytest.mark.parametrize("given_type", TYPES, ids=str)
@pytest.mark.parametrize("model_type", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_any_numbers_become_those_of_the_model(given_type: torch.dtype, model_type: torch.dtype) -> None:
    x = (pictures() % 2 if given_type == torch.bool else pictures() // 2).to(given_type)
    model = nn.Sequential(Scaler(3, dim=1), nn.Flatten(), nn.Linear(90, 2)).to(model_type)
    scaler = model[0]
    scaler.fit([x])
    scaled = scaler(x)
    assert scaled.dtype == model_type
    assert model(x).dtype == model_type
    expected = StandardScaler().fit_transform(rows_of(x).double().numpy())
    np.testing.assert_allclose(rows_of(scaled).double().numpy(), expected, atol=2 * torch.finfo(model_type).eps)


def test_statistics_stay_in_float64_whatever_the_model_becomes() -> None:
    x = 1e8 + random(50, 4)
    scaler = Scaler(4).fit([x])
    before = copy.deepcopy(scaler.state_dict())
    for change in (scaler.half, scaler.double, scaler.bfloat16, scaler.float, scaler.cpu, scaler.share_memory):
        assert change() is scaler
        for name, statistic in before.items():
            assert scaler.state_dict()[name].dtype == DOUBLE
            assert torch.equal(scaler.state_dict()[name], statistic)
    assert scaler.dtype == torch.float32


def test_a_scaler_made_without_memory_gets_some_and_loads() -> None:
    fitted = Scaler(4).fit([random(5, 4)])
    with torch.device("meta"):
        scaler = Scaler(4)
    scaler.to_empty(device="cpu").load_state_dict(fitted.state_dict())
    assert torch.equal(scaler(torch.ones(2, 4)), fitted(torch.ones(2, 4)))


def test_large_numbers_are_centred_before_they_are_rounded() -> None:
    seconds = 1_700_000_000 + torch.arange(1000).view(-1, 1) % 60
    expected = StandardScaler().fit_transform(seconds.double().numpy())
    for x in (seconds, seconds.double(), seconds.to(torch.int32)):
        scaled = Scaler(1).fit([x])(x)
        assert scaled.dtype == torch.float32
        np.testing.assert_allclose(scaled.double().numpy(), expected, atol=2e-7)
    # The mean of float32 numbers is seldom one itself; subtracted rounded, it would shift them all.
    near = (1e5 + random(1000, 1)).float()
    expected = StandardScaler().fit_transform(near.double().numpy())
    np.testing.assert_allclose(Scaler(1).fit([near])(near).double().numpy(), expected, atol=1e-6)


def test_in_autocast_it_gives_float32_and_the_next_layer_halves_it() -> None:
    x = random(10, 4).float()
    model = nn.Sequential(Scaler(4).fit([x]), nn.Linear(4, 2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scaled = model[0](x)
        assert scaled.dtype == torch.float32
        assert model(x).dtype == torch.bfloat16
        again = Scaler(4).fit([x])
    assert torch.equal(scaled, model[0](x))
    assert torch.equal(again.deviation, model[0].deviation)


def test_compiled_it_is_one_graph_with_the_same_numbers_also_after_loading() -> None:
    x = random(10, 4).float()
    scaler = Scaler(4).fit([x])
    compiled = torch.compile(scaler, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), scaler(x))
    scaler.load_state_dict(Scaler(4).fit([x + 5]).state_dict())
    assert compiled(x).mean().item() == pytest.approx(-5 / x.std(correction=0).item(), rel=0.3)
    assert torch.equal(compiled(x), scaler(x))


def test_a_loaded_scaler_is_fitted_and_has_the_same_bits() -> None:
    x = 1e8 + random(50, 4)
    model = nn.Sequential(Scaler(4).fit([x]), nn.Linear(4, 1))
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = nn.Sequential(Scaler(4), nn.Linear(4, 1))
    loaded.load_state_dict(torch.load(file, weights_only=True))
    assert set(loaded[0].state_dict()) == {"count", "mean", "rest", "squares", "deviation"}
    assert unfitted(loaded) == []
    assert torch.equal(loaded(x), model(x))


def test_a_replica_has_statistics_of_its_own() -> None:
    x = random(50, 4)
    model = nn.Sequential(Scaler(4, of=lambda batch: batch)).double()
    model[0].fit([x])
    replica = copy.deepcopy(model)
    assert torch.equal(replica(x), model(x))
    assert replica[0].dtype == DOUBLE
    replica[0].fit([x + 1])
    check_like_sklearn(model[0], x)
    check_like_sklearn(replica[0], x + 1)


def test_fitting_writes_into_the_tensors_that_engines_hold() -> None:
    scaler = Scaler(4)
    held = list(scaler.buffers())
    scaler.fit([random(50, 4)]).update(random(3, 4))
    assert all(now is before for now, before in zip(scaler.buffers(), held, strict=True))
    assert list(scaler.parameters()) == []


def test_its_name_tells_its_size() -> None:
    assert repr(Scaler(3, dim=1)) == "Scaler(3, dim=1)"
