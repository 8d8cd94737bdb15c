"""SIGINT and SIGTERM, which ask a run to stop."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any


@contextmanager
def stop_on_signals() -> Iterator[Callable[[], str | None]]:
    """A function that tells which of SIGINT and SIGTERM came; a second one stops at once."""
    received: list[str] = []

    def note(number: int, _frame: Any) -> None:
        name = signal.Signals(number).name
        if received:
            _tell_at_once(f"{name} again: stopping without saving")
            raise KeyboardInterrupt
        received.append(name)
        _tell_at_once(
            f"{name}: finishing the step, then saving and stopping; once more stops without saving"
        )

    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: received[0] if received else None
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def signals_left_to_leader() -> Iterator[None]:
    """Hear neither SIGINT nor SIGTERM: the process that leads stops all others."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    stopping = (signal.SIGINT, signal.SIGTERM)
    previous = {number: signal.signal(number, signal.SIG_IGN) for number in stopping}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _tell_at_once(text: str) -> None:
    """Write a line to standard error from within a signal's handler.

    By its number, since a stream that was being written to when the signal came cannot be used.
    """
    with suppress(OSError):
        os.write(2, f"\n{text}\n".encode())
