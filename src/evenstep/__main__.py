"""`python -m evenstep`, and the command `evenstep`."""

import signal
import sys
from types import FrameType

from evenstep.errors import Preempted
from evenstep.launcher.server import start_server_for


def main() -> None:
    """Start what takes longest first, then read the command line."""
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, _stop)
    start_server_for(sys.argv[1:])
    from evenstep.cli import main as run_command

    run_command()


def _stop(number: int, frame: FrameType | None) -> None:
    """Until there is a run that can save."""
    raise Preempted("asked to stop before anything was begun")


if __name__ == "__main__":
    main()
