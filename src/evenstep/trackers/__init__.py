"""`--log` and `report --to`: trackers that read the Record of a run, each in a process of its own."""

from __future__ import annotations

import os
from collections.abc import Iterable
from importlib.util import find_spec

from evenstep.errors import PlanError

EXTRA = {"tensorboard": "tensorboard"}
"""Where it is not `trackers`."""


def check_installed(names: Iterable[str], flag: str = "--log") -> None:
    """Refuse a tracker that is not installed, before anything is started."""
    for name in names:
        missing = next((package for package in _packages(name) if find_spec(package) is None), None)
        if missing is not None:
            install = f"pip install 'evenstep[{EXTRA.get(name, 'trackers')}]'"
            raise PlanError(f"{flag} {name} needs {missing}, which is not installed here; {install}")


def _packages(name: str) -> tuple[str, ...]:
    """What mlflow-skinny leaves out is needed for a database, not for a server."""
    is_database = name == "mlflow" and "://" not in os.environ.get("MLFLOW_TRACKING_URI", "")
    return (name, "sqlalchemy", "alembic") if is_database else (name,)
