"""What it costs to send: latency and bandwidth of links, and collectives over them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from evenstep.errors import BadInput, shorten

SHARE_OF_NOMINAL = 0.94
"""Of a network's nominal bandwidth, what is payload: 1,448 of the 1,538 bytes of an Ethernet frame."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """Seconds for a message of any size, and bytes a second for a large one."""

    latency: float
    bandwidth: float
    name: str = ""
    mesh: int | None = None
    """How many devices are wired to each other without a switch: fewer of them use fewer of the wires."""

    def bandwidth_of(self, members: int) -> float:
        """What one member sends to the others.

        >>> Link(latency=0.0, bandwidth=140e9, mesh=8).bandwidth_of(2)
        20000000000.0
        """
        return self.bandwidth * (members - 1) / (self.mesh - 1) if self.mesh and members < self.mesh else self.bandwidth

    def ring(self, members: int, num_bytes: float) -> float:
        """An all-reduce in which each member passes every slice on, twice around."""
        hops = 2 * (members - 1)
        return hops * (self.latency + num_bytes / members / self.bandwidth_of(members)) if members > 1 else 0.0

    def tree(self, members: int, num_bytes: float) -> float:
        """An all-reduce up and down a tree: fewer hops, each of all bytes, one behind the other."""
        if members < 2:
            return 0.0
        return 2 * math.ceil(math.log2(members)) * self.latency + 2 * num_bytes / self.bandwidth_of(members)

    def all_reduce(self, members: int, num_bytes: float) -> float:
        """The cheaper of both, as NCCL chooses."""
        return min(self.ring(members, num_bytes), self.tree(members, num_bytes))

    def algorithm(self, members: int, num_bytes: float) -> str:
        """Which of both that is."""
        return "ring" if self.ring(members, num_bytes) <= self.tree(members, num_bytes) else "tree"

    def half(self, members: int, num_bytes: float) -> float:
        """An all-gather or a reduce-scatter: half of a ring."""
        return self.ring(members, num_bytes) / 2


def gbit(rate: float, latency: float = 2.5e-5) -> Link:
    """A network link by its nominal rate."""
    return Link(latency=latency, bandwidth=rate * 1e9 / 8 * SHARE_OF_NOMINAL, name=f"{rate:g}gbit")


NVLINK = {"p100": 80e9, "v100": 120e9, "a100": 240e9, "h100": 370e9, "h200": 370e9, "b200": 720e9}
"""Bus bandwidth of a GPU inside a machine: torch/_inductor/comm_analysis.py (torch 2.13); p100: 4 links of 20 GB/s."""
NETWORK = {"p100": 12e9, "v100": 12e9, "a100": 25e9, "h100": 50e9, "h200": 50e9, "b200": 50e9}
"""Network bandwidth for each GPU of a machine, from the same file; p100 as v100."""
PCIE = 24e9
NVLINK_LATENCY, NETWORK_LATENCY = 3.4e-6, 1.4e-5
"""Of one hop, protocol Simple: torch/_inductor/comm_analysis.py."""
WITHOUT_SWITCH = ("p100", "v100")
"""Eight of these in a machine are a mesh of NVLinks; sixteen, and later GPUs, have a switch."""
MEMORY = {"p100": 732e9, "v100": 900e9, "a100": 2039e9, "h100": 3350e9, "h200": 4800e9, "b200": 8000e9}
"""Bytes a second of a GPU's memory, by data sheets."""
GPUS_OF_A_MACHINE = 8
CORES = {"p100": 5, "v100": 5, "a100": 16, "h100": 14, "h200": 14, "b200": 14}
"""Of the host for each GPU, in machines with as many: DGX-1 (40), DGX A100 (128), DGX H100 and later (112)."""
COPIES = 9
"""Reads and writes of every gradient's bytes: into a bucket 2, reduce-scatter 3, all-gather 2, out of the bucket 2."""

NVLINK_OF_ITS_GPU = "nvlink"
"""The name of a link whose bandwidth is that of the GPU it is predicted for."""


def nvlink(gpu: str = "a100", per_machine: int = 8) -> Link:
    mesh = per_machine if gpu in WITHOUT_SWITCH and per_machine == 8 else None
    return Link(latency=NVLINK_LATENCY, bandwidth=NVLINK[gpu], name=f"nvlink-{gpu}", mesh=mesh)


def handling_seconds(gpu: str, gradient_bytes: float) -> float:
    """What averaging costs a GPU besides the link: gradients go through its memory COPIES times.

    >>> round(handling_seconds("v100", 100e6), 4)
    0.001
    """
    return COPIES * gradient_bytes / MEMORY[gpu]


def network_of(gpu: str, per_machine: int) -> Link:
    """The network of a machine full of GPUs, each with its own adapter."""
    bandwidth = NETWORK[gpu] * per_machine * SHARE_OF_NOMINAL
    return Link(latency=NETWORK_LATENCY, bandwidth=bandwidth, name=f"{NETWORK[gpu] * 8e-9:g}gbit for each GPU")


def parse_link(text: str) -> Link:
    """A link as it is written on the command line: `25gbit`, `nvlink`, `pcie`, or seconds and bytes a second.

    >>> parse_link("25gbit").name, parse_link("2e-5,3e9").bandwidth
    ('25gbit', 3000000000.0)
    """
    word = text.strip().lower()
    if found := re.fullmatch(r"(\d+(?:\.\d+)?)\s*gbit", word):
        rate = float(found[1])
        if rate > 0:
            return gbit(rate)
    if word == NVLINK_OF_ITS_GPU:
        return replace(nvlink(), name=word)
    if (found := re.fullmatch(r"nvlink-(\w+)", word)) and found[1] in NVLINK:
        return nvlink(found[1])
    if word == "pcie":
        return Link(latency=5.7e-6, bandwidth=PCIE, name="pcie")
    if found := re.fullmatch(r"([^,]+),([^,]+)", word):
        return _from_numbers(text, found[1], found[2])
    raise _refusal(text)


def _from_numbers(text: str, latency: str, bandwidth: str) -> Link:
    try:
        link = Link(latency=float(latency), bandwidth=float(bandwidth), name=text.strip())
    except ValueError:
        raise _refusal(text) from None
    if not (0 <= link.latency < 10 and 1e3 <= link.bandwidth < 1e15):
        raise _refusal(text)
    return link


def _refusal(text: str) -> BadInput:
    kinds = ", ".join(f"nvlink-{name}" for name in NVLINK)
    return BadInput(
        f"--link is {shorten(repr(text))}; write 25gbit, nvlink, {kinds}, pcie, or seconds and bytes a second: 2e-5,3e9"
    )


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Machines with some devices each, and the links inside and between them."""

    per_machine: int
    inside: Link
    between: Link

    def machines(self, devices: int) -> int:
        return -(-devices // self.per_machine)

    def in_a_machine(self, devices: int) -> int:
        return -(-devices // self.machines(devices))

    def all_reduce(self, devices: int, num_bytes: float) -> float:
        """Inside each machine, and between one device of each."""
        here, machines = self.in_a_machine(devices), self.machines(devices)
        inside = self.inside.all_reduce(here, num_bytes) if here > 1 else 0.0
        return inside + (self.between.all_reduce(machines, num_bytes) if machines > 1 else 0.0)

    def half(self, devices: int, num_bytes: float) -> float:
        """An all-gather or a reduce-scatter over all devices."""
        here, machines = self.in_a_machine(devices), self.machines(devices)
        inside = self.inside.half(here, num_bytes) if here > 1 else 0.0
        return inside + (self.between.half(machines, num_bytes) if machines > 1 else 0.0)
