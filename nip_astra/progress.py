"""The progress bar of a run, and loops of known length.

A trainer's loop is decorated with `attach_progress_bar` and receives an `IterationContext`:

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
import io
import logging
import math
import os
import sys
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, Concatenate, ParamSpec, Protocol, TextIO, TypeVar, cast

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar as DrawnBar
from rich.table import Table
from rich.text import Text

from nip_astra.errors import counted
from nip_astra.safe_text import safe_line

P = ParamSpec("P")
R = TypeVar("R", covariant=True)
SelfT = TypeVar("SelfT")

TEST_RUN_NUM_ITERATIONS = 1
"""Iterations of a loop in a test run."""
_cuts: list[int] = []
"""Arguments of the open `loops_cut_to` blocks, innermost last."""
SECONDS_BETWEEN_WRITES = 0.5
"""Minimum time between two writes of a progress file."""
SECONDS_BETWEEN_WAITS = 60.0
"""Minimum time between two lines about a wait."""
NUM_PLAIN_LINES = 10
"""Maximum number of lines of a run if standard error is not a terminal."""
MIN_BAR_WIDTH, MAX_BAR_WIDTH = 10, 30
"""Columns of a bar on a terminal; figures that would make it shorter are not shown."""
REFRESHES_PER_SECOND = 4
LIBRARIES_WITH_BARS = ("transformers.utils.logging", "datasets.utils")
"""Modules with their own progress bars, disabled while ours is shown."""


@contextmanager
def loops_cut_to(num_iterations: int | None) -> Iterator[None]:
    """Limit every loop of the runs within the block, like a test run; None sets no limit."""
    if num_iterations is None:
        yield
        return
    _cuts.append(num_iterations)
    try:
        yield
    finally:
        _cuts.pop()


class ProgressBar:
    """The progress of a run, in one line, created by `open_progress`; several loops may share it.

    Parameters
    ----------
    total : int, optional
        Iterations of the whole run; None if unknown, for instance while models are loaded.
    console : Console, optional
        Where it is shown: one live line on a terminal, else at most `NUM_PLAIN_LINES` lines.
    bar : optional
        A caller's bar with the methods of tqdm, shown instead.

    Attributes
    ----------
    num_done : int
        Iterations done, including those of an earlier process.
    counts_requests : bool
        Whether `count_requests` counts here.
    num_expected : int or None
        Units of the open `counting` block that are not counted yet.
    seconds_before : float
        Duration of the run in earlier processes.
    """

    def __init__(
        self,
        total: int | None,
        console: Console | None = None,
        bar: Any = None,
        path: Path | None = None,
    ) -> None:
        self.total = 0 if total is None else total
        self.num_done = 0
        self.is_live = console is not None and _is_live(console)
        self.is_endless = self.counts_requests = total is None
        self.num_expected: int | None = None
        self.seconds_before = 0.0
        self.console, self._bar, self._path = console, bar, path
        self._num_resumed = self._num_lines = 0
        self._description = self._position = self._wait = ""
        self._values: dict[str, str] = {}
        self._started, self._ended = time.monotonic(), math.inf
        self._written = self._wait_shown = -math.inf
        self._write()
        _BARS.append(self)
        _SCREEN.update()

    def step(self, num_iterations: int = 1) -> None:
        """Count completed iterations."""
        self._update(num_iterations, is_resumed=False)

    def skip(self, num_iterations: int) -> None:
        """Count iterations of an earlier process, which do not affect the rate."""
        self._update(num_iterations, is_resumed=True)

    def _update(self, num_iterations: int, *, is_resumed: bool) -> None:
        self.num_done += num_iterations
        self._write()
        if is_resumed:
            self._num_resumed += num_iterations
        if self._bar is not None:
            if is_resumed and hasattr(self._bar, "initial"):
                # tqdm leaves the initial iterations out of its rate and of the remaining time.
                self._bar.initial += num_iterations
            self._bar.update(num_iterations)
        lines_due = NUM_PLAIN_LINES * self.num_done // max(self.total, 1)
        is_due = lines_due > self._num_lines and not is_resumed
        if is_due and self.console is not None and not (self.is_live or self.is_endless):
            head = f"{self._head}, in all" if self._position else self._head
            _print_whole(self.console, " ".join(filter(None, [head, *self._parts()])))
        self._num_lines = lines_due

    def lengthen(self, num_iterations: int) -> None:
        """Add iterations that were unknown when the bar was opened."""
        self.total += num_iterations
        if getattr(self._bar, "total", None) is not None:
            self._bar.total += num_iterations

    def set_description(self, description: str) -> None:
        """Show the current task, for instance "train", and drop another task's values."""
        if safe_line(description) != self._description:
            self.set_postfix({})
        self._describe(safe_line(description), "")

    def set_position(self, num_done: int, num_iterations: int) -> None:
        """Show the progress of the current task, if it is only part of the run."""
        if self._description and num_iterations != self.total:
            self._describe(self._description, f"{num_done}/{num_iterations}")

    def _describe(self, description: str, position: str) -> None:
        self._description, self._position = description, position
        if self._bar is not None:
            self._bar.set_description(self._head + (", in all" if position else ""))

    def set_postfix(self, values: Mapping[str, float | str]) -> None:
        """Show the latest values, the most important first, with three digits; NaN is hidden."""
        # NaN is unequal to itself.
        numbers = {name: value for name, value in values.items() if value == value}
        self._values = {safe_line(name): _short(value) for name, value in numbers.items()}
        if self._bar is not None:
            self._bar.set_postfix(dict(self._values), refresh=False)

    def show_wait(self, reason: str) -> None:
        """Show what the run is waiting for; an empty reason ends the wait."""
        self._wait = safe_line(reason)
        if self._bar is not None:
            figures = {"waiting for": self._wait} if reason else dict(self._values)
            self._bar.set_postfix(figures, refresh=True)
        now = time.monotonic()
        if self.is_live:
            _SCREEN.refresh()
        elif self.console is not None and reason and now - self._wait_shown > SECONDS_BETWEEN_WAITS:
            self._wait_shown = now
            _print_whole(self.console, f"waiting for {self._wait}")

    def close(self) -> None:
        """Release the terminal, leaving the final state on it."""
        if self not in _BARS:
            return
        self._wait = ""
        self._written = -math.inf
        self._ended = time.monotonic()
        self._write()
        if self._bar is not None:
            self._bar.close()
        _BARS.remove(self)
        if self.is_live and not self.is_endless:
            _SCREEN.leave(self)
        _SCREEN.update()

    @property
    def _head(self) -> str:
        return f"{self._description} {self._position}".strip()

    def _parts(self) -> list[str]:
        """Return the texts after the bar, the most important first; truncated to fit."""
        elapsed = min(time.monotonic(), self._ended) - self._started
        if self.is_endless:
            requests = [counted(self.num_done, "request")] if self.num_done else []
            return [*requests, _clock(elapsed)]
        # Iterations of an earlier process took none of this one's time.
        seconds_per_iteration = elapsed / max(self.num_done - self._num_resumed, 1)
        num_left = max(self.total - self.num_done, 0)
        remaining = _clock(seconds_per_iteration * num_left) if self.num_done else "?"
        times = f"[{_clock(self.seconds_before + elapsed)}<{remaining}]"
        figures = [f"{name}={value}" for name, value in self._values.items()]
        return [f"{self.num_done}/{self.total}", *figures[:1], times, *figures[1:]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        head = Text(self._head, no_wrap=True)
        head.truncate(options.max_width // 3, overflow="ellipsis")
        room = options.max_width - MIN_BAR_WIDTH - (head.cell_len + 1 if head else 0)
        texts = []
        for part in self._parts():
            room -= cell_len(part) + 1
            if room < 0:
                break
            texts.append(Text(part, no_wrap=True))
        bar = DrawnBar(
            None if self.is_endless else max(self.total, 1),
            self.num_done,
            min(MIN_BAR_WIDTH + max(room, 0), MAX_BAR_WIDTH),
        )
        line = Table.grid(padding=(0, 1, 0, 0))
        line.add_row(*([head] if head else []), bar, *texts)
        yield line
        if self._wait:
            yield Text(f"  waiting for {self._wait}", no_wrap=True, overflow="ellipsis")

    def _write(self) -> None:
        """Write the progress file, at most every `SECONDS_BETWEEN_WRITES`."""
        now = time.monotonic()
        if self._path is None or now - self._written < SECONDS_BETWEEN_WRITES:
            return
        self._written = now
        new_path = self._path.with_name(f"{self._path.name}.new")
        # A run does not fail because its progress cannot be shown.
        with suppress(OSError):
            new_path.write_text(f"{self.num_done} {self.total}\n", encoding="utf-8")
            new_path.replace(self._path)


def read_progress(path: Path) -> tuple[int, int] | None:
    """Read completed and total iterations from a run's progress file; None if it has none yet."""
    try:
        num_done, total = path.read_text(encoding="utf-8").split()
        return int(num_done), int(total)
    except (OSError, ValueError):
        return None


SECONDS_UNSHOWN = 1.0
"""Shorter waits are not shown."""
_BARS: list[ProgressBar] = []
"""The open bars of this process."""
_WAITS: dict[object, str] = {}
"""Current waits, the earliest first."""


_DRAWING = threading.RLock()
"""Lock held while the display writes; a process forked meanwhile could not write to its streams."""


class _Display(Live):
    """The display in a terminal."""

    def refresh(self) -> None:
        with _DRAWING:
            super().refresh()

    def leave(self, bar: ProgressBar) -> None:
        """Keep the final state of a closing bar."""
        self.console.print(bar)


class _Console(Console):
    """A console that discards its output once the pipe is closed; Rich would exit."""

    def on_broken_pipe(self) -> None:
        """Discard all further output."""
        self.quiet = True


class _NotebookDisplay:
    """The display in a notebook cell: one output that is replaced, without ipywidgets.

    If no bar leaves anything, the cell's next display takes the output over.
    """

    _empty: ClassVar[tuple[object, str] | None] = None
    """Cell and id of the last display that became empty."""

    def __init__(self, get_renderable: Callable[[], Group], console: Console) -> None:
        from IPython import get_ipython

        self._get_renderable, self._console = get_renderable, console
        self._left: list[ProgressBar] = []
        self._cell = getattr(get_ipython(), "execution_count", None)
        cell, empty = self._empty or (None, "")
        self._is_shown = bool(empty) and cell == self._cell
        self._id = empty if self._is_shown else uuid.uuid4().hex
        _NotebookDisplay._empty = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._keep_up, name="progress", daemon=True)

    def start(self) -> None:
        self.refresh()
        self._thread.start()

    def _keep_up(self) -> None:
        while not self._stopped.wait(1 / REFRESHES_PER_SECOND):
            self.refresh()

    def refresh(self) -> None:
        from IPython.display import display

        with _DRAWING:
            page = Console(
                file=io.StringIO(), record=True, width=self._console.width, force_jupyter=False
            )
            page.print(*self._left, self._get_renderable(), sep="")
            text = page.export_text(clear=False)
            html = page.export_html(inline_styles=True, code_format=_NOTEBOOK_FORMAT)
            is_empty = not text.strip()
            bundle = {} if is_empty else {"text/plain": text, "text/html": html}
            display(bundle, raw=True, display_id=self._id, update=self._is_shown)
            self._is_shown = True

    def leave(self, bar: ProgressBar) -> None:
        """Keep the final state of a closing bar."""
        self._left.append(bar)

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()
        self.refresh()
        if not self._left:
            _NotebookDisplay._empty = self._cell, self._id


_NOTEBOOK_FORMAT = '<pre style="margin:0;line-height:1.2">{code}</pre>'


class _Screen:
    """The live display of this process: a line for each open bar, below all other output.

    Meanwhile other libraries show no bars, and their output is printed above ours.
    """

    def __init__(self) -> None:
        self._live: _Display | _NotebookDisplay | None = None
        self._undo: list[Callable[[], object]] = []
        self._enable: list[Callable[[], object]] = []
        self.num_holds = 0

    def update(self) -> None:
        """Open or close the display, depending on the open bars."""
        if not _BARS:
            self.close()
        if _BARS or self.num_holds:
            for name in LIBRARIES_WITH_BARS:
                library = sys.modules.get(name)
                if library is not None and library.is_progress_bar_enabled():
                    library.disable_progress_bar()
                    self._enable.append(library.enable_progress_bar)
        else:
            while self._enable:
                self._enable.pop()()
        console = next((bar.console for bar in _BARS if bar.is_live), None)
        if console is not None and self._live is None:
            self._start(console)

    def _start(self, console: Console) -> None:
        if console.is_jupyter:
            # tqdm warns about missing ipywidgets even for disabled bars.
            warnings.filterwarnings("ignore", message="IProgress not found")
            self._live = _NotebookDisplay(self._bars, console)
            self._live.start()
            return
        self._live = _Display(
            get_renderable=self._bars,
            console=console,
            refresh_per_second=REFRESHES_PER_SECOND,
            transient=True,
            # Redirected text goes to the bars' stream, not into a pipe.
            redirect_stdout=sys.stdout.isatty(),
        )
        streams = {name: getattr(sys, name) for name in ("stdout", "stderr")}
        self._live.start()
        for name, stream in streams.items():
            redirected = getattr(sys, name)
            if redirected is not stream:
                _move_log_handlers(stream, redirected)
                self._undo.append(functools.partial(_restore_stream, name, stream, redirected))

    def _bars(self) -> Group:
        """Return the bars with a known total; without one, the newest."""
        live = [bar for bar in _BARS if bar.is_live]
        return Group(*([bar for bar in live if bar.total] or live[-1:]))

    def refresh(self) -> None:
        """Redraw the display at once."""
        if self._live is not None:
            self._live.refresh()

    def leave(self, bar: ProgressBar) -> None:
        """Keep the final state of a closing bar."""
        if self._live is not None:
            self._live.leave(bar)

    def close(self) -> None:
        """Remove the display, and restore the streams."""
        if self._live is not None:
            self._live.stop()
        self.forget()

    def forget(self) -> None:
        """Restore the streams; a forked process does not touch its parent's display."""
        for undo in reversed(self._undo):
            undo()
        self._live, self._undo = None, []


def _move_log_handlers(source: TextIO, target: TextIO) -> None:
    """Redirect log handlers from one stream to another, for instance transformers'."""
    for logger in [logging.root, *logging.root.manager.loggerDict.values()]:
        for handler in getattr(logger, "handlers", []):
            # `logging.lastResort` has no stream attribute of its own.
            if vars(handler).get("stream") is source:
                handler.stream = target


def _restore_stream(name: str, stream: TextIO, redirected: TextIO) -> None:
    _move_log_handlers(redirected, stream)
    # Another library may have replaced the stream since.
    if getattr(sys, name) is redirected:
        setattr(sys, name, stream)


_SCREEN = _Screen()


def _after_fork() -> None:
    _DRAWING.release()
    _BARS.clear()
    _WAITS.clear()
    _SCREEN.forget()


os.register_at_fork(
    before=_DRAWING.acquire, after_in_parent=_DRAWING.release, after_in_child=_after_fork
)


def quiet_libraries() -> None:
    """Disable the bars of libraries imported after ours was shown."""
    _SCREEN.update()


@contextmanager
def only_own_bars() -> Iterator[None]:
    """Disable the bars of other libraries within the block, even if none of ours is shown."""
    _SCREEN.num_holds += 1
    try:
        yield
    finally:
        _SCREEN.num_holds -= 1
        _SCREEN.update()


@contextmanager
def waiting_for(reason: str, *, after: float | None = None) -> Iterator[None]:
    """Show on the open progress bars what the run is waiting for within the block.

    Parameters
    ----------
    after : float, optional
        Seconds, by default `SECONDS_UNSHOWN`; a shorter wait is not shown.
    """
    key = object()
    delay = SECONDS_UNSHOWN if after is None else after

    def begin() -> None:
        _WAITS[key] = reason
        _show_waits()

    timer: asyncio.TimerHandle | threading.Timer
    try:
        timer = asyncio.get_running_loop().call_later(delay, begin)
    except RuntimeError:
        # No event loop runs in this thread.
        timer = threading.Timer(delay, begin)
        timer.daemon = True
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if _WAITS.pop(key, None) is not None:
            _show_waits()


def count_requests(number: int = 1) -> None:
    """Count answered requests on the newest bar that counts them, if there is one."""
    bar = _request_bar()
    if bar is None:
        return
    if bar.num_expected is not None:
        # Further requests are repetitions.
        number = min(number, bar.num_expected)
        bar.num_expected -= number
    bar.step(number)


@contextmanager
def counting(num_units: int) -> Iterator[None]:
    """Count units on the newest bar that counts requests, if it has a total.

    Each request that is answered within the block counts as one; those without a request are
    counted at its end. A block within another one counts nothing.
    """
    bar = _request_bar()
    if bar is None or bar.is_endless or bar.num_expected is not None:
        yield
        return
    bar.num_expected = num_units
    try:
        yield
        bar.step(bar.num_expected)
    finally:
        bar.num_expected = None


def _request_bar() -> ProgressBar | None:
    return next((bar for bar in reversed(_BARS) if bar.counts_requests), None)


def _show_waits() -> None:
    reasons = list(_WAITS.values())
    text = reasons[0] if reasons else ""
    if len(reasons) > 1:
        text += f" (and {len(reasons) - 1} more)"
    for bar in list(_BARS):
        bar.show_wait(text)


def open_progress(
    total: int | None,
    enabled: bool = True,
    tqdm_func: Callable[..., Any] | None = None,
    *,
    path: str | None = None,
    seconds_before: float = 0.0,
) -> ProgressBar:
    """Open the bar of a run.

    Parameters
    ----------
    total : int, optional
        Iterations of the whole run; see `total_num_iterations`. None if unknown.
    enabled : bool
        False shows nothing.
    tqdm_func : Callable, optional
        Makes a bar that is shown instead, with tqdm's arguments.
    path : str, optional
        Progress file; see `read_progress`.
    seconds_before : float
        Duration of the run in earlier processes, which the bar adds to its own.
    """
    console = bar = None
    if enabled and tqdm_func is not None:
        bar = tqdm_func(total=total, dynamic_ncols=True, unit="it", file=sys.stderr)
    elif enabled:
        console = _Console(stderr=True, markup=False, emoji=False, highlight=False)
    progress = ProgressBar(total, console, bar, None if path is None else Path(path))
    progress.seconds_before = seconds_before
    return progress


@contextmanager
def showing(
    description: str,
    total: int | None = None,
    *,
    counts_requests: bool = False,
    enabled: bool = True,
) -> Iterator[ProgressBar]:
    """Show a bar within the block; without a total, only time and answered requests."""
    bar = open_progress(total, enabled)
    bar.counts_requests |= counts_requests
    bar.set_description(description)
    try:
        yield bar
    finally:
        bar.close()


class _LoopIsCut(BaseException):
    """Ends a loop that continues after its last iteration."""


class IterationContext:
    """The iterations of a decorated loop; `is_cut` if fewer than requested."""

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
        """Number of iterations of the loop, limited in a test run."""
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
        """Count completed iterations; the last one of a cut loop ends it."""
        self._step(num_iterations)
        # A loop that has read the number of iterations ends by itself.
        if self._is_cut and self._num_done >= self._num_iterations + self._is_read:
            raise _LoopIsCut

    def _step(self, num_iterations: int) -> None:
        self._count(num_iterations)
        self._progress.step(num_iterations)
        self._call_step_func(num_iterations)

    def iterate(self, start: int = 0) -> Iterator[int]:
        """Yield the index of each iteration, counted when its body has ended.

        Iterations before `start` were completed by an earlier process.
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
    """Decorate a method that loops; it receives an `IterationContext` as its first argument.

    The owner has `settings`, see `ExperimentSettings`. The loop counts on the owner's `progress` if
    that is a `ProgressBar`, else on a bar of its own.

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
            settings = cast(Any, self).settings
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


def total_num_iterations(owner: Any) -> int:
    """Return the iterations of all decorated loops of an object, each run once."""
    loops = [inspect.getattr_static(type(owner), name) for name in dir(type(owner))]
    return sum(
        _capped(loop.num_iterations_func(owner), owner.settings.test_run)
        for loop in loops
        if hasattr(loop, "num_iterations_func")
    )


def _is_counted(owner: object, loop: Any) -> bool:
    """Return whether `total_num_iterations` counts a loop; not if its name is overridden."""
    return inspect.getattr_static(type(owner), loop.__name__, None) is loop


def _capped(num_iterations: int, is_test_run: bool) -> int:
    limits = list(_cuts)
    if is_test_run:
        limits.append(TEST_RUN_NUM_ITERATIONS)
    return min([num_iterations, *limits])


def _short(value: float | str) -> str:
    if isinstance(value, str):
        return safe_line(value)
    return f"{value:,.0f}" if 999.5 <= abs(value) < 1e9 else f"{value:.3g}"


def _clock(seconds: float) -> str:
    """Format a duration, for instance 03:34 or 1:00:05."""
    return str(timedelta(seconds=round(seconds))).removeprefix("0:")


def _print_whole(console: Console, text: str) -> None:
    """Print a line without wrapping."""
    console.print(Text(text), soft_wrap=True)


def _is_live(console: Console) -> bool:
    """Return whether a line can be redrawn: on a terminal or in a notebook."""
    return console.is_jupyter or (console.is_terminal and not console.is_dumb_terminal)
