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
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

from tqdm import tqdm

from nip_astra.progress_displays import (
    FileDisplay,
    LineDisplay,
    ProgressDisplay,
    SilentDisplay,
    TqdmDisplay,
)
from nip_astra.progress_displays import read_progress as read_progress
from nip_astra.safe_text import safe_line


class ProgressSettings(Protocol):
    """The settings that progress depends on."""

    @property
    def test_run(self) -> bool:
        """Whether loops are cut to `TEST_RUN_NUM_ITERATIONS`."""

    @property
    def progress(self) -> bool:
        """Whether progress is shown."""

    @property
    def tqdm_func(self) -> Callable[..., Any] | None:
        """What makes the bar in place of tqdm."""

    @property
    def global_tqdm_step_fn(self) -> Callable[[], None] | None:
        """What is called once an iteration, for instance by a sweep's own bar."""


class ProgressOwner(Protocol):
    """An object with loops, for instance a trainer."""

    @property
    def settings(self) -> ProgressSettings:
        """The settings that progress depends on."""


P = ParamSpec("P")
R = TypeVar("R", covariant=True)
SelfT = TypeVar("SelfT", bound=ProgressOwner)

TEST_RUN_NUM_ITERATIONS = 1
"""How many iterations a loop has where the settings ask for a test run."""
_cuts: list[int] = []
"""Those of `loops_cut_to`, the innermost last."""


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


class ProgressBar:
    """How far a run has come. Made by `open_progress`; several loops may share one.

    Attributes
    ----------
    total : int
        Iterations of the whole run.
    num_done : int
        Iterations done, those of an earlier process included.
    """

    def __init__(self, total: int, display: ProgressDisplay) -> None:
        self.total = total
        self.num_done = 0
        self._display = display
        self._description = ""

    def step(self, num_iterations: int = 1) -> None:
        """Count iterations that were just done."""
        self.num_done += num_iterations
        self._display.update(num_iterations, is_resumed=False)

    def skip(self, num_iterations: int) -> None:
        """Count iterations that an earlier process did; they do not enter the rate."""
        self.num_done += num_iterations
        self._display.update(num_iterations, is_resumed=True)

    def lengthen(self, num_iterations: int) -> None:
        """Count on iterations that were not known of when the bar was opened."""
        self.total += num_iterations
        self._display.lengthen(num_iterations)

    def set_description(self, description: str) -> None:
        """Show what is being done, for instance "train"; another task's values go."""
        if description != self._description:
            self._description = description
            self._display.postfix({})
        self._display.describe(safe_line(description))

    def set_position(self, num_done: int, num_iterations: int) -> None:
        """Show how far that is which is being done, where it is a part of the whole run."""
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
        """Leave the terminal in order."""
        if self in _BARS:
            _BARS.remove(self)
        self._display.close()


SECONDS_UNSHOWN = 1.0
"""A shorter wait is not shown."""
_BARS: list[ProgressBar] = []
"""The bars of this process that are open."""
_WAITS: dict[object, str] = {}
"""What the run waits for at present, the earliest first."""
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
        File that holds the numbers of iterations done and to be done; see `read_progress`.
    """
    display: ProgressDisplay
    if not enabled:
        display = SilentDisplay()
    elif tqdm_func is None and not sys.stderr.isatty():
        display = LineDisplay(total, sys.stderr)
    else:
        display = TqdmDisplay(total, tqdm_func or tqdm)
    bar = ProgressBar(total, display if path is None else FileDisplay(total, Path(path), display))
    _BARS.append(bar)
    return bar


class _LoopIsCut(BaseException):
    """Ends a loop that goes on after the last of its iterations."""


class IterationContext:
    """What a decorated loop knows and says about its iterations.

    Parameters
    ----------
    is_cut : bool
        Whether the loop has fewer iterations than it asked for.
    """

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
        """How many iterations the loop has; capped where the settings ask for a test run."""
        self._is_read = True
        return self._num_iterations

    def set_description(self, description: str) -> None:
        """Show what is being done, for instance "train"."""
        self._progress.set_description(description)
        self._is_described = True
        self._count(0)

    def set_postfix(self, **values: float | str) -> None:
        """Show the latest values; numbers with three significant digits."""
        self._progress.set_postfix(values)

    def step(self, num_iterations: int = 1) -> None:
        """Count iterations that were just done.

        The last one ends a loop that is cut, by a test run for instance, and does not know of it.
        """
        self._step(num_iterations)
        # A loop that has read how many there are is to end by itself.
        if self._is_cut and self._num_done >= self._num_iterations + self._is_read:
            raise _LoopIsCut

    def _step(self, num_iterations: int) -> None:
        self._count(num_iterations)
        self._progress.step(num_iterations)
        self._call_step_func(num_iterations)

    def iterate(self, start: int = 0) -> Iterator[int]:
        """Return the index of each iteration, and count it when its body has ended.

        Parameters
        ----------
        start : int
            The first index; those before it were done by an earlier process and count as done.
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
    """A method that `attach_progress_bar` decorated.

    Attributes
    ----------
    num_iterations_func : Callable
        Gives the number of iterations of its owner's loop, not capped.
    """

    num_iterations_func: Callable[[SelfT], int]

    def __call__(self, owner: SelfT, /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the loop."""

    def __get__(self, owner: SelfT, owner_type: type | None = None) -> Callable[P, R]:
        """Bind the method to its owner."""


def attach_progress_bar(
    num_iterations_func: Callable[[Any], int],
) -> Callable[[Callable[Concatenate[SelfT, IterationContext, P], R]], ProgressLoop[SelfT, P, R]]:
    """Decorate a method that loops, so that its first argument, an `IterationContext`, is given.

    The owner has `settings`. Where its attribute `progress` is a `ProgressBar`, the loop counts on
    that bar; else it has its own.

    Parameters
    ----------
    num_iterations_func : Callable
        Gives the number of iterations from the owner, before the loop runs. It is kept as the
        method's attribute of the same name.
    """

    def decorate(
        loop: Callable[Concatenate[SelfT, IterationContext, P], R],
    ) -> ProgressLoop[SelfT, P, R]:
        @functools.wraps(loop)
        def run_loop(self: SelfT, /, *args: P.args, **kwargs: P.kwargs) -> R:
            settings = self.settings
            asked = num_iterations_func(self)
            num_iterations = _capped(asked, settings.test_run)
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
                is_cut=num_iterations < asked,
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
    """How many iterations the decorated loops of an object have together, each run once."""
    loops = [inspect.getattr_static(type(owner), name) for name in dir(type(owner))]
    return sum(
        _capped(loop.num_iterations_func(owner), owner.settings.test_run)
        for loop in loops
        if hasattr(loop, "num_iterations_func")
    )


def _is_counted(owner: ProgressOwner, loop: Any) -> bool:
    """Say whether `total_num_iterations` counts a loop; not where its name is overridden."""
    return inspect.getattr_static(type(owner), loop.__name__, None) is loop


def _capped(num_iterations: int, is_test_run: bool) -> int:
    cuts = [*_cuts, *([TEST_RUN_NUM_ITERATIONS] if is_test_run else [])]
    return min(num_iterations, *cuts) if cuts else num_iterations


def _short(value: float | str) -> str:
    if isinstance(value, str):
        return safe_line(value)
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.3g}"
