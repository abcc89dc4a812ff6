"""Builds the C library at install, where there is a compiler; without it, DDP averages gradients over gloo."""

from __future__ import annotations

import importlib.util
import platform
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = "src/evenstep/distributed/shm"


class CustomBuildHook(BuildHookInterface[Any]):
    """Called by hatchling for a wheel, and for an editable install."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        file = Path(self.root, FOLDER, "native.py")
        spec = importlib.util.spec_from_file_location("library", file)
        assert spec is not None
        assert spec.loader is not None
        library = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(library)
        built = library.build()
        if built is None:
            self.app.display_warning(
                "evenstep: the C library was not built (no C compiler); DDP averages gradients over gloo"
            )
            return
        # Git does not know it, so hatchling would leave it out.
        build_data["artifacts"].append(f"{FOLDER}/{built.name}")
        if version != "editable":
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{sys.platform}_{platform.machine()}"
