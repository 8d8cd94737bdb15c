"""The countdown game: combine numbers to a target."""

from __future__ import annotations

import re
from collections import Counter
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

_TERM = re.compile(r"\d+|[-+*()]")
MAX_LENGTH = 200
"""Maximum length of an answer, in characters."""


class CountdownEnvironment(Environment):
    """One target and its numbers, answered in one message."""

    def __init__(
        self, numbers: Sequence[int], target: int, solution: str, *, valid_reward: float
    ) -> None:
        self.numbers, self.target = list(numbers), target
        self.solution = solution
        self.valid_reward = valid_reward
        self.columns = (("numbers", " ".join(map(str, sorted(numbers)))), ("target", target))

    def reset(self) -> Sequence[Message]:
        numbers = " ".join(map(str, self.numbers))
        return [Message("user", f"make {self.target} from {numbers}")]

    def step(self, message: str) -> Reaction:
        parsed = value_of(message)
        if parsed is None or Counter(parsed[1]) != Counter(self.numbers):
            return Reaction(reward=0.0)
        return Reaction(reward=1.0 if parsed[0] == self.target else self.valid_reward)


@register_task(TaskType.COUNTDOWN)
class CountdownTask(GeneratedTask):
    """Use each number once, with +, - and *, to make the target; a solution always exists."""

    class Parameters(TaskParameters):
        """Size of the problems, and reward of a valid but wrong answer."""

        num_numbers: int = Field(default=3, ge=2, le=6)
        """Numbers of a problem. More are harder."""
        most: int = Field(default=9, ge=2, le=1000)
        """Largest number given."""
        valid_reward: float = Field(default=0.1, ge=0, lt=1)
        """Reward of an expression that uses each number once but misses the target. Larger teaches
        the format faster, but rewards wrong answers."""

    def draw(self, generator: torch.Generator) -> CountdownEnvironment:
        options = self.parameters
        numbers = [pick(generator, 1, options.most) for _ in range(options.num_numbers)]
        order = [numbers[i] for i in torch.randperm(len(numbers), generator=generator).tolist()]
        text = "".join(f"{'+-*'[pick(generator, 0, 2)]}{number}" for number in order)[1:]
        parsed = value_of(text)
        assert parsed is not None
        return CountdownEnvironment(numbers, parsed[0], text, valid_reward=options.valid_reward)


def value_of(text: str) -> tuple[int, list[int]] | None:
    """Value and numbers of an expression of +, -, * and brackets, or None if it is invalid.

    The expression is parsed, never executed.
    """
    text = text.strip()
    terms = _TERM.findall(text)
    if not terms or len(text) > MAX_LENGTH or "".join(terms) != text.replace(" ", ""):
        return None
    try:
        value = _Parser(terms).whole()
    except (ValueError, IndexError, RecursionError):
        return None
    return value, [int(term) for term in terms if term.isdecimal()]


class _Parser:
    """Parser of sums of products, left to right."""

    def __init__(self, terms: Sequence[str]) -> None:
        self.terms, self.place = terms, 0

    def whole(self) -> int:
        value = self._sum()
        if self.place != len(self.terms):
            raise ValueError("something follows the expression")
        return value

    def _next(self) -> str:
        return self.terms[self.place] if self.place < len(self.terms) else ""

    def _sum(self) -> int:
        value = self._product()
        while self._next() in ("+", "-"):
            sign = 1 if self._take() == "+" else -1
            value += sign * self._product()
        return value

    def _product(self) -> int:
        value = self._number()
        while self._next() == "*":
            self._take()
            value *= self._number()
        return value

    def _number(self) -> int:
        term = self._take()
        if term == "(":
            value = self._sum()
            if self._take() != ")":
                raise ValueError("a bracket is not closed")
            return value
        return int(term)

    def _take(self) -> str:
        self.place += 1
        return self.terms[self.place - 1]
