"""Which stream of a card a training runs on."""

from __future__ import annotations

import torch


def leave_default_stream(device: torch.device) -> None:
    """Go on, in this thread, on a stream of its own: the default one cannot be recorded as a graph.

    DDP's nodes belong to the stream on which it is made, and cuBLAS keeps a workspace for each: it is one and the same.
    """
    if device.type == "cuda" and torch.cuda.current_stream(device) == torch.cuda.default_stream(device):
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.default_stream(device))
        torch.cuda.set_stream(stream)


def return_to_default_stream(device: torch.device) -> None:
    """Go on, in this thread, where others expect it to be."""
    if device.type == "cuda":
        stream = torch.cuda.default_stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        torch.cuda.set_stream(stream)
