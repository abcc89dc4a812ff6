"""What a watched run left behind, read back."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from evenstep import checkpoint
from evenstep.audit.samples import FILE, Problems, read_lines
from evenstep.record import Record
from evenstep.worker.witness import FACTS, FOLDER

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Failure:
    """A run that did not come to its end."""

    message: str

    @property
    def first_lines(self) -> str:
        """Without where the logs are: they are removed."""
        lines = [
            line.strip() for line in self.message.splitlines() if not line.startswith(("full logs:", "go on from"))
        ]
        return "\n".join(lines[:6])


@dataclass(frozen=True)
class Evidence:
    """A run folder."""

    folder: Path

    @cached_property
    def record(self) -> Record:
        return Record.read(self.folder)

    @cached_property
    def steps(self) -> list[int]:
        """Those that the optimizer took: fp16's scaler skips some."""
        return sorted(int(path.stem.removeprefix("step-")) for path in (self.folder / FOLDER).glob("*.safetensors"))

    @cached_property
    def begin(self) -> int:
        """The step from which it goes on; 0 for a run from the start."""
        return self.record.data.get("step", 0)

    @cached_property
    def losses(self) -> dict[int, float]:
        return {step.step: step.loss for step in self.record.steps}

    @cached_property
    def ids(self) -> dict[int, list[Any]]:
        """The samples of every step."""
        path = self.folder / FILE
        return {line.step: line.ids for line in read_lines(path, Problems())} if path.exists() else {}

    @cached_property
    def facts(self) -> dict[str, Any]:
        values: dict[str, Any] = json.loads((self.folder / FOLDER / FACTS).read_text())
        return values

    def tensors(self, step: int) -> Tensors:
        """Everything of one step, in the model's order: `gradient/NAME`, `weight/NAME`, `optimizer/NAME/KEY` ..."""
        loaded = load_file(self.folder / FOLDER / f"step-{step:08d}.safetensors")
        places = {name: place for place, name in enumerate(self.facts["parameters"])}
        return {key: loaded[key] for key in sorted(loaded, key=lambda key: _place(key, places))}

    def checkpoint(self, step: int) -> Path:
        """The folder of a checkpoint."""
        return self.folder / checkpoint.FOLDER / f"step-{step:08d}"

    def forget_checkpoints(self) -> None:
        """Give their room on the disk back: a large model's are large."""
        shutil.rmtree(self.folder / checkpoint.FOLDER, ignore_errors=True)

    @cached_property
    def without_gradient(self) -> list[str]:
        """Parameters that no gradient reached in any step."""
        reached = {key for step in self.steps for key in self.tensors(step) if key.startswith("gradient/")}
        return [name for name in self.facts["parameters"] if f"gradient/{name}" not in reached]


def _place(key: str, places: dict[str, int]) -> tuple[int, str]:
    kind, _, name = key.partition("/")
    name = name.rpartition("/")[0] if kind == "optimizer" else name
    return places.get(name, len(places)), key
