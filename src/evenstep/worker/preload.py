"""Imported by the fork server, so that its forks have torch already.

Nothing here computes, starts a thread or initializes CUDA: none of that survives a fork.
"""

# ruff: noqa: E402, F401, I001
from __future__ import annotations

import os
import signal

from evenstep.distributed.worker_process import BLOCKED_SIGNALS, die_with

# With the launcher, which started this process; if it is gone, no time is spent on importing torch.
die_with(os.getppid())
# A cluster signals every process of a job: the server must outlive the ranks, which die with it, and a signal that
# arrives before a rank has its handlers stays pending for it.
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_SIGNALS)

import torch
import torch.distributed.elastic.multiprocessing.api
import multiprocessing.synchronize

# What several ranks of a machine need besides the trainer.
import evenstep.distributed.shm.allreduce
import evenstep.monitor.replica_check
import evenstep.monitor.stragglers
import evenstep.training.trainer
import evenstep.worker.main
from evenstep.worker.lazy_compiler import put_off_compiler

put_off_compiler()
