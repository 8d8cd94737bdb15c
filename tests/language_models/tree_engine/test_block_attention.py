"""Attention in blocks is attention: values, gradients, and what is left out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nip_astra.language_models.tree_engine import attention
from nip_astra.language_models.tree_engine.attention import TrieAttention
from nip_astra.language_models.tree_engine.token_trie import TokenTrie, build_trie


def _trie(*, pair_cost: float = 0.0) -> TokenTrie:
    """A beginning of 20 tokens with three branches of 30, two of them with two of 15."""
    beginning = list(range(20))
    branches = [[*beginning, *range(100 * b, 100 * b + 30)] for b in (1, 2, 3)]
    leaves = [[*branch, *range(s, s + 15)] for branch in branches[:2] for s in (1000, 2000)]
    return build_trie([*leaves, branches[2]], pair_cost=pair_cost)


def _attended_with_gradients(attend: TrieAttention, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(attend.trie.num_tokens, heads, 8) for heads in (6, 2, 2)]
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
    whole = _attended_with_gradients(TrieAttention(trie, torch.float32), torch.float32)
    monkeypatch.setattr(attention, "SMALLEST_IN_BLOCKS", 0)
    monkeypatch.setattr(attention, "BLOCK_TOKENS", 16)
    in_blocks = _attended_with_gradients(TrieAttention(trie, torch.float32), torch.float32)
    for found, expected in zip(in_blocks, whole, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_in_bfloat16_blocks_are_no_less_exact_than_whole_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trie = _trie()
    exact = _attended_with_gradients(TrieAttention(trie, torch.float32), torch.float32)

    def error() -> list[float]:
        found = _attended_with_gradients(TrieAttention(trie, torch.bfloat16), torch.bfloat16)
        return [float((a.float() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]

    whole = error()
    monkeypatch.setattr(attention, "SMALLEST_IN_BLOCKS", 0)
    monkeypatch.setattr(attention, "BLOCK_TOKENS", 16)
    for in_blocks, in_rows in zip(error(), whole, strict=True):
        assert in_blocks < 1.2 * in_rows


def test_a_block_leaves_out_what_none_of_its_tokens_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "BLOCK_TOKENS", 15)
    trie = _trie()
    last = attention.blocks_of(trie, group=3)[-1]
    # The last branch sees the beginning and itself, of 170 tokens.
    assert (last.start, last.stop) == (trie.num_tokens - 5, trie.num_tokens)
    assert last.keys_L.tolist() == [*range(20), *range(trie.num_tokens - 30, trie.num_tokens)]
    assert last.bias_QL.shape == (5 * 3, 50)
