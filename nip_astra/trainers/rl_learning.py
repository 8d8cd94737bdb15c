"""How agents learn from the frames of an iteration.

Shapes: B frames of a minibatch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager

import torch
from tensordict import TensorDict
from torch import Tensor
from torchrl.objectives import LossModule

from nip_astra.errors import NonFiniteLossError
from nip_astra.rl_objectives.objective import Objective, sum_of_losses
from nip_astra.trainers.minibatches import ReplayBuffer
from nip_astra.trainers.rl_optimizers import AgentOptimizers
from nip_astra.trainers.rl_statistics import MetricSums


class Learner:
    """Takes optimizer steps on a loss.

    Attributes
    ----------
    loss_module : LossModule
        An `Objective`, whose agents learn apart from each other, or any loss module of TorchRL, of
        which the sum of the entries `loss_*` is minimised.
    """

    def __init__(
        self,
        loss_module: LossModule,
        optimizers: AgentOptimizers,
        buffer: ReplayBuffer,
        *,
        num_epochs: int,
        device: torch.device,
    ) -> None:
        self.loss_module = loss_module
        self.optimizers = optimizers
        self.buffer = buffer
        self.num_epochs = num_epochs
        self.device = device
        self._executor: Executor | None = None

    @contextmanager
    def threads(self, num_threads: int | None) -> Iterator[None]:
        """Have agents that share no weights learn at the same time within the block.

        Torch's own threads are divided among them. The numbers are those of one thread, to the bit,
        where none of them has more than one of torch's.

        Parameters
        ----------
        num_threads : int, optional
            At most so many. One for None: on busy cores, two threads of small networks wait for
            each other.
        """
        count = min(num_threads or 1, len(self.optimizers.optimizers), os.cpu_count() or 1)
        if count < 2 or not self.optimizers.are_disjoint:
            yield
            return
        torch_threads = torch.get_num_threads()
        torch.set_num_threads(max(torch_threads // count, 1))
        try:
            with ThreadPoolExecutor(count) as self._executor:
                yield
        finally:
            self._executor = None
            torch.set_num_threads(torch_threads)

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
        names = self.optimizers.learning(iteration)
        self.optimizers.begin(iteration)
        frames = batch.flatten()
        if isinstance(self.loss_module, Objective):
            frames = frames.exclude(*self.loss_module.unread_keys)
        sums, norms, num_steps = MetricSums(), [], 0
        self.buffer.empty()
        self.buffer.extend(frames)
        for _ in range(self.num_epochs):
            for minibatch in self.buffer:
                metrics = self._gradients(minibatch, names)
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

    def _gradients(self, minibatch: TensorDict, names: Sequence[str]) -> dict[str, Tensor]:
        """Set the gradients of a minibatch, and give what to log."""
        self.optimizers.zero_grad()
        if isinstance(self.loss_module, Objective):
            by_agent = self.loss_module.compute_gradients(minibatch, names, self._executor)
            return {
                f"{name}/{key}": value
                for name, entries in by_agent.items()
                for key, value in entries.items()
            }
        output = self.loss_module(minibatch)
        torch.autograd.backward(sum_of_losses(output.items()))
        return {key: value.detach().mean() for key, value in output.items()}

    def _check(self, norms: Sequence[Tensor], iteration: int) -> None:
        if not norms or bool(torch.stack(list(norms)).isfinite().all()):
            return
        self.optimizers.zero_grad()
        raise NonFiniteLossError(
            f"the agents were to learn in iteration {iteration + 1}, but a gradient is not finite. "
            "Rewards and observations must be finite, and steps small enough: lower rl.lr or "
            "rl.max_grad_norm. The latest checkpoint holds the agents of an earlier iteration."
        )
