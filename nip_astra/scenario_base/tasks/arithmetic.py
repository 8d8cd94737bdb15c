"""Integer arithmetic problems with a unique answer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

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


class ArithmeticEnvironment(Environment):
    """One problem, answered in one message."""

    def __init__(self, problem: str, answer: int) -> None:
        self.problem, self.answer = problem, answer
        self.solution = str(answer)
        self.columns = (("problem", problem), ("answer", answer))

    def reset(self) -> Sequence[Message]:
        return [Message("user", f"{self.problem}=")]

    def step(self, message: str) -> Reaction:
        number = re.fullmatch(r"\s*(-?\d{1,18})\s*", message, flags=re.ASCII)
        return Reaction(reward=float(number is not None and int(number[1]) == self.answer))


@register_task(TaskType.ARITHMETIC)
class ArithmeticTask(GeneratedTask):
    """Sums, differences and products; the reward is 1 for exactly the right number, else 0.

    Levels: 1 `a+b` of digits, 2 `a+b` to 49, 3 `a-b` to 49, 4 `a*b` to 9, 5 `a+b` to 999, 6
    `a+b*c`.
    """

    class Parameters(TaskParameters):
        """Difficulty of the problems."""

        levels: list[Literal[1, 2, 3, 4, 5, 6]] = Field(default=[1, 2, 3], min_length=1)
        """Levels to draw from uniformly; repeat a level to draw it more often. Larger is harder."""

    def draw(self, generator: torch.Generator) -> ArithmeticEnvironment:
        levels = self.parameters.levels
        return problem_of(levels[pick(generator, 0, len(levels) - 1)], generator)


def problem_of(level: int, generator: torch.Generator) -> ArithmeticEnvironment:
    """A problem of a level, from 1 to 6."""
    largest = {1: 9, 2: 49, 3: 49, 4: 9, 5: 999}.get(level, 9)
    a, b = pick(generator, 0, largest), pick(generator, 0, largest)
    if level in (1, 2, 5):
        return ArithmeticEnvironment(f"{a}+{b}", a + b)
    if level == 3:
        return ArithmeticEnvironment(f"{a}-{b}", a - b)
    if level == 4:
        return ArithmeticEnvironment(f"{a}*{b}", a * b)
    c = pick(generator, 0, largest)
    return ArithmeticEnvironment(f"{a}+{b}*{c}", a + b * c)
