"""Attention over token trees: each token sees itself and its ancestors, which are stored once.

Shape suffixes: `N` token, `R` row, `T` query position, `K` key-value head, `G` query heads of one
key-value head, `H` all query heads, `D` head dimension, `L` key position, `P` group of rows that
share keys.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from nip_astra.errors import reason_of
from nip_astra.language_models.tree_engine.token_trie import TokenTrie, build_trie

logger = logging.getLogger(__name__)

SMALLEST_FLASH = 1 << 25
"""Number of multiplications for the scores of a row's own tokens from which a CPU uses flash
attention. A layer of SmolLM2 reads 8 contexts of 512 tokens in 0.25 of the time, one of 2,000 in
0.15, and with gradients a trie of 250 tokens in half, of 650 in 0.4. Few tokens after many shared
ones, which are below the limit, would take 1.2."""
FEWEST_FLASH_TOKENS = 64
"""Tokens of a context from which a GPU does; fewer would not repay the copies of shared keys."""
BLOCK_TOKENS = 96
"""Tokens per block; smaller blocks compute fewer unrelated pairs, in more and smaller products. For
rows of 2,000 tokens and more twice as many are faster."""
SMALLEST_FLEX = 4096
"""Minimum sequence length for compiled flex attention. On an H200 in bfloat16, a layer with its
gradients took 1.4 times as long as dense attention at 2,048 tokens, and 0.87 at 8,192."""
FLEX_BLOCK = 128
"""Tokens per block that flex attention skips or computes."""
MAX_COMPILED = 128
"""Maximum number of flex attention kernels per process: sizes are powers of two."""


def grouped_attention(
    queries_NHD: Tensor, keys_KLD: Tensor, values_KLD: Tensor, mask_NL: Tensor | None
) -> Tensor:
    """Compute attention to one sequence, causal without a mask, `[N, H * D]`; queries scaled."""
    num_tokens, _, dim = queries_NHD.shape
    grouped_KGND = queries_NHD.view(num_tokens, len(keys_KLD), -1, dim).permute(1, 2, 0, 3)
    size = (*grouped_KGND.shape[:2], -1, -1)
    attended_KGND = F.scaled_dot_product_attention(
        grouped_KGND,
        # Query heads of one group read the same keys, without copies of them.
        keys_KLD.unsqueeze(1).expand(size),
        values_KLD.unsqueeze(1).expand(size),
        attn_mask=mask_NL,
        is_causal=mask_NL is None,
        scale=1.0,
    )
    return attended_KGND.permute(2, 0, 1, 3).reshape(num_tokens, -1)


class TrieAttention:
    """Attention within the rows of a trie; gradients flow.

    On a CPU long rows are computed in blocks that skip unrelated tokens.
    """

    def __init__(self, trie: TokenTrie, dtype: torch.dtype) -> None:
        self.trie = trie
        self.dtype = dtype
        self.row_lengths = trie.row_lengths
        self._blocks: list[Block] | None = None

    @cached_property
    def biases(self) -> list[Tensor]:
        """Return each row's additive mask: 0 for visible tokens, -inf elsewhere."""
        return [
            torch.zeros(mask.shape, dtype=self.dtype, device=mask.device).masked_fill_(
                ~mask, float("-inf")
            )
            for mask in self.trie.row_masks()
        ]

    def __call__(
        self, layer: int, queries_NHD: Tensor, keys_NKD: Tensor, values_NKD: Tensor
    ) -> Tensor:
        """Return the attended values `[N, H * D]`; the queries are scaled."""
        if self._is_in_blocks(queries_NHD):
            if self._blocks is None:
                is_short = max(self.row_lengths) < 2000
                size = BLOCK_TOKENS if is_short else 2 * BLOCK_TOKENS
                self._blocks = blocks_of(self.trie, size)
            return block_attention(queries_NHD, keys_NKD, values_NKD, self._blocks)
        rows = []
        inputs = (queries_NHD, keys_NKD, values_NKD)
        splits = (torch.split(x, self.row_lengths) for x in inputs)
        for query, key, value, bias in zip(*splits, self.biases, strict=True):
            keys_KLD, values_KLD = key.transpose(0, 1), value.transpose(0, 1)
            rows.append(grouped_attention(query, keys_KLD, values_KLD, bias))
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def _is_in_blocks(self, queries_NHD: Tensor) -> bool:
        longest = max(self.row_lengths, default=0)
        return (
            queries_NHD.device.type == "cpu"
            and _num_products(queries_NHD, longest) >= SMALLEST_FLASH
        )


class SharedKeys(NamedTuple):
    """Keys and values shared by several rows."""

    keys: Tensor
    """`[P, K, D, L]`; row r reads group `r // (R / P)`."""
    values: Tensor
    """`[P, K, L, D]`."""
    bias: Tensor | None
    """`[P, 1, 1, 1 or T, 1, L]`: 0 for visible keys, -inf for others; None if all are visible."""


def is_flash_faster(queries_RTHD: Tensor) -> bool:
    """Return whether `causal_attention` is clearly faster than `cascade_attention`."""
    num_queries = queries_RTHD.shape[1]
    if queries_RTHD.device.type == "cpu":
        return _num_products(queries_RTHD, num_queries) >= SMALLEST_FLASH
    return queries_RTHD.dtype.itemsize == 2 and num_queries >= FEWEST_FLASH_TOKENS


def _num_products(queries: Tensor, num_tokens: int) -> int:
    """Return the number of multiplications for the scores of a row's own tokens."""
    num_heads, dim = queries.shape[-2:]
    return num_heads * dim * num_tokens**2


def causal_attention(queries_RTHD: Tensor, keys_RKLD: Tensor, values_RKLD: Tensor) -> Tensor:
    """Attend to all tokens up to itself, `[R, T, H, D]`: the queries, scaled, are of the last T."""
    attended_RHTD: Tensor = F.scaled_dot_product_attention(
        queries_RTHD.transpose(1, 2),
        keys_RKLD,
        values_RKLD,
        attn_mask=causal_lower_right(queries_RTHD.shape[1], keys_RKLD.shape[2]),
        scale=1.0,
        enable_gqa=True,
    )
    return attended_RHTD.transpose(1, 2)


def causal_bias(
    num_queries: int,
    num_old: int,
    old_bias_PL: Tensor | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Return the bias that shows each new token its group's old keys and new ones up to itself.

    `[P or 1, 1, 1, T, 1, num_old + T]`.
    """
    future = torch.ones(num_queries, num_queries, dtype=torch.bool, device=device).triu(1)
    new = torch.zeros(num_queries, num_queries, dtype=dtype, device=device)
    new.masked_fill_(future, float("-inf"))
    num_groups = 1 if old_bias_PL is None else len(old_bias_PL)
    old = old_bias_PL
    if old is None:
        old = torch.zeros(1, num_old, dtype=dtype, device=device)
    bias = torch.cat(
        [old[:, None].expand(-1, num_queries, -1), new.expand(num_groups, -1, -1)], dim=-1
    )
    return bias[:, None, None, :, None]


def cascade_attention(queries_RTKGD: Tensor, segments: Sequence[SharedKeys]) -> Tensor:
    """Attend to several segments of keys, each read once for all rows that share it.

    Parameters
    ----------
    queries_RTKGD : Tensor
        Scaled by `1 / sqrt(D)` already.
    segments : Sequence[SharedKeys]
        In any order; their softmax is one.
    """
    num_rows, num_queries, num_keys, group, dim = queries_RTKGD.shape
    if len(segments) == num_queries == 1 and segments[0].keys.shape[0] == num_rows:
        return _own_attention(queries_RTKGD, segments[0])
    scores = []
    for keys, _, bias in segments:
        num_groups, _, _, length = keys.shape
        sharing = num_rows // num_groups
        grouped = _gather_groups(queries_RTKGD, num_groups)
        score = torch.bmm(grouped, keys.view(-1, dim, length))
        score = score.view(num_groups, num_keys, sharing, num_queries, group, length)
        if bias is not None:
            score = score + bias
        scores.append(_scatter_groups(score))
    together = scores[0] if len(scores) == 1 else torch.cat(scores, dim=-1)
    probabilities = together.softmax(dim=-1)
    attended = None
    start = 0
    for _, values, _ in segments:
        num_groups, _, length, _ = values.shape
        sharing = num_rows // num_groups
        part = _gather_groups(probabilities[..., start : start + length], num_groups)
        found = torch.bmm(part, values.view(-1, length, dim))
        found = _scatter_groups(found.view(num_groups, num_keys, sharing, num_queries, group, dim))
        attended = found if attended is None else attended + found
        start += length
    assert attended is not None
    return attended


def _own_attention(queries_RTKGD: Tensor, own: SharedKeys) -> Tensor:
    """The same for one query of every row and its own keys alone, without regrouping."""
    num_rows, _, num_keys, group, dim = queries_RTKGD.shape
    keys, values, bias = own
    length = keys.shape[-1]
    scores = torch.bmm(queries_RTKGD.reshape(-1, group, dim), keys.view(-1, dim, length))
    if bias is not None:
        scores = scores.view(num_rows, 1, num_keys, group, length) + bias.squeeze(2)
        scores = scores.view(-1, group, length)
    attended = torch.bmm(scores.softmax(dim=-1), values.view(-1, length, dim))
    return attended.view(num_rows, 1, num_keys, group, dim)


def _gather_groups(x_RTKGX: Tensor, num_groups: int) -> Tensor:
    """Put the queries of all rows of a group together: `[P * K, (R / P) * T * G, X]`."""
    num_rows, num_queries, num_keys, group, size = x_RTKGX.shape
    if num_groups == num_rows and num_queries == 1:
        return x_RTKGX.reshape(num_groups * num_keys, group, size)
    grouped = x_RTKGX.view(
        num_groups, num_rows // num_groups, num_queries, num_keys, group, size
    ).permute(0, 3, 1, 2, 4, 5)
    return grouped.reshape(num_groups * num_keys, -1, size)


def _scatter_groups(x: Tensor) -> Tensor:
    """Undo `_gather_groups`: `[P, K, R / P, T, G, X]` to `[R, T, K, G, X]`."""
    if x.shape[2] == x.shape[3] == 1:
        return x.reshape(x.shape[0], 1, x.shape[1], x.shape[4], x.shape[5])
    rows = x.permute(0, 2, 3, 1, 4, 5)
    return rows.reshape(x.shape[0] * x.shape[2], x.shape[3], x.shape[1], x.shape[4], x.shape[5])


class Block(NamedTuple):
    """Consecutive queries, and the keys visible to any of them."""

    queries: slice
    keys: list[slice]
    bias_QL: Tensor
    """Of the last keys: 0 if visible, -inf elsewhere. All queries see the keys before those."""

    def visible(self, x_NKD: Tensor) -> Tensor:
        """Return the block's keys or values, `[L, K, D]`."""
        parts = [x_NKD[keys] for keys in self.keys]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def add(self, sum_NKD: Tensor, x_LKD: Tensor) -> None:
        """Add to the block's rows of a sum."""
        sizes = [keys.stop - keys.start for keys in self.keys]
        for keys, part in zip(self.keys, torch.split(x_LKD, sizes), strict=True):
            sum_NKD[keys] += part


def blocks_of(trie: TokenTrie, size: int) -> list[Block]:
    """Split the rows of a trie into blocks of at most `size` tokens."""
    blocks, first = [], 0
    for ends_L in torch.split(trie.ends_N, trie.row_lengths):
        open_L = ends_L[:0]
        for start in range(0, len(ends_L), size):
            queries_Q = torch.arange(start, min(start + size, len(ends_L))).to(ends_L)
            keys_L = torch.cat([open_L, queries_Q])
            stop = start + len(queries_Q)
            # Keys before the block are ancestors of its first query: the later, the sooner closed.
            num_seen_by_all = int((ends_L[open_L] >= stop).sum())
            partly_L = keys_L[num_seen_by_all:]
            is_seen_QL = (partly_L <= queries_Q[:, None]) & (queries_Q[:, None] < ends_L[partly_L])
            bias_QL = torch.zeros(is_seen_QL.shape).masked_fill_(~is_seen_QL, float("-inf"))
            queries = slice(first + start, first + stop)
            blocks.append(Block(queries, _ranges(first + keys_L), bias_QL))
            open_L = keys_L[ends_L[keys_L] > stop]
        first += len(ends_L)
    return blocks


def _ranges(ascending: Tensor) -> list[slice]:
    """Return the ranges of ascending indices."""
    runs = torch.tensor_split(ascending, (ascending.diff() > 1).nonzero().squeeze(1) + 1)
    return [slice(int(run[0]), int(run[-1]) + 1) for run in runs]


def block_attention(
    queries_NHD: Tensor, keys_NKD: Tensor, values_NKD: Tensor, blocks: list[Block]
) -> Tensor:
    """Return the attended values `[N, H * D]`; the queries are scaled, gradients flow."""
    num_tokens, num_keys, dim = keys_NKD.shape
    # Query heads of one group read the same keys.
    queries_KGND = queries_NHD.view(num_tokens, num_keys, -1, dim).permute(1, 2, 0, 3)
    attended_KGND: Tensor = _BlockAttention.apply(queries_KGND, keys_NKD, values_NKD, blocks)  # type: ignore[no-untyped-call]
    return attended_KGND.permute(2, 0, 1, 3).reshape(num_tokens, -1)


_OPTIONS: dict[str, Any] = {"dropout_p": 0.0, "is_causal": False, "scale": 1.0}


class _BlockAttention(torch.autograd.Function):
    """Torch's flash attention for a CPU, block by block.

    Nothing of the size of queries times keys is stored: the backward pass recomputes it.
    """

    @staticmethod
    def forward(
        ctx: Any, queries_KGND: Tensor, keys_NKD: Tensor, values_NKD: Tensor, blocks: list[Block]
    ) -> Tensor:
        attended, masses = [], []
        for block, *inputs in _inputs(queries_KGND, keys_NKD, values_NKD, blocks):
            found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *inputs, attn_mask=_bias(block, inputs[1]), **_OPTIONS
            )
            attended.append(found[0])
            masses.append(found[1])
        attended_KGND = torch.cat(attended, dim=2)
        ctx.save_for_backward(queries_KGND, keys_NKD, values_NKD, attended_KGND, *masses)
        ctx.blocks = blocks
        return attended_KGND

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        queries_KGND, keys_NKD, values_NKD, attended_KGND, *masses = ctx.saved_tensors
        grad_queries = torch.empty_like(queries_KGND)
        # Many blocks add to one key, which in bfloat16 would lose what each adds.
        grad_keys = torch.zeros(keys_NKD.shape, device=keys_NKD.device)
        grad_values = torch.zeros_like(grad_keys)
        blocks = _inputs(queries_KGND, keys_NKD, values_NKD, ctx.blocks)
        for (block, *inputs), mass in zip(blocks, masses, strict=True):
            own = block.queries
            grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *(gradients[0][:, :, own], *inputs, attended_KGND[:, :, own], mass),
                attn_mask=_bias(block, inputs[1]),
                **_OPTIONS,
            )
            grad_queries[:, :, own] = grads[0]
            for total, grad_KGLD in zip((grad_keys, grad_values), grads[1:], strict=True):
                block.add(total, grad_KGLD.float().sum(dim=1).transpose(0, 1))
        return grad_queries, grad_keys.to(keys_NKD), grad_values.to(values_NKD), None


def _inputs(
    queries_KGND: Tensor, keys_NKD: Tensor, values_NKD: Tensor, blocks: list[Block]
) -> Iterator[tuple[Any, ...]]:
    """Yield each block with its queries, keys and values, `[K, G, Q or L, D]`."""
    group = queries_KGND.shape[1]
    for block in blocks:
        keys_KGLD, values_KGLD = (
            block.visible(x).transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1)
            for x in (keys_NKD, values_NKD)
        )
        yield block, queries_KGND[:, :, block.queries], keys_KGLD, values_KGLD


def _bias(block: Block, keys_KGLD: Tensor) -> Tensor:
    """Return the bias of all keys of a block, `[Q, L]`."""
    # Stored, these would take memory quadratic in the tokens of a row.
    num_seen_by_all = keys_KGLD.shape[2] - block.bias_QL.shape[1]
    return F.pad(block.bias_QL, (num_seen_by_all, 0)).to(keys_KGLD)


class FlexTrieAttention:
    """Attention within the rows of a trie with torch's flex attention; gradients flow.

    All rows are one sequence, and blocks of 128 by 128 pairs without a visible pair are skipped.
    """

    def __init__(self, trie: TokenTrie, attend: Callable[..., Any] = flex_attention) -> None:
        self.num_tokens = trie.num_tokens
        # Each size is compiled for once, so there are few: powers of two.
        self.size = max(SMALLEST_FLEX, 1 << (trie.num_tokens - 1).bit_length())
        self.block_mask = _block_mask(trie, self.size)
        self._attend = attend

    def __call__(
        self, layer: int, queries_NHD: Tensor, keys_NKD: Tensor, values_NKD: Tensor
    ) -> Tensor:
        """Return the attended values `[N, H * D]`; the queries are scaled."""
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
    """Return the mask that shows each token itself and its ancestors: earlier tokens not yet ended.

    A row's tokens end within the row, so rows need no separate masks. Padding sees itself.
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

    # The queries that see a key are those from itself to its end, so that the ends in a block of
    # keys decide which blocks of queries see any or all of it: no pair of tokens is looked at.
    ends_KB = ends_N.view(-1, FLEX_BLOCK)
    starts_Q = torch.arange(0, size, FLEX_BLOCK, device=device)[:, None]
    is_below_QK = starts_Q > starts_Q.T
    is_full_QK = is_below_QK & (ends_KB.amin(dim=1) >= starts_Q + FLEX_BLOCK)
    is_seen_QK = is_below_QK & (ends_KB.amax(dim=1) > starts_Q) | (starts_Q == starts_Q.T)
    parts = _seen_first(is_seen_QK & ~is_full_QK) + _seen_first(is_full_QK)
    return BlockMask.from_kv_blocks(
        *parts, BLOCK_SIZE=FLEX_BLOCK, mask_mod=sees, seq_lengths=(size, size)
    )


def _seen_first(is_seen_QK: Tensor) -> tuple[Tensor, Tensor]:
    """Return per query block the number of visible key blocks, and all blocks, visible first;
    int32.
    """
    order_QK = is_seen_QK.int().argsort(dim=1, descending=True, stable=True)
    return is_seen_QK.sum(dim=1, dtype=torch.int32)[None, None], order_QK.int()[None, None]


def compile_flex_attention(backend: str | Callable[..., Any] = "inductor") -> Callable[..., Any]:
    """Compile flex attention for each size, precision and model, with gradients and without.

    Beyond its limit (8) torch would silently compute all scores densely.
    """
    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=False, backend=backend)

    def attend(*inputs: Any, **options: Any) -> Any:
        with torch._dynamo.config.patch(recompile_limit=MAX_COMPILED):
            return compiled(*inputs, **options)

    return attend


@lru_cache(maxsize=1)
def compiled_flex_attention() -> Callable[..., Any] | None:
    """Compile flex attention and try it, with gradients, once per process."""
    compiled = compile_flex_attention()
    try:
        size, dtype = (1, 2, SMALLEST_FLEX, 64), torch.bfloat16
        inputs = [torch.randn(size, device="cuda", dtype=dtype) for _ in range(3)]
        trie = build_trie([range(SMALLEST_FLEX)]).to(inputs[0].device)
        mask = _block_mask(trie, SMALLEST_FLEX)
        for x in inputs:
            x.requires_grad_(True)
        with torch.enable_grad():
            compiled(*inputs, block_mask=mask, scale=1.0, enable_gqa=True).sum().backward()
        torch.cuda.synchronize()
    except Exception as error:
        logger.warning(
            "trees are scored with dense attention: flex attention failed: %s", reason_of(error)
        )
        return None
    logger.info("trees are scored with flex attention")
    return compiled


def uses_flex_attention(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether long trees are scored with flex attention; in float32 dense is faster."""
    is_half = dtype.itemsize == 2
    return device.type == "cuda" and is_half and compiled_flex_attention() is not None


def trie_attention(trie: TokenTrie, dtype: torch.dtype) -> FlexTrieAttention | TrieAttention:
    """Return the fastest attention for a trie on its device."""
    is_long = trie.num_tokens >= SMALLEST_FLEX
    if is_long and uses_flex_attention(trie.ids_N.device, dtype):
        compiled = compiled_flex_attention()
        assert compiled is not None
        return FlexTrieAttention(trie, compiled)
    return TrieAttention(trie, dtype)
