"""What the fork server imports before it serves: a process copied from it finds torch imported already.

Nothing here computes, starts a thread or touches a card: neither survives a fork.
"""

from __future__ import annotations

import importlib
import os
import signal

from evenstep.worker.lifeline import end_with

LAUNCHER = "EVENSTEP_LAUNCHER"
"""Set while the launcher starts its server: whose death is to be the server's."""

launcher = os.environ.pop(LAUNCHER, "")
if launcher and os.getppid() == int(launcher):
    end_with(int(launcher))
    # A cluster sends these to every process of a job; the ranks, which die with this one, are to save first.
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)

ENGINE = "torch.distributed.elastic.multiprocessing.api"
for module in ("torch", ENGINE, "multiprocessing.synchronize", "evenstep.worker.job", "evenstep.worker.main"):
    importlib.import_module(module)
importlib.import_module("evenstep.worker.later").put_off_compiler()
