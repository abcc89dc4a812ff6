"""What must be the same on all machines of a run: the command, the versions, the user's own code."""

from __future__ import annotations

import ast
import hashlib
import os
import socket
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

import evenstep
from evenstep.task import BUILT_IN, split_spec

MOST_NAMED = 4
MAX_CHARACTERS = 80
HASH_CHARS = 16
"""Of a source's SHA-256; short, since it guards against mistakes, not forgery."""
_Source = tuple[str, Path, str]
"""The name under which it is imported, its file, and the package to which its relative imports refer."""


@dataclass(frozen=True)
class Identity:
    """A machine's command, versions and sources; a machine that differs in one of them is refused."""

    machine: str
    command: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    """A hash of each of the user's own source files, by the name under which it is imported."""

    def refusal_of(self, other: Identity) -> str:
        """Why another machine does not match, with both values; empty if it does."""
        ours, theirs = self._facts(), other._facts()
        names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
        parts = [
            f"{name} is {_short(theirs.get(name))} on {other.machine} and {_short(ours.get(name))} on {self.machine}"
            for name in names[:MOST_NAMED]
        ]
        more = [f"{len(names) - MOST_NAMED} more differ"] if len(names) > MOST_NAMED else []
        return "; ".join([*parts, *more])

    def _facts(self) -> dict[str, str]:
        sources = {f"the source of {name}": text for name, text in self.sources.items()}
        return {**self.command, **self.versions, **sources}


def _short(text: str | None) -> str:
    text = text or "absent"
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]}..."


def identity_of(command: Mapping[str, str], sources: Mapping[str, str]) -> Identity:
    """This machine's identity, with the versions that compute."""
    versions = {"torch": str(torch.__version__), "evenstep": evenstep.__version__}
    return Identity(socket.gethostname(), command, versions, sources)


def sources_of_task(spec: str) -> dict[str, str]:
    """Hashes of a task's sources; none for a built-in task."""
    if spec in BUILT_IN:
        return {}
    module, _ = split_spec(spec)
    return sources_of_file(Path(module)) if module.endswith(".py") else sources_of_module(module)


def sources_of_file(file: Path) -> dict[str, str]:
    """Hashes of a script and of all that it imports from its own folder or the working folder."""
    return _hashes([(file.name, file, "")], (file.parent, Path()))


def sources_of_module(name: str) -> dict[str, str]:
    """Hashes of a module in the working folder and its imports; an installed one has none."""
    return _hashes(_own_sources(name, (Path(),)), (Path(),))


def _hashes(sources: Iterable[_Source], folders: Sequence[Path]) -> dict[str, str]:
    """Of these sources and their imports; found by parsing, not importing: code that differs should not run first."""
    hashes: dict[str, str] = {}
    # A queue, since import chains may exceed the recursion limit.
    queue = deque(sources)
    while queue:
        name, file, package = queue.popleft()
        if name in hashes:
            continue
        with suppress(OSError):
            source = file.read_bytes()
            hashes[name] = hashlib.sha256(source).hexdigest()[:HASH_CHARS]
            queue.extend(found for wanted in _imports(source, package) for found in _own_sources(wanted, folders))
    return hashes


def _own_sources(name: str, folders: Sequence[Path]) -> Iterator[_Source]:
    """A module and its parent packages; none if it is not the user's own."""
    parts = name.split(".")
    # `-m` also accepts names with hyphens.
    if not all(part.replace("-", "_").isidentifier() for part in parts):
        return
    for folder in folders:
        for number in range(1, len(parts) + 1):
            base = folder.joinpath(*parts[:number])
            package, module = base / "__init__.py", base.with_name(f"{base.name}.py")
            own = ".".join(parts[:number])
            # Path.is_file raises where a name is too long for a file.
            if os.path.isfile(package):
                yield own, package, own
            elif os.path.isfile(module):
                yield own, module, own.rpartition(".")[0]


def _imports(source: bytes, package: str) -> Iterator[str]:
    """The names that a source imports, anywhere in it."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level and package else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}".strip(".") for alias in node.names)
