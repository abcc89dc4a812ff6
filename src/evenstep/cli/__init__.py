"""The command `evenstep`: argv to one call. torch is imported inside commands, so that help is instant."""

from evenstep.cli import compare, doctor, inspect, report, train, verify  # noqa: F401  (each adds its commands to `app`)
from evenstep.cli.app import app, main

__all__ = ["app", "main"]
