"""A session generates the same as separate calls, and forwards each token once."""

from __future__ import annotations

import random
from itertools import compress

import pytest
import torch

from nip_astra.language_models.base import SamplingOptions, _UncachedSession
from nip_astra.language_models.huggingface import HuggingFaceLanguageModel
from nip_astra.language_models.tree_engine import kv_cache, sessions
from tests.kit.tiny import uniforms_of

OPTIONS = SamplingOptions(max_new_tokens=5)


@pytest.fixture(params=[0, 400], ids=["segments", "folded"])
def fold_tokens(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Whether shared keys are read beside a row's own or copied to it."""
    monkeypatch.setattr(kv_cache, "FOLD_TOKENS", request.param)
    return int(request.param)


def _grow(
    model: HuggingFaceLanguageModel,
    *,
    cached: bool,
    width: int,
    branching: int,
    seed: int,
    dropping: bool = False,
) -> list[tuple[list[list[int]], torch.Tensor, torch.Tensor]]:
    """Play three levels of a ragged tree; return tokens, and scores of tokens and spans."""
    chance = random.Random(seed)
    session = model.open_session() if cached else _UncachedSession(model)
    openings = [[2, 4, *(chance.randint(6, 20) for _ in range(chance.randint(1, 6)))] for _ in "ab"]
    contexts = [
        [*opening, *(chance.randint(6, 20) for _ in range(chance.randint(1, 4)))]
        for opening in openings
        for _ in range(branching)
    ]
    found = []
    for level in range(3):
        spans = [(len(context) - 1, len(context)) for context in contexts]
        uniforms = uniforms_of(len(contexts) * width, 5, seed=level)
        turns = session.generate(
            contexts, width, uniforms, OPTIONS, branching=branching, spans=spans
        )
        drawn = turns.generation
        ids = [row[mask].tolist() for row, mask in zip(drawn.ids_BT, drawn.mask_BT, strict=True)]
        assert turns.span_logprobs_CT is not None
        found.append((ids, drawn.logprobs_BT, turns.span_logprobs_CT))
        shared = [[4, *(chance.randint(6, 20) for _ in range(chance.randint(0, 3)))] for _ in ids]
        contexts = [
            [*contexts[row // width], *words, *shared[row], chance.randint(6, 20), 5]
            for row, words in enumerate(ids)
            for _ in range(branching)
        ]
        if dropping:
            are_kept = [row % 2 == 0 for row in range(len(ids))]
            session.keep(are_kept)
            kept = [is_kept for is_kept in are_kept for _ in range(branching)]
            contexts = list(compress(contexts, kept))
    return found


@pytest.mark.parametrize(("width", "branching"), [(1, 1), (3, 1), (1, 3), (2, 2)])
@pytest.mark.parametrize(("seed", "dropping"), [(0, False), (1, False), (2, True), (3, True)])
def test_a_tree_is_the_same_with_and_without_caches(
    tiny_model: HuggingFaceLanguageModel,
    fold_tokens: int,
    width: int,
    branching: int,
    seed: int,
    dropping: bool,
) -> None:
    shape = {"width": width, "branching": branching, "seed": seed, "dropping": dropping}
    with_caches = _grow(tiny_model, cached=True, **shape)
    without = _grow(tiny_model, cached=False, **shape)
    for ours, plain in zip(with_caches, without, strict=True):
        assert ours[0] == plain[0]
        assert torch.allclose(ours[1], plain[1], atol=1e-4)
        assert torch.allclose(ours[2], plain[2], atol=1e-4)


@pytest.mark.parametrize("limit", [1, 7, 20])
def test_small_passes_and_few_scores_at_once_change_nothing(
    tiny_model: HuggingFaceLanguageModel, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    whole = _grow(tiny_model, cached=True, width=2, branching=2, seed=0)
    monkeypatch.setattr(tiny_model, "max_batch_tokens", limit)
    monkeypatch.setattr(sessions, "MAX_SCORES", 50)
    monkeypatch.setattr(sessions, "MAX_LOGITS", 40)
    parts = _grow(tiny_model, cached=True, width=2, branching=2, seed=0)
    for one, other in zip(whole, parts, strict=True):
        assert one[0] == other[0]
        assert torch.allclose(one[1], other[1], atol=1e-5)


@pytest.mark.parametrize("period", [2, 3, 100])
@pytest.mark.parametrize("dropping", [False, True])
def test_rows_may_leave_some_steps_after_they_have_ended(
    tiny_model: HuggingFaceLanguageModel,
    monkeypatch: pytest.MonkeyPatch,
    fold_tokens: int,
    dropping: bool,
    period: int,
) -> None:
    """As on a GPU, where a check synchronises with the device."""
    shape = {"width": 2, "branching": 2, "seed": 2, "dropping": dropping}
    at_once = _grow(tiny_model, cached=True, **shape)
    monkeypatch.setattr(sessions.CachedSession, "check_period", period)
    later = _grow(tiny_model, cached=True, **shape)
    assert len({len(ids) for ids in at_once[0][0]}) > 1
    for one, other in zip(at_once, later, strict=True):
        assert one[0] == other[0]
        assert torch.allclose(one[1], other[1], atol=1e-5)
        assert torch.allclose(one[2], other[2], atol=1e-5)


def test_caches_of_long_conversations_are_seldom_copied(
    tiny_model: HuggingFaceLanguageModel,
) -> None:
    options = SamplingOptions(max_new_tokens=3, min_new_tokens=3)
    session, rows, places = tiny_model.open_session(), [[2, 4, 6], [2, 4, 7]], set()
    assert isinstance(session, sessions.CachedSession)
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
    kept = session._cached
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
    assert isinstance(session, sessions.CachedSession)
    uniforms = uniforms_of(2, 5)
    first = session.generate([[2, 4, 6], [2, 4, 7]], 1, uniforms, OPTIONS).generation
    other = [[2, 4, 9, 9, 9, 9, 9, 9, 9], [2, 8, 8, 8, 8, 8, 8, 8]]
    again = session.generate(other, 1, uniforms, OPTIONS).generation
    assert torch.equal(again.ids_BT, tiny_model.generate(other, 1, uniforms, OPTIONS).ids_BT)
    session.close()
    assert not session._tree.blocks
    reopened = session.generate([[2, 4, 6], [2, 4, 7]], 1, uniforms, OPTIONS).generation
    assert torch.equal(reopened.ids_BT, first.ids_BT)
