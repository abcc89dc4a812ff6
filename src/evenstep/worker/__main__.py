"""`python -m evenstep.worker RUN_FOLDER`: one rank, started by the launcher."""

import sys

from evenstep.worker.main import end, work

if __name__ == "__main__":
    work(sys.argv[1])
    end(0)
