"""A bound on how long a call may take."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class TimeLimitExceeded(BaseException):
    """The block took too long; its caller tells what was being done."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """End the block with `TimeLimitExceeded` after some seconds.

    What waits (for a network, a lock, another process, or in Python code) is ended, and so is a
    long calculation as soon as it comes back to Python. The system's timer reaches main threads
    only; in another thread, or where a timer is running already, the block has no limit.
    """
    can_set = threading.current_thread() is threading.main_thread()
    if not can_set or signal.getitimer(signal.ITIMER_REAL)[0] > 0:
        yield
        return

    def end(number: int, frame: Any) -> None:
        raise TimeLimitExceeded

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
