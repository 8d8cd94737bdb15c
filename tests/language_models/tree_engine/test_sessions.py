"""A session generates the same as separate calls, and forwards each token once."""

from __future__ import annotations

import random
from itertools import compress
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

from nip_astra.language_models.base import SamplingOptions, _UncachedSession
from nip_astra.language_models.huggingface import HuggingFaceLanguageModel
from nip_astra.language_models.tree_engine import attention, kv_cache, sessions
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


@pytest.fixture(params=[0, 400], ids=["segments", "folded"])
def fold_tokens(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Whether shared keys are read beside a row's own or copied to it."""
    monkeypatch.setattr(kv_cache, "FOLD_TOKENS", request.param)
    return int(request.param)


@pytest.mark.parametrize(("width", "branching"), [(1, 1), (3, 1), (1, 3), (2, 2)])
@pytest.mark.parametrize(("seed", "is_dropping"), [(0, False), (1, False), (2, True), (3, True)])
def test_a_tree_is_the_same_with_and_without_caches(
    tiny_model: HuggingFaceLanguageModel,
    fold_tokens: int,
    width: int,
    branching: int,
    seed: int,
    is_dropping: bool,
) -> None:
    shape = {"width": width, "branching": branching, "seed": seed, "is_dropping": is_dropping}
    assert_same(grow(tiny_model, **shape), grow(tiny_model, is_cached=False, **shape))


@pytest.mark.parametrize("limit", [1, 7, 20])
def test_small_passes_and_few_scores_at_once_change_nothing(
    tiny_model: HuggingFaceLanguageModel, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    whole = grow(tiny_model)
    monkeypatch.setattr(tiny_model, "max_batch_tokens", limit)
    monkeypatch.setattr(sessions, "MAX_SCORES", 50)
    monkeypatch.setattr(sessions, "MAX_LOGITS", 40)
    assert_same(grow(tiny_model), whole, tolerance=1e-5)


@pytest.mark.parametrize(("width", "branching"), [(1, 1), (2, 3)])
def test_flash_attention_reads_contexts_alike(
    tiny_model: HuggingFaceLanguageModel,
    monkeypatch: pytest.MonkeyPatch,
    fold_tokens: int,
    width: int,
    branching: int,
) -> None:
    expected = grow(tiny_model, width=width, branching=branching)
    attend = mock.Mock(side_effect=attention.causal_attention)
    monkeypatch.setattr(attention, "SMALLEST_FLASH", 0)
    monkeypatch.setattr(sessions, "causal_attention", attend)
    assert_same(grow(tiny_model, width=width, branching=branching), expected, tolerance=1e-5)
    old_lengths = {call.args[1].shape[2] - call.args[0].shape[1] for call in attend.mock_calls}
    assert min(old_lengths) == 0
    assert len(old_lengths) > 1


@pytest.mark.parametrize("period", [2, 3, 100])
@pytest.mark.parametrize("is_dropping", [False, True])
def test_rows_may_leave_some_steps_after_they_have_ended(
    tiny_model: HuggingFaceLanguageModel,
    monkeypatch: pytest.MonkeyPatch,
    fold_tokens: int,
    is_dropping: bool,
    period: int,
) -> None:
    """As on a GPU, where a check synchronises with the device."""
    at_once = grow(tiny_model, seed=2, is_dropping=is_dropping)
    monkeypatch.setattr(sessions.CachedSession, "check_period", period)
    later = grow(tiny_model, seed=2, is_dropping=is_dropping)
    assert len({len(ids) for ids in at_once[0].turns}) > 1
    assert_same(later, at_once, tolerance=1e-5)


def test_caches_of_long_conversations_are_seldom_copied(
    tiny_model: HuggingFaceLanguageModel,
) -> None:
    options = SamplingOptions(max_new_tokens=3, min_new_tokens=3)
    session, rows, places = tiny_model.open_session(), [[2, 4, 6], [2, 4, 7]], set()
    for turn in range(14):
        uniforms = uniforms_of(2, 3, seed=turn)
        drawn = session.generate(rows, 1, uniforms, options).generation
        alone = tiny_model.generate(rows, 1, uniforms, options)
        assert torch.equal(drawn.ids_BT, alone.ids_BT)
        assert torch.allclose(drawn.logprobs_BT, alone.logprobs_BT, atol=1e-5)
        rows = [[*row, *ids, 8, 9] for row, ids in zip(rows, drawn.ids_BT.tolist(), strict=True)]
        places.add(session._tree.top.keys.data_ptr())
        assert session._tree.top.keys.shape[-1] <= 1.25 * len(rows[0]) + 5
    assert len(places) <= 8


def test_each_token_of_a_tree_is_forwarded_once(tiny_model: HuggingFaceLanguageModel) -> None:
    session = tiny_model.open_session()
    options = SamplingOptions(max_new_tokens=4, min_new_tokens=4)
    contexts = [[2, 4, 6, 7], [2, 4, 8, 9, 10]]
    with tiny_model.counting() as first:
        drawn = session.generate(contexts, 3, torch.rand(6, 4), options).generation
    # The start [2, 4] once, the rest of each context, and all but the last token of six turns.
    assert first.forwarded == 2 + 2 + 3 + 6 * 3
    assert first.generated == 24
    longer = [[*contexts[row // 3], *ids, 11, 12] for row, ids in enumerate(drawn.ids_BT.tolist())]
    with tiny_model.counting() as second:
        session.generate(longer, 1, torch.rand(6, 4), options)
    # The last token of each turn, two more, and three of the new turn.
    assert second.forwarded == 6 * (1 + 2 + 3)
    session.keep([True, False, False, True, False, False])
    kept = session._cached_rows
    with tiny_model.counting() as third:
        session.generate([[*row, 6, 12, 13] for row in kept], 1, torch.rand(2, 4), options)
    assert third.forwarded == 2 * (3 + 3)


def test_rows_that_have_ended_are_forwarded_no_more(tiny_model: HuggingFaceLanguageModel) -> None:
    options = SamplingOptions(max_new_tokens=8, temperature=2.0)
    with tiny_model.counting() as spent:
        drawn = tiny_model.generate([[2, 4, 6]], 40, torch.rand(40, 8), options)
    lengths = drawn.mask_BT.sum(dim=1)
    assert int(lengths.min()) < 8
    assert spent.forwarded == 3 + int((lengths - 1).sum())


def test_contexts_that_continue_no_row_are_read_anew(tiny_model: HuggingFaceLanguageModel) -> None:
    session = tiny_model.open_session()
    uniforms = uniforms_of(2, 5)
    first = session.generate([[2, 4, 6], [2, 4, 7]], 1, uniforms, OPTIONS).generation
    other = [[2, 4, 9, 9, 9, 9, 9, 9, 9], [2, 8, 8, 8, 8, 8, 8, 8]]
    again = session.generate(other, 1, uniforms, OPTIONS).generation
    assert torch.equal(again.ids_BT, tiny_model.generate(other, 1, uniforms, OPTIONS).ids_BT)
    session.close()
    assert not session._tree.blocks
    reopened = session.generate([[2, 4, 6], [2, 4, 7]], 1, uniforms, OPTIONS).generation
    assert torch.equal(reopened.ids_BT, first.ids_BT)
