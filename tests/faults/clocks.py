"""A machine whose clock is wrong, or jumps: a library that its programs load before all others."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

# CLOCK_REALTIME is the one clock that people set, and that Linux has no namespace for.
SHIFTED = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>

static int (*true_clock)(clockid_t, struct timespec *);

static long number(const char *name) { const char *text = getenv(name); return text ? atol(text) : 0; }

static long shift(void) {
    static long began;
    struct timespec now;
    true_clock(CLOCK_MONOTONIC, &now);
    if (!began) began = now.tv_sec;
    return now.tv_sec - began >= number("CLOCK_SHIFT_AFTER") ? number("CLOCK_SHIFT") : 0;
}

int clock_gettime(clockid_t id, struct timespec *at) {
    if (!true_clock) true_clock = dlsym(RTLD_NEXT, "clock_gettime");
    int result = true_clock(id, at);
    if (id == CLOCK_REALTIME) at->tv_sec += shift();
    return result;
}

time_t time(time_t *seconds) {
    struct timespec at;
    clock_gettime(CLOCK_REALTIME, &at);
    if (seconds) *seconds = at.tv_sec;
    return at.tv_sec;
}

int gettimeofday(struct timeval *restrict to, void *restrict zone) {
    struct timespec at;
    clock_gettime(CLOCK_REALTIME, &at);
    to->tv_sec = at.tv_sec;
    to->tv_usec = at.tv_nsec / 1000;
    return 0;
}
"""


def why_no_clocks() -> str | None:
    """What this machine lacks for a wrong clock, or None."""
    return None if shutil.which("cc") else "cc not found: apt-get install gcc"


def wrong_clock(folder: Path, seconds: int, after_seconds: int = 0) -> dict[str, str]:
    """The environment of a program whose clock is so many seconds ahead, from so long after its start."""
    source, library = folder / "clock.c", folder / "clock.so"
    source.write_text(SHIFTED)
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return {"LD_PRELOAD": str(library), "CLOCK_SHIFT": str(seconds), "CLOCK_SHIFT_AFTER": str(after_seconds)}
