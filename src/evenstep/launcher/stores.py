"""The stores through which processes meet that know torchrun's environment alone."""

from __future__ import annotations

import socket
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

LOOPBACK = "127.0.0.1"


def open_store(seconds: float = 300, use_libuv: bool = True) -> TCPStore:
    """A store on a free port of loopback, held from this moment on; it listens to this machine alone.

    torch by itself would listen to everyone, and would take a port that may be gone by then.
    """
    with socket.create_server((LOOPBACK, 0), backlog=512) as listener:
        return TCPStore(
            LOOPBACK,
            listener.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=seconds),
            master_listen_fd=listener.detach(),
            use_libuv=use_libuv,
        )


def free_port() -> int:
    """A port for a program that opens it itself; another may be quicker."""
    with socket.create_server((LOOPBACK, 0)) as listener:
        return int(listener.getsockname()[1])
