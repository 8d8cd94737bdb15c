"""Have a test's forked processes work together, like processes that a launcher starts."""

from __future__ import annotations

import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

SECONDS = 100.0
"""After which processes that wait for each other are given up."""


def together(
    work: Callable[[str], Any], folder: Path, *, count: int = 2, killed: Sequence[int] = ()
) -> list[Any]:
    """Results of `work` in each process; its argument is the file through which they connect.

    Parameters
    ----------
    killed : Sequence[int]
        Processes that end themselves without a message; None stands for their results.
    """
    store = folder / f"store_{time.monotonic_ns()}"
    ends: list[Connection] = []
    children: list[int] = []
    for rank in range(count):
        here, there = Pipe(duplex=False)
        child = os.fork()
        if child == 0:
            _do(work, str(store), rank, count, there)
        there.close()
        ends.append(here)
        children.append(child)
    until = time.monotonic() + SECONDS
    try:
        results = [_result_of(end, until, rank in killed) for rank, end in enumerate(ends)]
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return results


def _do(work: Callable[[str], Any], store: str, rank: int, count: int, end: Connection) -> None:
    os.environ.update(
        {"RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank)}
        | {"LOCAL_WORLD_SIZE": str(count), "GLOO_SOCKET_IFNAME": "lo"}
    )
    torch.set_num_threads(1)
    try:
        end.send_bytes(pickle.dumps((work(store), "")))
    except BaseException:
        end.send_bytes(pickle.dumps((None, traceback.format_exc())))
    finally:
        # The first process's pytest continues, and this one ends.
        os._exit(0)


def _result_of(end: Connection, until: float, is_killed: bool) -> Any:
    if not end.poll(max(until - time.monotonic(), 0)):
        raise AssertionError("the processes of the test wait for each other")
    try:
        result, fault = pickle.loads(end.recv_bytes())
    except EOFError:
        assert is_killed, "a process of the test has ended without a result"
        return None
    assert not fault, fault
    return result
