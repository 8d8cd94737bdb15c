"""Attention over token tries by torch's flex attention, which skips blocks that nobody sees.

Experimental: tested with the uncompiled kernel, not run on a GPU yet.

The dense way computes every pair of tokens of a row and hides those that do not follow from each
other. Here all rows of a pass are one sequence, and blocks of 128 by 128 pairs without a visible
one are not computed. It pays on a GPU, where the kernel is compiled.

Shape suffixes: `N` token, padding included, `H` query head, `K` key-value head, `D` head dimension.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from nip_astra.language_models.tree_engine.attention import TrieAttention
from nip_astra.language_models.tree_engine.token_trie import TokenTrie
from nip_astra.utils.experimental import Experimental, tell_experimental

logger = logging.getLogger(__name__)

SMALLEST = 512
"""Tokens of the shortest sequence that is compiled for; fewer are computed densely."""


class FlexTrieAttention:
    """Attention within the rows of a trie; gradients flow.

    Parameters
    ----------
    trie : TokenTrie
        On the device of the model.
    attend : Callable
        `flex_attention`, compiled or not.
    """

    def __init__(self, trie: TokenTrie, attend: Callable[..., Any] = flex_attention) -> None:
        self.num_tokens = trie.num_tokens
        # Each size is compiled for once, so there are few: powers of two.
        self.size = max(SMALLEST, 1 << (trie.num_tokens - 1).bit_length())
        self.block_mask = _block_mask(trie, self.size)
        self._attend = attend

    def __call__(
        self, layer: int, queries_NHD: Tensor, keys_NKD: Tensor, values_NKD: Tensor
    ) -> Tensor:
        """The attended values `[N, H * D]`; the queries carry the scale."""
        padding = (0, 0, 0, 0, 0, self.size - self.num_tokens)
        inputs = (
            F.pad(x, padding).transpose(0, 1).unsqueeze(0)
            for x in (queries_NHD, keys_NKD, values_NKD)
        )
        attended_1HND: Tensor = self._attend(
            *inputs, block_mask=self.block_mask, scale=1.0, enable_gqa=True
        )
        return attended_1HND[0, :, : self.num_tokens].transpose(0, 1).flatten(1)


def _block_mask(trie: TokenTrie, size: int) -> BlockMask:
    """Let each token see itself and its ancestors: those before it that have not ended.

    A row's tokens end within the row, so that rows need no mask of their own. Padding sees itself.
    """
    device = trie.ids_N.device
    lengths = torch.tensor(trie.row_lengths, device=device)
    starts_N = torch.repeat_interleave(
        lengths.cumsum(0) - lengths, lengths, output_size=trie.num_tokens
    )
    padding = torch.arange(trie.num_tokens, size, device=device)
    ends_N = torch.cat([trie.ends_N + starts_N, padding + 1])

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < ends_N[key])

    mask: BlockMask = create_block_mask(sees, None, None, size, size, device=device)
    return mask


@lru_cache(maxsize=1)
def compiled_flex_attention() -> Callable[..., Any] | None:
    """Compile flex attention and try it, with gradients, once in a process.

    Returns
    -------
    Callable or None
        None, with a line in the log, where it cannot be compiled.
    """
    compiled: Callable[..., Any] = torch.compile(flex_attention)
    try:
        inputs = [torch.randn(1, 2, SMALLEST, 64, device="cuda") for _ in range(3)]
        mask = create_block_mask(
            lambda batch, head, query, key: key <= query, None, None, SMALLEST, SMALLEST, "cuda"
        )
        for x in inputs:
            x.requires_grad_(True)
        with torch.enable_grad():
            compiled(*inputs, block_mask=mask, scale=1.0, enable_gqa=True).sum().backward()
        torch.cuda.synchronize()
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        logger.warning("trees are scored with dense attention: flex attention failed: %s", reason)
        return None
    tell_experimental(Experimental.FLEX_ATTENTION)
    logger.info("trees are scored with flex attention")
    return compiled


def uses_flex_attention(device: torch.device) -> bool:
    """Say whether trees on a device are attended to by blocks."""
    return device.type == "cuda" and compiled_flex_attention() is not None


def trie_attention(trie: TokenTrie, dtype: torch.dtype) -> FlexTrieAttention | TrieAttention:
    """The attention that is fastest for a trie where it lies."""
    compiled = compiled_flex_attention() if trie.ids_N.device.type == "cuda" else None
    if compiled is None or trie.num_tokens < SMALLEST:
        return TrieAttention(trie, dtype)
    return FlexTrieAttention(trie, compiled)
