"""The command `evenstep`: argv to one call. torch is imported inside commands, so that help is instant."""

# Each adds its commands to `app`, in the order of the help.
from evenstep.cli import train, run, evaluate, verify, compare, report  # noqa: F401  isort:skip
from evenstep.cli import runs, audit, checkpoint, doctor, adopt, predict, fit, tune, manifest  # noqa: F401  isort:skip
from evenstep.cli.app import app, main

__all__ = ["app", "main"]
