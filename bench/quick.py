"""C1 to C8 in small form, in under three minutes on two quiet cores; the last line of stdout is one JSON object.

python bench/quick.py [C1 C4 ...]

{"C1": {"ours_over_raw": 1.01, ...}, ...}: our time over theirs, so below 1 is ahead. A part that fails has an "error".
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import suite

MOST_SECONDS = 120


def cpu_seconds() -> float:
    """Of all that was started here and has ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    keys = sys.argv[1:] or list(suite.RACES)
    unknown = [key for key in keys if key not in suite.RACES]
    if unknown:
        sys.exit(f"unknown {', '.join(unknown)}; there are {', '.join(suite.RACES)}")
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="evenstep-quick-") as folder:
        for key in keys:
            out = Path(folder) / f"{key}.json"
            started, spent = time.monotonic(), cpu_seconds()
            wrong = suite.run(key, out, "--quick", most_seconds=MOST_SECONDS)
            found[key] = {"error": wrong} if wrong else suite.headline(out)
            seconds, cpu = time.monotonic() - started, cpu_seconds() - spent
            print(f"{key}: {seconds:.0f} s, {cpu:.0f} s of CPU", file=sys.stderr, flush=True)
    print(json.dumps(found))
    is_there = [key for key in keys if suite.PARTS[key].path.exists()]
    sys.exit(1 if any("error" in found[key] for key in is_there) else 0)


if __name__ == "__main__":
    main()
