"""How many threads torch should use."""

from __future__ import annotations

import os

SMALL_MODEL_PARAMETERS = 5_000_000
"""Below this size the cost of waking a second thread exceeds what it computes."""


def choose_num_threads(num_parameters: int, requested: int | None) -> int:
    """Give the thread count: the one requested, one for a small model, else all cores.

    On busy cores small operations run up to ten times slower with two threads than with one.
    """
    if requested is not None:
        return requested
    if num_parameters < SMALL_MODEL_PARAMETERS:
        return 1
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else (os.cpu_count() or 1)
