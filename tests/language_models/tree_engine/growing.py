"""Trees of conversations, level by level, that sessions of a model generate."""

from __future__ import annotations

import random
from itertools import compress
from typing import NamedTuple

import torch
from torch import Tensor

from nip_astra.language_models.base import SamplingOptions, _UncachedSession
from nip_astra.language_models.huggingface import HuggingFaceLanguageModel
from tests.kit.tiny import uniforms_of

OPTIONS = SamplingOptions(max_new_tokens=5)


class Level(NamedTuple):
    """The turns of a level, and the scores of their tokens and of the last token before each."""

    turns: list[list[int]]
    logprobs_BT: Tensor
    span_logprobs_CT: Tensor


def grow(
    model: HuggingFaceLanguageModel,
    *,
    width: int = 2,
    branching: int = 2,
    seed: int = 0,
    is_cached: bool = True,
    is_dropping: bool = False,
) -> list[Level]:
    """Play three levels of a ragged tree; with `is_dropping` every second row ends at each."""
    numbers = random.Random(seed)

    def tokens(least: int, most: int) -> list[int]:
        return [numbers.randint(6, 20) for _ in range(numbers.randint(least, most))]

    session = model.open_session() if is_cached else _UncachedSession(model)
    openings = [[2, 4, *tokens(1, 6)] for _ in range(2)]
    contexts = [[*opening, *tokens(1, 4)] for opening in openings for _ in range(branching)]
    levels = []
    for depth in range(3):
        spans = [(len(context) - 1, len(context)) for context in contexts]
        uniforms = uniforms_of(len(contexts) * width, 5, seed=depth)
        turns = session.generate(
            contexts, width, uniforms, OPTIONS, branching=branching, spans=spans
        )
        drawn = turns.generation
        ids = [row[mask].tolist() for row, mask in zip(drawn.ids_BT, drawn.mask_BT, strict=True)]
        levels.append(Level(ids, drawn.logprobs_BT, turns.span_logprobs_CT))
        shared = [[4, *tokens(0, 3)] for _ in ids]
        contexts = [
            [*contexts[row // width], *words, *shared[row], numbers.randint(6, 20), 5]
            for row, words in enumerate(ids)
            for _ in range(branching)
        ]
        if is_dropping:
            are_kept = [row % 2 == 0 for row in range(len(ids))]
            session.keep(are_kept)
            contexts = list(
                compress(contexts, (kept for kept in are_kept for _ in range(branching)))
            )
    return levels


def assert_same(first: list[Level], second: list[Level], *, tolerance: float = 1e-4) -> None:
    """Check that both trees have the same turns, with the same scores."""
    for one, other in zip(first, second, strict=True):
        assert one.turns == other.turns
        assert torch.allclose(one.logprobs_BT, other.logprobs_BT, atol=tolerance)
        assert torch.allclose(one.span_logprobs_CT, other.span_logprobs_CT, atol=tolerance)
