"""Settings that are known to help when ranks cannot speak; a doctor tries them instead of guessing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from evenstep.doctor.trying import Settings

INTERFACE = "(the interface that leads to the others)"
"""Stands for a name that each machine knows for itself."""
SUSPECTS: Mapping[str, tuple[str, ...]] = {
    "gloo": ("GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT", "TORCH_DISTRIBUTED_DEBUG", "LD_PRELOAD"),
    "nccl": (
        "NCCL_SOCKET_IFNAME",
        "GLOO_SOCKET_IFNAME",
        "NCCL_IB_HCA",
        "NCCL_NET",
        "NCCL_NET_PLUGIN",
        "NCCL_P2P_LEVEL",
        "NCCL_P2P_DISABLE",
        "NCCL_SHM_DISABLE",
        "NCCL_ALGO",
        "NCCL_PROTO",
        "NCCL_TOPO_FILE",
        "NCCL_CUMEM_ENABLE",
        "TORCH_DISTRIBUTED_DEBUG",
    ),
}
"""Variables that have broken it before, by back end; the likeliest first."""
CURES: Mapping[str, tuple[tuple[str, str], ...]] = {
    "gloo": (("GLOO_SOCKET_IFNAME", INTERFACE),),
    "nccl": (
        ("NCCL_P2P_DISABLE", "1"),
        ("NCCL_SHM_DISABLE", "1"),
        ("NCCL_CUMEM_ENABLE", "0"),
        ("NCCL_NVLS_ENABLE", "0"),
        ("NCCL_IB_DISABLE", "1"),
        ("NCCL_SOCKET_IFNAME", INTERFACE),
        ("GLOO_SOCKET_IFNAME", INTERFACE),
    ),
}

CURES_BETWEEN: Mapping[str, tuple[tuple[str, str], ...]] = {
    "gloo": (("GLOO_SOCKET_IFNAME", INTERFACE),),
    "nccl": (("NCCL_SOCKET_IFNAME", INTERFACE), ("NCCL_IB_DISABLE", "1"), ("GLOO_SOCKET_IFNAME", INTERFACE)),
}
"""The same between machines."""


def suspects(back_end: str, environment: Iterable[str]) -> list[str]:
    """Those that are set, and may be the reason."""
    given = set(environment)
    return [name for name in SUSPECTS[back_end] if name in given]


def remedies(back_end: str, set_names: Iterable[str], is_between_machines: bool = False) -> list[Settings]:
    """What to try, one at a time: without what is set, then with what is known to help."""
    without: list[Settings] = [{name: None} for name in suspects(back_end, set_names)]
    cures = CURES_BETWEEN if is_between_machines else CURES
    return [*without, *({name: value} for name, value in cures[back_end])]


def in_words(settings: Settings) -> str:
    """What a user types."""
    return "; ".join(f"unset {name}" if value is None else f"export {name}={value}" for name, value in settings.items())


def with_interface(settings: Settings, interface: str) -> Settings:
    """The same, where this machine's own interface is meant."""
    return {name: interface if value == INTERFACE else value for name, value in settings.items()}
