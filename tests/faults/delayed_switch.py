"""A switch whose packets arrive later, for kernels without netem: TAP devices, and one process that holds packets back.

    python delayed_switch.py DELAY_MS NAMESPACE NAMESPACE... OWN

Each namespace gets a device eth0; the process itself lives in the last, and ends with it. A frame that one host sends
arrives at the others DELAY_MS later, in order: two hosts are twice that apart, there and back. Rates are tbf's, in the
namespaces, before the delay. Frames are as large as TCP hands them over (64 KB, cut by nobody): so one process moves a
gigabit a second with an eighth of a core. It prints "up", and runs until it is killed.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import os
import select
import struct
import sys
import time
from collections import deque

CLONE_NEWNET = 0x40000000
TUNSETIFF, TUNSETOFFLOAD, TUNSETVNETHDRSZ = 0x400454CA, 0x400454D0, 0x400454D8
IFF_TAP, IFF_NO_PI, IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
CHECKSUMS_AND_SEGMENTS = 0x01 | 0x02 | 0x04
"""TUN_F_CSUM, TUN_F_TSO4, TUN_F_TSO6: the sender leaves both to whoever receives, which is the same kernel."""
HEADER = 10
"""Bytes of virtio_net_hdr before each frame, which say what was left."""
LARGEST = 2**16 + 64
MAX_WAIT = 0.5
AT_ONCE = 64
"""Frames from one host, before the others have their turn."""


def enter(namespace: str) -> None:
    """Be in that network namespace from now on."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as file:
        if libc.setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")


def plug(namespace: str) -> int:
    """Make eth0 there; the other end of its cable."""
    enter(namespace)
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH22x", b"eth0", IFF_TAP | IFF_NO_PI | IFF_VNET_HDR))
    fcntl.ioctl(end, TUNSETVNETHDRSZ, struct.pack("i", HEADER))
    fcntl.ioctl(end, TUNSETOFFLOAD, CHECKSUMS_AND_SEGMENTS)
    return end


class Switch:
    """Learns who is behind which end, and sends everything else to all."""

    def __init__(self, ends: list[int], delay_seconds: float) -> None:
        self._ends, self._delay = ends, delay_seconds
        self._behind: dict[bytes, int] = {}
        self._held: deque[tuple[float, int, bytes]] = deque()
        """When, from where, what: in this order, since all are held for as long."""
        self._ready = select.epoll()
        for end in ends:
            self._ready.register(end, select.EPOLLIN)

    def run(self) -> None:
        while True:
            wait = self._held[0][0] - time.monotonic() if self._held else MAX_WAIT
            for end, _ in self._ready.poll(max(wait, 0)):
                self._read(end)
            while self._held and self._held[0][0] <= time.monotonic():
                self._pass_on(*self._held.popleft()[1:])

    def _read(self, end: int) -> None:
        due = time.monotonic() + self._delay
        for _ in range(AT_ONCE):
            try:
                self._held.append((due, end, os.read(end, LARGEST)))
            except OSError:
                # Nothing left to read, or its namespace is being removed.
                return

    def _pass_on(self, source: int, frame: bytes) -> None:
        target, sender = frame[HEADER : HEADER + 6], frame[HEADER + 6 : HEADER + 12]
        self._behind[sender] = source
        known = self._behind.get(target)
        for end in self._ends if known is None else [known]:
            if end != source:
                try:
                    os.write(end, frame)
                except OSError:
                    # eth0 is down: a frame that nobody takes is lost, as on a cable.
                    continue


def main() -> None:
    delay_ms, *namespaces, own = sys.argv[1:]
    switch = Switch([plug(namespace) for namespace in namespaces], float(delay_ms) / 1e3)
    enter(own)
    # On a busy machine, a link must not become slower than it is.
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    gc.disable()
    print("up", flush=True)
    switch.run()


if __name__ == "__main__":
    main()
