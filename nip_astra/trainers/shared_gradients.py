"""Gradients of minibatches, computed by several processes that all take the same steps."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nip_astra.errors import ConfigurationError, HelperProcessError

CAN_SHARE = sys.platform == "linux"
"""Whether a process that has computed may be forked: libraries of other systems forbid it."""


class Task(NamedTuple):
    """Some of the losses of one agent: its name, and the number among its parts."""

    agent: str
    part: int


Compute = Callable[[Task], Mapping[str, Tensor]]
"""Adds to gradients those of a task's losses in the present minibatch, and gives what to log."""


class _Message(NamedTuple):
    """What a process tells the others of a minibatch; figures are arrays, weights their numbers."""

    figures: dict[Task, dict[str, Any]]
    seconds: dict[Task, float]
    weights: list[int]
    fault: str = ""


class SharedGradients:
    """Processes that compute the gradients of minibatches together.

    All go through the same minibatches and take the same steps; only the tasks are divided, by how
    long each took. So the weights of one are those of all, to the bit, and when the block ends only
    the first process is left. Gradients are handed over in memory that all share, in two places by
    turns: what one writes, nobody reads any more.

    Parameters
    ----------
    tasks : Sequence[Task]
        What there is to do for a minibatch. No two tasks give a gradient to the same weight.
    weights : Sequence[Tensor]
        All that may get a gradient, on the CPU.
    seconds : dict[Task, float]
        How long tasks took so far; taken further.
    """

    def __init__(
        self, tasks: Sequence[Task], weights: Sequence[Tensor], seconds: dict[Task, float]
    ) -> None:
        self._tasks = list(tasks)
        self._weights = list(weights)
        self._seconds = seconds
        self._number, self._count = 0, 1
        self._num_minibatches = 0
        self._peers: dict[int, Connection] = {}
        self._places: list[list[list[Tensor]]] = []

    @contextmanager
    def between(self, count: int) -> Iterator[None]:
        """Go through the block in `count` processes, and leave it in the first.

        Raises
        ------
        HelperProcessError
            When another process failed, or ended before its time.
        """
        self._count = count
        self._places = [[_shared_like(self._weights) for _ in range(2)] for _ in range(count)]
        pipes = {(a, b): multiprocessing.Pipe() for b in range(count) for a in range(b)}
        helpers: list[int] = []
        while len(helpers) < count - 1 and not self._number:
            helper = _fork()
            if helper:
                helpers.append(helper)
            else:
                self._number = len(helpers) + 1
        for (a, b), ends in pipes.items():
            for end, owner, peer in zip(ends, (a, b), (b, a), strict=True):
                if owner == self._number:
                    self._peers[peer] = end
                else:
                    end.close()
        try:
            yield
        except BaseException as error:
            self._give_up(error, helpers)
            raise
        if self._number:
            os._exit(0)
        self._part_from(helpers)

    def _give_up(self, error: BaseException, helpers: Sequence[int]) -> None:
        """End the other processes; as one of them, say why and end."""
        if self._number:
            with suppress(OSError):
                fault = "".join(traceback.format_exception(error))
                self._peers[0].send_bytes(pickle.dumps(_Message({}, {}, [], fault)))
            os._exit(1)
        for helper in helpers:
            os.kill(helper, signal.SIGKILL)
        self._part_from(helpers)

    def _part_from(self, helpers: Sequence[int]) -> None:
        for peer in self._peers.values():
            peer.close()
        for helper in helpers:
            os.waitpid(helper, 0)

    def compute(self, compute: Compute) -> dict[Task, dict[str, Tensor]]:
        """Have the gradients of a minibatch computed, and give what to log, by task.

        Parameters
        ----------
        compute : Callable
            Runs a task; gradients are None before.
        """
        place = self._places[self._number][self._num_minibatches % 2]
        found: dict[Task, dict[str, Tensor]] = {}
        seconds: dict[Task, float] = {}
        for task in self._shares()[self._number]:
            started = time.perf_counter()
            found[task] = dict(compute(task))
            seconds[task] = time.perf_counter() - started
        gradients = {n: w.grad for n, w in enumerate(self._weights) if w.grad is not None}
        if gradients:
            torch._foreach_copy_([place[n] for n in gradients], list(gradients.values()))
        figures = {
            task: {key: value.detach().numpy() for key, value in entries.items()}
            for task, entries in found.items()
        }
        message = pickle.dumps(_Message(figures, seconds, list(gradients)))
        for peer in self._peers.values():
            self._send(peer, message)
        self._seconds |= seconds
        for number, peer in self._peers.items():
            heard = self._receive(peer)
            self._take(heard, number)
            found |= {
                task: {key: torch.as_tensor(value) for key, value in entries.items()}
                for task, entries in heard.figures.items()
            }
        self._num_minibatches += 1
        return found

    def _shares(self) -> list[list[Task]]:
        """Divide the tasks: the longest first, each to whom has the least to do."""
        shares: list[list[Task]] = [[] for _ in range(self._count)]
        loads = [0.0] * self._count
        for task in sorted(self._tasks, key=lambda task: (-self._seconds.get(task, 1.0), task)):
            number = loads.index(min(loads))
            shares[number].append(task)
            loads[number] += self._seconds.get(task, 1.0)
        return shares

    def _take(self, message: _Message, number: int) -> None:
        """Take over the gradients that a process computed."""
        weights = [self._weights[n] for n in message.weights]
        if any(weight.grad is not None for weight in weights):
            raise ConfigurationError(
                "losses were to be computed by several processes at once, but two parts of "
                "`loss_parts` have a gradient in the same weight. Give them as one part."
            )
        gradients = [torch.empty_like(weight) for weight in weights]
        if weights:
            place = self._places[number][self._num_minibatches % 2]
            torch._foreach_copy_(gradients, [place[n] for n in message.weights])
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient
        self._seconds |= message.seconds

    def _send(self, peer: Connection, message: bytes) -> None:
        # Why it cannot hear is told, or seen to be missing, where its message is waited for.
        with suppress(OSError):
            peer.send_bytes(message)

    def _receive(self, peer: Connection) -> _Message:
        try:
            message: _Message = pickle.loads(peer.recv_bytes())
        except (EOFError, OSError):
            message = _Message({}, {}, [], "It ended without a word, as for want of memory.")
        if message.fault:
            raise HelperProcessError(
                "losses were to be computed by several processes at once, but one of them failed. "
                "Resume the run from its latest checkpoint, with --num-threads 1 if it happens "
                f"again.\n{message.fault}"
            )
        return message


def _shared_like(weights: Sequence[Tensor]) -> list[Tensor]:
    """Give tensors of the shapes of others in memory that forked processes share."""
    sizes = [weight.numel() * weight.element_size() for weight in weights]
    # Each begins at a line of the cache.
    rooms = [-(-size // 64) * 64 for size in sizes]
    memory = torch.frombuffer(mmap.mmap(-1, max(sum(rooms), 1)), dtype=torch.uint8)
    return [
        room[:size].view(weight.dtype).view(weight.shape)
        for room, size, weight in zip(
            torch.split(memory[: sum(rooms)], rooms), sizes, weights, strict=True
        )
    ]


def _fork() -> int:
    """Fork, and give the new process' number, or 0 in it."""
    with warnings.catch_warnings():
        # The other threads of this process draw progress bars and send figures; none of them
        # computes, so none holds a lock that a helper, which prints nothing, will need.
        warnings.simplefilter("ignore", DeprecationWarning)
        helper = os.fork()
    if helper == 0:
        # The first process is asked to stop, and ends the others.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return helper
