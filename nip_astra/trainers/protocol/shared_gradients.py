"""Gradients of minibatches, computed by several processes that all take the same steps."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nip_astra.errors import ConfigurationError, WorkerProcessError
from nip_astra.utils.forked import fork, kill, signals_held_back, wait_for

_FORGETTING = 1.05
"""By what a time rises in each minibatch that took longer."""


class Task(NamedTuple):
    """Some of the losses of one agent: its name, and the number among its parts."""

    agent: str
    part: int


Compute = Callable[[Task], Mapping[str, Tensor]]
"""Adds to gradients those of a task's losses in the present minibatch, and gives what to log."""


class _Figure(NamedTuple):
    """A tensor to be logged, as another process can read it."""

    dtype: torch.dtype
    values: Any


class _Message(NamedTuple):
    """What a process tells the others of a minibatch; weights by their numbers."""

    figures: dict[Task, dict[str, _Figure]]
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
    buffers : Sequence[Tensor]
        What tasks must not change.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        weights: Sequence[Tensor],
        seconds: dict[Task, float],
        buffers: Sequence[Tensor] = (),
    ) -> None:
        self._tasks = list(tasks)
        self._weights = list(weights)
        self._seconds = seconds
        self._buffers = list(buffers)
        self._number, self._count = 0, 1
        self._num_minibatches = 0
        self._workers: list[int] = []
        self._peers: dict[int, Connection] = {}
        self._places: list[list[list[Tensor]]] = []

    @contextmanager
    def between(self, count: int) -> Iterator[None]:
        """Go through the block in `count` processes, and leave it in the first.

        Raises
        ------
        WorkerProcessError
            When another process cannot be started, fails, or ends before its time.
        """
        try:
            self._begin(count)
            yield
        except BaseException as error:
            self._give_up(error)
            raise
        if self._number:
            os._exit(0)
        self._part()

    def _begin(self, count: int) -> None:
        self._count = count
        self._places = [[_shared_like(self._weights) for _ in range(2)] for _ in range(count)]
        pipes = {(a, b): multiprocessing.Pipe() for b in range(count) for a in range(b)}
        with signals_held_back():
            while len(self._workers) < count - 1:
                worker = fork()
                if not worker:
                    self._number = len(self._workers) + 1
                    break
                self._workers.append(worker)
        for (a, b), ends in pipes.items():
            for end, owner, peer in zip(ends, (a, b), (b, a), strict=True):
                if owner == self._number:
                    self._peers[peer] = end
                else:
                    end.close()

    def _give_up(self, error: BaseException) -> None:
        """End the other processes; as one of them, say why and end."""
        if self._number:
            with suppress(OSError, KeyError):
                fault = "".join(traceback.format_exception(error))
                self._peers[0].send(_Message({}, {}, [], fault))
            os._exit(1)
        kill(self._workers)
        self._part()

    def _part(self) -> None:
        for peer in self._peers.values():
            peer.close()
        wait_for(self._workers)

    def compute(self, compute: Compute) -> dict[Task, dict[str, Tensor]]:
        """Have the gradients of a minibatch computed, and give what to log, by task.

        Parameters
        ----------
        compute : Callable
            Runs a task; gradients are None before.

        Raises
        ------
        ConfigurationError
            When tasks have a weight in common, draw random numbers, or change buffers.
        """
        found: dict[Task, dict[str, Tensor]] = {}
        seconds: dict[Task, float] = {}
        gradients: dict[int, Tensor] = {}
        before = self._hidden_state()
        for task in self._shards()[self._number]:
            started = time.perf_counter()
            found[task] = dict(compute(task))
            seconds[task] = time.perf_counter() - started
            for number, weight in enumerate(self._weights):
                if weight.grad is not None:
                    self._check_apart(number not in gradients)
                    gradients[number], weight.grad = weight.grad, None
        if self._hidden_state() != before:
            raise ConfigurationError(
                "losses were to be computed by several processes at once, but networks draw random "
                "numbers in them, as dropout does, or keep statistics, as batch normalisation "
                "does, so that the processes would part. Train with --num-threads 1, or have the "
                "body say so by `has_hidden_state`."
            )
        if gradients:
            place = self._places[self._number][self._num_minibatches % 2]
            torch._foreach_copy_([place[n] for n in gradients], list(gradients.values()))
        figures = {
            task: {key: _Figure(v.dtype, v.detach().double().numpy()) for key, v in entries.items()}
            for task, entries in found.items()
        }
        message = _Message(figures, seconds, list(gradients))
        self._note(seconds)
        for number, heard in self._exchange(message).items():
            place = self._places[number][self._num_minibatches % 2]
            self._check_apart(gradients.keys().isdisjoint(heard.weights))
            gradients |= {n: torch.empty_like(self._weights[n]) for n in heard.weights}
            if heard.weights:
                torch._foreach_copy_(
                    [gradients[n] for n in heard.weights], [place[n] for n in heard.weights]
                )
            self._note(heard.seconds)
            for task, entries in heard.figures.items():
                found[task] = {
                    key: torch.as_tensor(values).to(dtype)
                    for key, (dtype, values) in entries.items()
                }
        for number, gradient in gradients.items():
            self._weights[number].grad = gradient
        self._num_minibatches += 1
        return {task: found[task] for task in self._tasks}

    def _hidden_state(self) -> tuple[bytes, list[int]]:
        """What tells whether a first minibatch drew random numbers or changed buffers."""
        if self._num_minibatches:
            return b"", []
        state: bytes = torch.get_rng_state().numpy().tobytes()
        return state, [buffer._version for buffer in self._buffers]

    def _check_apart(self, are_apart: bool) -> None:
        if not are_apart:
            raise ConfigurationError(
                "losses were to be computed by several processes at once, but two parts of "
                "`loss_parts` have a gradient in the same weight. Give them as one part, or train "
                "with --num-threads 1."
            )

    def _exchange(self, message: _Message) -> dict[int, _Message]:
        """Tell all others, and hear from all, by the number of the process.

        Of two the first speaks first, and pairs meet in the same order in all processes, so that
        nobody waits with a message that is too long for the pipe.
        """
        heard: dict[int, _Message] = {}
        for number in sorted(self._peers):
            peer = self._peers[number]
            if self._number < number:
                self._send(peer, message)
            heard[number] = self._receive(peer)
            if self._number > number:
                self._send(peer, message)
        return heard

    def _note(self, seconds: Mapping[Task, float]) -> None:
        """Take the least of late: whatever else the machine does makes a task slow, never fast."""
        for task, latest in seconds.items():
            before = self._seconds.get(task, latest)
            self._seconds[task] = min(latest, before * _FORGETTING)

    def _shards(self) -> list[list[Task]]:
        """Divide the tasks: the longest first, each to whom has the least to do."""
        shards: list[list[Task]] = [[] for _ in range(self._count)]
        loads = [0.0] * self._count
        for task in sorted(self._tasks, key=lambda task: (-self._seconds.get(task, 1.0), task)):
            number = loads.index(min(loads))
            shards[number].append(task)
            loads[number] += self._seconds.get(task, 1.0)
        return shards

    def _send(self, peer: Connection, message: _Message) -> None:
        # Why it cannot hear is told, or seen to be missing, where its message is waited for.
        with suppress(OSError):
            peer.send(message)

    def _receive(self, peer: Connection) -> _Message:
        try:
            message: _Message = peer.recv()
        except (EOFError, OSError):
            message = _Message({}, {}, [], "It ended without a word, as for want of memory.")
        if message.fault:
            raise WorkerProcessError(
                "losses were to be computed by several processes at once, but one of them failed. "
                "Resume the run from its latest checkpoint, with --num-threads 1 if it happens "
                f"again.\n{message.fault}"
            )
        return message


def _shared_like(weights: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of the shapes of others in memory that forked processes share."""
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
