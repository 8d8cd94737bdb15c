"""Prompts are reused by their prefixes, and rows of different lengths attend like single rows."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F

from nip_astra.language_models.tree_engine import kv_cache
from nip_astra.language_models.tree_engine.kv_cache import (
    BLOCK_TOKENS,
    KVCache,
    PartAttention,
    PrefilledPrompt,
    PromptCache,
    PromptPart,
    count_shared,
)

SHAPE = LAYERS, HEADS, DIM = 1, 2, 4
CPU = torch.device("cpu")


def prompt_of(*ids: int) -> PrefilledPrompt:
    return PrefilledPrompt(ids, torch.empty(0), torch.empty(0))


def test_the_kept_prompt_with_the_longest_common_beginning_is_found() -> None:
    draw = random.Random(0)
    kept = PromptCache(max_prompts=20, max_tokens=10_000)
    known: list[tuple[int, ...]] = []
    for _ in range(60):
        start = draw.choice(known)[: draw.randrange(80)] if known else ()
        ids = (*start, *(draw.randrange(2) for _ in range(draw.randrange(5, 60))))
        newest = known[-20:]
        most = max((min(count_shared(item, ids), len(ids) - 1) for item in newest), default=0)
        result, length = kept.find_nearest(ids, None)
        if ids in newest:
            assert length == len(ids) - 1
        elif most < BLOCK_TOKENS:
            assert (result, length) == (None, 0)
        else:
            assert (length, result.ids[:length]) == (most, ids[:most])
        if ids not in known:
            kept.add(prompt_of(*ids), None)
            known.append(ids)


def test_prompts_of_another_owner_are_not_found() -> None:
    kept, ids, owner = PromptCache(4, 1000), tuple(range(40)), object()
    kept.add(prompt_of(*ids), owner)
    assert kept.find_nearest(ids, None) == (None, 0)
    assert kept.find_nearest(ids, owner)[1] == 39
    assert kept.renew(ids, owner)
    assert not kept.renew(ids, None)


def test_the_prompt_kept_longest_is_dropped_unless_renewed() -> None:
    kept = PromptCache(max_prompts=3, max_tokens=90)
    prompts = [tuple(range(start, start + 30)) for start in (0, 100, 200, 300)]
    for ids in prompts[:3]:
        kept.add(prompt_of(*ids), None)
    kept.renew(prompts[0], None)
    kept.add(prompt_of(*prompts[3]), None)
    assert [kept.find_nearest(ids, None)[1] for ids in prompts] == [29, 0, 29, 29]
    kept.add(prompt_of(*range(400, 480)), None)
    assert [kept.find_nearest(ids, None)[1] for ids in prompts] == [0] * 4


@pytest.mark.parametrize("most_pairs", [0, 100, 1 << 18])
def test_rows_attend_to_their_own_tokens_however_they_are_grouped(
    monkeypatch: pytest.MonkeyPatch, most_pairs: int
) -> None:
    monkeypatch.setattr(kv_cache, "MAX_PADDED_PAIRS", most_pairs)
    torch.manual_seed(0)
    starts, counts = [5, 0, 3, 0, 2], [1, 1, 2, 7, 9]
    cache = KVCache(SHAPE, torch.float32, CPU)
    contexts = [torch.randn(2, start, HEADS, DIM) for start in starts]
    for (keys, values), start in zip(contexts, starts, strict=True):
        prompt = cache.allocate_prompt(tuple(range(start + 1)))
        if start:
            PartAttention([PromptPart(prompt, 0, start)])(
                0, torch.randn(start, HEADS, DIM), keys, values
            )
        cache.add(prompt, start)
    attention = cache.advance(counts)
    queries, keys, values = (torch.randn(sum(counts), HEADS, DIM) for _ in range(3))
    result = torch.split(attention(0, queries, keys, values), counts)
    assert cache.lengths == [start + count for start, count in zip(starts, counts, strict=True)]
    new = zip(*(torch.split(x, counts) for x in (queries, keys, values)), strict=True)
    for row, (query, key, value) in enumerate(new):
        all_keys, all_values = (
            torch.cat([old, item]).transpose(0, 1)
            for old, item in zip(contexts[row], (key, value), strict=True)
        )
        seen = torch.ones(len(query), all_keys.shape[1], dtype=torch.bool).tril(starts[row])
        expected = F.scaled_dot_product_attention(
            query.transpose(0, 1), all_keys, all_values, attn_mask=seen, scale=1.0
        )
        torch.testing.assert_close(result[row], expected.transpose(0, 1).flatten(1))
