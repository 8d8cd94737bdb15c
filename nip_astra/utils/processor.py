"""Threads, processes and memory of this machine."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from nip_astra.distributed.launch import processes_on_this_machine

SMALL_MODEL_PARAMETERS = 5_000_000
"""Below this size, waking a second thread costs more than it saves."""
MOST_PROCESSES = 4
"""Default maximum: each costs tens of milliseconds per rollout; more than two are unmeasured."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_THRESHOLD = 1 << 30
_is_kept_to_one_thread = False


def keep_to_one_thread() -> None:
    """Let every later choice of threads or processes in this process be one.

    A forked process has none of the threads that OpenMP began in its parent, and would wait for
    them for good as soon as it used a second one.
    """
    global _is_kept_to_one_thread
    _is_kept_to_one_thread = True


def choose_num_threads(num_parameters: int, requested: int | None) -> int:
    """Return the number of torch threads: one for a small model, else as requested, or all cores.

    On busy cores two threads are up to ten times slower for small operations, and the last digits
    of a sum depend on the number of threads.
    """
    if num_parameters < SMALL_MODEL_PARAMETERS or _is_kept_to_one_thread:
        return 1
    return num_cores() if requested is None else requested


def choose_num_processes(num_parameters: int, requested: int | None) -> int:
    """Return the number of processes for sampling: one for a large model, or as requested."""
    if num_parameters >= SMALL_MODEL_PARAMETERS:
        return 1
    return min(num_cores(), MOST_PROCESSES) if requested is None else requested


def num_cores() -> int:
    """Return this process's number of cores: its share if a run has several processes here."""
    if _is_kept_to_one_thread:
        return 1
    affinity = getattr(os, "sched_getaffinity", None)
    count = len(affinity(0)) if affinity else (os.cpu_count() or 1)
    return max(count // processes_on_this_machine(), 1)


def split_evenly(indices: range, count: int) -> list[range]:
    """Split consecutive indices into `count` ranges whose lengths differ by at most one."""
    ends = [indices.start + len(indices) * part // count for part in range(count + 1)]
    return [range(start, stop) for start, stop in pairwise(ends)]


def peak_memory_bytes() -> int:
    """Return the peak resident memory of this process."""
    with suppress(OSError):
        # Better than the resource usage, which starts from that of the parent process.
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    # Kibibytes on Linux, bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def keep_freed_memory() -> bool:
    """Let the C library reuse freed memory; return whether it can.

    By default glibc maps every large tensor anew, and first touching its pages takes several times
    as long as an elementwise operation on it.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    options = (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD)
    return all(mallopt(option, _KEPT_THRESHOLD) for option in options)
