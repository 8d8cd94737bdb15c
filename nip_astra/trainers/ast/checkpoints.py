"""Save and take up an AST run: weights, optimizer, counters, half-used experience, records."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from nip_astra.checkpoints.store import CheckpointStore
from nip_astra.checkpoints.tensors import load_state, save_state
from nip_astra.language_models.base import LanguageModel
from nip_astra.tracking.tracker import Tracker
from nip_astra.trainers.ast.state import AstState

logger = logging.getLogger(__name__)


class AstCheckpoints:
    """The checkpoints of one run.

    Parameters
    ----------
    store : CheckpointStore or None
        None for a trainer without a run directory, which saves nothing.
    policy : LanguageModel
        The attacker's model.
    modules : torch.nn.Module
        What else learns, for instance a value head.
    """

    def __init__(
        self,
        store: CheckpointStore | None,
        policy: LanguageModel,
        modules: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        tracker: Tracker,
    ) -> None:
        self.store = store
        self.policy = policy
        self.modules = modules
        self.optimizer = optimizer
        self.tracker = tracker
        self._records: dict[str, Any] | None = None

    def save(self, state: AstState, *, trainer: str, is_best: bool = False) -> None:
        """Save everything that a new process needs to go on exactly."""
        if self.store is None:
            return
        content = {
            "run": state.to_dict(),
            "modules": dict(self.modules.state_dict()),
            "optimizer": self.optimizer.state_dict(),
            "tracker": self.tracker.position(),
        }

        def write(directory: Path) -> None:
            self.policy.save(directory / "attacker")
            save_state(directory / "state", content)

        metadata = {
            "trainer": trainer,
            "iteration": state.iteration,
            "optimizer_steps": state.num_optimizer_steps,
        }
        path = self.store.save(state.update_count, write, metadata=metadata, is_best=is_best)
        logger.info("saved checkpoint %s at iteration %d", path.name, state.iteration)

    def load(self, checkpoint: Path) -> AstState:
        """Take up weights and optimizer, and give the state that goes with them."""
        content = load_state(checkpoint / "state")
        self.policy.restore(checkpoint / "attacker")
        self.modules.load_state_dict(content["modules"])
        self.optimizer.load_state_dict(content["optimizer"])
        self._records = content["tracker"]
        return AstState.from_dict(content["run"])

    def rewind_records(self) -> None:
        """Forget what was recorded after the checkpoint that was loaded, if one was."""
        if self._records is not None:
            self.tracker.rewind(self._records)

    def log(self, run_id: str) -> None:
        """Hand the newest and the best checkpoint to the tracker as artifacts."""
        found = {"latest": self.store.latest(), "best": self.store.best()} if self.store else {}
        for alias, path in found.items():
            if path is not None:
                self.tracker.log_artifact(
                    path, name=f"checkpoint-{run_id}", type="checkpoint", aliases=[alias]
                )

    def restore_best(self) -> None:
        """Take the weights of the best checkpoint.

        Raises
        ------
        CheckpointError
            When it is lost or corrupt.
        """
        if self.store is not None:
            best = self.store.open_best()
            self.policy.restore(best / "attacker")
            logger.info("restored the best checkpoint %s", best.name)
