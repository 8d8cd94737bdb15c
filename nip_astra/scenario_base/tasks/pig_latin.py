"""Translate words to Pig Latin."""

from __future__ import annotations

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

VOWELS = "aeiou"
STARTS = (*"bcdfghjklmnprstvwz", *("bl", "br", "ch", "cl", "dr", "fl", "gr", "pl", "sh", "st"), "")
ENDS = (*"bdgklmnprst", "", "")


class PigLatinEnvironment(Environment):
    """Some words, answered in one message."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = list(words)
        self.solution = " ".join(map(pig_latin, words))
        self.columns = (("words", " ".join(words)),)

    def reset(self) -> Sequence[Message]:
        return [Message("user", " ".join(self.words))]

    def step(self, message: str) -> Reaction:
        words, right = message.split(), str(self.solution).split()
        num_right = sum(a == b for a, b in zip(words, right, strict=False))
        return Reaction(reward=num_right / len(right) if len(words) == len(right) else 0.0)


@register_task(TaskType.PIG_LATIN)
class PigLatinTask(GeneratedTask):
    """Words in Pig Latin; the reward is the fraction of correct words.

    The consonants before the first vowel of a word move to its end, followed by "ay"; a word that
    begins with a vowel gets "way". Words are random syllables. The reward is 0 for a wrong number
    of words. Problems have solutions, for supervised training (`remote_api_cross_entropy`).
    """

    class Parameters(TaskParameters):
        """Length of the problems."""

        num_words: int = Field(default=1, ge=1, le=8)
        """Words per problem. More are harder."""
        most_syllables: int = Field(default=2, ge=1, le=4)
        """Maximum syllables per word. More are harder, and give more distinct words."""

    def draw(self, generator: torch.Generator) -> PigLatinEnvironment:
        options = self.parameters
        return PigLatinEnvironment(
            [
                "".join(_syllable(generator) for _ in range(count))
                for count in (
                    pick(generator, 1, options.most_syllables) for _ in range(options.num_words)
                )
            ]
        )


def pig_latin(word: str) -> str:
    """A lower-case word in Pig Latin; a word without a vowel gets "ay"."""
    place = next((i for i, letter in enumerate(word) if letter in VOWELS), 0)
    is_vowel = word[:1] in (*VOWELS,)
    return word[place:] + word[:place] + ("way" if is_vowel else "ay")


def _syllable(generator: torch.Generator) -> str:
    parts = (STARTS, VOWELS, ENDS)
    return "".join(part[pick(generator, 0, len(part) - 1)] for part in parts)
