"""The official files of a data set: found on this machine or downloaded, and always checked."""

from __future__ import annotations

import gzip
import hashlib
import os
import sys
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from evenstep.errors import TaskError

CONNECT_SECONDS = 5.0

# In FIPS mode, md5 is refused unless it is declared not to be used for security.
_md5 = partial(hashlib.md5, usedforsecurity=False)


@dataclass(frozen=True)
class Official:
    """The files of one data set as their authors published them."""

    name: str
    md5: Mapping[str, str]
    """Of each file's content, uncompressed: packers write different gzip headers around the same bytes."""
    url: str
    """A folder (ends with /) that holds each file, or one tar archive of them all."""
    suffix: str = ""
    """What the published names end with: `.gz`, or nothing."""
    archive_md5: str = ""
    inner: str = ""
    """The folder inside the archive."""
    also: tuple[str, ...] = ()
    """Folders where a Linux distribution installs the files."""


def find(official: Official, data: str | None = None) -> dict[str, Path]:
    """The path of each file of a data set; missing ones are downloaded."""
    given = data or os.environ.get("EVENSTEP_DATA")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "evenstep"
    roots = [Path(given).expanduser(), cache] if given else [cache]
    missing = [name for name in official.md5 if _look_up(official, name, roots) is None]
    if missing:
        try:
            writable = next(filter(_is_writable, roots), roots[0])
            _download(official, missing, writable / official.name)
        except (OSError, HTTPException, EOFError, zlib.error) as error:
            raise TaskError(_missing_message(official, missing, roots, bool(given), error)) from error
    found = {name: _look_up(official, name, roots) for name in official.md5}
    return {name: path for name, path in found.items() if path is not None}


def verified(path: Path, md5: str) -> bytes:
    """The uncompressed content of a file, refused unless it is the official one."""
    content = unpacked(path)
    found = _md5(content).hexdigest()
    if found != md5:
        raise TaskError(
            f"{path} is not the official file: its content has md5 {found}, expected {md5};\n"
            "replace it, or delete it and it is downloaded again"
        )
    return content


def unpacked(path: Path) -> bytes:
    """The content of a file, uncompressed if it was gzipped."""
    content = path.read_bytes()
    if content[:2] != b"\x1f\x8b":
        return content
    try:
        return gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise TaskError(
            f"{path} does not unpack: {error};\nreplace it, or delete it and it is downloaded again"
        ) from error


def _look_up(official: Official, name: str, roots: list[Path]) -> Path | None:
    folders = [folder for root in roots[:1] for folder in _folders(official, root)]
    folders += [Path(folder) for folder in official.also]
    folders += [folder for root in roots[1:] for folder in _folders(official, root)]
    candidates = (folder / spelling for folder in folders for spelling in (name, f"{name}.gz"))
    return next((path for path in candidates if path.is_file()), None)


def _folders(official: Official, root: Path) -> list[Path]:
    own = root / official.name
    return [own, root, own / official.inner, root / official.inner] if official.inner else [own, root]


def _is_writable(folder: Path) -> bool:
    while not folder.exists():
        folder = folder.parent
    return os.access(folder, os.W_OK)


def _download(official: Official, missing: list[str], folder: Path) -> None:
    if official.url.endswith("/"):
        for name in missing:
            published = name + official.suffix
            with _fetched(official.url + published, folder) as part:
                _keep(part, folder / published, official.md5[name])
        return
    with _fetched(official.url, folder) as archive:
        _extract(official, missing, archive, folder)


def _extract(official: Official, missing: list[str], archive: Path, folder: Path) -> None:
    with archive.open("rb") as file:
        found = hashlib.file_digest(file, _md5).hexdigest()
    if found != official.archive_md5:
        raise OSError(f"the download has md5 {found}, expected {official.archive_md5}")
    with tarfile.open(archive) as tar:
        for name in missing:
            # By name: an archive may hold paths that lead elsewhere.
            member = tar.extractfile(f"{official.inner}/{name}")
            assert member is not None, f"{official.inner}/{name} is not a plain file"
            with _part(folder, name) as part:
                part.write_bytes(member.read())
                _keep(part, folder / name, official.md5[name])


def _keep(part: Path, path: Path, md5: str) -> None:
    try:
        verified(part, md5)
    except TaskError as error:
        raise OSError(f"the download is not the official {path.name}") from error
    part.rename(path)


@contextmanager
def _fetched(url: str, folder: Path) -> Iterator[Path]:
    """The file behind a URL, under a temporary name."""
    from rich.console import Console
    from rich.progress import DownloadColumn, Progress

    console = Console(stderr=True)
    with urlopen(url, timeout=CONNECT_SECONDS) as response:
        # Only now: a mistyped folder should not be created where there is no network.
        folder.mkdir(parents=True, exist_ok=True)
        with _part(folder, url.rpartition("/")[2]) as part:
            columns = (*Progress.get_default_columns(), DownloadColumn())
            with (
                Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as progress,
                part.open("wb") as file,
            ):
                num_bytes = response.headers.get("Content-Length")
                bar = progress.add_task(url.rpartition("/")[2], total=int(num_bytes) if num_bytes else None)
                while chunk := response.read(1 << 18):
                    file.write(chunk)
                    progress.advance(bar, len(chunk))
            yield part


@contextmanager
def _part(folder: Path, name: str) -> Iterator[Path]:
    # The process id: two runs may download at the same time, and both end with the same file.
    path = folder / f".{name}.{os.getpid()}.part"
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def _missing_message(
    official: Official, missing: list[str], roots: list[Path], is_given: bool, error: Exception
) -> str:
    reason = " ".join(str(error.reason if isinstance(error, URLError) else error).split())
    names = ", ".join(name + official.suffix for name in missing)
    folder = str(roots[0]) if is_given else "DIR"
    return (
        f"{official.name} is not in {roots[0]}, and the download from {official.url} failed: {reason}\n"
        f"put {names} into {folder}/{official.name} and pass --data {folder} (or set EVENSTEP_DATA)"
    )
