"""Tasks with generated problems: arithmetic, countdown, number guessing and Pig Latin."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field

from nip_astra.parameters.types import TaskType
from nip_astra.rollouts.messages import Turn
from nip_astra.scenario_base.tasks.base import (
    Environment,
    Reaction,
    TaskParameters,
    pick,
    register_environment,
)
from nip_astra.scenario_base.tasks.tools import register_tool


@register_environment(TaskType.ARITHMETIC)
class ArithmeticEnvironment(Environment):
    """Sums, differences and products; the reward is 1 for exactly the right number, else 0.

    Levels: 1 `a+b` of digits, 2 `a+b` to 49, 3 `a-b` to 49, 4 `a*b` to 9, 5 `a+b` to 999, 6
    `a+b*c`.
    """

    is_stateless = True

    class Parameters(TaskParameters):
        """Difficulty of the problems."""

        levels: list[Literal[1, 2, 3, 4, 5, 6]] = Field(default=[1, 2, 3], min_length=1)
        """Levels to draw from uniformly; repeat a level to draw it more often. Larger is harder."""

    @classmethod
    def draw(cls, parameters: Any, generator: torch.Generator) -> ArithmeticEnvironment:
        levels = parameters.levels
        level = levels[pick(generator, 0, len(levels) - 1)]
        return draw_arithmetic_problem(level, generator)

    def __init__(self, problem: str, answer: int) -> None:
        self.problem = problem
        self.answer = answer
        self.solution = str(answer)
        self.columns = (("problem", problem), ("answer", answer))

    def reset(self) -> Sequence[Turn]:
        return [Turn("user", f"{self.problem}=")]

    def step(self, message: str) -> Reaction:
        number = re.fullmatch(r"\s*(-?\d{1,18})\s*", message, flags=re.ASCII)
        is_answer = number is not None and int(number[1]) == self.answer
        return Reaction(reward=float(is_answer))


def draw_arithmetic_problem(level: int, generator: torch.Generator) -> ArithmeticEnvironment:
    """Return a problem of a level, from 1 to 6."""
    largest = {1: 9, 2: 49, 3: 49, 4: 9, 5: 999}.get(level, 9)
    a = pick(generator, 0, largest)
    b = pick(generator, 0, largest)
    if level in (1, 2, 5):
        return ArithmeticEnvironment(f"{a}+{b}", a + b)
    if level == 3:
        return ArithmeticEnvironment(f"{a}-{b}", a - b)
    if level == 4:
        return ArithmeticEnvironment(f"{a}*{b}", a * b)
    c = pick(generator, 0, largest)
    return ArithmeticEnvironment(f"{a}+{b}*{c}", a + b * c)


_TERM = re.compile(r"\d+|[-+*()]")
MAX_LENGTH = 200
"""Maximum length of an answer, in characters."""


@register_environment(TaskType.COUNTDOWN)
class CountdownEnvironment(Environment):
    """Use each number once, with +, - and *, to make the target; a solution always exists."""

    is_stateless = True

    class Parameters(TaskParameters):
        """Size of the problems, and reward of a valid but wrong answer."""

        num_numbers: int = Field(default=3, ge=2, le=6)
        """Numbers of a problem. More are harder."""
        most: int = Field(default=9, ge=2, le=1000)
        """Largest number given."""
        valid_reward: float = Field(default=0.1, ge=0, lt=1)
        """Reward of an expression that uses each number once but misses the target. Larger teaches
        the format faster, but rewards wrong answers."""

    @classmethod
    def draw(cls, parameters: Any, generator: torch.Generator) -> CountdownEnvironment:
        numbers = [pick(generator, 1, parameters.most) for _ in range(parameters.num_numbers)]
        # The target is that of a random expression, so that a solution exists.
        order = torch.randperm(len(numbers), generator=generator).tolist()
        expression = ""
        for index in order:
            operator = "+-*"[pick(generator, 0, 2)]
            expression += f"{operator}{numbers[index]}"
        # Without the first operator.
        expression = expression[1:]
        parsed = parse_expression(expression)
        assert parsed is not None
        return cls(numbers, parsed.value, expression, valid_reward=parameters.valid_reward)

    def __init__(
        self, numbers: Sequence[int], target: int, solution: str, *, valid_reward: float
    ) -> None:
        self.numbers = list(numbers)
        self.target = target
        self.solution = solution
        self.valid_reward = valid_reward
        # Sorted: the order of the numbers makes no other problem.
        sorted_numbers = " ".join(map(str, sorted(numbers)))
        self.columns = (("numbers", sorted_numbers), ("target", target))

    def reset(self) -> Sequence[Turn]:
        numbers = " ".join(map(str, self.numbers))
        return [Turn("user", f"make {self.target} from {numbers}")]

    def step(self, message: str) -> Reaction:
        parsed = parse_expression(message)
        if parsed is None or Counter(parsed.numbers) != Counter(self.numbers):
            return Reaction(reward=0.0)
        return Reaction(reward=1.0 if parsed.value == self.target else self.valid_reward)


class Expression(NamedTuple):
    """A parsed expression."""

    value: int
    numbers: list[int]
    """Its numbers, in order."""


def parse_expression(text: str) -> Expression | None:
    """Return value and numbers of an expression of +, -, * and brackets, or None if it is invalid.

    The expression is parsed, never executed.
    """
    text = text.strip()
    terms = _TERM.findall(text)
    has_other_characters = "".join(terms) != text.replace(" ", "")
    if not terms or len(text) > MAX_LENGTH or has_other_characters:
        return None
    try:
        value = _Parser(terms).parse()
    except (ValueError, IndexError, RecursionError):
        return None
    numbers = [int(term) for term in terms if term.isdecimal()]
    return Expression(value, numbers)


@register_tool("calculator")
def calculator(expression: str) -> str:
    """Value of an expression of whole numbers with +, -, * and brackets."""
    parsed = parse_expression(expression)
    if parsed is None:
        raise ValueError(f"{expression[:40]!r} is not an expression of whole numbers")
    return str(parsed.value)


class _Parser:
    """Parser of sums of products, from left to right."""

    def __init__(self, terms: Sequence[str]) -> None:
        self.terms = terms
        self.position = 0

    def parse(self) -> int:
        """Return the value of the whole expression."""
        total = self._parse_sum()
        if self.position != len(self.terms):
            raise ValueError("something follows the expression")
        return total

    def _peek(self) -> str:
        return self.terms[self.position] if self.position < len(self.terms) else ""

    def _take(self) -> str:
        term = self.terms[self.position]
        self.position += 1
        return term

    def _parse_sum(self) -> int:
        total = self._parse_product()
        while self._peek() in ("+", "-"):
            sign = 1 if self._take() == "+" else -1
            total += sign * self._parse_product()
        return total

    def _parse_product(self) -> int:
        product = self._parse_number()
        while self._peek() == "*":
            self._take()
            product *= self._parse_number()
        return product

    def _parse_number(self) -> int:
        term = self._take()
        if term != "(":
            return int(term)
        total = self._parse_sum()
        if self._take() != ")":
            raise ValueError("a bracket is not closed")
        return total


@register_environment(TaskType.GUESS_NUMBER)
class GuessNumberEnvironment(Environment):
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

    @classmethod
    def draw(cls, parameters: Any, generator: torch.Generator) -> GuessNumberEnvironment:
        start = pick(generator, 1, parameters.num_starts)
        hidden = pick(generator, start, start + parameters.most - 1)
        return cls(hidden, start, parameters.most, parameters.max_turns)

    def __init__(self, hidden: int, start: int, most: int, max_turns: int) -> None:
        self.hidden = hidden
        self.start = start
        self.range_size = most
        self.max_turns = max_turns
        self.num_turns = 0
        self.columns = (("hidden", hidden), ("start", start), ("most", most))

    def reset(self) -> Sequence[Turn]:
        self.num_turns = 0
        last = self.start + self.range_size - 1
        return [Turn("user", f"guess {self.start} to {last}")]

    def step(self, message: str) -> Reaction:
        self.num_turns += 1
        match = re.fullmatch(r"\s*(\d{1,9})\s*", message, flags=re.ASCII)
        guess = None if match is None else int(match[1])
        if guess == self.hidden:
            return Reaction(reward=1 - (self.num_turns - 1) / (2 * self.max_turns))
        if self.num_turns == self.max_turns:
            return Reaction(reward=0.0)
        hint = "number?"
        if guess is not None:
            hint = "higher" if guess < self.hidden else "lower"
        return Reaction([Turn("user", hint)], is_over=False)


VOWELS = "aeiou"
STARTS = [*"bcdfghjklmnprstvwz", "bl", "br", "ch", "cl", "dr", "fl", "gr", "pl", "sh", "st", ""]
ENDS = [*"bdgklmnprst", "", ""]


@register_environment(TaskType.PIG_LATIN)
class PigLatinEnvironment(Environment):
    """Words in Pig Latin; the reward is the fraction of correct words.

    The consonants before the first vowel of a word move to its end, followed by "ay"; a word that
    begins with a vowel gets "way". Words are random syllables. The reward is 0 for a wrong number
    of words. Problems have solutions, for supervised training (`remote_api_cross_entropy`).
    """

    is_stateless = True

    class Parameters(TaskParameters):
        """Length of the problems."""

        num_words: int = Field(default=1, ge=1, le=8)
        """Words per problem. More are harder."""
        most_syllables: int = Field(default=2, ge=1, le=4)
        """Maximum syllables per word. More are harder, and give more distinct words."""

    @classmethod
    def draw(cls, parameters: Any, generator: torch.Generator) -> PigLatinEnvironment:
        words = []
        for _ in range(parameters.num_words):
            num_syllables = pick(generator, 1, parameters.most_syllables)
            words.append("".join(_draw_syllable(generator) for _ in range(num_syllables)))
        return cls(words)

    def __init__(self, words: Sequence[str]) -> None:
        self.words = list(words)
        self.solution = " ".join(map(pig_latin, words))
        self.columns = (("words", " ".join(words)),)

    def reset(self) -> Sequence[Turn]:
        return [Turn("user", " ".join(self.words))]

    def step(self, message: str) -> Reaction:
        words = message.split()
        correct_words = str(self.solution).split()
        if len(words) != len(correct_words):
            return Reaction(reward=0.0)
        num_correct = sum(
            word == correct for word, correct in zip(words, correct_words, strict=True)
        )
        return Reaction(reward=num_correct / len(correct_words))


def pig_latin(word: str) -> str:
    """Return a lower-case word in Pig Latin; a word without a vowel gets "ay"."""
    vowel_positions = [index for index, letter in enumerate(word) if letter in VOWELS]
    first_vowel = vowel_positions[0] if vowel_positions else 0
    begins_with_vowel = bool(vowel_positions) and first_vowel == 0
    suffix = "way" if begins_with_vowel else "ay"
    return word[first_vowel:] + word[:first_vowel] + suffix


def _draw_syllable(generator: torch.Generator) -> str:
    parts = [sounds[pick(generator, 0, len(sounds) - 1)] for sounds in (STARTS, VOWELS, ENDS)]
    return "".join(parts)
