"""Which checkpoints are whole: a damaged or incomplete one is refused, and the one before it is taken."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from evenstep.checkpoint.files import FOLDER, OPTIMIZER, STATE, SUMS, WEIGHTS, read_state
from evenstep.errors import CheckpointError
from evenstep.plan import RUNS

EXAMPLE = "runs/2026-11-15-digits-ddp"
_NAME = re.compile(r"step-([0-9]+)")


def whole(folder: Path) -> list[Path]:
    """The finished checkpoints below a folder, oldest first."""
    for replaced in folder.glob(".step-*.replaced"):
        # A process was killed between moving the old one away and renaming the new one.
        final = folder / replaced.name.removeprefix(".").removesuffix(".replaced")
        if not final.exists():
            replaced.rename(final)
    found = ((_NAME.fullmatch(path.name), path) for path in folder.glob("step-*") if path.is_dir())
    # Eight digits sort as text; from step 100,000,000 on there are nine.
    return [path for _, path in sorted((int(name[1]), path) for name, path in found if name is not None)]


def verify(path: Path) -> None:
    """Raise CheckpointError unless every file has the hash it was written with."""
    try:
        lines = (path / SUMS).read_text().splitlines()
        expected = {name: digest for digest, name in (line.split("  ", 1) for line in lines)}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not a checkpoint: its {SUMS} cannot be read ({error})") from error
    missing = {WEIGHTS, OPTIMIZER, STATE} - set(expected)
    if missing:
        raise CheckpointError(f"{path} is not a complete checkpoint: {SUMS} does not list {', '.join(sorted(missing))}")
    for name, digest in expected.items():
        file = path / Path(name).name
        if not file.is_file():
            raise CheckpointError(f"{path} is damaged: {name} is missing")
        if sha256(file) != digest:
            raise CheckpointError(f"{path} is damaged: {name} is not what was written (SHA-256 differs)")


def find(where: str) -> tuple[Path, list[str]]:
    """The newest whole checkpoint of a run folder (or the checkpoint itself), verified, and warnings about others."""
    path = Path(where)
    if not os.path.exists(path):
        if path.parent.name == FOLDER and os.path.isdir(path.parent):
            there = sorted(one.name for one in path.parent.glob("[!.]*") if os.path.isdir(one))
            if path.is_symlink():
                raise CheckpointError(f"{where} points to {path.resolve()}, which was moved or deleted")
            raise CheckpointError(f"{path.parent} has no checkpoint {path.name}; it has {', '.join(there) or 'none'}")
        usual = Path(RUNS) / where
        advice = f"did you mean {usual}?" if os.path.isdir(usual) else f"give a run folder, such as {EXAMPLE}"
        raise CheckpointError(f"{where} does not exist; {advice}")
    if (path / SUMS).exists() or (path / STATE).exists():
        verify(path)
        return path.resolve(), []
    if path.is_file():
        raise CheckpointError(f"{where} is neither a checkpoint nor a run folder; give one, such as {EXAMPLE}")
    candidates = whole(path / FOLDER) or whole(path)
    if not candidates:
        raise CheckpointError(
            f"{where} is neither a checkpoint nor a run folder with one; the first is written after the first epoch"
        )
    warnings = []
    for candidate in reversed(candidates):
        try:
            verify(candidate)
            read_state(candidate)
        except CheckpointError as error:
            warnings.append(f"{error}; using the one before it")
            continue
        return candidate.resolve(), warnings
    raise CheckpointError(f"no intact checkpoint in {where}; {warnings[0].removesuffix('; using the one before it')}")


def sha256(path: Path) -> str:
    """The hash of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
