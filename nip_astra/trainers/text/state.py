"""How far a run of chat models has come."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from nip_astra.checkpoints.run_state import RunState


class Stage(StrEnum):
    """Parts of an iteration, in their order; the state is saved after each."""

    SAMPLE_ROLLOUTS = "sample_rollouts"
    LOG_STATS = "log_stats"
    TEST = "test_during_training"
    CREATE_FINE_TUNE_JOBS = "create_fine_tune_jobs"
    AWAIT_FINE_TUNE_JOBS = "await_fine_tune_jobs"


STAGES = tuple(Stage)


@dataclass
class TextRunState(RunState):
    """Counters and findings of a run; all plain values.

    Attributes
    ----------
    run_key : str
        Names the run at its services, where two runs may have the same name.
    stage : str
        The `Stage` that is to be done next.
    after : dict or None
        Statistics of the last test.
    last : dict
        Statistics of the last iteration's rollouts.
    num_requests, prompt_tokens, completion_tokens : int
        What was asked of chat models, and paid for.
    num_jobs : int
        Fine-tuning jobs submitted.
    groups : dict
        State of each group of agents.
    """

    run_key: str = field(default_factory=lambda: secrets.token_hex(6))
    stage: str = str(Stage.SAMPLE_ROLLOUTS)
    after: dict[str, Any] | None = None
    last: dict[str, Any] = field(default_factory=dict)
    num_requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    num_jobs: int = 0
    groups: dict[str, Any] = field(default_factory=dict)

    @property
    def update_count(self) -> int:
        """Stages that are over, in all iterations."""
        return self.iteration * len(STAGES) + STAGES.index(Stage(self.stage))

    def advance(self) -> None:
        """Go on to the next stage, which may be the first of the next iteration."""
        place = STAGES.index(Stage(self.stage)) + 1
        self.iteration += place == len(STAGES)
        self.stage = str(STAGES[place % len(STAGES)])

    def costs(self) -> dict[str, int]:
        """What was asked of services so far."""
        return {
            "num_requests": self.num_requests,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "num_jobs": self.num_jobs,
        }
