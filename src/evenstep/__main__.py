"""`python -m evenstep`, and the command `evenstep`."""

import sys

from evenstep.launcher.server import start_server_for


def main() -> None:
    """Start what takes longest first, then read the command line."""
    start_server_for(sys.argv[1:])
    from evenstep.cli import main as run_command

    run_command()


if __name__ == "__main__":
    main()
