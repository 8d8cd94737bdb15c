"""Forked processes, which start with a copy of this process's memory."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch

from nip_astra.deadlines import waiting_on
from nip_astra.errors import WorkerProcessError
from nip_astra.trust import read_variable
from nip_astra.utils.children import PERIOD, Child, end_with_parent, ended_early
from nip_astra.utils.processor import keep_to_one_thread

_STOPPING = (signal.SIGINT, signal.SIGTERM)
_TOKENIZERS = "TOKENIZERS_PARALLELISM"
_num_processes = 1

Result = TypeVar("Result")


def can_fork() -> bool:
    """Return whether a process that has used torch may be forked: on Linux without a GPU."""
    return sys.platform == "linux" and not torch.accelerator.is_available()


def get_num_processes() -> int:
    """Return the maximum number of processes, including this one."""
    return _num_processes


@contextmanager
def using_processes(count: int) -> Iterator[None]:
    """Allow up to `count` processes within the block, or one if forking is impossible."""
    global _num_processes
    before = _num_processes
    _num_processes = count if can_fork() else 1
    try:
        yield
    finally:
        _num_processes = before


@contextmanager
def blocked_signals() -> Iterator[None]:
    """Block the signals that stop a run, so that none arrives before a fork is recorded."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def fork(name: str, *, is_worker: bool = True) -> Child | None:
    """Fork with signals blocked; return the child, or None in it.

    The child ends with this process, and keeps to one thread: OpenMP waits for the threads that it
    began before the fork, which only this process has.

    Parameters
    ----------
    name : str
        Describes the child in errors.
    is_worker : bool
        Whether the child does a part of this process's work: it leaves the signals that stop a run
        and the log to this process.
    """
    # Buffered output must be written once. A closed stream may be None.
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with suppress(OSError, ValueError):
            stream.flush()
    first = os.getpid()
    parallelism = read_variable(_TOKENIZERS)
    # A forked process would wait for the threads of tokenizers.
    os.environ[_TOKENIZERS] = "false"
    worker = -1
    try:
        with warnings.catch_warnings():
            # Other threads draw progress bars and send figures; none holds a lock for computing.
            warnings.simplefilter("ignore", DeprecationWarning)
            worker = os.fork()
    except OSError as error:
        raise WorkerProcessError(
            f"a process could not be forked: {error}. Run with --num-threads 1."
        ) from error
    finally:
        if worker != 0 and parallelism is None:
            del os.environ[_TOKENIZERS]
        elif worker != 0 and parallelism is not None:
            os.environ[_TOKENIZERS] = parallelism
    if worker == 0:
        try:
            _begin_child(first)
            if is_worker:
                _become_worker()
        except BaseException:
            os._exit(1)
        return None
    return Child(name, worker)


def _begin_child(first: int) -> None:
    """Detach a forked process from the threads of its parent, `first`."""
    # Both processes hold the lock of the run.
    end_with_parent(signal.SIGKILL)
    if os.getppid() != first:
        os._exit(1)
    # Before any operation: torch would wait for threads that only the first process has. So would
    # the destructors of its objects, such as those of lost process groups.
    torch.set_num_threads(1)
    keep_to_one_thread()
    gc.freeze()


def _become_worker() -> None:
    """Leave signals, log and the terminal to the parent."""
    for number in _STOPPING:
        signal.signal(number, signal.SIG_IGN)
    # A progress bar's lock may have been held at the fork and is never released here.
    logging.disable()
    if sys.stdout is not None:
        sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
    if sys.stderr is not None:
        sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)


class _Outcome(NamedTuple):
    """A result, or an error with its traceback."""

    result: Any = None
    error: BaseException | None = None
    trace: str = ""


def call_at_once(calls: Sequence[Callable[[], Result]]) -> list[Result]:
    """Run calls in parallel: the first here, the others in forked processes.

    Each has one torch thread. Results of forked processes must be picklable; other effects are
    lost.
    """
    workers: list[Child] = []
    pipes: list[Connection] = []
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with blocked_signals():
            for number, call in enumerate(calls[1:], 2):
                here, there = multiprocessing.Pipe(duplex=False)
                pipes.append(here)
                worker = fork(f"process {number} of {len(calls)} of a rollout")
                if worker is None:
                    _run_and_send(call, there)
                workers.append(worker)
                there.close()
        return [calls[0](), *map(_receive, workers, pipes)]
    except BaseException:
        for worker in workers:
            worker.kill()
        raise
    finally:
        torch.set_num_threads(num_threads)
        for pipe in pipes:
            pipe.close()
        for worker in workers:
            worker.wait()


def _run_and_send(call: Callable[[], object], pipe: Connection) -> NoReturn:
    """Run a call, send its result, and end this process."""
    try:
        try:
            answer = _Outcome(call())
        except BaseException as error:
            answer = _Outcome(None, error, traceback.format_exc())
        pipe.send_bytes(_pickled(answer))
    finally:
        os._exit(0)


def _pickled(answer: _Outcome) -> bytes:
    try:
        pickled = pickle.dumps(answer)
        # Some objects can be pickled but not unpickled.
        pickle.loads(pickled)
        return pickled
    except Exception:
        trace = answer.trace or traceback.format_exc()
        return pickle.dumps(_Outcome(None, WorkerProcessError(f"a process failed:\n{trace}")))


def _receive(worker: Child, pipe: Connection) -> Any:
    # A grandchild may hold the pipe open after the worker has ended.
    with waiting_on(worker.name):
        while not pipe.poll(PERIOD):
            if worker.code is not None and not pipe.poll():
                raise ended_early(worker)
    try:
        answer: _Outcome = pickle.loads(pipe.recv_bytes())
    except (EOFError, OSError) as error:
        raise ended_early(worker) from error
    if answer.error is not None:
        answer.error.add_note(f"raised in a forked process:\n{answer.trace}")
        raise answer.error
    return answer.result
