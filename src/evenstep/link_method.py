"""`--link METHOD`: how gradients are sent between machines, as a value."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from evenstep.errors import PlanError, shorten

LinkName = Literal["none", "auto", "bf16", "powersgd", "topk", "local", "diloco", "streaming"]

LOCAL = ("local", "diloco", "streaming")

LINKS = "none, auto, bf16, powersgd:RANK, topk:FRACTION, local:STEPS, diloco:STEPS or streaming:STEPS:FRAGMENTS"

FRAGMENTS = 4
"""Of `streaming`, where their number is not given."""


@dataclass(frozen=True)
class LinkMethod:
    """How ranks exchange gradients; `value` is a rank, a fraction, or a number of steps."""

    name: LinkName
    value: float = 0.0
    num_fragments: int = 0
    """The parts of the weights that `streaming` sends one after another; 0: all weights are sent at once."""

    @property
    def is_local(self) -> bool:
        """Whether ranks take several steps of their own; with one, gradients are averaged as without it."""
        return self.name in LOCAL and self.value > 1

    @property
    def is_streaming(self) -> bool:
        """Whether these are sent in fragments, while training goes on."""
        return self.is_local and self.num_fragments > 0

    @property
    def is_lossy(self) -> bool:
        """Whether gradients are sent with less than all of their digits."""
        return self.name in ("bf16", "powersgd", "topk")

    @property
    def is_exact(self) -> bool:
        """Whether it is the training that one device does, up to rounding."""
        return not self.is_lossy and not self.is_local

    @property
    def is_plain(self) -> bool:
        """Whether nothing about it needs a check, or a strategy that knows it."""
        return self.name == "none" or (self.name in LOCAL and not self.is_local)

    @property
    def num_steps(self) -> int:
        """Between two exchanges of the same weights."""
        return int(self.value) if self.is_local else 1

    def fragment_after(self, step: int) -> int | None:
        """The fragment that is sent after this step of the run: each once in `num_steps`, at even distances.

        >>> [parse_link("streaming:6:2").fragment_after(step) for step in range(1, 10)]
        [None, None, 0, None, None, 1, None, None, 0]
        """
        place = (step - 1) % self.num_steps + 1
        number = -(-place * self.num_fragments // self.num_steps)
        return number - 1 if number * self.num_steps // self.num_fragments == place else None


def parse_link(text: str | None) -> LinkMethod:
    """What `--link` names.

    >>> parse_link("powersgd:2"), parse_link("local:50").num_steps, parse_link(None)
    (LinkMethod(name='powersgd', value=2, num_fragments=0), 50, LinkMethod(name='none', value=0.0, num_fragments=0))
    """
    name, _, value = (text or "none").strip().partition(":")
    if name in ("none", "auto", "bf16") and not value:
        return LinkMethod(name)  # type: ignore[arg-type]
    if name in ("powersgd", "local", "diloco") and re.fullmatch("0*[1-9][0-9]{0,8}", value):
        return LinkMethod(name, int(value))  # type: ignore[arg-type]
    if name == "topk" and re.fullmatch(r"[01]?\.?[0-9]{1,9}", value) and 0 < float(value) < 1:
        return LinkMethod("topk", float(value))
    if name == "streaming" and re.fullmatch("0*[1-9][0-9]{0,8}(:0*[1-9][0-9]{0,8})?", value):
        return _streaming(*map(int, value.split(":")))
    raise PlanError(f"link is {shorten(repr(text))}; write {LINKS}, such as powersgd:2, topk:0.01 or local:50")


def _streaming(num_steps: int, num_fragments: int | None = None) -> LinkMethod:
    if num_fragments is not None and num_fragments > num_steps:
        raise PlanError(
            f"--link streaming:{num_steps}:{num_fragments} sends one fragment after a step, and has fewer steps than "
            f"fragments; write streaming:{num_fragments}:{num_fragments} or streaming:{num_steps}"
        )
    return LinkMethod("streaming", num_steps, num_fragments or min(FRAGMENTS, num_steps))
