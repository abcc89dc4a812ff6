"""What the fork server imports before it serves: a process copied from it finds torch imported already.

Nothing here computes, starts a thread or touches a card: neither survives a fork.
"""

from __future__ import annotations

import importlib
import os
import signal

from evenstep.distributed.process import BLOCKED_SIGNALS, LAUNCHER, die_with

launcher = os.environ.pop(LAUNCHER, "")
if launcher:
    # At once, if it is gone already: torch takes seconds to import, for nobody.
    die_with(int(launcher))
    # A cluster sends the others to every process of a job: this one, with which the ranks die, is to outlive them, and
    # what comes before a rank has begun is kept for it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_SIGNALS)

ENGINE = "torch.distributed.elastic.multiprocessing.api"
OURS = ("evenstep.training.trainer", "evenstep.worker.main", "evenstep.worker.user_program")
for module in ("torch", ENGINE, "multiprocessing.synchronize", *OURS):
    importlib.import_module(module)
importlib.import_module("evenstep.worker.lazy_compiler").put_off_compiler()
