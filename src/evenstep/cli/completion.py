"""What the shell offers for an argument when TAB is pressed; `evenstep --install-completion` sets it up."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable

from evenstep.strategy_facts import STRATEGIES
from evenstep.task import BUILT_IN


def complete_task(incomplete: str) -> list[str]:
    return [*_beginning(BUILT_IN, incomplete), *_files(incomplete, ".py")]


def complete_settings(incomplete: str) -> list[str]:
    return _files(incomplete, ".toml")


def complete_strategy(incomplete: str) -> list[str]:
    return _beginning(STRATEGIES, incomplete)


def complete_run(incomplete: str) -> list[str]:
    """Folders; if nothing is typed yet, those of runs/."""
    return _files(incomplete or "runs/", "/")


def _beginning(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def _files(incomplete: str, ending: str) -> list[str]:
    """Files of this ending, and folders to look into."""
    found = sorted(glob.glob(f"{glob.escape(incomplete)}*"))
    return [
        f"{path}/" if os.path.isdir(path) else path for path in found if os.path.isdir(path) or path.endswith(ending)
    ]
