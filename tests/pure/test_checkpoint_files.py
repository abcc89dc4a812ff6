"""Checkpoint folders: damage is seen, the one before is used, and a failed save harms nothing."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from evenstep.checkpoint import atomic_write, files, integrity
from evenstep.errors import CheckpointError
from evenstep.record import Evaluation, Tally
from tests.pure.conftest import Ended

FOLDER = Path("runs/one/checkpoints")


def state(step: int, **changes: object) -> dict[str, object]:
    loader = {"position": step * 8, "num_finished": step, "num_samples": 100}
    rest = {"seed": 0, "num_steps": None, "scheduler": None, "scaler": None, "generators": [], "optimizers": {}}
    versions = {"format": files.FORMAT, "evenstep": "0.1.0", "torch": "2.13.0"}
    return {"step": step, "loader": loader, **rest, "valid": {}, "plan": {"strategy": "ddp"}, **versions, **changes}


def save(step: int, **changes: object) -> Path:
    """A small real checkpoint."""
    weights = {"layer.weight": torch.full((3, 4), float(step)), "layer.scale": torch.tensor(1.5)}
    return atomic_write.write(
        FOLDER,
        step,
        {
            files.WEIGHTS: lambda file: save_file(weights, file),
            files.OPTIMIZER: lambda file: save_file({"layer.weight/momentum": torch.zeros(3, 4)}, file),
            files.STATE: lambda file: file.write_text(json.dumps(state(step, **changes))),
        },
    )


def flip_a_byte(path: Path) -> None:
    content = bytearray((path / files.WEIGHTS).read_bytes())
    content[-1] ^= 1
    (path / files.WEIGHTS).write_bytes(content)


def truncate(path: Path) -> None:
    os.truncate(path / files.OPTIMIZER, 20)


def delete(path: Path) -> None:
    (path / files.STATE).unlink()


def delete_sums(path: Path) -> None:
    (path / files.SUMS).unlink()


def scramble_sums(path: Path) -> None:
    (path / files.SUMS).write_text("no sums\n")


def forget_weights(path: Path) -> None:
    lines = (path / files.SUMS).read_text().splitlines()
    (path / files.SUMS).write_text("\n".join(line for line in lines if files.WEIGHTS not in line))


DAMAGE = {
    flip_a_byte: "is damaged: weights.safetensors is not what was written (SHA-256 differs)",
    truncate: "is damaged: optimizer.safetensors is not what was written (SHA-256 differs)",
    delete: "is damaged: state.json is missing",
    delete_sums: "is not a checkpoint: its SHA256SUMS cannot be read",
    scramble_sums: "is not a checkpoint: its SHA256SUMS cannot be read",
    forget_weights: "is not a complete checkpoint: SHA256SUMS does not list weights.safetensors",
}
damaged_in_any_way = pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)


def test_a_checkpoint_is_whole_and_found_by_any_of_its_names() -> None:
    path = save(3)
    integrity.verify(path)
    assert files.read_state(path)["step"] == 3
    for name in ("runs/one", FOLDER, FOLDER / "latest", path):
        assert integrity.find(str(name)) == (path.resolve(), [])
    assert files.tensor_table(path / files.WEIGHTS) == {
        "layer.weight": ("F32", [3, 4]),
        "layer.scale": ("F32", []),
    }


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_every_file_of_a_checkpoint_follows_the_umask(mask: int, mode: int) -> None:
    before = os.umask(mask)
    try:
        path = save(3)
    finally:
        os.umask(before)
    assert {file.name: file.stat().st_mode & 0o777 for file in path.iterdir()} == dict.fromkeys(
        (files.WEIGHTS, files.OPTIMIZER, files.STATE, files.SUMS), mode
    )


def test_sha256sum_agrees() -> None:
    path = save(3)
    checked = subprocess.run(["sha256sum", "-c", files.SUMS], cwd=path, capture_output=True, text=True)
    assert checked.returncode == 0
    assert checked.stdout.splitlines() == ["optimizer.safetensors: OK", "state.json: OK", "weights.safetensors: OK"]
    flip_a_byte(path)
    assert subprocess.run(["sha256sum", "-c", files.SUMS], cwd=path, capture_output=True).returncode == 1


@damaged_in_any_way
def test_damage_is_refused_by_name(damage: Callable[[Path], None]) -> None:
    path = save(3)
    damage(path)
    with pytest.raises(CheckpointError) as refused:
        integrity.verify(path)
    assert str(refused.value).startswith(f"{path} {DAMAGE[damage]}")


@damaged_in_any_way
def test_the_one_before_is_used_and_a_warning_names_the_damaged_one(damage: Callable[[Path], None]) -> None:
    older, newest = save(3), save(6)
    damage(newest)
    found, (warning,) = integrity.find("runs/one")
    assert found == older.resolve()
    assert warning.startswith(f"{newest} {DAMAGE[damage]}")
    assert warning.endswith("; using the one before it")


@damaged_in_any_way
def test_nothing_is_used_when_all_are_damaged(damage: Callable[[Path], None]) -> None:
    for step in (3, 6):
        damage(save(step))
    with pytest.raises(CheckpointError, match=r"no intact checkpoint in runs/one; .*step-00000006 is") as refused:
        integrity.find("runs/one")
    assert "using the one before" not in str(refused.value)


def test_what_is_no_checkpoint_is_refused() -> None:
    Path("runs/empty").mkdir(parents=True)
    Path("notes.txt").write_text("milk")
    with pytest.raises(
        CheckpointError,
        match="runs/empty is neither a checkpoint nor a run folder with one",
    ):
        integrity.find("runs/empty")
    with pytest.raises(CheckpointError, match=r"notes\.txt is neither a checkpoint nor a run folder; give one"):
        integrity.find("notes.txt")
    with pytest.raises(CheckpointError, match="runs/gone does not exist; give a run folder, such as runs/"):
        integrity.find("runs/gone")


def test_a_newer_format_is_refused_with_the_version_that_wrote_it() -> None:
    path = save(3, format=99, evenstep="9.0")
    message = "has format 99 and this evenstep reads up to 1; it was written by evenstep 9.0: upgrade to load it"
    with pytest.raises(CheckpointError, match=message):
        files.read_state(path)
    with pytest.raises(CheckpointError, match=message):
        integrity.find("runs/one")


@pytest.mark.parametrize("content", ["{", "[1]", ""])
def test_a_state_that_is_no_json_table_is_refused_although_its_sum_is_right(content: str) -> None:
    older = save(3)
    path = atomic_write.write(
        FOLDER,
        6,
        {
            files.WEIGHTS: lambda file: save_file({}, file),
            files.STATE: lambda file: file.write_text(content),
        },
    )
    with pytest.raises(CheckpointError, match=r"step-00000006/state\.json is not a state of a checkpoint: "):
        files.read_state(path)
    assert integrity.find("runs/one")[0] == older.resolve()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": "3"}, "seed: expected int, got str"),
        ({"num_steps": -1}, "num_steps: expected int >= 0"),
        ({"loader": []}, "loader: expected object, got array"),
        ({"loader": {"position": 8}}, "loader: missing required field num_finished"),
        ({"generators": [{"python": [3, [], None], "numpy": []}]}, r"generators\[0\].python\[1\]: expected array"),
        ({"optimizers": {"": {"class": 1}}}, "optimizers"),
        ({"format": None}, "format: expected int, got null"),
    ],
)
def test_a_state_with_a_wrong_field_is_refused_by_its_name(changes: dict[str, Any], message: str) -> None:
    path = save(3, **changes)
    with pytest.raises(CheckpointError, match=rf"step-00000003/state\.json is not a state of a checkpoint: {message}"):
        files.read_state(path)


def test_a_state_keeps_what_was_added_to_it() -> None:
    assert dict(files.read_state(save(3, mine=[1])))["mine"] == [1]


def test_a_file_outside_the_checkpoint_is_never_read() -> None:
    path = save(3)
    with (path / files.SUMS).open("a") as sums:
        sums.write(f"{'0' * 64}  ../../../secret\n")
    Path("secret").write_text("s")
    with pytest.raises(CheckpointError, match="secret is missing"):
        integrity.verify(path)


def test_the_last_ones_the_best_one_and_the_latest_one_are_kept() -> None:
    for step in range(1, 7):
        save(step)
        if step == 2:
            atomic_write.point(FOLDER, "best", "step-00000002")
        atomic_write.prune(FOLDER, keep=2)
    assert [path.name for path in integrity.whole(FOLDER)] == ["step-00000002", "step-00000005", "step-00000006"]
    assert os.readlink(FOLDER / "latest") == "step-00000006"
    assert os.readlink(FOLDER / "best") == "step-00000002"
    atomic_write.point(FOLDER, "best", "step-00000006")
    atomic_write.prune(FOLDER, keep=1)
    assert [path.name for path in integrity.whole(FOLDER)] == ["step-00000006"]


def fill_and_fail(file: Path) -> None:
    file.write_bytes(b"half of it")
    raise OSError(28, "No space left on device")


def test_the_newest_is_the_one_with_the_highest_step_also_where_its_name_is_longer() -> None:
    for step in (99_999_999, 100_000_000, 100_000_001):
        save(step)
    assert integrity.find("runs/one")[0].name == "step-100000001"
    atomic_write.prune(FOLDER, keep=2)
    assert [path.name for path in integrity.whole(FOLDER)] == ["step-100000000", "step-100000001"]


@pytest.mark.parametrize("step", [3, 6], ids=["over an older one", "as a new one"])
def test_a_save_that_fails_leaves_the_older_ones_and_no_trace(step: int) -> None:
    older = save(3)
    before = sorted(os.listdir(FOLDER))
    with pytest.raises(OSError, match="No space left"):
        atomic_write.write(FOLDER, step, {files.WEIGHTS: lambda file: save_file({}, file), "more": fill_and_fail})
    assert sorted(os.listdir(FOLDER)) == before == ["latest", "step-00000003"]
    assert integrity.find("runs/one") == (older.resolve(), [])


def test_a_step_saved_twice_is_the_second_one() -> None:
    save(3, valid={"loss": 2.0})
    path = save(3, valid={"loss": 1.0})
    integrity.verify(path)
    assert files.read_state(path)["valid"] == {"loss": 1.0}
    assert sorted(os.listdir(FOLDER)) == ["latest", "step-00000003"]


def test_what_a_killed_process_left_is_not_in_the_way() -> None:
    path = save(3)
    # Killed while it wrote, with a process id that is ours now; and killed between its two renames.
    shutil.copytree(path, FOLDER / f".{path.name}.{os.getpid()}")
    shutil.copytree(path, FOLDER / f".{path.name}.replaced")
    integrity.verify(save(3))
    assert sorted(os.listdir(FOLDER)) == ["latest", "step-00000003"]


def test_inspect_prints_the_names_and_shapes_of_the_weights(evenstep: Callable[..., Ended]) -> None:
    path = save(3)
    ended = evenstep("checkpoint", "inspect", "runs/one")
    assert ended.code == 0
    assert ended.err == ""
    assert str(path.resolve()) in ended.out
    lines = [line.split() for line in ended.out.splitlines()]
    assert ["layer.weight", "F32", "3", "x", "4"] in lines
    assert ["layer.scale", "F32", "one", "number"] in lines
    assert ["step", "3"] in lines


def test_inspect_prints_json_and_warns_in_it(evenstep: Callable[..., Ended]) -> None:
    save(3)
    flip_a_byte(save(6))
    facts = json.loads(evenstep("checkpoint", "inspect", "runs/one", "--json").out)
    assert facts["step"] == 3
    assert facts["weights"]["layer.weight"] == {"dtype": "F32", "shape": [3, 4]}
    assert "step-00000006 is damaged" in facts["warnings"][0]


def test_inspect_refuses_a_damaged_checkpoint_with_exit_code_2(evenstep: Callable[..., Ended]) -> None:
    path = save(3)
    flip_a_byte(path)
    ended = evenstep("checkpoint", "inspect", path)
    assert ended.code == 2
    assert ended.out == ""
    assert ended.err.startswith(f"error: {path} is damaged: weights.safetensors")


TALLY = {"steps": 3, "samples": 24}
EVALUATION = {"step": 3, "epoch": 0, "values": {"loss": 0.5}, "samples": 8, "seconds": 0.1}


def test_what_a_restart_must_know_is_read_as_another_version_wrote_it() -> None:
    so_far = {"tally": {**TALLY, "new": 1}, "best": 0.5, "evaluation": {**EVALUATION, "new": 1}, "new": 1}
    known = files.read_state(save(3, so_far=so_far)).get("so_far")
    assert known is not None
    assert known.tally == Tally(steps=3, samples=24)
    assert known.evaluation == Evaluation(**EVALUATION)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"tally": 3}, "so_far.tally: expected"),
        ({"tally": {"steps": -1}}, "so_far.tally.steps: expected"),
        ({"best": "low"}, "so_far.best: expected"),
        ({"evaluation": {"step": 3}}, "so_far.evaluation: missing required field epoch"),
    ],
)
def test_what_a_restart_must_know_is_refused_where_it_is_damaged(damage: dict[str, object], message: str) -> None:
    path = save(3, so_far={"tally": TALLY, "best": None, "evaluation": None, **damage})
    with pytest.raises(CheckpointError, match=message):
        files.read_state(path)


@pytest.fixture
def _small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atomic_write, "LARGE_BYTES", 1)


CHECKPOINTS = Path("checkpoints")
SPARE = CHECKPOINTS / ".spare-checkpoint"


def saved(step: int, content: bytes, keep: int = 1) -> tuple[Path, int]:
    """A checkpoint whose weights are written over a spare file, if there is one; and the inode of the file."""
    beside = atomic_write.begin(CHECKPOINTS, step)
    taken = atomic_write.take_spares(CHECKPOINTS, beside, {files.WEIGHTS: len(content)})
    # What could not be taken makes room on the disk before anything is written.
    assert not SPARE.exists()
    with (beside / files.WEIGHTS).open("r+b" if taken else "xb") as file:
        file.write(content)
    final = atomic_write.finish(beside, step)
    atomic_write.prune(CHECKPOINTS, keep)
    return final, (final / files.WEIGHTS).stat().st_ino


@pytest.mark.usefixtures("_small_is_large")
def test_a_large_checkpoint_is_written_over_one_that_would_be_deleted() -> None:
    inodes = [saved(step, bytes([step]) * 100)[1] for step in range(1, 6)]
    # The first to be deleted is that of step 1, when that of step 2 is there.
    assert inodes[2:] == inodes[:3]
    assert (CHECKPOINTS / "latest" / files.WEIGHTS).read_bytes() == bytes([5]) * 100
    assert [path.name for path in integrity.whole(CHECKPOINTS)] == [files.step_name(5)]


def mapped(path: Path, num_bytes: int) -> Any:
    """The bytes of a file that is mapped and no longer open; Python's own mmap would keep it open."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
    with path.open("rb") as file:
        address = libc.mmap(None, num_bytes, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
    return (ctypes.c_char * num_bytes).from_address(address)


@pytest.mark.usefixtures("_small_is_large")
@pytest.mark.parametrize("how", ["open", "mapped", "linked", "of another size", "on overlayfs", "an archive"])
def test_files_that_somebody_uses_are_not_written_over(
    how: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    first, inode = saved(1, b"a" * 100)
    seen: Callable[[], bytes] = (Path("mine") / files.WEIGHTS).read_bytes
    if how == "open":
        opened = (first / files.WEIGHTS).open("rb")
        request.addfinalizer(opened.close)
        seen = opened.read
    elif how == "mapped":
        view = mapped(first / files.WEIGHTS, 100)
        seen = lambda: view.raw  # noqa: E731
    elif how == "linked":
        Path("mine").mkdir()
        (Path("mine") / files.WEIGHTS).hardlink_to(first / files.WEIGHTS)
    elif how == "an archive":
        first.rename("mine")
        first.symlink_to(Path("mine").resolve())
    elif how == "on overlayfs":
        monkeypatch.setattr(atomic_write, "_file_system", lambda folder: "overlay")
    length = 99 if how == "of another size" else 100
    saved(2, b"b" * 100)
    _, last = saved(3, b"c" * length)
    if how in ("of another size", "on overlayfs"):
        assert not first.exists()
    else:
        assert seen() == b"a" * 100
        assert last != inode
    assert (CHECKPOINTS / "latest" / files.WEIGHTS).read_bytes() == b"c" * length


def test_a_program_that_opens_a_file_at_the_wrong_moment_does_not_end_the_training() -> None:
    """The kernel tells the holder of a lease by a signal, which ends a process that does not expect it."""
    path = Path("weights")
    path.write_bytes(b"a" * 100)
    asks = "from evenstep.checkpoint.atomic_write import _is_unused\nfrom pathlib import Path\n"
    asks += "for _ in range(20_000):\n    _is_unused(Path('weights'), 100)\n"
    with subprocess.Popen([sys.executable, "-c", asks]) as asking:
        while asking.poll() is None:
            path.read_bytes()
    assert asking.returncode == 0


def test_small_checkpoints_leave_nothing_behind() -> None:
    for step in (1, 2):
        saved(step, b"a" * 100)
    assert not SPARE.exists()
