"""Blockwise attention equals attention: values, gradients, and skipped blocks."""

from __future__ import annotations

import functools
import logging
import math
import random

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.nn.attention import flex_attention as torch_flex

from nip_astra.language_models import scoring
from nip_astra.language_models.huggingface import HuggingFaceLanguageModel
from nip_astra.language_models.tree_engine import attention
from nip_astra.language_models.tree_engine.attention import (
    FlexTrieAttention,
    TrieAttention,
    trie_attention,
)
from nip_astra.language_models.tree_engine.decoder import Attend
from nip_astra.language_models.tree_engine.token_trie import TokenTrie, build_trie


def _trie(*, pair_cost: float = 0.0) -> TokenTrie:
    """A stem of 20 tokens with three branches of 30, two of which have two branches of 15."""
    beginning = list(range(20))
    branches = [[*beginning, *range(100 * b, 100 * b + 30)] for b in (1, 2, 3)]
    leaves = [[*branch, *range(s, s + 15)] for branch in branches[:2] for s in (1000, 2000)]
    return build_trie([*leaves, branches[2]], pair_cost=pair_cost)


def _attended_with_gradients(attend: Attend, trie: TokenTrie, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(trie.num_tokens, heads, 8) for heads in (6, 2, 2)]
    inputs = [
        torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes
    ]
    attended = attend(0, *inputs)
    weights = torch.randn(attended.shape, generator=generator).to(dtype)
    return [attended.detach(), *torch.autograd.grad(attended, inputs, weights)]


@pytest.mark.parametrize("pair_cost", [0.0, 1.0])
def test_blocks_give_the_values_and_gradients_of_whole_rows(
    monkeypatch: pytest.MonkeyPatch, pair_cost: float
) -> None:
    trie = _trie(pair_cost=pair_cost)
    assert len(trie.row_lengths) == (1 if pair_cost == 0 else 3)
    whole = _attended_with_gradients(TrieAttention(trie, torch.float32), trie, torch.float32)
    monkeypatch.setattr(attention, "SMALLEST_FLASH", 0)
    monkeypatch.setattr(attention, "BLOCK_TOKENS", 16)
    in_blocks = _attended_with_gradients(TrieAttention(trie, torch.float32), trie, torch.float32)
    torch.testing.assert_close(in_blocks, whole, atol=1e-5, rtol=1e-5)


def test_in_bfloat16_blocks_are_no_less_exact_than_whole_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trie = _trie()
    exact = _attended_with_gradients(TrieAttention(trie, torch.float32), trie, torch.float32)

    def error() -> list[float]:
        result = _attended_with_gradients(TrieAttention(trie, torch.bfloat16), trie, torch.bfloat16)
        pairs = zip(result, exact, strict=True)
        return [float((mine.float() - whole).norm() / whole.norm()) for mine, whole in pairs]

    whole = error()
    monkeypatch.setattr(attention, "SMALLEST_FLASH", 0)
    monkeypatch.setattr(attention, "BLOCK_TOKENS", 16)
    for in_blocks, in_rows in zip(error(), whole, strict=True):
        assert in_blocks < 1.2 * in_rows


def test_a_block_leaves_out_tokens_that_none_of_its_tokens_sees() -> None:
    trie = _trie()
    first, *_, last = attention.split_into_blocks(trie, 15)
    assert (first.queries, first.key_ranges) == (slice(0, 15), [slice(0, 15)])
    # The last branch sees the stem and itself, out of 170 tokens.
    assert last.queries == slice(trie.num_tokens - 5, trie.num_tokens)
    assert last.key_ranges == [slice(0, 20), slice(trie.num_tokens - 30, trie.num_tokens)]
    # Of the branch's last 30 tokens, it sees all tokens before the block.
    assert last.bias_QL.shape == (5, 5)


def tree(seed: int, *, pair_cost: float = 0.0) -> TokenTrie:
    """A trie of sequences that share prefixes of all lengths."""
    numbers = random.Random(seed)
    sequences = [[numbers.randrange(6, 20) for _ in range(12)]]
    for _ in range(14):
        parent = numbers.choice(sequences)
        kept = parent[: numbers.randrange(len(parent) + 1)]
        new = [numbers.randrange(6, 20) for _ in range(numbers.randrange(1, 12))]
        sequences.append(kept + new)
    return build_trie(sequences, pair_cost=pair_cost, max_row_tokens=60 if pair_cost else math.inf)


@pytest.fixture
def _small_flex(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "SMALLEST_FLEX", 128)
    # torch computes flex attention's gradients on a CPU, but does not guarantee this.
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)


@pytest.mark.usefixtures("_small_flex")
@pytest.mark.parametrize(("seed", "pair_cost"), [(0, 0.0), (1, 0.5)])
def test_values_and_gradients_equal_those_of_dense_attention(seed: int, pair_cost: float) -> None:
    trie = tree(seed, pair_cost=pair_cost)
    assert (len(trie.row_lengths) > 1) == (pair_cost > 0)
    attentions = (FlexTrieAttention(trie), TrieAttention(trie, torch.float32))
    ours, dense = (_attended_with_gradients(one, trie, torch.float32) for one in attentions)
    torch.testing.assert_close(ours, dense, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("_small_flex")
@pytest.mark.parametrize(("seed", "pair_cost"), [(0, 0.0), (1, 0.5), (2, 0.0)])
def test_blocks_by_the_ends_of_tokens_are_those_of_all_pairs(
    seed: int, pair_cost: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "FLEX_BLOCK", 8)
    trie = tree(seed, pair_cost=pair_cost)
    ours = FlexTrieAttention(trie).block_mask
    size = (1, 1, ours.shape[-2], ours.shape[-1])
    pairs = torch_flex.create_block_mask(ours.mask_mod, *size, device="cpu", BLOCK_SIZE=8)
    for name in ("kv", "full_kv", "q", "full_q"):
        counts, indices = (f"{name}_num_blocks", f"{name}_indices")
        assert torch.equal(getattr(ours, counts), getattr(pairs, counts))
        numbers = torch.arange(getattr(ours, indices).shape[-1])
        is_used = numbers < getattr(ours, counts)[..., None]
        assert torch.equal(getattr(ours, indices)[is_used], getattr(pairs, indices)[is_used])
    assert int(ours.full_kv_num_blocks.sum()) > 0


@pytest.mark.usefixtures("_small_flex")
@torch._dynamo.config.patch(recompile_limit=2)
def test_more_shapes_than_torch_compiles_by_default_are_each_compiled_once() -> None:
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = attention.compile_flex_attention(counter)
    generator = torch.Generator().manual_seed(0)
    shapes = [(20, 2), (20, 4), (140, 2)]
    for length, heads in [*shapes, *shapes]:
        trie = build_trie([range(length), [*range(length // 2), 5]])
        sizes = ((trie.num_tokens, count, 8) for count in (heads, 2, 2))
        inputs = [torch.randn(size, generator=generator) for size in sizes]
        result = FlexTrieAttention(trie, compiled)(0, *inputs)
        dense = TrieAttention(trie, torch.float32)(0, *inputs)
        assert torch.allclose(result, dense, atol=1e-5)
    assert counter.frame_count == len(shapes) > torch._dynamo.config.recompile_limit
    torch._dynamo.reset()


@pytest.mark.usefixtures("_small_flex")
def test_the_cpu_keeps_dense_attention() -> None:
    trie = tree(0)
    assert isinstance(trie_attention(trie, torch.float32), TrieAttention)
    assert not attention.uses_flex_attention(torch.device("cpu"), torch.bfloat16)


@pytest.mark.usefixtures("_small_flex")
def test_a_kernel_that_cannot_be_compiled_is_replaced_with_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no working compiler\nlong trace")

    monkeypatch.setattr(torch, "randn", fail)
    attention.compiled_flex_attention.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert attention.compiled_flex_attention() is None
    assert "flex attention failed: no working compiler" in caplog.text
    attention.compiled_flex_attention.cache_clear()


@pytest.mark.usefixtures("_small_flex")
def test_the_mask_of_a_pass_with_gradients_is_bounded(
    tiny_model: HuggingFaceLanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    def by_blocks(trie: TokenTrie, dtype: torch.dtype) -> FlexTrieAttention:
        sizes.append(trie.num_tokens)
        return FlexTrieAttention(trie)

    def learn() -> list[torch.Tensor]:
        tiny_model.module.zero_grad()
        logprobs_BT = tiny_model.logprobs(contexts, contexts > 0, ids_BT, ids_BT > 0)
        logprobs_BT.sum().backward()
        return [logprobs_BT.detach(), *(p.grad.clone() for p in tiny_model.parameters())]

    generator = torch.Generator().manual_seed(0)
    contexts, ids_BT = (torch.randint(6, 20, (8, n), generator=generator) for n in (20, 10))
    dense = learn()
    monkeypatch.setattr(scoring, "uses_flex_attention", lambda device, dtype: True)
    monkeypatch.setattr(scoring, "trie_attention", by_blocks)
    rows = functools.partial(build_trie, max_row_tokens=60)
    monkeypatch.setattr("nip_astra.language_models.huggingface.build_trie", rows)
    tiny_model.max_batch_tokens = 64
    torch.testing.assert_close(learn(), dense, atol=1e-4, rtol=1e-5)
    assert len(sizes) > 1
    assert max(sizes) <= 64


def test_flex_attention_reads_prompts_that_share_a_beginning_in_several_passes(
    tiny_model: HuggingFaceLanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "uses_flex_attention", lambda device, dtype: True)
    limits = scoring.row_limits(tiny_model._decoder, torch.device("cuda"), torch.float32)
    prompts = [[2, *[number] * 199] for number in range(10, 26)]
    trie = build_trie(
        [[*item, *answer] for item in prompts for answer in ([5] * 40, [6] * 40)], **limits
    )
    assert max(part.num_tokens for part in trie.passes(600)) <= 600
    assert trie.num_tokens <= 1.05 * trie.num_unique
    # Answers to the same prompt stay together.
    assert len(trie.row_lengths) == len(prompts)


def test_a_long_prompt_is_forwarded_once_for_the_same_loss(
    tiny_model: HuggingFaceLanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(6, 20, (1, 520), generator=generator)
    contexts, answers = prompt.expand(4, -1), torch.randint(6, 20, (4, 30), generator=generator)
    rows = contexts, contexts > 0, answers, answers > 0

    def learn() -> tuple[float, float, float]:
        tiny_model.module.zero_grad()
        with tiny_model.counting() as spent:
            loss = tiny_model.logprobs(*rows).double().mean()
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in tiny_model.parameters()])
        return float(loss.detach()), float(norm), spent.forwarded / (520 + 4 * 29)

    loss, norm, forwarded = learn()
    assert forwarded <= 1.05
    with torch.no_grad():
        tiny_model.max_batch_tokens = 256
        assert float(tiny_model.logprobs(*rows).double().mean()) == pytest.approx(loss, rel=1e-6)
    monkeypatch.setattr(
        "nip_astra.language_models.huggingface.row_limits", lambda *_: {"max_row_tokens": 512}
    )
    cut_loss, cut_norm, cut_forwarded = learn()
    assert cut_forwarded > 3
    assert (loss, norm) == pytest.approx((cut_loss, cut_norm), rel=1e-6)
