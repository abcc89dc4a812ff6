"""The store through which processes of one machine meet that know torchrun's environment alone."""

from __future__ import annotations

import socket
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

ADDRESS = "127.0.0.1"


def loopback_store() -> TCPStore:
    """A store on a free port that listens to this machine alone; torch's own would listen to everyone."""
    with socket.socket() as listener:
        listener.bind((ADDRESS, 0))
        listener.listen(512)
        port = listener.getsockname()[1]
        return TCPStore(
            ADDRESS,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=30),
            master_listen_fd=listener.detach(),
        )
