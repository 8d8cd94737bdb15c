"""Training of agents on the frames of an iteration, in minibatches.

Shapes: E environments, T rounds played, B frames, N episodes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchrl.objectives import LossModule

from nip_astra.distributed.sharding import RowDivision
from nip_astra.distributed.team import LOST, Team, lost_process_errors
from nip_astra.errors import ConfigurationError, NonFiniteLossError
from nip_astra.rl_objectives.objective import Objective, frames_of, sum_of_losses
from nip_astra.trainers.protocol.divided_losses import DividedLosses, Task
from nip_astra.trainers.protocol.optimizers import OTHERS, AgentOptimizers
from nip_astra.trainers.protocol.sharded_agents import ShardedAgents
from nip_astra.trainers.protocol.statistics import MetricSums
from nip_astra.utils.forked import can_fork
from nip_astra.utils.seeding import SeedPart, derive_seed


class ReplayBuffer(Protocol):
    """A buffer of frames; TorchRL's with a sampler without replacement fits."""

    def extend(self, data: TensorDict, /) -> Any:
        """Add the frames of an iteration, [B]."""

    def empty(self) -> Any:
        """Remove all frames."""

    def __iter__(self) -> Iterator[Any]:
        """Yield the minibatches of one epoch."""


class MinibatchBuffer:
    """The frames of an iteration in a new order each epoch.

    The order depends on the `key` and on the number of epochs so far, so it survives a restart.
    The last minibatch of an epoch may be smaller than `minibatch_size` frames. With an
    `episode_key`, the entry that identifies the episode of a frame, no minibatch cuts an episode:
    it holds those episodes of an epoch whose first frames fall into its `minibatch_size` frames.
    """

    def __init__(self, minibatch_size: int, *key: SeedPart, episode_key: str | None = None) -> None:
        self.minibatch_size = minibatch_size
        self.episode_key = episode_key
        self.num_epochs = 0
        self._key = key
        self._frames: TensorDict | None = None

    def __len__(self) -> int:
        return 0 if self._frames is None else len(self._frames)

    def extend(self, data: TensorDict) -> None:
        """Add frames, [B]."""
        self._frames = data if self._frames is None else torch.cat([self._frames, data])

    def empty(self) -> None:
        """Remove all frames."""
        self._frames = None

    def __iter__(self) -> Iterator[TensorDict]:
        if self._frames is None:
            raise ConfigurationError("the buffer holds no frames. Call extend first.")
        generator = torch.Generator().manual_seed(derive_seed(*self._key, self.num_epochs))
        self.num_epochs += 1
        if self.episode_key is None:
            order_B = torch.randperm(len(self._frames), generator=generator)
            sizes: int | list[int] = self.minibatch_size
        else:
            _, episode_B = self._frames[self.episode_key].cpu().unique(return_inverse=True)
            lengths_N = episode_B.bincount()
            order_N = torch.randperm(len(lengths_N), generator=generator)
            lengths_N = lengths_N[order_N]
            minibatch_N = (lengths_N.cumsum(0) - lengths_N) // self.minibatch_size
            of_minibatches = minibatch_N.bincount(weights=lengths_N.double()).long().tolist()
            sizes = [size for size in of_minibatches if size]
            order_B = order_N.argsort()[episode_B].argsort(stable=True)
        yield from self._frames[order_B.to(self._frames.device)].split(sizes)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of epochs so far, without frames."""
        return {"num_epochs": self.num_epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of `state_dict`."""
        self.num_epochs = state["num_epochs"]


def episode_numbers(done_ET: Tensor) -> Tensor:
    """Number the episodes of a batch, [E, T] long, by the frames at which they end.

    A part of an episode that continues from or into another batch counts as an episode.
    """
    num_environments, num_steps = done_ET.shape
    ended_before_ET = done_ET.long().cumsum(dim=1) - done_ET.long()
    first_E1 = torch.arange(num_environments, device=done_ET.device).unsqueeze(1) * num_steps
    return first_E1 + ended_before_ET


class Learner:
    """Takes optimizer steps on a loss.

    The loss module is an `Objective`, whose agents learn apart from each other, or any loss module
    of TorchRL (also an `Objective` with its own `forward`): the sum of its entries `loss_*` is
    minimised.
    """

    def __init__(
        self,
        loss_module: LossModule,
        optimizers: AgentOptimizers,
        buffer: ReplayBuffer,
        *,
        num_epochs: int,
        device: torch.device,
        team: Team | None = None,
    ) -> None:
        self.loss_module = loss_module
        self.optimizers = optimizers
        self.buffer = buffer
        self.num_epochs = num_epochs
        self.device = device
        self.team = team or Team()
        self.sharded: ShardedAgents | None = None
        if self.team.size > 1:
            self._check_can_be_divided()
        self._num_processes = 1
        self._seconds: dict[Task, float] = {}

    @contextmanager
    def processes(self, count: int | None) -> Iterator[None]:
        """Let up to `count` processes compute losses that share no weights, within the block.

        Results are bit-identical to one process. Each has one torch thread; losses that cannot be
        distributed stay in one process with all its threads.
        """
        count = min(count or 1, os.cpu_count() or 1)
        if count < 2 or self.team.size > 1 or not self._can_share():
            yield
            return
        torch_threads = torch.get_num_threads()
        # A forked process has none of the threads that torch began here, and would wait for them.
        torch.set_num_threads(1)
        self._num_processes = count
        try:
            yield
        finally:
            self._num_processes = 1
            torch.set_num_threads(torch_threads)

    @property
    def _has_hidden_state(self) -> bool:
        modules = self.loss_module.modules()
        return any(getattr(module, "has_hidden_state", False) for module in modules)

    def _check_can_be_divided(self) -> None:
        """Raise for losses that the processes of a team cannot train together."""
        objective = self.loss_module
        faults = {
            "its loss module is not an Objective with agent_losses": not isinstance(
                objective, Objective
            )
            or objective.has_own_forward()
            or type(objective).compute_gradients is not Objective.compute_gradients,
            "its loss has weights of its own": OTHERS in self.optimizers.optimizers,
            "its buffer draws from generators that are not in every process": not isinstance(
                self.buffer, MinibatchBuffer
            ),
            "a body draws random numbers or keeps statistics": self._has_hidden_state,
        }
        found = [text for text, is_so in faults.items() if is_so]
        if found:
            raise ConfigurationError(
                f"{self.team.size} processes cannot train the agents together: {'; '.join(found)}. "
                "Start without torchrun, or choose another trainer, such as vanilla_ppo."
            )

    def _can_share(self) -> bool:
        return (
            can_fork()
            and self.device.type == "cpu"
            and self.optimizers.are_disjoint
            # Other buffers may draw from generators that other processes lack.
            and isinstance(self.buffer, MinibatchBuffer)
            and isinstance(self.loss_module, Objective)
            and self.loss_module.has_parts()
            and not self._has_hidden_state
        )

    def learn(self, batch: TensorDict, iteration: int) -> tuple[dict[str, Tensor], int]:
        """Train on a batch; return means over minibatches, on the device, and the step count."""
        if self.sharded is None:
            return self._learn(batch, iteration)
        with lost_process_errors(self.team, only_if=LOST):
            learned = self._learn(batch, iteration)
            # The leader samples with whole weights.
            self.sharded.gather()
        return learned

    def _learn(self, batch: TensorDict, iteration: int) -> tuple[dict[str, Tensor], int]:
        names = self.optimizers.learning(iteration)
        self.optimizers.begin(iteration)
        frames = batch.flatten()
        if isinstance(self.loss_module, Objective):
            frames = frames.exclude(*self.loss_module.unread_keys)
        sums, norms, num_steps = MetricSums(), [], 0
        self.buffer.empty()
        self.buffer.extend(frames)
        with self._rows_divided(), self._shared(names) as shared:
            for _ in range(self.num_epochs):
                for minibatch in self.buffer:
                    metrics = self._gradients(minibatch, names, shared)
                    self._add_up_gradients()
                    of_agents = self.optimizers.clip(names)
                    norms += list(of_agents.values())
                    if self.device.type == "cpu":
                        self._check(norms[-len(of_agents) :], iteration)
                    self.optimizers.step(names)
                    num_steps += 1
                    sums.add(metrics)
                    sums.add({f"{n}/grad_norm".lstrip("/"): norm for n, norm in of_agents.items()})
        self.buffer.empty()
        self._check(norms, iteration)
        if isinstance(self.loss_module, Objective):
            self.loss_module.finish_iteration()
        return sums.result(), num_steps

    def _add_up_gradients(self) -> None:
        """Add the gradients of other processes' rows."""
        gradients = [weight.grad for weight in self.optimizers.weights]
        # Those of divided weights were added up as they were scattered.
        self.team.all_reduce([g for g in gradients if g is not None and not isinstance(g, DTensor)])

    @contextmanager
    def _rows_divided(self) -> Iterator[None]:
        """Distribute the frames that networks read among the processes of the team."""
        if self.team.size == 1:
            yield
            return
        objective: Any = self.loss_module
        whole = objective.agents
        agents = whole if self.sharded is None else self.sharded.agents
        objective.agents, agents.division = agents, RowDivision(self.team)
        try:
            yield
        finally:
            objective.agents, agents.division = whole, None

    @contextmanager
    def _shared(self, names: Sequence[str]) -> Iterator[DividedLosses | None]:
        """Enter a block in which several processes learn; yield None with a single one."""
        objective, tasks = self.loss_module, []
        if self._num_processes > 1 and isinstance(objective, Objective):
            parts = {name: len(objective.loss_parts(name)) for name in names}
            tasks = [Task(name, part) for name in names for part in range(parts[name])]
        count = min(self._num_processes, len(tasks))
        if count < 2:
            yield None
            return
        buffers = list(objective.buffers())
        shared = DividedLosses(tasks, self.optimizers.weights, self._seconds, buffers)
        with shared.between(count):
            yield shared

    def _gradients(
        self, minibatch: TensorDict, names: Sequence[str], shared: DividedLosses | None
    ) -> dict[str, Tensor]:
        """Set the gradients of a minibatch, and return its metrics."""
        self.optimizers.zero_grad()
        objective = self.loss_module
        if not isinstance(objective, Objective) or objective.has_own_forward():
            output = objective(minibatch)
            torch.autograd.backward(sum_of_losses(output.items()))
            return {key: value.detach().mean() for key, value in output.items()}
        if shared is None:
            by_agent = objective.compute_gradients(minibatch, names)
        else:
            by_agent = {name: {} for name in names}
            frames = frames_of(minibatch)
            found = shared.compute(lambda task: objective.compute_part(*task, frames))
            for task, entries in found.items():
                by_agent[task.agent] |= entries
            objective.finish_minibatch(by_agent)
        return {
            f"{name}/{key}": value
            for name, entries in by_agent.items()
            for key, value in entries.items()
        }

    def _check(self, norms: Sequence[Tensor], iteration: int) -> None:
        if not norms or bool(torch.stack(list(norms)).isfinite().all()):
            return
        self.optimizers.zero_grad()
        raise NonFiniteLossError(
            f"a gradient is not finite in iteration {iteration + 1}. Check that rewards and "
            "observations are finite, or lower rl.lr or rl.max_grad_norm."
        )
