"""How Slurm itself knows who somebody is: munge, whose daemons seal a text for one user of the cluster.

credential = sealed_for_me("secret")      # on one node
opened_from_me(credential)                # on another, by the same user; for anyone else, None
"""

from __future__ import annotations

import os
import re
import subprocess

SECONDS = 10.0
LONGEST_CREDENTIAL = 4096
OPENED = (0, 15, 16, 17)
"""Also if it is too old, from a clock that is ahead, or was opened before: it is sealed all the same, and who sent it
has to prove yet that the secret in it is his.
"""


def sealed_for_me(text: str) -> bytes:
    """A credential that only this user can open, on the nodes of this cluster; nothing if there is no munge."""
    done = _run(["munge", f"--restrict-uid={os.geteuid()}"], text.encode())
    credential = done.stdout.strip() if done is not None and done.returncode == 0 else b""
    return credential if len(credential) <= LONGEST_CREDENTIAL else b""


def opened_from_me(credential: bytes) -> str | None:
    """The text in a credential that this user has made; None if it is somebody else's, or no credential."""
    done = _run(["unmunge", "--numeric", "--keys=UID"], credential) if len(credential) <= LONGEST_CREDENTIAL else None
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
