"""The built-in tasks: official formats, official files, networks of the right shape."""

from __future__ import annotations

import gzip
import hashlib
import io
import struct
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from evenstep.errors import TaskError
from evenstep.task import load_task
from evenstep.tasks.cifar10 import CIFAR10, read_records
from evenstep.tasks.digits import DigitNet
from evenstep.tasks.download import Official, find, unpacked, verified
from evenstep.tasks.mnist import FASHION_MNIST, MNIST, read_idx
from evenstep.tasks.networks import GPT, Net, Normalize, ResNet18, SimpleNet
from evenstep.tasks.shakespeare import TINYSHAKESPEARE, read_text, windows

HERE = Path("tiny")


def idx(*shape: int) -> bytes:
    """An IDX file whose bytes count 0, 1, 2, ..."""
    num_bytes = torch.Size(shape).numel()
    return bytes([0, 0, 8, len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + bytes(range(num_bytes))


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.fixture(autouse=True)
def _a_machine_without_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("EVENSTEP_DATA", raising=False)


# Formats


@pytest.mark.parametrize("is_packed", [True, False])
def test_reads_idx_images_and_labels(tmp_path: Path, is_packed: bool) -> None:
    images, labels = tmp_path / "images", tmp_path / "labels"
    images.write_bytes(gzip.compress(idx(2, 3, 4)) if is_packed else idx(2, 3, 4))
    labels.write_bytes(gzip.compress(idx(2)) if is_packed else idx(2))
    assert torch.equal(read_idx(unpacked(images), images), torch.arange(24, dtype=torch.uint8).view(2, 3, 4))
    assert read_idx(unpacked(labels), labels).tolist() == [0, 1]


def test_an_idx_file_with_another_magic_is_refused() -> None:
    with pytest.raises(TaskError, match=r"tiny begins with 00 00 0d 01, .* 00 00 08"):
        read_idx(b"\x00\x00\x0d\x01" + bytes(8), HERE)


def test_an_empty_idx_file_is_refused() -> None:
    with pytest.raises(TaskError, match="tiny begins with"):
        read_idx(b"", HERE)


def test_a_truncated_idx_file_is_refused() -> None:
    with pytest.raises(TaskError, match="tiny has 39 bytes, but 2 x 3 x 4 need 40"):
        read_idx(idx(2, 3, 4)[:-1], HERE)


def test_a_truncated_gzip_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "labels.gz"
    path.write_bytes(gzip.compress(idx(9))[:-9])
    with pytest.raises(TaskError, match=r"labels\.gz does not unpack"):
        unpacked(path)


def test_reads_cifar_records_plane_by_plane() -> None:
    red = bytes([7]) + bytes([255]) * 1024 + bytes(2048)
    blue = bytes([1]) + bytes(2048) + bytes([255]) * 1024
    images, labels = read_records(red + blue, HERE)
    assert images.shape == (2, 3, 32, 32)
    assert images.dtype == torch.uint8
    assert images.amax((2, 3)).tolist() == [[255, 0, 0], [0, 0, 255]]
    assert labels.tolist() == [7, 1]


def test_a_truncated_cifar_file_is_refused() -> None:
    with pytest.raises(TaskError, match="3072 bytes, not a multiple of 3073"):
        read_records(bytes(3072), HERE)


def test_a_cifar_label_beyond_nine_is_refused() -> None:
    with pytest.raises(TaskError, match="label 10, allowed are 0 to 9"):
        read_records(bytes([10]) + bytes(3072), HERE)


def test_a_text_becomes_windows_and_what_follows() -> None:
    alphabet, tokens = read_text(b"banana\n", HERE)
    assert alphabet == "\nabn"
    inputs, targets = windows(tokens, context=3)
    assert inputs.tolist() == [[2, 1, 3], [1, 3, 1]]
    assert targets.tolist() == [[1, 3, 1], [3, 1, 0]]


def test_a_text_that_is_none_is_refused() -> None:
    with pytest.raises(TaskError, match="not UTF-8 text"):
        read_text(b"\xff\xfe", HERE)


# Files


@pytest.fixture
def website(tmp_path: Path) -> Path:
    folder = tmp_path / "website"
    folder.mkdir()
    return folder


def published(website: Path, **more: str) -> Official:
    """A data set of one file, `words`, that says hello."""
    return Official(name="hello", md5={"words": md5(b"hello")}, **({"url": f"{website.as_uri()}/"} | more))


def test_another_content_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "words"
    path.write_bytes(b"goodbye")
    with pytest.raises(TaskError, match=f"not the official file: its content has md5 .*, expected {md5(b'hello')}"):
        verified(path, md5(b"hello"))


def test_the_checksum_is_that_of_the_content_not_of_the_packing(tmp_path: Path) -> None:
    path = tmp_path / "words.gz"
    path.write_bytes(gzip.compress(b"hello", mtime=7))
    assert verified(path, md5(b"hello")) == b"hello"


@pytest.mark.parametrize("place", ["hello/words", "words", "hello/words.gz", "words.gz"])
def test_finds_a_file_in_the_folder_or_in_its_own_folder_there(tmp_path: Path, website: Path, place: str) -> None:
    path = tmp_path / "data" / place
    path.parent.mkdir(parents=True)
    path.touch()
    assert find(published(website), str(tmp_path / "data")) == {"words": path}


def test_looks_in_the_argument_before_the_environment_before_the_cache(
    tmp_path: Path, website: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argument, environment, cache = (tmp_path / place / "words" for place in ("one", "two", "cache/evenstep"))
    for path in (argument, environment, cache):
        path.parent.mkdir(parents=True)
        path.touch()
    assert find(published(website)) == {"words": cache}
    monkeypatch.setenv("EVENSTEP_DATA", str(environment.parent))
    assert find(published(website)) == {"words": environment}
    assert find(published(website), str(argument.parent)) == {"words": argument}


def test_finds_what_the_distribution_installed(tmp_path: Path, website: Path) -> None:
    installed = tmp_path / "installed" / "words.gz"
    installed.parent.mkdir()
    installed.touch()
    also = Official("hello", {"words": ""}, f"{website.as_uri()}/", also=(str(installed.parent),))
    assert find(also, str(tmp_path / "elsewhere")) == {"words": installed}
    assert FASHION_MNIST.also == ("/usr/share/datasets/fashion-mnist",)


def test_downloads_a_missing_file_and_leaves_nothing_else(tmp_path: Path, website: Path) -> None:
    (website / "words.gz").write_bytes(gzip.compress(b"hello"))
    path = find(published(website, suffix=".gz"))["words"]
    assert path == tmp_path / "cache/evenstep/hello/words.gz"
    assert unpacked(path) == b"hello"
    assert list(path.parent.iterdir()) == [path]


def test_downloads_into_the_given_folder(tmp_path: Path, website: Path) -> None:
    (website / "words").write_bytes(b"hello")
    path = tmp_path / "data" / "hello" / "words"
    assert find(published(website), str(tmp_path / "data")) == {"words": path}


def test_takes_from_an_archive_only_the_files_it_names(tmp_path: Path, website: Path) -> None:
    with tarfile.open(website / "all.tar.gz", "w:gz") as tar:
        for name in ("inside/words", "../outside"):
            member = tarfile.TarInfo(name)
            member.size = 5
            tar.addfile(member, io.BytesIO(b"hello"))
    archive = website / "all.tar.gz"
    hello = published(website, url=archive.as_uri(), archive_md5=md5(archive.read_bytes()), inner="inside")
    path = find(hello, str(tmp_path / "data"))["words"]
    assert [file for file in (tmp_path / "data").rglob("*") if file.is_file()] == [path]
    assert path.read_bytes() == b"hello"


def test_another_archive_is_not_even_opened(tmp_path: Path, website: Path) -> None:
    (website / "all.tar.gz").write_bytes(b"<html>please log in</html>")
    url = (website / "all.tar.gz").as_uri()
    with pytest.raises(TaskError, match=r"failed: the download has md5 \w+, expected 0123"):
        find(published(website, url=url, archive_md5="0123", inner="inside"), str(tmp_path / "data"))


def test_a_wrong_download_is_not_kept(tmp_path: Path, website: Path) -> None:
    (website / "words").write_bytes(b"goodbye")
    with pytest.raises(TaskError, match="failed: the download is not the official words"):
        find(published(website), str(tmp_path / "data"))
    assert [path for path in (tmp_path / "data").rglob("*") if path.is_file()] == []


def test_missing_data_are_told_in_two_lines(tmp_path: Path, website: Path) -> None:
    with pytest.raises(TaskError) as caught:
        find(published(website, suffix=".gz"))
    first, second = str(caught.value).splitlines()
    assert first.startswith(
        f"hello is not in {tmp_path}/cache/evenstep, and the download from {website.as_uri()}/ failed:"
    )
    assert second == "put words.gz into DIR/hello and pass --data DIR (or set EVENSTEP_DATA)"
    assert not (tmp_path / "cache").exists()


def test_missing_data_are_told_with_the_folder_that_was_given(tmp_path: Path, website: Path) -> None:
    with pytest.raises(TaskError) as caught:
        find(published(website), str(tmp_path / "data"))
    second = str(caught.value).splitlines()[1]
    assert second == f"put words into {tmp_path}/data/hello and pass --data {tmp_path}/data (or set EVENSTEP_DATA)"


@pytest.mark.parametrize(
    "official", [MNIST, FASHION_MNIST, CIFAR10, TINYSHAKESPEARE], ids=lambda official: official.name
)
def test_the_tables_of_official_files_are_well_formed(official: Official) -> None:
    assert all(len(md5) == 32 for md5 in official.md5.values())
    assert official.url.endswith("/") != bool(official.inner)


# Networks


def bytes_like(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


GREY, COLOUR = ([33.0], [79.0]), ([125.0, 123.0, 114.0], [63.0, 62.0, 67.0])


@pytest.mark.parametrize(
    ("make_model", "images", "expected_parameters"),
    [
        (lambda: SimpleNet(Normalize(*GREY)), bytes_like(2, 28, 28), 203_530),
        (lambda: Net(Normalize(*COLOUR)), bytes_like(2, 3, 32, 32), 62_006),
        (lambda: ResNet18(Normalize(*COLOUR)), bytes_like(2, 3, 32, 32), 11_173_962),
        (DigitNet, bytes_like(2, 8, 8) // 16, 38_282),
    ],
    ids=["SimpleNet", "Net", "ResNet18", "DigitNet"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_networks_have_their_size_and_follow_their_dtype(
    make_model: Callable[[], nn.Module], images: torch.Tensor, expected_parameters: int, dtype: torch.dtype
) -> None:
    model = make_model().to(dtype)
    logits = model(images)
    assert num_parameters(model) == expected_parameters
    assert logits.shape == (2, 10)
    assert logits.dtype == dtype


def test_normalize_centres_each_channel_and_stays_out_of_the_checkpoint() -> None:
    normalize = Normalize([10.0, 20.0], [2.0, 4.0])
    images = torch.tensor([12, 16], dtype=torch.uint8).view(1, 2, 1, 1)
    assert normalize(images, torch.empty(0)).flatten().tolist() == [1.0, -1.0]
    assert normalize.state_dict() == {}


def test_gpt_has_its_size_and_answers_at_every_position() -> None:
    gpt = GPT(vocabulary=11, context=8, layers=2, heads=2, width=16)
    block = 4 * 16 + 16 * 48 + (16 * 16 + 16) + (16 * 64 + 64) + (64 * 16 + 16)
    assert num_parameters(gpt) == 11 * 16 + 8 * 16 + 2 * block + 2 * 16 + 16 * 11
    assert gpt(torch.zeros(3, 8, dtype=torch.uint8)).shape == (3, 8, 11)


def test_gpt_does_not_see_the_future() -> None:
    gpt = GPT(vocabulary=11, context=8, layers=2, heads=2, width=16).double()
    tokens = torch.arange(8).view(1, 8)
    changed = tokens.clone()
    changed[0, 5] = 10
    before, after = gpt(tokens)[0], gpt(changed)[0]
    assert torch.equal(before[:5], after[:5])
    assert not torch.allclose(before[5:], after[5:])


def test_gpt_writes_the_same_text_for_the_same_seed_even_past_its_context() -> None:
    gpt = GPT(vocabulary=11, context=4, layers=1, heads=2, width=16)
    start = torch.tensor([[3]])
    first, again = (gpt.generate(start, 9, torch.Generator().manual_seed(1)) for _ in range(2))
    assert first.shape == (1, 10)
    assert first[0, 0] == 3
    assert torch.equal(first, again)


# Tasks


def test_digits_are_split_four_to_one_within_each_digit() -> None:
    task = load_task("digits")
    (images, labels), (valid_images, valid_labels) = task.train, task.valid
    assert images.shape == (1438, 8, 8)
    assert valid_images.shape == (359, 8, 8)
    assert images.dtype == torch.uint8
    assert labels.dtype == torch.int64
    shares = valid_labels.bincount() / (labels.bincount() + valid_labels.bincount())
    assert torch.allclose(shares, torch.full((10,), 0.2), atol=0.005)


def test_digits_are_those_of_scikit_learn() -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    images, labels = datasets.load_digits(return_X_y=True)
    task = load_task("digits")
    ours = sorted(torch.cat([task.train[0], task.valid[0]]).flatten(1).tolist())
    assert ours == sorted(images.astype(int).tolist())
    assert torch.cat([task.train[1], task.valid[1]]).bincount().tolist() == torch.tensor(labels).bincount().tolist()


def test_the_split_of_digits_does_not_depend_on_the_seed() -> None:
    torch.manual_seed(1)
    first = load_task("digits").valid
    torch.manual_seed(2)
    assert all(map(torch.equal, first, load_task("digits").valid))


def test_digits_has_a_loss_and_an_accuracy_for_each_sample() -> None:
    task = load_task("digits")
    assert task.metrics is not None
    model, batch = task.model(), tuple(part[:5] for part in task.train)
    assert task.loss(model, batch).shape == ()
    assert task.metrics(model, batch)["accuracy"].shape == (5,)


def test_digits_without_scikit_learn_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(TaskError, match=r"^digits needs scikit-learn: pip install 'evenstep\[demo\]'$"):
        load_task("digits")


@pytest.mark.slow
def test_shakespeare_learns_from_a_text_and_shows_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = b"To be, or not to be:\n" * 100
    (tmp_path / "input.txt").write_bytes(text)
    monkeypatch.setattr(
        "evenstep.tasks.shakespeare.TINYSHAKESPEARE",
        Official(name="tinyshakespeare", md5={"input.txt": md5(text)}, url="file:///nowhere/"),
    )
    task = load_task("shakespeare", str(tmp_path))
    assert task.metrics is not None
    assert task.show is not None
    model, batch = task.model(), tuple(part[:2] for part in task.train)
    losses, num_tokens = task.loss(model, batch)
    bits, _ = task.metrics(model, batch)["bits_per_character"]
    assert num_tokens == 2 * 128
    assert losses.item() == pytest.approx(0.6931 * bits.item(), rel=1e-3)
    assert len(task.show(model)) == 200
