"""Flags that the trainings of parity, fault and data tests get beside their own, to run those tests with them:

MORE_FLAGS="--virtual-replicas 3" pytest tests/faults/test_crashes.py tests/process/test_{data,parity}.py
MORE_FLAGS="--shares 2,1" ...       for two devices; other numbers of devices keep equal shares
MORE_FLAGS="--replay-every 3" ...
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from typing import Any

MORE = shlex.split(os.environ.get("MORE_FLAGS", ""))


def more_flags(num_devices: int) -> list[str]:
    """What `MORE_FLAGS` holds, as far as it is for so many devices."""
    if "--shares" in MORE and len(MORE[-1].split(",")) != num_devices:
        return []
    if "--virtual-replicas" in MORE and int(MORE[-1]) < num_devices:
        return []
    return MORE


def more_fields(num_devices: int, strategy: str) -> dict[str, Any]:
    """The same as fields of a Plan; fsdp refuses --replay-every."""
    flags = [] if strategy == "fsdp" and "--replay-every" in MORE else more_flags(num_devices)
    return {
        name.removeprefix("--").replace("-", "_"): value if name == "--shares" else int(value)
        for name, value in zip(flags[::2], flags[1::2], strict=True)
    }


def num_devices(arguments: Sequence[str]) -> int:
    """What the flags of a command say."""
    if "--devices" not in arguments:
        return 1
    given = arguments[arguments.index("--devices") + 1]
    return int(given) if given.isdigit() else len(given.split(","))
