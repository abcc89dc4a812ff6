"""`--log` and `report --to`: trackers that read the Record of a run, each in a process of its own."""

from __future__ import annotations

import os
from collections.abc import Iterable
from importlib.util import find_spec

from evenstep.errors import PlanError, shorten

EXTRA = {"tensorboard": "tensorboard"}
"""Where it is not `trackers`."""


def check_installed(names: Iterable[str], flag: str = "--log") -> None:
    """Refuse a tracker that is not installed or cannot be written, before anything is started."""
    for name in names:
        if name == "mlflow":
            _check_uri(os.environ.get("MLFLOW_TRACKING_URI", ""))
        missing = next((package for package in _packages(name) if find_spec(package) is None), None)
        if missing is not None:
            install = f"pip install 'evenstep[{EXTRA.get(name, 'trackers')}]'"
            raise PlanError(f"{flag} {name} needs {missing}, which is not installed here; {install}")


def how_to_look(name: str, view: str) -> str:
    """The command that shows a run in a tracker, and what it needs where that is missing."""
    if name == "mlflow" and view.startswith("mlflow ") and find_spec("flask") is None:
        return f"{view} (needs the whole MLflow: pip install mlflow; mlflow-skinny, which is here, only writes)"
    return view


def _packages(name: str) -> tuple[str, ...]:
    """What mlflow-skinny leaves out is needed for a database, not for a server."""
    is_server = os.environ.get("MLFLOW_TRACKING_URI", "").startswith(("http", "databricks"))
    return (name, "sqlalchemy", "alembic") if name == "mlflow" and not is_server else (name,)


def _check_uri(uri: str) -> None:
    """MLflow has refused to write folders since 3.13."""
    is_folder = uri.startswith("file:") or (uri != "" and ":" not in uri)
    if is_folder and os.environ.get("MLFLOW_ALLOW_FILE_STORE", "").lower() != "true":
        raise PlanError(
            f"MLFLOW_TRACKING_URI is {shorten(uri)}, a folder, which MLflow does not write any more; "
            "unset it, or set it to sqlite:///mlflow.db or to a server"
        )
