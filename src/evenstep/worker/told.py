"""What the card tells the host of a replayed whole step, as part of its graph: beside the update, not after it."""

from __future__ import annotations

from typing import Any

import torch

PLACES = 4
"""Steps whose values are on the host at once: more than may be under way when those of the first are read."""


class Told:
    """A ring of places on the card, copied to the host whole; the card counts where the next values go, and so does the
    host. Made before a graph is recorded, in memory of its own."""

    def __init__(self, stream: torch.cuda.Stream, most_values: int) -> None:
        device = stream.device
        num_bytes = PLACES * most_values * 8
        self._host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)
        # Not a graph's own memory: what lay at the same place earlier in the step would be written over other steps'.
        self._ring = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._place = torch.zeros(1, dtype=torch.int64, device=device)
        # Whoever frees the host's memory will wait for the stream that replays: it has written there.
        self._host.copy_(self._ring, non_blocking=True)
        self._stream = stream
        self._num = 0

    def record(self, values: torch.Tensor) -> None:
        """Tell these; whoever records waits for it later, by `join`."""
        shape, num = (PLACES, *values.shape), PLACES * values.numel()
        self._host = self._host.view(values.dtype)[:num].view(shape)
        self._ring = self._ring.view(values.dtype)[:num].view(shape)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._ring.index_copy_(0, self._place, values[None])
            self._host.copy_(self._ring, non_blocking=True)
            self._place.add_(1).remainder_(PLACES)

    def join(self) -> None:
        """A step ends when it has been told of."""
        torch.cuda.current_stream().wait_stream(self._stream)

    def next(self) -> int:
        """Where the values of the step that was just asked for will be."""
        self._num += 1
        return (self._num - 1) % PLACES

    def read(self, place: int) -> Any:
        """As numbers; the card must have come to the end of that step."""
        return self._host[place].tolist()
