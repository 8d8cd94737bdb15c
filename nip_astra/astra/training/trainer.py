"""Training of an attacker with user objects."""

from __future__ import annotations

from typing import Generic

import torch

from nip_astra.astra.core.algorithm import Algorithm
from nip_astra.astra.core.common import ActionT, Batch, StateT, Step
from nip_astra.astra.core.sampler import Sampler
from nip_astra.astra.logging import logger
from nip_astra.astra.training.configuration import TrainingConfiguration
from nip_astra.astra.training.harness import Harness, one_sampler
from nip_astra.astra.training.loop import OwnObjectsLoop
from nip_astra.errors import ConfigurationError

__all__ = ["Trainer", "TrainingConfiguration"]


class Trainer(Generic[StateT, ActionT, Step, Batch]):
    """Collects episodes and trains on them; it does not evaluate, save or log.

    A subclass may override `train` with a custom loop over `harness` and `optimizer`.

    Parameters
    ----------
    config : TrainingConfiguration
        Length, batch sizes, optimizer and seed; without dev evaluations and early stopping, which
        need the prompts of `HFASTTrainer`.
    environment : Sampler
        Samples episodes; also `sampler`.
    algorithm : Algorithm
        Converts episodes to losses.
    use_wandb : bool
        Whether `harness.log_current_step` sends to W&B, with the configuration.

    Attributes
    ----------
    harness : Harness
        Provides experience and losses. It, or its methods, may be replaced before `train`.
    """

    def __init__(
        self,
        config: TrainingConfiguration,
        environment: Sampler[StateT, ActionT] | None = None,
        algorithm: Algorithm[StateT, ActionT, Step, Batch] | None = None,
        use_wandb: bool = False,
        *,
        sampler: Sampler[StateT, ActionT] | None = None,
    ) -> None:
        if not isinstance(config, TrainingConfiguration):
            raise ConfigurationError(
                f"the configuration is a {type(config).__name__}. Give a "
                "nip_astra.astra.TrainingConfiguration, or an object of a subclass."
            )
        self.config = config
        self.harness: Harness[StateT, ActionT, Step, Batch] = Harness(
            one_sampler(environment, sampler),
            algorithm,
            config.num_episodes_per_experience,
            use_wandb,
            {"config": config.to_dict()},
            config=config,
        )
        self._loop = self._make_loop()

    def _make_loop(self) -> OwnObjectsLoop:
        return OwnObjectsLoop(self.config, self.harness)

    @property
    def _global_step_counter(self) -> int:
        """Number of batches so far; a batch is counted before its step."""
        return self._loop.num_batches

    @_global_step_counter.setter
    def _global_step_counter(self, count: int) -> None:
        self._loop.num_batches = count

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Optimizer of the attacker's weights; it may be replaced before training."""
        return self._loop.optimizer

    @optimizer.setter
    def optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            # The loop sets rates as multiples of the configured one.
            group.setdefault("lr_factor", group["lr"] / self.config.lr)
        self._loop.use_optimizer(optimizer)

    def train(self) -> None:
        """Train until `config.training_steps` iterations are completed."""
        if self._loop.state.iteration >= self.config.num_iterations:
            logger.warning(
                "there is nothing left to train: %d of %d iterations are done; raise "
                "config.training_steps to continue",
                self._loop.state.iteration,
                self.config.num_iterations,
            )
        self._loop.harness = self.harness
        self._loop.train()
