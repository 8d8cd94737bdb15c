"""Make a number out of given ones."""

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
"""Characters of an answer that is read."""


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
        given = " ".join(map(str, self.numbers))
        return [Message("user", f"make {self.target} from {given}")]

    def step(self, message: str) -> Reaction:
        found = value_of(message)
        if found is None or Counter(found[1]) != Counter(self.numbers):
            return Reaction(reward=0.0)
        return Reaction(reward=1.0 if found[0] == self.target else self.valid_reward)


@register_task(TaskType.COUNTDOWN)
class CountdownTask(GeneratedTask):
    """Use each number once, with +, - and *, to make the target; there is always a way."""

    class Parameters(TaskParameters):
        """How large the problems are, and what an answer that misses is worth."""

        num_numbers: int = Field(default=3, ge=2, le=6)
        """Numbers of a problem. More are harder."""
        most: int = Field(default=9, ge=2, le=1000)
        """Largest number given."""
        valid_reward: float = Field(default=0.1, ge=0, lt=1)
        """Reward of an expression that uses each number once and misses the target. Larger teaches
        the form faster, and pays for wrong answers."""

    def draw(self, generator: torch.Generator) -> CountdownEnvironment:
        options = self.parameters
        numbers = [pick(generator, 1, options.most) for _ in range(options.num_numbers)]
        order = [numbers[i] for i in torch.randperm(len(numbers), generator=generator).tolist()]
        text = "".join(f"{'+-*'[pick(generator, 0, 2)]}{number}" for number in order)[1:]
        found = value_of(text)
        assert found is not None
        return CountdownEnvironment(numbers, found[0], text, valid_reward=options.valid_reward)


def value_of(text: str) -> tuple[int, list[int]] | None:
    """What an expression of +, -, * and brackets gives, and the numbers in it.

    None where it is none; nothing of it is run.
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
    """Reads sums of products, from left to right."""

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
