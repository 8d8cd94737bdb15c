"""Work that is divided among forked processes, which begin with all that this one has."""

from __future__ import annotations

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
from typing import Any, NamedTuple, NoReturn, TextIO, TypeVar

import torch

from nip_astra.errors import WorkerProcessError
from nip_astra.trust import read_variable
from nip_astra.utils.children import PERIOD, Child, end_with_parent, ended_early

_STOPPING = (signal.SIGINT, signal.SIGTERM)
_TOKENIZERS = "TOKENIZERS_PARALLELISM"
_num_processes = 1

Result = TypeVar("Result")


def can_fork() -> bool:
    """Say whether a process that has computed may be forked.

    Libraries of other systems than Linux forbid it, and so does torch where there is a GPU, whether
    used or not.
    """
    return sys.platform == "linux" and not torch.accelerator.is_available()


def get_num_processes() -> int:
    """How many processes, this one included, what can be divided may use."""
    return _num_processes


@contextmanager
def using_processes(count: int) -> Iterator[None]:
    """Let what can be divided use up to `count` processes within the block.

    Where none can be forked, there is one.
    """
    global _num_processes
    before = _num_processes
    _num_processes = count if can_fork() else 1
    try:
        yield
    finally:
        _num_processes = before


@contextmanager
def signals_held_back() -> Iterator[None]:
    """Hold the signals that stop a run back, so that none comes between a fork and its note."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def fork(name: str) -> Child | None:
    """Fork, and give the new process, or None in it; signals are held back.

    Parameters
    ----------
    name : str
        What the new process does, for errors.

    Raises
    ------
    WorkerProcessError
        When the system has no room for another process.
    """
    # What is still to be written is written once. A stream that was closed may be None.
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with suppress(OSError, ValueError):
            stream.flush()
    first = os.getpid()
    parallelism = read_variable(_TOKENIZERS)
    # Tokenizers have threads too, which a forked process would wait for.
    os.environ[_TOKENIZERS] = "false"
    worker = -1
    try:
        with warnings.catch_warnings():
            # The other threads of this process draw progress bars and send figures; none of them
            # computes, so none holds a lock that a worker needs to compute.
            warnings.simplefilter("ignore", DeprecationWarning)
            worker = os.fork()
    except OSError as error:
        raise WorkerProcessError(
            f"work was to be divided among processes, but one could not be started: {error}. Run "
            "with --num-threads 1."
        ) from error
    finally:
        if worker != 0 and parallelism is None:
            del os.environ[_TOKENIZERS]
        elif worker != 0 and parallelism is not None:
            os.environ[_TOKENIZERS] = parallelism
    if worker == 0:
        try:
            _become_worker(first)
        except BaseException:
            os._exit(1)
        return None
    return Child(name, worker)


def _become_worker(first: int) -> None:
    """Leave signals, threads and the terminal to the process that has the number `first`."""
    for number in _STOPPING:
        signal.signal(number, signal.SIG_IGN)
    # However that ends, this one ends too, and with it what both hold, as the lock of a run.
    end_with_parent(signal.SIGKILL)
    if os.getppid() != first:
        os._exit(1)
    # It has none of the threads that torch began in the first, and would wait for them.
    torch.set_num_threads(1)
    # Who draws a progress bar may have held its lock, for which this process would wait for ever.
    logging.disable()
    if sys.stdout is not None:
        sys.stdout = _past_the_bar(1)
    if sys.stderr is not None:
        sys.stderr = _past_the_bar(2)


def _past_the_bar(number: int) -> TextIO:
    """A stream of this process' own that writes where the system's stream goes."""
    return os.fdopen(os.dup(number), "w", buffering=1)


class _Answer(NamedTuple):
    """What a call gave: a result, or what it raised and where."""

    result: Any = None
    error: BaseException | None = None
    trace: str = ""


def call_at_once(calls: Sequence[Callable[[], Result]]) -> list[Result]:
    """Make calls at the same time: the first here, each other in a forked process.

    Each has one of torch's threads. Of a forked process nothing is kept but what its call gives,
    which must be picklable.

    Raises
    ------
    WorkerProcessError
        When another process cannot be started, or ends before its time.
    """
    workers: list[Child] = []
    pipes: list[Connection] = []
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with signals_held_back():
            for number, call in enumerate(calls[1:], 2):
                here, there = multiprocessing.Pipe(duplex=False)
                pipes.append(here)
                worker = fork(f"process {number} of {len(calls)} that divide work")
                if worker is None:
                    _answer(call, there)
                workers.append(worker)
                there.close()
        return [calls[0](), *map(_heard, workers, pipes)]
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


def _answer(call: Callable[[], object], pipe: Connection) -> NoReturn:
    """Make a call, tell what it gave, and end this process."""
    try:
        try:
            answer = _Answer(call())
        except BaseException as error:
            answer = _Answer(None, error, traceback.format_exc())
        pipe.send_bytes(_pickled(answer))
    finally:
        os._exit(0)


def _pickled(answer: _Answer) -> bytes:
    try:
        pickled = pickle.dumps(answer)
        # Not all that can be written can be read.
        pickle.loads(pickled)
        return pickled
    except Exception:
        trace = answer.trace or traceback.format_exc()
        return pickle.dumps(_Answer(None, WorkerProcessError(f"a process failed:\n{trace}")))


def _heard(worker: Child, pipe: Connection) -> Any:
    # A process that the worker started may hold the other end open after the worker has ended.
    while not pipe.poll(PERIOD):
        if worker.code is not None and not pipe.poll():
            raise ended_early(worker)
    try:
        answer: _Answer = pickle.loads(pipe.recv_bytes())
    except (EOFError, OSError) as error:
        raise ended_early(worker) from error
    if answer.error is not None:
        answer.error.add_note(f"raised in a process that did a part of the work:\n{answer.trace}")
        raise answer.error
    return answer.result
