"""One progress bar for a whole run, and loops whose length is known before they start.

A loop of a trainer is decorated with `attach_progress_bar`; it is given an `IterationContext`:

    @attach_progress_bar(lambda self: self.hyper_params.training.num_iterations)
    def _run_train_loop(self, iteration_context):
        for iteration in iteration_context.iterate():
            iteration_context.set_postfix(loss=self._iteration(iteration))

    self._run_train_loop()
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TextIO, TypeVar, cast

from tqdm import tqdm

from nip_astra.safe_text import safe_line


class ProgressSettings(Protocol):
    """The settings that progress depends on; see `ExperimentSettings`."""

    @property
    def test_run(self) -> bool: ...
    @property
    def progress(self) -> bool: ...
    @property
    def tqdm_func(self) -> Callable[..., Any] | None: ...
    @property
    def global_tqdm_step_fn(self) -> Callable[[], None] | None: ...


class ProgressOwner(Protocol):
    """An object with loops, for instance a trainer."""

    @property
    def settings(self) -> ProgressSettings: ...


P = ParamSpec("P")
R = TypeVar("R", covariant=True)
SelfT = TypeVar("SelfT", bound=ProgressOwner)

TEST_RUN_NUM_ITERATIONS = 1
"""Iterations of a loop in a test run."""
_cuts: list[int] = []
"""Arguments of the open `loops_cut_to`, the innermost last."""
SECONDS_BETWEEN_WRITES = 0.5
"""Least time between two writes of a progress file."""
SECONDS_BETWEEN_WAITS = 60.0
"""Least time between two lines about a wait."""
NUM_PLAIN_LINES = 10
"""Most lines of a whole run if standard error is not a terminal."""


@contextmanager
def loops_cut_to(num_iterations: int | None) -> Iterator[None]:
    """Cut every loop of the runs within the block, as a test run cuts its own; None cuts none."""
    if num_iterations is None:
        yield
        return
    _cuts.append(num_iterations)
    try:
        yield
    finally:
        _cuts.pop()


class ProgressDisplay:
    """Shows the progress of a `ProgressBar`; this one shows nothing."""

    def update(self, num_iterations: int, *, is_resumed: bool) -> None:
        """Advance; `is_resumed` iterations were done by an earlier process."""

    def lengthen(self, num_iterations: int) -> None:
        """Add iterations to the total."""

    def describe(self, description: str, position: str = "") -> None:
        """Show the current task, and its own progress if it is not the whole run."""

    def postfix(self, values: Mapping[str, str]) -> None:
        """Show the latest values."""

    def show_wait(self, what: str) -> None:
        """Show what the run waits for; nothing if `what` is empty."""

    def close(self) -> None:
        """Release the terminal."""


class TqdmDisplay(ProgressDisplay):
    """A tqdm bar, or a caller's replacement."""

    def __init__(self, total: int, make_bar: Callable[..., Any]) -> None:
        self._bar = make_bar(total=total, dynamic_ncols=True, unit="it", file=sys.stderr)
        self._values: dict[str, str] = {}

    def update(self, num_iterations: int, *, is_resumed: bool) -> None:
        if is_resumed and hasattr(self._bar, "initial"):
            # tqdm leaves the initial iterations out of its rate and of the remaining time.
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


class LineDisplay(ProgressDisplay):
    """Whole lines, for logs and pipes; at most `NUM_PLAIN_LINES` a run."""

    def __init__(self, total: int, stream: TextIO) -> None:
        self._total = max(total, 1)
        self._stream = stream
        self._num_done = self._num_resumed = self._num_lines = 0
        self._description = self._position = self._postfix = ""
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


class ProgressBar:
    """The progress of a run. Made by `open_progress`; several loops may share one.

    Attributes
    ----------
    total : int
        Iterations of the whole run.
    num_done : int
        Iterations done, including those of an earlier process.
    """

    def __init__(self, total: int, display: ProgressDisplay, path: Path | None = None) -> None:
        self.total = total
        self.num_done = 0
        self._display = display
        self._path = path
        self._description = ""
        self._written = -math.inf
        self._write()

    def step(self, num_iterations: int = 1) -> None:
        """Count iterations that were just done."""
        self._update(num_iterations, is_resumed=False)

    def skip(self, num_iterations: int) -> None:
        """Count iterations of an earlier process; they do not enter the rate."""
        self._update(num_iterations, is_resumed=True)

    def _update(self, num_iterations: int, *, is_resumed: bool) -> None:
        self.num_done += num_iterations
        self._write()
        self._display.update(num_iterations, is_resumed=is_resumed)

    def lengthen(self, num_iterations: int) -> None:
        """Add iterations that were unknown when the bar was opened."""
        self.total += num_iterations
        self._display.lengthen(num_iterations)

    def set_description(self, description: str) -> None:
        """Show the current task, for instance "train", and drop another task's values."""
        if description != self._description:
            self._description = description
            self._display.postfix({})
        self._display.describe(safe_line(description))

    def set_position(self, num_done: int, num_iterations: int) -> None:
        """Show the progress of the current task, if it is a part of the whole run."""
        if self._description and num_iterations != self.total:
            self._display.describe(self._description, f"{num_done}/{num_iterations}")

    def set_postfix(self, values: Mapping[str, float | str]) -> None:
        """Show the latest values; numbers with three significant digits, and no NaN."""
        known = {name: value for name, value in values.items() if value == value}
        self._display.postfix({safe_line(name): _short(value) for name, value in known.items()})

    def show_wait(self, what: str) -> None:
        """Show what the run waits for; nothing if `what` is empty."""
        self._display.show_wait(safe_line(what))

    def close(self) -> None:
        """Release the terminal."""
        if self in _BARS:
            _BARS.remove(self)
        self._written = -math.inf
        self._write()
        self._display.close()

    def _write(self) -> None:
        """Write the progress file, at most every `SECONDS_BETWEEN_WRITES`."""
        now = time.monotonic()
        if self._path is None or now - self._written < SECONDS_BETWEEN_WRITES:
            return
        self._written = now
        new = self._path.with_name(f"{self._path.name}.new")
        # A run does not fail because its progress cannot be shown.
        with suppress(OSError):
            new.write_text(f"{self.num_done} {self.total}\n", encoding="utf-8")
            new.replace(self._path)


def read_progress(path: Path) -> tuple[int, int] | None:
    """Iterations done and in all, from a run's progress file; None if it has none yet."""
    try:
        num_done, total = path.read_text(encoding="utf-8").split()
        return int(num_done), int(total)
    except (OSError, ValueError):
        return None


SECONDS_UNSHOWN = 1.0
"""Shorter waits are not shown."""
_BARS: list[ProgressBar] = []
"""The bars of this process that are open."""
_WAITS: dict[object, str] = {}
"""Present waits, the earliest first."""
os.register_at_fork(after_in_child=_BARS.clear)
os.register_at_fork(after_in_child=_WAITS.clear)


@contextmanager
def waiting_for(what: str, *, after: float | None = None) -> Iterator[None]:
    """Show on the open progress bars what the run waits for within the block.

    Parameters
    ----------
    after : float, optional
        Seconds, by default `SECONDS_UNSHOWN`; a shorter wait is not shown.
    """
    key, after = object(), SECONDS_UNSHOWN if after is None else after

    def begin() -> None:
        _WAITS[key] = what
        _show_waits()

    timer: asyncio.TimerHandle | threading.Timer
    try:
        timer = asyncio.get_running_loop().call_later(after, begin)
    except RuntimeError:
        timer = threading.Timer(after, begin)
        timer.daemon = True
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if _WAITS.pop(key, None) is not None:
            _show_waits()


def _show_waits() -> None:
    waits = list(_WAITS.values())
    others = f" (and {len(waits) - 1} more)" if len(waits) > 1 else ""
    for bar in list(_BARS):
        bar.show_wait(f"{waits[0]}{others}" if waits else "")


def open_progress(
    total: int,
    enabled: bool = True,
    tqdm_func: Callable[..., Any] | None = None,
    *,
    path: str | None = None,
) -> ProgressBar:
    """The bar of a run.

    Parameters
    ----------
    total : int
        Iterations of the whole run; see `total_num_iterations`.
    enabled : bool
        False shows nothing.
    tqdm_func : Callable, optional
        Makes the bar in place of tqdm, with tqdm's arguments. Without it, a standard error that is
        no terminal gets at most ten plain lines instead of a bar.
    path : str, optional
        Progress file; see `read_progress`.
    """
    display = ProgressDisplay()
    if enabled and tqdm_func is None and not sys.stderr.isatty():
        display = LineDisplay(total, sys.stderr)
    elif enabled:
        display = TqdmDisplay(total, tqdm_func or tqdm)
    bar = ProgressBar(total, display, None if path is None else Path(path))
    _BARS.append(bar)
    return bar


class _LoopIsCut(BaseException):
    """Ends a loop that continues after its last iteration."""


class IterationContext:
    """The iterations of a decorated loop; `is_cut` if it has fewer than it requested."""

    def __init__(
        self,
        num_iterations: int,
        progress: ProgressBar,
        step_func: Callable[[], None] | None = None,
        *,
        is_cut: bool = False,
    ) -> None:
        self._num_iterations = num_iterations
        self._is_cut = is_cut
        self._is_read = False
        self._progress = progress
        self._step_func = step_func
        self._num_done = 0
        self._is_described = False

    @property
    def num_iterations(self) -> int:
        """Iterations of the loop; capped in a test run."""
        self._is_read = True
        return self._num_iterations

    def set_description(self, description: str) -> None:
        """Show the current task, for instance "train"."""
        self._progress.set_description(description)
        self._is_described = True
        self._count(0)

    def set_postfix(self, **values: float | str) -> None:
        """Show the latest values; numbers with three significant digits."""
        self._progress.set_postfix(values)

    def step(self, num_iterations: int = 1) -> None:
        """Count iterations that were just done; the last one of a cut loop ends it."""
        self._step(num_iterations)
        # A loop that has read the number of iterations ends by itself.
        if self._is_cut and self._num_done >= self._num_iterations + self._is_read:
            raise _LoopIsCut

    def _step(self, num_iterations: int) -> None:
        self._count(num_iterations)
        self._progress.step(num_iterations)
        self._call_step_func(num_iterations)

    def iterate(self, start: int = 0) -> Iterator[int]:
        """The index of each iteration, which is counted when its body has ended.

        Iterations before `start` were done by an earlier process.
        """
        num_skipped = min(start, self._num_iterations)
        if num_skipped > 0:
            self._count(num_skipped)
            self._progress.skip(num_skipped)
            self._call_step_func(num_skipped)
        for index in range(start, self._num_iterations):
            yield index
            self._step(1)

    def _count(self, num_iterations: int) -> None:
        self._num_done += num_iterations
        if self._is_described:
            self._progress.set_position(self._num_done, self._num_iterations)

    def _call_step_func(self, num_iterations: int) -> None:
        if self._step_func is not None:
            for _ in range(num_iterations):
                self._step_func()


class ProgressLoop(Protocol[SelfT, P, R]):
    """A method that `attach_progress_bar` decorated; `num_iterations_func` is not capped."""

    num_iterations_func: Callable[[SelfT], int]

    def __call__(self, owner: SelfT, /, *args: P.args, **kwargs: P.kwargs) -> R: ...

    def __get__(self, owner: SelfT, owner_type: type | None = None) -> Callable[P, R]: ...


def attach_progress_bar(
    num_iterations_func: Callable[[Any], int],
) -> Callable[[Callable[Concatenate[SelfT, IterationContext, P], R]], ProgressLoop[SelfT, P, R]]:
    """Decorate a method that loops; it gets an `IterationContext` as its first argument.

    The owner has `settings`. The loop counts on the owner's `progress` if that is a `ProgressBar`,
    else on a bar of its own.

    Parameters
    ----------
    num_iterations_func : Callable
        Gives the number of iterations from the owner, before the loop runs.
    """

    def decorate(
        loop: Callable[Concatenate[SelfT, IterationContext, P], R],
    ) -> ProgressLoop[SelfT, P, R]:
        @functools.wraps(loop)
        def run_loop(self: SelfT, /, *args: P.args, **kwargs: P.kwargs) -> R:
            settings = self.settings
            requested = num_iterations_func(self)
            num_iterations = _capped(requested, settings.test_run)
            shared: ProgressBar | None = getattr(self, "progress", None)
            if shared is not None and not _is_counted(self, run_loop):
                shared.lengthen(num_iterations)
            progress = shared or open_progress(
                num_iterations, settings.progress, settings.tqdm_func
            )
            context = IterationContext(
                num_iterations,
                progress,
                settings.global_tqdm_step_fn,
                is_cut=num_iterations < requested,
            )
            try:
                return loop(self, context, *args, **kwargs)
            except _LoopIsCut:
                return cast(R, None)
            finally:
                if shared is None:
                    progress.close()

        run_loop.num_iterations_func = num_iterations_func  # type: ignore[attr-defined]  # set here
        return cast(ProgressLoop[SelfT, P, R], run_loop)

    return decorate


def total_num_iterations(owner: ProgressOwner) -> int:
    """Iterations of all decorated loops of an object, each run once."""
    loops = [inspect.getattr_static(type(owner), name) for name in dir(type(owner))]
    return sum(
        _capped(loop.num_iterations_func(owner), owner.settings.test_run)
        for loop in loops
        if hasattr(loop, "num_iterations_func")
    )


def _is_counted(owner: ProgressOwner, loop: Any) -> bool:
    """Whether `total_num_iterations` counts a loop; not if its name is overridden."""
    return inspect.getattr_static(type(owner), loop.__name__, None) is loop


def _capped(num_iterations: int, is_test_run: bool) -> int:
    cuts = [*_cuts, *([TEST_RUN_NUM_ITERATIONS] if is_test_run else [])]
    return min(num_iterations, *cuts) if cuts else num_iterations


def _short(value: float | str) -> str:
    if isinstance(value, str):
        return safe_line(value)
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.3g}"
