"""How agents learn from the frames of an iteration.

Shapes: B frames of a minibatch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

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
from nip_astra.trainers.protocol.minibatches import MinibatchBuffer, ReplayBuffer
from nip_astra.trainers.protocol.optimizers import OTHERS, AgentOptimizers
from nip_astra.trainers.protocol.sharded_agents import ShardedAgents
from nip_astra.trainers.protocol.statistics import MetricSums
from nip_astra.utils.forked import can_fork


class Learner:
    """Takes optimizer steps on a loss.

    Attributes
    ----------
    loss_module : LossModule
        An `Objective`, whose agents learn apart from each other, or any loss module of TorchRL, of
        which the sum of the entries `loss_*` is minimised. So it is of an `Objective` that has a
        `forward` of its own.
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
        """Have losses that share no weights computed by several processes within the block.

        The numbers are those of one process, to the bit. Each has one of torch's threads; where
        losses cannot be divided, there is one process with the threads that there are.

        Parameters
        ----------
        count : int, optional
            At most so many; one for None.
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

    def _check_can_be_divided(self) -> None:
        """Refuse what the processes of a team cannot learn together."""
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
            "a body draws random numbers or keeps statistics (has_hidden_state)": any(
                getattr(module, "has_hidden_state", False) for module in objective.modules()
            ),
        }
        found = [text for text, is_so in faults.items() if is_so]
        if found:
            raise ConfigurationError(
                f"{self.team.size} processes were to train the agents together, but "
                f"{'; '.join(found)}. Start the run without torchrun, or choose another trainer, "
                "such as vanilla_ppo."
            )

    def _can_share(self) -> bool:
        return (
            can_fork()
            and self.device.type == "cpu"
            and self.optimizers.are_disjoint
            # Other buffers may draw from generators that are not every process' own.
            and isinstance(self.buffer, MinibatchBuffer)
            and isinstance(self.loss_module, Objective)
            and self.loss_module.has_parts()
            and not any(getattr(m, "has_hidden_state", False) for m in self.loss_module.modules())
        )

    def learn(self, batch: TensorDict, iteration: int) -> tuple[dict[str, Tensor], int]:
        """Learn from a batch in epochs of minibatches.

        Returns
        -------
        tuple
            Means over the minibatches of what is to be logged, still on the device; and how many
            steps were taken.

        Raises
        ------
        NonFiniteLossError
            When a gradient is not finite. On a CPU no step is taken with it; elsewhere it is seen
            when the iteration ends, so that the device does not wait.
        """
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
        """Complete the gradients of weights by those that other processes' rows gave."""
        gradients = [weight.grad for weight in self.optimizers.weights]
        # Those of divided weights were added up as they were scattered.
        self.team.all_reduce([g for g in gradients if g is not None and not isinstance(g, DTensor)])

    @contextmanager
    def _rows_divided(self) -> Iterator[None]:
        """Divide the frames that networks read among the processes of the team."""
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

    def take_parts(self, sharded: ShardedAgents) -> None:
        """Learn from now on by agents of which each process of the team holds a part."""
        self.sharded, self.optimizers = sharded, sharded.optimizers

    @contextmanager
    def _shared(self, names: Sequence[str]) -> Iterator[DividedLosses | None]:
        """Enter a block in which several processes learn, or give None where there is one."""
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
        """Set the gradients of a minibatch, and give what to log."""
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
            f"the agents were to learn in iteration {iteration + 1}, but a gradient is not finite. "
            "Rewards and observations must be finite, and steps small enough: lower rl.lr or "
            "rl.max_grad_norm. A checkpoint, if there is one, holds the agents of an earlier "
            "iteration."
        )
