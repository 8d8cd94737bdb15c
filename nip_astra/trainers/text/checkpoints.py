"""Save and take up a run of chat models; its rollouts are files of their own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nip_astra.checkpoints.store import CheckpointStore
from nip_astra.checkpoints.tensors import load_state, save_state
from nip_astra.tracking.tracker import Tracker
from nip_astra.trainers.text.state import TextRunState


class TextCheckpoints:
    """The checkpoints of one run.

    Parameters
    ----------
    store : CheckpointStore or None
        None for a trainer without a run directory, which saves nothing.
    """

    def __init__(self, store: CheckpointStore | None, tracker: Tracker) -> None:
        self.store, self.tracker = store, tracker
        self._records: Mapping[str, Any] | None = None

    def save(self, state: TextRunState, more: Mapping[str, Any]) -> None:
        """Save the run's state, and what a trainer of one's own keeps beside it."""
        if self.store is None:
            return
        content = {
            "run": state.to_dict(),
            "trainer": dict(more),
            "tracker": self.tracker.position(),
        }
        metadata = {"iteration": state.iteration, "stage": str(state.stage)}
        self.store.save(
            state.num_stages_done,
            lambda folder: save_state(folder / "state", content),
            metadata=metadata,
        )

    def load(self, checkpoint: Path) -> tuple[TextRunState, dict[str, Any]]:
        """The run's state of a checkpoint, and what the trainer kept beside it."""
        content = load_state(checkpoint / "state")
        self._records = content["tracker"]
        return TextRunState.from_dict(content["run"]), content["trainer"]

    def rewind_records(self) -> None:
        """Forget what was recorded after the checkpoint that was loaded, if one was."""
        if self._records is not None:
            self.tracker.rewind(self._records)
