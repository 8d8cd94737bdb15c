"""Where the progress of a run is shown: a bar, lines, a file, or nowhere."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TextIO

from tqdm import tqdm

SECONDS_BETWEEN_WRITES = 0.5
"""How often a file of a run's progress is written at most."""

SECONDS_BETWEEN_WAITS = 60.0
"""How often a display of whole lines says what the run waits for at most."""

NUM_PLAIN_LINES = 10
"""How many lines a whole run prints at most where standard error is no terminal."""


class ProgressDisplay(Protocol):
    """What a `ProgressBar` draws on."""

    def update(self, num_iterations: int, *, is_resumed: bool) -> None:
        """Advance; `is_resumed` iterations were done by an earlier process."""

    def lengthen(self, num_iterations: int) -> None:
        """Show that there is more to do than was known."""

    def describe(self, description: str, position: str = "") -> None:
        """Show what is being done, and how far that is where it is not the whole run."""

    def postfix(self, values: Mapping[str, str]) -> None:
        """Show the latest values."""

    def show_wait(self, what: str) -> None:
        """Show what the run waits for; nothing if `what` is empty."""

    def close(self) -> None:
        """Leave the terminal in order."""


class TqdmDisplay:
    """A tqdm bar, or what a caller gave in its place."""

    def __init__(self, total: int, make_bar: Callable[..., Any]) -> None:
        self._bar = make_bar(total=total, dynamic_ncols=True, unit="it", file=sys.stderr)
        self._values: dict[str, str] = {}

    def update(self, num_iterations: int, *, is_resumed: bool) -> None:
        if is_resumed and hasattr(self._bar, "initial"):
            # tqdm leaves the initial iterations out of its rate and of the time it foresees.
            self._bar.initial += num_iterations
        self._bar.update(num_iterations)

    def lengthen(self, num_iterations: int) -> None:
        if getattr(self._bar, "total", None) is not None:
            self._bar.total += num_iterations

    def describe(self, description: str, position: str = "") -> None:
        self._bar.set_description(f"{description} {position}, in all" if position else description)

    def postfix(self, values: Mapping[str, str]) -> None:
        self._values = dict(values)
        self._bar.set_postfix(values, refresh=False)

    def show_wait(self, what: str) -> None:
        self._bar.set_postfix({"waiting for": what} if what else self._values, refresh=True)

    def close(self) -> None:
        self._bar.close()


class LineDisplay:
    """Whole lines, for logs and pipes; at most `NUM_PLAIN_LINES` a run."""

    def __init__(self, total: int, stream: TextIO) -> None:
        self._total = max(total, 1)
        self._stream = stream
        self._num_done = 0
        self._num_resumed = 0
        self._num_lines = 0
        self._description = self._position = ""
        self._postfix = ""
        self._started = time.monotonic()
        self._wait_shown = -math.inf

    def update(self, num_iterations: int, *, is_resumed: bool) -> None:
        self._num_done += num_iterations
        lines_due = NUM_PLAIN_LINES * self._num_done // self._total
        if is_resumed:
            self._num_resumed += num_iterations
        elif lines_due > self._num_lines:
            self._print()
        self._num_lines = lines_due

    def lengthen(self, num_iterations: int) -> None:
        self._total += num_iterations

    def describe(self, description: str, position: str = "") -> None:
        self._description, self._position = description, position

    def postfix(self, values: Mapping[str, str]) -> None:
        self._postfix = ", ".join(f"{name}={value}" for name, value in values.items())

    def show_wait(self, what: str) -> None:
        now = time.monotonic()
        if what and now - self._wait_shown > SECONDS_BETWEEN_WAITS:
            self._wait_shown = now
            print(f"waiting for {what}", file=self._stream, flush=True)

    def close(self) -> None:
        """There is nothing to close."""

    def _print(self) -> None:
        elapsed = time.monotonic() - self._started
        per_iteration = elapsed / max(self._num_done - self._num_resumed, 1)
        remaining = per_iteration * max(self._total - self._num_done, 0)
        in_all = f"{self._num_done}/{self._total}"
        if self._position:
            in_all = f"{self._position}, in all {in_all}"
        head = f"{self._description} {in_all}".strip()
        times = f"[{tqdm.format_interval(elapsed)}<{tqdm.format_interval(remaining)}]"
        print(" ".join(filter(None, [head, times, self._postfix])), file=self._stream, flush=True)


class SilentDisplay:
    """Nothing."""

    def update(self, num_iterations: int, *, is_resumed: bool) -> None:
        """Show nothing."""

    def lengthen(self, num_iterations: int) -> None:
        """Show nothing."""

    def describe(self, description: str, position: str = "") -> None:
        """Show nothing."""

    def postfix(self, values: Mapping[str, str]) -> None:
        """Show nothing."""

    def show_wait(self, what: str) -> None:
        """Show nothing."""

    def close(self) -> None:
        """There is nothing to close."""


class FileDisplay:
    """A file with the numbers of iterations done and to be done, beside another display."""

    def __init__(self, total: int, path: Path, display: ProgressDisplay) -> None:
        self._total, self._path, self._display = total, path, display
        self._num_done = 0
        self._written = -math.inf
        self._write()

    def update(self, num_iterations: int, *, is_resumed: bool) -> None:
        self._num_done += num_iterations
        self._write()
        self._display.update(num_iterations, is_resumed=is_resumed)

    def lengthen(self, num_iterations: int) -> None:
        self._total += num_iterations
        self._display.lengthen(num_iterations)

    def describe(self, description: str, position: str = "") -> None:
        self._display.describe(description, position)

    def postfix(self, values: Mapping[str, str]) -> None:
        self._display.postfix(values)

    def show_wait(self, what: str) -> None:
        self._display.show_wait(what)

    def close(self) -> None:
        self._written = -math.inf
        self._write()
        self._display.close()

    def _write(self) -> None:
        if time.monotonic() - self._written < SECONDS_BETWEEN_WRITES:
            return
        self._written = time.monotonic()
        new = self._path.with_name(f"{self._path.name}.new")
        # A run does not fail because nobody can see how far it is.
        with suppress(OSError):
            new.write_text(f"{self._num_done} {self._total}\n", encoding="utf-8")
            new.replace(self._path)


def read_progress(path: Path) -> tuple[int, int] | None:
    """Iterations done and to be done, as a run has written them; None where it has not yet."""
    try:
        num_done, total = path.read_text(encoding="utf-8").split()
        return int(num_done), int(total)
    except (OSError, ValueError):
        return None
