"""The secret that the launchers of one run share: given by the user, or made by the first machine.

Whoever has it is a machine of the run; who has it not can do nothing but knock. It never travels: see tunnel.py.

What machines leave for each other in a store, signed: who does not know the token cannot speak for one of them.

How Slurm itself knows who somebody is: munge, whose daemons seal a text for one user of the cluster.

credential = sealed_for_me("secret")      # on one node
opened_from_me(credential)                # on another, by the same user; for anyone else, None
"""

from __future__ import annotations

import hmac
import json
import os
import re
import secrets
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evenstep.errors import PlanError

TOKEN = "EVENSTEP_TOKEN"
TOKEN_FILE = "EVENSTEP_TOKEN_FILE"
"""A file that holds the token, for those who keep secrets in files."""
MIN_TOKEN_CHARS = 16
MOST_BYTES = 4096
LABEL = "evenstep token "
MAKE_ONE = f'export {TOKEN}=$(python -c "import secrets; print(secrets.token_hex())")'


def given_token(environment: Mapping[str, str] = os.environ) -> str | None:
    """The token that the user has set, as text or as a file; None if there is none."""
    token, file = environment.get(TOKEN, "").strip(), environment.get(TOKEN_FILE)
    if token and file:
        raise PlanError(f"{TOKEN} and {TOKEN_FILE} are both set; unset one of them")
    if file:
        return _checked(read_private(Path(file)), f"the token in {file}")
    return _checked(token, TOKEN) if token else None


def make_token() -> str:
    """256 bits that nobody can guess."""
    return secrets.token_hex(32)


@contextmanager
def token_hidden() -> Iterator[None]:
    """Whatever is started meanwhile does not inherit the token: ranks, and what the user's code starts, need none."""
    kept = {name: os.environ.pop(name) for name in (TOKEN, TOKEN_FILE) if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)


def labelled(token: str) -> str:
    """What is sealed for the other machines: it says what it is."""
    return f"{LABEL}{token}"


def unlabelled(text: str) -> str | None:
    """The token in a text that `labelled` made; None for anything else that this user may have sealed."""
    found = re.fullmatch(f"{LABEL}([0-9a-f]{{64}})", text.strip())
    return found[1] if found is not None else None


def read_private(path: Path) -> str:
    """The text of a file that nobody else can read or write."""
    try:
        with path.open("rb") as file:
            about = os.fstat(file.fileno())
            text = file.read(MOST_BYTES)
    except OSError as error:
        raise PlanError(f"{path} cannot be read: {error.strerror}; {TOKEN_FILE} names a file with a token") from error
    if about.st_uid not in (os.geteuid(), 0) or stat.S_IMODE(about.st_mode) & 0o077:
        raise PlanError(f"{path} is open to others (mode {stat.S_IMODE(about.st_mode):o}): chmod 600 {path}")
    return text.decode(errors="replace").strip()


def _checked(token: str, what: str) -> str:
    """A short one could be found by trying."""
    if len(token) < MIN_TOKEN_CHARS:
        raise PlanError(
            f"{what} has {len(token)} characters, and {MIN_TOKEN_CHARS} is the least; make one, and set it on all "
            f"machines:\n{MAKE_ONE}"
        )
    return token


class TokenFile:
    """Where the first machine leaves a token that it made, for machines that share its folder."""

    def __init__(self, folder: Path, address: tuple[str, int]) -> None:
        self.path = folder / f".token-{address[0].replace(':', '_')}-{address[1]}"

    def write(self, token: str) -> None:
        """Leave it; nobody else can read it."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Written beside it, and moved: no reader finds half of it, and a link that someone has put there is not
            # followed.
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
        """The token that was left; None if there is none."""
        try:
            # A list from the file server itself: a client of NFS may believe for a while that there is no such file.
            is_there = self.path.name in os.listdir(self.path.parent)
        except OSError:
            return None
        return read_private(self.path) if is_there else None

    def remove(self) -> None:
        """The run has ended."""
        self.path.unlink(missing_ok=True)

    def announcement(self, token: str) -> str:
        """What to do on machines that do not share the folder; the token itself is for a terminal, not for a log."""
        shown = token if sys.stderr.isatty() else f"...   (what {self.path} holds)"
        return (
            f"no {TOKEN} is set, so this machine made one. Machines that share this folder find it; on others, before "
            f"the same command:\nexport {TOKEN}={shown}"
        )


FORGED = "someone who is no machine of this run writes into its rendezvous; use another port and another token"
DIGEST = "sha256"
DIGEST_BYTES = 32
_NEVER = (0, b"")


@dataclass(frozen=True)
class MessageSigner:
    """The key of one run. A message is bound to it, to the place where it was left, and to its turn there."""

    key: bytes = field(repr=False)
    """Derived from the token and the id of the run: what was signed in another run is worth nothing here."""
    _seen: dict[str, tuple[int, bytes]] = field(default_factory=dict, repr=False, compare=False)
    """The latest turn seen at each place, and the signature there: an older message cannot come back."""
    _used: dict[str, int] = field(default_factory=dict, repr=False, compare=False)
    """The latest turn used at each place. Not seen: of two machines that write at once, the store takes one."""

    def sign(self, place: str, values: Mapping[str, Any]) -> str:
        """A message for a place, which takes the turn after the latest that was read or written there."""
        turn = max(self._seen.get(place, _NEVER)[0], self._used.get(place, 0)) + 1
        self._used[place] = turn
        text = json.dumps({"place": place, "turn": turn, "values": values})
        return f"{self._signature(text.encode())}{text}"

    def verify(self, place: str, message: bytes) -> dict[str, Any] | None:
        """What a message says; None if it is someone else's, or belongs elsewhere, or is not newer than one seen."""
        written, text = message[: 2 * DIGEST_BYTES], message[2 * DIGEST_BYTES :]
        if not hmac.compare_digest(written, self._signature(text).encode()):
            return None
        found = json.loads(text)
        turn, seen = self._seen.get(place, _NEVER)
        if found["place"] != place or found["turn"] < turn or (found["turn"] == turn and written != seen):
            return None
        self._seen[place] = (found["turn"], written)
        values: dict[str, Any] = found["values"]
        return values

    def _signature(self, text: bytes) -> str:
        return hmac.digest(self.key, b"message " + text, DIGEST).hex()


SECONDS = 10.0
MAX_CREDENTIAL_BYTES = 4096
OPENED = (0, 15, 16, 17)
"""Also if it is too old, from a clock that is ahead, or was opened before: it is sealed all the same, and who sent it
has to prove yet that the secret in it is his.
"""


def munge_seal(text: str) -> bytes:
    """A credential that only this user can open, on the nodes of this cluster; nothing if there is no munge."""
    done = _run(["munge", f"--restrict-uid={os.geteuid()}"], text.encode())
    credential = done.stdout.strip() if done is not None and done.returncode == 0 else b""
    return credential if len(credential) <= MAX_CREDENTIAL_BYTES else b""


def munge_open(credential: bytes) -> str | None:
    """The text in a credential that this user has made; None if it is somebody else's, or no credential."""
    done = _run(["unmunge", "--numeric", "--keys=UID"], credential) if len(credential) <= MAX_CREDENTIAL_BYTES else None
    if done is None or done.returncode not in OPENED:
        return None
    about, _, text = done.stdout.decode(errors="replace").partition("\n\n")
    maker = re.fullmatch(r"UID:\s*(\d+)", about.strip())
    return text if maker is not None and int(maker[1]) == os.geteuid() else None


def _run(command: list[str], given: bytes) -> subprocess.CompletedProcess[bytes] | None:
    try:
        return subprocess.run(command, input=given, capture_output=True, timeout=SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
