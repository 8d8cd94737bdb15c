"""Calls that may never return: notices of long waits, time limits, and the deadline of a run.

A call of foreign code (a reward function, a tool, an environment) runs in `within_deadline`. After
`SECONDS_UNTIL_NOTICE` a line names the call; after the deadline it is interrupted, and the block
raises `CallDeadlineError`, which ends the run. `time_limit` interrupts in the same way, and its
caller decides what follows.

How a call is interrupted:

- In the main thread by a signal, SIGVTALRM, whose handler raises. A thread of ours sends it; where
  the call holds the interpreter's lock, as a regular expression does, a timer of the kernel that
  counts processor time does. Python code, waits and most native code that calls back end at once.
- In another thread by an exception that Python raises there at its next instruction. A wait does
  not end, so whoever waits for such threads calls `raise_if_expired` (see `call_in_threads`).
- Native code that never returns cannot be interrupted. If it leaves the interpreter's lock free,
  the run is recorded as failed after `SECONDS_TO_UNWIND`, and the process ends in the state of its
  last checkpoint. If it holds the lock, no Python code can run: the stack of every thread is
  printed each `SECONDS_WITHOUT_PYTHON`, and only a signal that kills ends the process.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import functools
import inspect
import logging
import math
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from nip_astra.errors import CallDeadlineError

try:
    # The program's own `os._exit` may be one that refuses.
    from posix import _exit as end_process
except ImportError:
    from os import _exit as end_process

logger = logging.getLogger(__name__)

DEFAULT_DEADLINE = 600.0
"""Seconds after which a call ends the run, unless a setting changes it."""
SECONDS_UNTIL_NOTICE = 10.0
"""Seconds after which a line says what is waited for."""
SECONDS_BETWEEN_NOTICES = 60.0
SECONDS_BETWEEN_INTERRUPTS = 1.0
"""Period of further attempts to interrupt a call that has caught the first."""
SECONDS_TO_UNWIND = 30.0
"""Seconds after the deadline until a call counts as one that cannot be interrupted."""
SECONDS_WITHOUT_PYTHON = 50.0
"""Seconds without any Python code after which the stacks of all threads are printed."""
_SECONDS_BETWEEN_SIGNS = 10.0
"""Period in which the watchdog shows that Python code runs."""
_PERIOD = 1.0
_MIN_PERIOD = 0.02
"""Maximum and minimum seconds between two looks at the open calls."""
_SIGNAL = getattr(signal, "SIGVTALRM", None)

Result = TypeVar("Result")


class TimeLimitExceeded(BaseException):
    """The block exceeded its time limit; the caller converts it to a message."""


class _Interrupted(BaseException):
    """Raised within an expired call; code that catches every `Exception` does not catch it."""


@dataclass(eq=False)
class _Call:
    """A call in progress; `limit` may be infinite."""

    name: str
    limit: float
    started: float = field(default_factory=time.monotonic)
    thread: threading.Thread = field(default_factory=threading.current_thread)
    is_open: bool = True
    is_expired: bool = False
    next_notice: float = 0.0
    next_interrupt: float = 0.0
    first_signal: float = math.inf
    """When the watchdog first sent a signal; it may have waited for the interpreter's lock."""

    def __post_init__(self) -> None:
        self.next_notice = self.started + SECONDS_UNTIL_NOTICE
        self.next_interrupt = self.started + self.limit

    @property
    def is_in_main(self) -> bool:
        return self.thread is threading.main_thread()

    def seconds_left(self) -> float:
        """Return the seconds until the next notice or interrupt."""
        return min(self.next_notice, self.next_interrupt) - time.monotonic()

    def error(self) -> CallDeadlineError:
        return CallDeadlineError(
            f"{self.name} did not return within {self.limit:g} s. Correct it, or allow more time "
            "with --settings call_deadline=SECONDS, then resume the run."
        )


_calls: list[_Call] = []
"""The open calls of all threads, the outermost of a thread first."""
_lock = threading.RLock()
_wake = threading.Event()
_watchdog: threading.Thread | None = None
_deadlines: list[float] = []
"""Deadlines of the open `using_deadline` blocks."""
_on_stuck: list[Callable[[CallDeadlineError], None]] = []
_is_forked = _is_exiting = False


@contextmanager
def using_deadline(
    seconds: float, *, on_stuck: Callable[[CallDeadlineError], None] | None = None
) -> Iterator[None]:
    """Let calls within the block, of any thread, end after some seconds.

    Parameters
    ----------
    on_stuck : callable, optional
        Records that a call of the main thread cannot be interrupted; then the process ends.
    """
    _deadlines.append(seconds)
    is_main = threading.current_thread() is threading.main_thread()
    is_ended_here = on_stuck is not None and is_main
    if on_stuck is not None and is_main:
        _on_stuck.append(on_stuck)
    _ensure_watchdog()
    try:
        yield
    finally:
        _deadlines.pop()
        if is_ended_here:
            _on_stuck.pop()


def current_deadline() -> float:
    """Return the seconds after which a call ends the run."""
    return _deadlines[-1] if _deadlines else DEFAULT_DEADLINE


@contextmanager
def within_deadline(name: str, *, seconds: float | None = None) -> Iterator[None]:
    """Report and interrupt the block, a call of foreign code, if it takes too long.

    Parameters
    ----------
    name : str
        The call, as in "the reward function 'length'".
    seconds : float, optional
        Deadline of this call; by default that of the run.

    Raises
    ------
    CallDeadlineError
        When the deadline has passed, even if the block has caught the interrupt.
    """
    call = _Call(name, current_deadline() if seconds is None else seconds)
    with _watched(call):
        yield
    if call.is_expired:
        raise call.error()


def limit_hooks(cls: type, names: Iterable[str]) -> None:
    """Give a user's class deadlines for the hooks that it defines.

    Parameters
    ----------
    names : iterable of str
        Hooks that return soon: not those that sample or train for as long as a run takes.
    """
    if cls.__module__.partition(".")[0] == __name__.partition(".")[0]:
        # Our own may take long with large models, and end.
        return
    for name in names:
        hook = vars(cls).get(name)
        if inspect.isfunction(hook) and not inspect.iscoroutinefunction(hook):
            setattr(cls, name, _with_deadline(hook, f"{name} of {cls.__name__}"))


def _with_deadline(hook: Callable[..., Result], name: str) -> Callable[..., Result]:
    @functools.wraps(hook)
    def call(*args: Any, **kwargs: Any) -> Result:
        with within_deadline(name):
            return hook(*args, **kwargs)

    return call


@contextmanager
def time_limit(seconds: float, name: str = "a call") -> Iterator[None]:
    """End the block with `TimeLimitExceeded` after some seconds; limits may be nested."""
    call = _Call(name, seconds)
    with _watched(call):
        yield
    if call.is_expired:
        raise TimeLimitExceeded


@contextmanager
def waiting_on(name: str) -> Iterator[None]:
    """Report what the block waits for, and wait without a limit."""
    with _watched(_Call(name, math.inf)):
        yield


def raise_if_expired() -> None:
    """Raise the error of an expired call that is still open in any thread."""
    with _lock:
        expired = next((call for call in _calls if call.is_expired and call.is_open), None)
    if expired is not None:
        expired.is_open = False
        raise expired.error()


def call_in_threads(calls: Sequence[Callable[[], Result]], num_threads: int) -> list[Result]:
    """Return the results of calls that run in some threads, in order.

    The first error in the order of the calls is raised once all have ended, or at once if a call
    has passed its deadline; its thread is left behind.
    """
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in range(len(calls)):
        waiting.put(number)
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()
    results: dict[int, Result] = {}
    errors: dict[int, BaseException] = {}

    def work() -> None:
        with suppress(queue.Empty):
            while True:
                number = waiting.get_nowait()
                try:
                    results[number] = calls[number]()
                except BaseException as error:
                    errors[number] = error
                ended.put(number)

    for _ in range(min(num_threads, len(calls))):
        # The program does not wait for a thread that never ends.
        threading.Thread(target=work, name="calls", daemon=True).start()
    num_ended = 0
    while num_ended < len(calls):
        try:
            ended.get(timeout=_PERIOD)
            num_ended += 1
        except queue.Empty:
            raise_if_expired()
    for number in sorted(errors):
        raise errors[number]
    return [results[number] for number in range(len(calls))]


def result_within_deadlines(future: Future[Result]) -> Result:
    """Return the result of a future, and raise the error of a call that has expired meanwhile."""
    while True:
        try:
            return future.result(timeout=_PERIOD)
        except TimeoutError:
            if future.done():
                raise
            raise_if_expired()


class DaemonThread:
    """Runs calls one after another in a thread that does not keep the program from ending."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._work: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, call: Callable[[], Result]) -> Future[Result]:
        """Append a call; return its future."""
        future: Future[Result] = Future()

        def work() -> None:
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)

        self._work.put(work)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
            self._thread.start()
        return future

    def _run(self) -> None:
        while True:
            self._work.get()()


# ---- watching


@contextmanager
def _watched(call: _Call) -> Iterator[None]:
    """Watch a call; an interrupt within the block ends it and leaves `is_expired` set."""
    _begin(call)
    try:
        try:
            yield
        finally:
            # From here on nothing interrupts.
            call.is_open = False
    except BaseException:
        if not call.is_expired:
            raise
        # Also an error of code that has caught the interrupt.
    finally:
        _end(call)


def _begin(call: _Call) -> None:
    with _lock:
        _calls.append(call)
    _ensure_watchdog()
    if call.limit < _PERIOD:
        _wake.set()
    if call.is_in_main and _SIGNAL is not None:
        if signal.getsignal(_SIGNAL) is not _handle_signal:
            signal.signal(_SIGNAL, _handle_signal)
        _arm()


def _end(call: _Call) -> None:
    with _lock:
        _calls.remove(call)
        if call.is_expired and not call.is_in_main:
            _raise_in(call.thread, None)
    if call.is_in_main and _SIGNAL is not None:
        _arm()


def _arm() -> None:
    """Let the kernel signal when the process has computed until the next event of the main thread.

    Other threads compute too, so it may come early, and is then set again.
    """
    left = [call.seconds_left() for call in list(_calls) if call.is_in_main and call.is_open]
    next_event = min(left, default=math.inf)
    seconds = 0.0 if math.isinf(next_event) else max(next_event, 0.05)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)


def _handle_signal(number: int, frame: Any) -> None:
    """Report and interrupt calls of the main thread, in which Python runs handlers of signals."""
    for call in list(_calls):
        if call.is_in_main and call.is_open:
            # The watchdog is late only where the call holds the interpreter's lock.
            _report_if_due(call, slack=2 * _PERIOD)
            if time.monotonic() >= call.next_interrupt:
                call.is_expired = True
                call.next_interrupt = time.monotonic() + SECONDS_BETWEEN_INTERRUPTS
                _arm()
                raise _Interrupted
    _arm()


def _ensure_watchdog() -> None:
    global _watchdog
    with _lock:
        if _watchdog is None or not _watchdog.is_alive():
            _watchdog = threading.Thread(target=_watch, name="deadlines", daemon=True)
            _watchdog.start()


def _watch() -> None:
    """Look at the open calls in turns, for as long as there are calls or deadlines."""
    global _watchdog
    armed = -math.inf
    try:
        while True:
            with _lock:
                if not _calls and not _deadlines:
                    _watchdog = None
                    return
            if time.monotonic() > armed + _SECONDS_BETWEEN_SIGNS:
                armed = time.monotonic()
                _expect_python()
            for call in list(_calls):
                if call.is_open:
                    _look_at(call)
            _wake.wait(_seconds_to_next_look())
            _wake.clear()
    finally:
        faulthandler.cancel_dump_traceback_later()


def _seconds_to_next_look() -> float:
    left = [call.seconds_left() for call in list(_calls) if call.is_open]
    return max(min([_PERIOD, *left]), _MIN_PERIOD)


def _expect_python() -> None:
    """Print all stacks if this thread cannot run again for a while."""
    if _is_exiting:
        return
    with suppress(ValueError, OSError):
        faulthandler.dump_traceback_later(SECONDS_WITHOUT_PYTHON, repeat=True, file=2)


def _look_at(call: _Call) -> None:
    _report_if_due(call)
    now = time.monotonic()
    if now < call.next_interrupt:
        return
    with _lock:
        if call not in _calls or not call.is_open:
            return
        if now > call.first_signal + SECONDS_TO_UNWIND and _on_stuck:
            _on_stuck[-1](call.error())
            end_process(2)
        if call.is_in_main:
            call.first_signal = min(call.first_signal, now)
            main = threading.main_thread().ident
            assert main is not None
            if _SIGNAL is not None:
                signal.pthread_kill(main, _SIGNAL)
            return
        call.is_expired = True
        call.next_interrupt = now + SECONDS_BETWEEN_INTERRUPTS
        _raise_in(call.thread, _Interrupted)


def _report_if_due(call: _Call, *, slack: float = 0.0) -> None:
    now = time.monotonic()
    if now < call.next_notice + slack:
        return
    call.next_notice = now + SECONDS_BETWEEN_NOTICES
    end = "" if math.isinf(call.limit) else f"; it is interrupted after {call.limit:g} s"
    text = f"waiting for {call.name} for {now - call.started:.0f} s{end}"
    if _is_forked and sys.stderr is not None:
        # Forked processes log nothing.
        with suppress(OSError, ValueError):
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()
    else:
        logger.warning("%s", text)


def _raise_in(thread: threading.Thread, error: type[BaseException] | None) -> None:
    """Have Python raise an exception in another thread; None withdraws one."""
    if thread.ident is not None:
        identity = ctypes.c_ulong(thread.ident)
        raised = None if error is None else ctypes.py_object(error)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(identity, raised)


def _after_fork() -> None:
    global _watchdog, _lock, _wake, _is_forked
    _calls.clear()
    # What a run records is a matter of its own process, which notices that this one has ended.
    _on_stuck[:] = [_print_error for _ in _on_stuck]
    _watchdog, _lock, _wake, _is_forked = None, threading.RLock(), threading.Event(), True
    if _deadlines:
        _ensure_watchdog()


def _print_error(error: CallDeadlineError) -> None:
    os.write(2, f"{error}\n".encode(errors="replace"))


def _before_exit() -> None:
    global _is_exiting
    # This thread of Python ends before the program does.
    _is_exiting = True
    faulthandler.cancel_dump_traceback_later()


atexit.register(_before_exit)
# A forked process lacks the thread that prints stacks, and would wait for it.
os.register_at_fork(before=faulthandler.cancel_dump_traceback_later, after_in_child=_after_fork)
