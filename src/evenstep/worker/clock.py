"""How long steps take on devices that the host runs ahead of."""

from __future__ import annotations

import time

import torch


class Clock:
    """How long steps take, by the host's clock; it runs while it is entered, and waits for the devices at both ends."""

    def __init__(self, devices: tuple[torch.device, ...]) -> None:
        self._devices = devices
        self._seconds = 0.0
        self._began = 0.0
        self.is_on = False
        self.count = 0

    def start(self) -> None:
        """Begin to count."""
        self._wait()
        self._seconds, self.count, self.is_on = 0.0, 0, True

    def stop(self) -> float:
        """Seconds of a step."""
        began = time.perf_counter()
        self._wait()
        self.is_on = False
        return (self._seconds + time.perf_counter() - began) / max(1, self.count)

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        if self.is_on:
            self._seconds += time.perf_counter() - self._began
            self.count += 1

    def _wait(self) -> None:
        for device in self._devices:
            torch.cuda.synchronize(device)
