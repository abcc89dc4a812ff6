"""Numbers of a device that the host reads later, without making it wait: copies and times."""

from __future__ import annotations

import time
from typing import Any

import torch

from evenstep.distributed.world import World


class DeviceTime:
    """A point in time on the device: on a GPU, the host runs ahead of it."""

    def __init__(self, world: World) -> None:
        self._time = time.perf_counter()
        self._event: torch.cuda.Event | None = None
        if world.size > 1 and world.device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()

    def seconds_since(self, earlier: DeviceTime) -> float:
        """Both must have been reached by the device."""
        if self._event is None or earlier._event is None:
            return self._time - earlier._time
        return float(earlier._event.elapsed_time(self._event)) / 1000


class HostCopy:
    """An asynchronous copy of a small tensor to the host, summed over processes if a world is given."""

    def __init__(self, values: torch.Tensor, world: World | None = None) -> None:
        self._work = world.total(values) if world is not None else None
        self._values = self._on_gpu = values
        self._event: torch.cuda.Event | None = None
        if values.is_cuda:
            # On a side stream: backward must not queue behind the slowest rank's forward.
            stream = side_stream(values.device)
            stream.wait_stream(torch.cuda.current_stream(values.device))
            with torch.cuda.stream(stream):
                if self._work is not None:
                    self._work.wait()
                self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
                self._values.copy_(values, non_blocking=True)
                values.record_stream(stream)
                self._event = torch.cuda.Event()
                self._event.record(stream)

    def join(self) -> torch.Tensor:
        """The values on the GPU, for which the current stream waits."""
        assert self._event is not None
        torch.cuda.current_stream(self._on_gpu.device).wait_event(self._event)
        return self._on_gpu

    def read(self) -> Any:
        """The values, as floats; waits until they have arrived."""
        if self._event is not None:
            self._event.synchronize()
        elif self._work is not None:
            self._work.wait()
        return self._values.tolist()


_SIDE_STREAMS: dict[torch.device, torch.cuda.Stream] = {}


def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of copies to the host: on that of the computation, they would delay the next kernel."""
    if device not in _SIDE_STREAMS:
        _SIDE_STREAMS[device] = torch.cuda.Stream(device)
    return _SIDE_STREAMS[device]
