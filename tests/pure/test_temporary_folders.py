"""Folders of running processes are left alone, and those of killed ones are removed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from evenstep.distributed.temporary_folders import PREFIX, live_folder

HOLD = """
from evenstep.distributed.temporary_folders import live_folder
with live_folder() as folder:
    print(folder, flush=True)
    input()
"""
CONTAINER = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc")
"""Process ids of its own, beside the same /tmp and host name."""


@pytest.fixture(autouse=True)
def _own_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@contextmanager
def held_elsewhere() -> Iterator[Path]:
    """Another process that holds a folder; it is killed at the end."""
    command = [sys.executable, "-c", HOLD]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield Path(process.stdout.readline().strip())
        finally:
            process.kill()


def look() -> None:
    """What every start of evenstep does."""
    with live_folder() as folder:
        assert folder.is_dir()
    assert not folder.exists()


def test_what_a_running_process_holds_stays_and_what_a_killed_one_held_goes() -> None:
    with held_elsewhere() as folder:
        look()
        assert folder.is_dir()
    look()
    assert not folder.exists()


def test_what_is_held_here_is_left_alone_by_a_container_with_process_ids_of_its_own() -> None:
    if subprocess.run([*CONTAINER, "true"], capture_output=True).returncode:
        pytest.skip("this system lets nobody make a PID namespace")
    with live_folder() as folder:
        subprocess.run([*CONTAINER, sys.executable, "-c", HOLD], input="\n", text=True, check=True)
        assert folder.is_dir()


def test_a_folder_that_is_only_being_made_is_left_alone() -> None:
    with live_folder() as folder:
        (folder / "lock").unlink()
        look()
        assert folder.is_dir()


@pytest.mark.timeout(30)
@pytest.mark.parametrize("make", [os.mkfifo, lambda lock: lock.symlink_to("victim")])
def test_what_others_put_in_place_of_a_lock_is_not_waited_for_nor_followed(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    victim = tmp_path / f"{PREFIX}theirs"
    victim.mkdir()
    (victim / "victim").touch()
    make(victim / "lock")
    look()
    assert (victim / "victim").exists()


def test_a_folder_that_is_a_link_is_left_alone(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "lock").touch()
    (tmp_path / f"{PREFIX}link").symlink_to(victim)
    look()
    assert (victim / "lock").exists()
