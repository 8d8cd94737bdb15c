"""Guess a hidden number in several turns."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from pydantic import Field

from nip_astra.parameters.types import TaskType
from nip_astra.scenario_base.tasks.base import (
    Environment,
    GeneratedTask,
    Reaction,
    TaskParameters,
    pick,
    register_task,
)
from nip_astra.scorers.base import Message


class GuessNumberEnvironment(Environment):
    """One hidden number."""

    def __init__(self, hidden: int, start: int, most: int, max_turns: int) -> None:
        self.hidden, self.start, self.most, self.max_turns = hidden, start, most, max_turns
        self.num_turns = 0
        self.columns = (("hidden", hidden), ("start", start), ("most", most))

    def reset(self) -> Sequence[Message]:
        self.num_turns = 0
        return [Message("user", f"guess {self.start} to {self.start + self.most - 1}")]

    def step(self, message: str) -> Reaction:
        self.num_turns += 1
        guess = re.fullmatch(r"\s*(\d{1,9})\s*", message, flags=re.ASCII)
        if guess is not None and int(guess[1]) == self.hidden:
            return Reaction(reward=1 - (self.num_turns - 1) / (2 * self.max_turns))
        if self.num_turns == self.max_turns:
            return Reaction(reward=0.0)
        hint = "number?" if guess is None else "higher" if int(guess[1]) < self.hidden else "lower"
        return Reaction([Message("user", hint)], is_over=False)


@register_task(TaskType.GUESS_NUMBER)
class GuessNumberTask(GeneratedTask):
    """Guess; the environment replies "higher" or "lower" until the last turn.

    The reward is 1 for a correct first guess and decreases linearly towards 1/2 with the turns; 0
    without a correct guess.
    """

    class Parameters(TaskParameters):
        """Range and number of guesses."""

        most: int = Field(default=16, ge=2, le=1000)
        """Size of the range. Larger is harder."""
        num_starts: int = Field(default=40, ge=1, le=1000)
        """Ranges start at 1 to this number. Larger gives more distinct problems."""
        max_turns: int = Field(default=4, ge=1, le=20)
        """Maximum number of guesses."""

    def draw(self, generator: torch.Generator) -> GuessNumberEnvironment:
        options = self.parameters
        start = pick(generator, 1, options.num_starts)
        hidden = pick(generator, start, start + options.most - 1)
        return GuessNumberEnvironment(hidden, start, options.most, options.max_turns)
