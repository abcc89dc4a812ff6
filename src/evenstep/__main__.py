"""`python -m evenstep`, and the command `evenstep`."""

import os
import signal
import sys
import threading
from types import FrameType
from typing import NoReturn

from evenstep.distributed.huge_pages import start_again_for
from evenstep.errors import STOPPED, Preempted
from evenstep.launcher.fork_server import ensure_resource_tracker, start_server_for
from evenstep.private_apis import run_exit_handlers


def main() -> None:
    """Start what takes longest first, then read the command line."""
    start_again_for(sys.argv[1:])
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, _stop)
    try:
        start_server_for(sys.argv[1:])
        from evenstep.cli import main as run_command
    except Preempted as error:
        _exit(str(error), error.exit_code)
    except KeyboardInterrupt:
        _exit("stopped", STOPPED)
    try:
        run_command()
    except SystemExit as ended:
        _leave(ended)
        raise


def _exit(message: str, exit_code: int) -> NoReturn:
    """What prints messages in the command is not imported yet."""
    print(message, file=sys.stderr)
    sys.exit(exit_code)


def _leave(ended: SystemExit) -> None:
    """End at once, where nothing is left to do: to take torch apart, object by object, takes half a second."""
    others = [thread for thread in threading.enumerate() if not thread.daemon and thread is not threading.main_thread()]
    if others or not isinstance(ended.code, int | None):
        return
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        # Python has words for that.
        return
    # It hears of every semaphore that goes now.
    ensure_resource_tracker(starts=False)
    run_exit_handlers()
    os._exit(ended.code or 0)


def _stop(number: int, frame: FrameType | None) -> None:
    """Until there is a run that can save."""
    raise Preempted("stopped")


if __name__ == "__main__":
    main()
