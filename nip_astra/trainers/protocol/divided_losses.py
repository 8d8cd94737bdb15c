"""Losses of minibatches, distributed over several processes that take the same steps."""

from __future__ import annotations

import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nip_astra.distributed.team import Team, team_on_this_machine
from nip_astra.errors import ConfigurationError, LostProcessError, WorkerProcessError
from nip_astra.utils.children import PERIOD, SECONDS_TO_END, Child, check_alive, ended_early
from nip_astra.utils.forked import blocked_signals, fork

_FORGETTING = 1.05
"""Maximum growth of a recorded time per minibatch."""


class Task(NamedTuple):
    """A part of one agent's losses, by index."""

    agent: str
    part: int


Compute = Callable[[Task], Mapping[str, Tensor]]
"""Adds the gradients of a task in the current minibatch, and returns its metrics."""


class _Done(NamedTuple):
    """The metrics of a task, and its duration."""

    figures: dict[str, Tensor]
    seconds: float


class _Part(NamedTuple):
    """The results of one process in a minibatch; gradients by weight index."""

    fault: str
    done: dict[Task, _Done]
    gradients: dict[int, Tensor]


class DividedLosses:
    """Processes that compute the gradients of minibatches together.

    All iterate over the same minibatches and take the same steps; only the tasks are divided, by
    their durations so far, `seconds`, which are updated. A weight's gradient comes from one task,
    so that adding up the gradients of the processes changes no bit. When the block ends only the
    first process is left. `weights`, on the CPU, are all that may get a gradient; tasks must not
    change `buffers`.
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
        self._team = Team()
        self._board: _Board | None = None
        self._num_minibatches = 0
        self._workers: list[Child] = []

    @contextmanager
    def between(self, count: int) -> Iterator[None]:
        """Run the block in `count` processes, and leave it in the first."""
        number = 0
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="nip_astra_"))
            try:
                number = self._fork(count)
                store = str(Path(folder) / "meeting")
                watch = partial(check_alive, () if number else self._workers)
                with team_on_this_machine(store, number, count, watch) as self._team:
                    yield
            except BaseException as error:
                if number:
                    os._exit(1)
                lost = self._lost() if isinstance(error, LostProcessError) else None
                for worker in self._workers:
                    worker.kill()
                if lost is not None:
                    raise ended_early(lost) from error
                raise
            if number:
                os._exit(0)
            for worker in self._workers:
                worker.wait()

    def _lost(self) -> Child:
        """Return the process that ended first; others end when its connections are closed."""
        until = time.monotonic() + SECONDS_TO_END
        while time.monotonic() < until:
            for worker in self._workers:
                if worker.code is not None:
                    return worker
            time.sleep(PERIOD)
        return self._workers[0]

    def _fork(self, count: int) -> int:
        """Start the other processes; return the index of this process."""
        with blocked_signals():
            while len(self._workers) < count - 1:
                number = len(self._workers) + 1
                worker = fork(f"process {number + 1} of {count} that compute losses")
                if worker is None:
                    return number
                self._workers.append(worker)
        return 0

    def compute(self, compute: Compute) -> dict[Task, dict[str, Tensor]]:
        """Compute the gradients of a minibatch, and return the metrics, by task.

        `compute` runs a task; gradients are None before.
        """
        part = self._computed(compute)
        done = None if self._board is None else self._board.exchange(part, self._team)
        if done is None:
            # The first minibatch, or one of another form, or a failure.
            done = self._exchange(part)
        self._num_minibatches += 1
        for task in self._tasks:
            self._note(task, done[task].seconds)
        return {task: done[task].figures for task in self._tasks}

    def _exchange(self, part: _Part) -> dict[Task, _Done]:
        """Exchange the results of all processes as messages, and prepare the board for the next."""
        tasks = [(*task, done.figures, done.seconds) for task, done in part.done.items()]
        mine: dict[str, Any] = {"fault": part.fault, "tasks": tasks}
        gathered = self._team.all_gather(mine | {"weights": list(part.gradients)})
        for one in gathered:
            if one["fault"]:
                raise WorkerProcessError(
                    "a process that computes losses failed. Run with --num-threads 1 if this "
                    f"happens again.\n{one['fault']}"
                )
        numbers: list[int] = [number for one in gathered for number in one["weights"]]
        self._check_apart(len(numbers) == len(set(numbers)))
        weights = {number: self._weights[number] for number in sorted(numbers)}
        for number, weight in weights.items():
            own = part.gradients.get(number)
            weight.grad = torch.zeros_like(weight) if own is None else own
        self._team.all_reduce([w.grad for w in weights.values() if w.grad is not None])
        results: dict[Task, _Done] = {}
        for one in gathered:
            for agent, part_number, figures, seconds in one["tasks"]:
                results[Task(agent, part_number)] = _Done(figures, seconds)
        self._board = _Board({task: results[task] for task in self._tasks}, weights)
        return results

    def _computed(self, compute: Compute) -> _Part:
        """Run the tasks of this process."""
        part, before = _Part("", {}, {}), self._hidden_state()
        try:
            for task in self._shards(self._team.size)[self._team.rank]:
                started = time.perf_counter()
                figures = {name: one.detach() for name, one in compute(task).items()}
                part.done[task] = _Done(figures, time.perf_counter() - started)
                for number, weight in enumerate(self._weights):
                    if weight.grad is not None:
                        self._check_apart(number not in part.gradients)
                        part.gradients[number], weight.grad = weight.grad, None
            if self._hidden_state() != before:
                raise ConfigurationError(
                    "several processes cannot compute losses of networks that draw random numbers, "
                    "as dropout does, or keep statistics, as batch normalisation does. Train with "
                    "--num-threads 1, or set `has_hidden_state` of the body."
                )
        except BaseException as error:
            if self._team.rank == 0:
                raise
            return _Part("".join(traceback.format_exception(error)), {}, {})
        return part

    def _hidden_state(self) -> tuple[bytes, list[int]]:
        """Return state that changes if a minibatch draws random numbers or changes buffers."""
        if self._num_minibatches:
            return b"", []
        state: bytes = torch.get_rng_state().numpy().tobytes()
        return state, [buffer._version for buffer in self._buffers]

    def _check_apart(self, are_apart: bool) -> None:
        if not are_apart:
            raise ConfigurationError(
                "two parts of `loss_parts` have a gradient in the same weight. Give them as one "
                "part, or train with --num-threads 1."
            )

    def _note(self, task: Task, latest: float) -> None:
        """Record the shortest recent time: other load on the machine only makes a task slower."""
        before = self._seconds.get(task, latest)
        self._seconds[task] = min(latest, before * _FORGETTING)

    def _shards(self, count: int) -> list[list[Task]]:
        """Distribute the tasks: the longest first, each to the least loaded process."""
        shards: list[list[Task]] = [[] for _ in range(count)]
        loads = [0.0] * count
        for task in sorted(self._tasks, key=lambda task: (-self._seconds.get(task, 1.0), task)):
            number = loads.index(min(loads))
            shards[number].append(task)
            loads[number] += self._seconds.get(task, 1.0)
        return shards


class _Board:
    """A tensor for the results of all processes in a minibatch, filled by one addition.

    The part of one process is 0 in the others, so that adding up as whole numbers keeps its bits.
    It has places for the results `done` and the gradients of `weights`, by number.
    """

    def __init__(self, done: Mapping[Task, _Done], weights: Mapping[int, Tensor]) -> None:
        self._weights = weights
        count, time_of = torch.zeros((), dtype=torch.int32), torch.zeros((), dtype=torch.float64)
        figures = {(task, n): v for task, (all_of, _) in done.items() for n, v in all_of.items()}
        places = [count, *(time_of for _ in done), *figures.values(), *weights.values()]
        # Each begins at a multiple of the largest number's size.
        rooms = [-(-place.numel() * place.element_size() // 8) * 8 for place in places]
        self._board = torch.zeros(sum(rooms) // 4, dtype=torch.int32)
        views = iter(
            room[: place.numel() * place.element_size()].view(place.dtype).view(place.shape)
            for room, place in zip(
                torch.split(self._board.view(torch.uint8), rooms), places, strict=True
            )
        )
        self._num_filled = next(views)
        self._seconds = {task: next(views) for task in done}
        self._figures = {key: next(views) for key in figures}
        self._gradients = {number: next(views) for number in weights}

    def exchange(self, part: _Part, team: Team) -> dict[Task, _Done] | None:
        """Set all gradients, and return all results; None if there is no room for one."""
        self._board.zero_()
        figures = {
            (t, n): value for t, done in part.done.items() for n, value in done.figures.items()
        }
        is_like = not part.fault and part.gradients.keys() <= self._gradients.keys()
        is_like = is_like and all(
            key in self._figures and _kind(value) == _kind(self._figures[key])
            for key, value in figures.items()
        )
        if is_like:
            for number, gradient in part.gradients.items():
                self._gradients[number].copy_(gradient)
            for key, value in figures.items():
                self._figures[key].copy_(value)
            for task, done in part.done.items():
                self._seconds[task].fill_(done.seconds)
            self._num_filled.fill_(len(part.gradients) + len(figures))
        team.all_reduce([self._board])
        if int(self._num_filled) != len(self._gradients) + len(self._figures):
            return None
        for number, weight in self._weights.items():
            weight.grad = self._gradients[number]
        found = {task: _Done({}, float(seconds)) for task, seconds in self._seconds.items()}
        for (task, name), value in self._figures.items():
            found[task].figures[name] = value.clone()
        return found


def _kind(tensor: Tensor) -> tuple[torch.dtype, torch.Size]:
    return tensor.dtype, tensor.shape
