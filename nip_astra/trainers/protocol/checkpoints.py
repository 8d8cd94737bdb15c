"""Save and take up a run of agents in a protocol."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from nip_astra.checkpoints.store import CheckpointStore
from nip_astra.checkpoints.tensors import load_state, save_state
from nip_astra.rl_objectives.objective import Objective
from nip_astra.samplers.episodes import EpisodeSampler
from nip_astra.scenario_base.protocol.combined import CombinedAgents
from nip_astra.tracking.tracker import Tracker
from nip_astra.trainers.protocol.agent_files import AGENTS_DIR, load_agent, save_agents
from nip_astra.trainers.protocol.message_regression import MessageRegression
from nip_astra.trainers.protocol.minibatches import MinibatchBuffer, ReplayBuffer
from nip_astra.trainers.protocol.optimizers import AgentOptimizers
from nip_astra.trainers.protocol.state import RlState
from nip_astra.trainers.protocol.statistics import EpisodeLedger

logger = logging.getLogger(__name__)


class Stateful(Protocol):
    """What the trainer keeps beside the parts that every run has."""

    def trainer_state(self) -> dict[str, Any]:
        """Plain values and tensors."""

    def load_trainer_state(self, state: Mapping[str, Any]) -> None:
        """Take up what `trainer_state` gave."""


class RlCheckpoints:
    """The checkpoints of one run.

    Parameters
    ----------
    store : CheckpointStore or None
        None for a trainer without a run directory, which saves nothing.
    owner : Stateful
        The trainer.
    """

    def __init__(
        self,
        store: CheckpointStore | None,
        owner: Stateful,
        *,
        agents: CombinedAgents,
        optimizers: AgentOptimizers,
        loss_module: nn.Module,
        buffer: ReplayBuffer,
        sampler: EpisodeSampler,
        ledger: EpisodeLedger,
        tracker: Tracker,
        message_regression: MessageRegression,
    ) -> None:
        self.store = store
        self.owner = owner
        self.agents = agents
        self.optimizers = optimizers
        self.loss_module = loss_module
        self.buffer = buffer
        self.sampler = sampler
        self.ledger = ledger
        self.tracker = tracker
        self.message_regression = message_regression
        self._records: dict[str, Any] | None = None

    def save(self, state: RlState, *, trainer: str) -> None:
        """Save everything that a new process needs to go on exactly."""
        if self.store is None:
            return
        content = {
            "run": state.to_dict(),
            "optimizers": self.optimizers.state_dict(),
            "loss_module": self._loss_state(),
            "buffer": self._buffer_state(),
            "sampler": self.sampler.state(),
            "ledger": self.ledger.state(),
            "trainer": self.owner.trainer_state(),
            "message_regression": self.message_regression.state(),
            "tracker": self.tracker.position(),
        }

        def write(directory: Path) -> None:
            save_agents((self.agents[name] for name in self.agents.names), directory / AGENTS_DIR)
            save_state(directory / "state", content)

        metadata = {
            "trainer": trainer,
            "iteration": state.iteration,
            "optimizer_steps": state.num_optimizer_steps,
        }
        path = self.store.save(state.iteration, write, metadata=metadata)
        logger.info("saved checkpoint %s at iteration %d", path.name, state.iteration)

    def load(self, checkpoint: Path) -> RlState:
        """Take up a checkpoint and give the run's state."""
        content = load_state(checkpoint / "state")
        for name in self.agents.names:
            load_agent(self.agents[name], checkpoint / AGENTS_DIR / f"{name}.safetensors")
        self.optimizers.load_state_dict(content["optimizers"])
        self._load_loss_state(content["loss_module"])
        if isinstance(self.buffer, MinibatchBuffer):
            self.buffer.load_state_dict(content["buffer"])
        self.sampler.load_state(content["sampler"])
        self.ledger.load_state(content["ledger"], torch.device(self.sampler.environment.device))
        # An older version had nothing to keep there.
        self.message_regression.load_state(content.get("message_regression", {}))
        self.owner.load_trainer_state(content["trainer"])
        self._records = content["tracker"]
        return RlState.from_dict(content["run"])

    def rewind_records(self) -> None:
        """Forget what was recorded after the checkpoint that was loaded, if one was."""
        if self._records is not None:
            self.tracker.rewind(self._records)

    def _loss_state(self) -> dict[str, Any]:
        if isinstance(self.loss_module, Objective):
            return dict(self.loss_module.own_state())
        return dict(self.loss_module.state_dict())

    def _load_loss_state(self, state: dict[str, Any]) -> None:
        if isinstance(self.loss_module, Objective):
            self.loss_module.load_own_state(state)
        else:
            self.loss_module.load_state_dict(state)

    def _buffer_state(self) -> dict[str, Any]:
        # A buffer of another kind is filled anew in every iteration, and draws from the global
        # generators.
        return self.buffer.state_dict() if isinstance(self.buffer, MinibatchBuffer) else {}
