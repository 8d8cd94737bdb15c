"""How far a run of chat models has come."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Stage(StrEnum):
    """Parts of an iteration, in their order; the state is saved after each."""

    SAMPLE_ROLLOUTS = "sample_rollouts"
    LOG_STATS = "log_stats"
    TEST = "test_during_training"
    CREATE_FINE_TUNE_JOBS = "create_fine_tune_jobs"
    AWAIT_FINE_TUNE_JOBS = "await_fine_tune_jobs"


STAGES = tuple(Stage)


@dataclass
class TextRunState:
    """Counters and findings of a run; all plain values.

    Attributes
    ----------
    run_key : str
        Names the run at its services, where two runs may have the same name.
    iteration : int
        Iterations that are over.
    stage : Stage
        What is to be done next.
    before, after : dict or None
        Statistics of the first and the last test.
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
    iteration: int = 0
    stage: Stage = Stage.SAMPLE_ROLLOUTS
    before: dict[str, Any] | None = None
    after: dict[str, Any] | None = None
    last: dict[str, Any] = field(default_factory=dict)
    num_requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    num_jobs: int = 0
    groups: dict[str, Any] = field(default_factory=dict)

    @property
    def num_stages_done(self) -> int:
        """Stages that are over, in all iterations."""
        return self.iteration * len(STAGES) + STAGES.index(self.stage)

    def advance(self) -> None:
        """Go on to the next stage, which may be the first of the next iteration."""
        place = STAGES.index(self.stage) + 1
        self.iteration += place == len(STAGES)
        self.stage = STAGES[place % len(STAGES)]

    def costs(self) -> dict[str, int]:
        """What was asked of services so far."""
        return {
            "num_requests": self.num_requests,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "num_jobs": self.num_jobs,
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return {**vars(self), "stage": str(self.stage)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TextRunState:
        """Take up what `to_dict` gave."""
        return cls(**{**values, "stage": Stage(values["stage"])})
