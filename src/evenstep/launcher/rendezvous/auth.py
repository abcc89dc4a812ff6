"""The token that the launchers of one run share, and what it protects.

The user sets it, or the first machine makes one and leaves it in a file, or in a credential of munge, Slurm's
authentication service. It is never sent over the network (see tunnel.py). Messages between machines are signed with a
key derived from it.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import os
import re
import secrets
import stat
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

import msgspec

from evenstep.errors import PlanError
from evenstep.launcher.variables import TOKEN, TOKEN_FILE, LauncherVariables, launcher_variables

T = TypeVar("T")
Reader: TypeAlias = asyncio.StreamReader
Writer: TypeAlias = asyncio.StreamWriter
Side = Literal["server", "client"]
MAX_FRAME_BYTES = 2**22
"""The longest message of an authenticated machine."""
MIN_TOKEN_CHARS = 16
MOST_BYTES = 4096
LABEL = "evenstep token "
"""Before the token in a credential: this user may have sealed anything."""
MUNGE_SECONDS = 10.0
MAX_CREDENTIAL_BYTES = 4096
OPENED = (0, 15, 16, 17)
"""Success, and expired, from the future, or replayed: such a credential is still authentic, and its sender must yet
prove that it knows the token in it.
"""
FORGED = "an unauthorized process writes to this run's rendezvous; use another port and another token"
DIGEST = "sha256"
DIGEST_BYTES = 32
_NEVER = (0, b"")
MAKE_ONE = f'export {TOKEN}=$(python -c "import secrets; print(secrets.token_hex())")'


def given_token(given: LauncherVariables | None = None) -> str | None:
    """The token that the user has set, as text or in a file; None if there is none."""
    given = given or launcher_variables()
    token, file = given.EVENSTEP_TOKEN.strip(), given.EVENSTEP_TOKEN_FILE
    if token and file:
        raise PlanError(f"{TOKEN} and {TOKEN_FILE} are both set; unset one of them")
    if file:
        return _checked(read_private(Path(file)), f"the token in {file}")
    return _checked(token, TOKEN) if token else None


def make_token() -> str:
    """256 random bits."""
    return secrets.token_hex(32)


def read_private(path: Path) -> str:
    """The text of a file; refused if other users can read or write it."""
    try:
        with path.open("rb") as file:
            about = os.fstat(file.fileno())
            text = file.read(MOST_BYTES)
    except OSError as error:
        raise PlanError(f"{path} cannot be read: {error.strerror}; {TOKEN_FILE} names a file with a token") from error
    if about.st_uid not in (os.geteuid(), 0) or stat.S_IMODE(about.st_mode) & 0o077:
        raise PlanError(f"{path} is accessible to other users (mode {stat.S_IMODE(about.st_mode):o}): chmod 600 {path}")
    return text.decode(errors="replace").strip()


def _checked(token: str, what: str) -> str:
    """Refuse a token short enough to be found by trying."""
    if len(token) < MIN_TOKEN_CHARS:
        raise PlanError(
            f"{what} has {len(token)} characters, and {MIN_TOKEN_CHARS} is the minimum; make one, and set it on all "
            f"machines:\n{MAKE_ONE}"
        )
    return token


class TokenFile:
    """The file with a token that the first machine made, for machines that share its folder."""

    def __init__(self, folder: Path, address: tuple[str, int]) -> None:
        self.path = folder / f".token-{address[0].replace(':', '_')}-{address[1]}"

    def write(self, token: str) -> None:
        """Write it, readable by this user alone."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Written to another name, then renamed: no reader finds half of it, and a planted symlink is not followed.
            beside = self.path.with_name(f"{self.path.name}-{secrets.token_hex(4)}")
            with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(f"{token}\n")
            beside.replace(self.path)
        except OSError as error:
            raise PlanError(
                f"{self.path} cannot be written: {error.strerror}; set a token instead, the same on all machines:\n"
                f"{MAKE_ONE}"
            ) from error

    def read(self) -> str | None:
        """The token; None if there is no file."""
        try:
            # Listing the folder asks the file server: an NFS client may cache for a while that the file does not exist.
            is_there = self.path.name in os.listdir(self.path.parent)
        except OSError:
            return None
        return read_private(self.path) if is_there else None

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)

    def announcement(self, token: str) -> str:
        """What to do on machines that do not share the folder; the token is shown on a terminal, never in a log."""
        shown = token if sys.stderr.isatty() else f"...   (see {self.path})"
        return (
            f"no {TOKEN} is set, so this machine made one. Machines that share this folder find it; on others, before "
            f"the same command:\nexport {TOKEN}={shown}"
        )


@dataclass(frozen=True)
class MessageSigner:
    """Signs messages with the key of one run, for one slot of the store and one sequence number."""

    key: bytes = field(repr=False)
    """Derived from the token and the run's id: messages of another run do not verify."""
    _seen: dict[str, tuple[int, bytes]] = field(default_factory=dict, repr=False, compare=False)
    """The latest sequence number read in each slot, and its signature: an older message cannot be replayed."""
    _used: dict[str, int] = field(default_factory=dict, repr=False, compare=False)
    """The latest sequence number written in each slot; of two machines that write at once, the store takes one."""

    def sign(self, slot: str, values: Mapping[str, Any]) -> str:
        """A signed message for a slot, with the number after the latest one read or written there."""
        number = max(self._seen.get(slot, _NEVER)[0], self._used.get(slot, 0)) + 1
        self._used[slot] = number
        text = json.dumps({"slot": slot, "number": number, "values": values})
        return f"{self._signature(text.encode())}{text}"

    def verify(self, slot: str, message: bytes) -> dict[str, Any] | None:
        """A message's values; None if its signature is wrong, it is for another slot, or it is older than one read."""
        written, text = message[: 2 * DIGEST_BYTES], message[2 * DIGEST_BYTES :]
        if not hmac.compare_digest(written, self._signature(text).encode()):
            return None
        found = json.loads(text)
        number, seen = self._seen.get(slot, _NEVER)
        if found["slot"] != slot or found["number"] < number or (found["number"] == number and written != seen):
            return None
        self._seen[slot] = (found["number"], written)
        values: dict[str, Any] = found["values"]
        return values

    def _signature(self, text: bytes) -> str:
        return hmac.digest(self.key, b"message " + text, DIGEST).hex()


def seal_token(token: str) -> bytes:
    """A munge credential that only this user can open, on nodes of this cluster; empty without munge."""
    done = _run(["munge", f"--restrict-uid={os.geteuid()}"], f"{LABEL}{token}".encode())
    credential = done.stdout.strip() if done is not None and done.returncode == 0 else b""
    return credential if len(credential) <= MAX_CREDENTIAL_BYTES else b""


def open_token(credential: bytes) -> str | None:
    """The token in a credential that this user made; None if another user made it, or it seals something else."""
    done = _run(["unmunge", "--numeric", "--keys=UID"], credential) if len(credential) <= MAX_CREDENTIAL_BYTES else None
    if done is None or done.returncode not in OPENED:
        return None
    about, _, text = done.stdout.decode(errors="replace").partition("\n\n")
    maker = re.fullmatch(r"UID:\s*(\d+)", about.strip())
    token = re.fullmatch(f"{LABEL}([0-9a-f]{{64}})", text.strip())
    return token[1] if token is not None and maker is not None and int(maker[1]) == os.geteuid() else None


def _run(command: list[str], given: bytes) -> subprocess.CompletedProcess[bytes] | None:
    try:
        return subprocess.run(command, input=given, capture_output=True, timeout=MUNGE_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None


class WrongToken(PlanError):
    """The run there has another token."""


def run_key(token: str, run: bytes) -> bytes:
    """The key of one run; slow and salted, so that a weak token is hard to find by trying."""
    return hashlib.scrypt(token.encode(), salt=run, n=2**14, r=8, p=1, dklen=DIGEST_BYTES)


@dataclass(frozen=True)
class Session:
    """The proofs and signed messages of one connection."""

    key: bytes = field(repr=False)
    nonces: bytes

    def proof(self, side: Side, text: bytes = b"") -> bytes:
        """An HMAC that only a side that knows the token can make, for this connection and this text."""
        return hmac.digest(self.key, side.encode() + self.nonces + text, DIGEST)

    async def check(self, side: Side, reader: Reader) -> None:
        if not hmac.compare_digest(await reader.readexactly(DIGEST_BYTES), self.proof(side)):
            raise WrongToken("wrong token: a proof does not match")

    def write(self, side: Side, writer: Writer, message: Any) -> None:
        text = msgspec.json.encode(message)
        writer.write(len(text).to_bytes(4, "big") + self.proof(side, b"says" + text) + text)

    async def read(self, side: Side, reader: Reader, kind: type[T]) -> T:
        """Read a signed message; it is decoded only after its signature is verified."""
        num = int.from_bytes(await reader.readexactly(4), "big")
        proof = await reader.readexactly(DIGEST_BYTES)
        text = await reader.readexactly(min(num, MAX_FRAME_BYTES))
        if not hmac.compare_digest(proof, self.proof(side, b"says" + text)):
            raise WrongToken("a signature is wrong")
        return msgspec.json.decode(text, type=kind)
