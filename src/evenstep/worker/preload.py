"""Imported by the fork server, so that its forks have torch already.

Nothing here computes, starts a thread or initializes CUDA: none of that survives a fork.
"""

from __future__ import annotations

import importlib
import os
import signal

from evenstep.distributed.process import BLOCKED_SIGNALS, die_with

# The launcher, which started this process; without it, no time is spent on importing torch.
die_with(os.getppid())
# A cluster signals every process of a job: the server must outlive the ranks, which die with it, and a signal that
# arrives before a rank has its handlers stays pending for it.
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_SIGNALS)

ENGINE = "torch.distributed.elastic.multiprocessing.api"
OURS = (
    "evenstep.distributed.shm.scalars",
    "evenstep.monitor.replicas",
    "evenstep.monitor.stragglers",
    "evenstep.training.trainer",
    "evenstep.worker.main",
    "evenstep.worker.user_program",
)
"""What several ranks of a machine need."""
for module in ("torch", ENGINE, "multiprocessing.synchronize", *OURS):
    importlib.import_module(module)
importlib.import_module("evenstep.worker.lazy_compiler").put_off_compiler()
