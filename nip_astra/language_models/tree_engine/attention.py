"""Attention over token trees: each token sees itself and its ancestors, which are stored once.

Shape suffixes: `N` token, `R` row, `T` query position, `K` key-value head, `G` query heads of one
key-value head, `H` all query heads, `D` head dimension, `L` key position, `P` group of rows that
share keys.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
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
        biases = []
        for mask_LL in self.trie.row_masks():
            bias_LL = torch.zeros(mask_LL.shape, dtype=self.dtype, device=mask_LL.device)
            biases.append(bias_LL.masked_fill_(~mask_LL, float("-inf")))
        return biases

    def __call__(
        self, layer: int, queries_NHD: Tensor, keys_NKD: Tensor, values_NKD: Tensor
    ) -> Tensor:
        """Return the attended values `[N, H * D]`; the queries are scaled."""
        longest = max(self.row_lengths, default=0)
        is_long = _num_products(queries_NHD, longest) >= SMALLEST_FLASH
        if is_long and queries_NHD.device.type == "cpu":
            # The same blocks serve all layers.
            if self._blocks is None:
                size = BLOCK_TOKENS if longest < 2000 else 2 * BLOCK_TOKENS
                self._blocks = split_into_blocks(self.trie, size)
            return block_attention(queries_NHD, keys_NKD, values_NKD, self._blocks)
        rows = []
        for query, key, value, bias in zip(
            torch.split(queries_NHD, self.row_lengths),
            torch.split(keys_NKD, self.row_lengths),
            torch.split(values_NKD, self.row_lengths),
            self.biases,
            strict=True,
        ):
            keys_KLD = key.transpose(0, 1)
            values_KLD = value.transpose(0, 1)
            rows.append(grouped_attention(query, keys_KLD, values_KLD, bias))
        return rows[0] if len(rows) == 1 else torch.cat(rows)


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
    num_heads, head_dim = queries.shape[-2:]
    return num_heads * head_dim * num_tokens**2


def causal_attention(queries_RTHD: Tensor, keys_RKLD: Tensor, values_RKLD: Tensor) -> Tensor:
    """Attend to all tokens up to itself, `[R, T, H, D]`: the queries, scaled, are of the last T."""
    num_queries, num_positions = queries_RTHD.shape[1], keys_RKLD.shape[2]
    attended_RHTD: Tensor = F.scaled_dot_product_attention(
        queries_RTHD.transpose(1, 2),
        keys_RKLD,
        values_RKLD,
        # `is_causal` would align the first query with the first key.
        attn_mask=causal_lower_right(num_queries, num_positions),
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
    is_future_TT = torch.ones(num_queries, num_queries, dtype=torch.bool, device=device).triu(1)
    new_bias_TT = torch.zeros(num_queries, num_queries, dtype=dtype, device=device)
    new_bias_TT.masked_fill_(is_future_TT, float("-inf"))
    if old_bias_PL is None:
        old_bias_PL = torch.zeros(1, num_old, dtype=dtype, device=device)
    num_groups = len(old_bias_PL)
    old_bias_PTL = old_bias_PL[:, None].expand(-1, num_queries, -1)
    new_bias_PTT = new_bias_TT.expand(num_groups, -1, -1)
    bias_PTL = torch.cat([old_bias_PTL, new_bias_PTT], dim=-1)
    return bias_PTL[:, None, None, :, None]


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
        return _attend_to_unshared(queries_RTKGD, segments[0])
    scores = []
    for keys, _, bias in segments:
        num_groups, _, _, length = keys.shape
        sharing = num_rows // num_groups
        # All queries that read a key are in one product with it.
        grouped = _gather_groups(queries_RTKGD, num_groups)
        score = torch.bmm(grouped, keys.view(-1, dim, length))
        score = score.view(num_groups, num_keys, sharing, num_queries, group, length)
        if bias is not None:
            score = score + bias
        scores.append(_scatter_groups(score))
    scores_RTKGL = scores[0] if len(scores) == 1 else torch.cat(scores, dim=-1)
    probabilities_RTKGL = scores_RTKGL.softmax(dim=-1)
    attended_RTKGD = None
    start = 0
    for _, values, _ in segments:
        num_groups, _, length, _ = values.shape
        sharing = num_rows // num_groups
        grouped = _gather_groups(probabilities_RTKGL[..., start : start + length], num_groups)
        part = torch.bmm(grouped, values.view(-1, length, dim))
        part = part.view(num_groups, num_keys, sharing, num_queries, group, dim)
        part_RTKGD = _scatter_groups(part)
        attended_RTKGD = part_RTKGD if attended_RTKGD is None else attended_RTKGD + part_RTKGD
        start += length
    assert attended_RTKGD is not None
    return attended_RTKGD


def _attend_to_unshared(queries_RTKGD: Tensor, segment: SharedKeys) -> Tensor:
    """Attend with one query of every row to its row's keys alone, without regrouping.

    Decoding comes here wherever rows share no keys.
    """
    num_rows, _, num_keys, group, dim = queries_RTKGD.shape
    keys, values, bias = segment
    length = keys.shape[-1]
    queries = queries_RTKGD.reshape(-1, group, dim)
    scores = torch.bmm(queries, keys.view(-1, dim, length))
    if bias is not None:
        scores = scores.view(num_rows, 1, num_keys, group, length) + bias.squeeze(2)
        scores = scores.view(-1, group, length)
    attended = torch.bmm(scores.softmax(dim=-1), values.view(-1, length, dim))
    return attended.view(num_rows, 1, num_keys, group, dim)


def _gather_groups(x_RTKGX: Tensor, num_groups: int) -> Tensor:
    """Put the queries of all rows of a group together: `[P * K, (R / P) * T * G, X]`."""
    num_rows, num_queries, num_keys, group, size = x_RTKGX.shape
    if num_groups == num_rows and num_queries == 1:
        # Nothing to move: a view.
        return x_RTKGX.reshape(num_groups * num_keys, group, size)
    sharing = num_rows // num_groups
    by_group = x_RTKGX.view(num_groups, sharing, num_queries, num_keys, group, size)
    grouped = by_group.permute(0, 3, 1, 2, 4, 5)
    return grouped.reshape(num_groups * num_keys, -1, size)


def _scatter_groups(x: Tensor) -> Tensor:
    """Undo `_gather_groups`: `[P, K, R / P, T, G, X]` to `[R, T, K, G, X]`."""
    num_groups, num_keys, sharing, num_queries, group, size = x.shape
    if sharing == num_queries == 1:
        return x.reshape(num_groups, 1, num_keys, group, size)
    by_row = x.permute(0, 2, 3, 1, 4, 5)
    return by_row.reshape(num_groups * sharing, num_queries, num_keys, group, size)


class Block(NamedTuple):
    """Consecutive queries, and the keys visible to any of them."""

    queries: slice
    key_ranges: list[slice]
    bias_QL: Tensor
    """Of the last keys: 0 if visible, -inf elsewhere. All queries see the keys before those."""

    def select_visible(self, x_NKD: Tensor) -> Tensor:
        """Return the block's keys or values, `[L, K, D]`."""
        parts = [x_NKD[key_range] for key_range in self.key_ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def add_to_visible(self, sum_NKD: Tensor, x_LKD: Tensor) -> None:
        """Add to the block's rows of a sum."""
        sizes = [key_range.stop - key_range.start for key_range in self.key_ranges]
        parts = torch.split(x_LKD, sizes)
        for key_range, part in zip(self.key_ranges, parts, strict=True):
            sum_NKD[key_range] += part


def split_into_blocks(trie: TokenTrie, size: int) -> list[Block]:
    """Split the rows of a trie into blocks of at most `size` tokens."""
    blocks: list[Block] = []
    row_start = 0
    for ends_L in torch.split(trie.ends_N, trie.row_lengths):
        # Earlier tokens of the row whose continuations have not ended.
        open_L = ends_L[:0]
        for start in range(0, len(ends_L), size):
            stop = min(start + size, len(ends_L))
            queries_Q = torch.arange(start, stop).to(ends_L)
            keys_L = torch.cat([open_L, queries_Q])
            # Keys before the block are ancestors of its first query: the later, the sooner closed.
            num_seen_by_all = int((ends_L[open_L] >= stop).sum())
            partly_seen_L = keys_L[num_seen_by_all:]
            is_earlier_QL = partly_seen_L <= queries_Q[:, None]
            is_open_QL = queries_Q[:, None] < ends_L[partly_seen_L]
            is_seen_QL = is_earlier_QL & is_open_QL
            bias_QL = torch.zeros(is_seen_QL.shape).masked_fill_(~is_seen_QL, float("-inf"))
            queries = slice(row_start + start, row_start + stop)
            blocks.append(Block(queries, _find_ranges(row_start + keys_L), bias_QL))
            open_L = keys_L[ends_L[keys_L] > stop]
        row_start += len(ends_L)
    return blocks


def _find_ranges(ascending: Tensor) -> list[slice]:
    """Return the ranges of consecutive numbers among ascending indices."""
    gaps = (ascending.diff() > 1).nonzero().squeeze(1)
    runs = torch.tensor_split(ascending, gaps + 1)
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


_FLASH_OPTIONS: dict[str, Any] = {"dropout_p": 0.0, "is_causal": False, "scale": 1.0}


class _BlockAttention(torch.autograd.Function):
    """Torch's flash attention for a CPU, block by block.

    Nothing of the size of queries times keys is stored: the backward pass recomputes it.
    """

    @staticmethod
    def forward(
        ctx: Any, queries_KGND: Tensor, keys_NKD: Tensor, values_NKD: Tensor, blocks: list[Block]
    ) -> Tensor:
        attended: list[Tensor] = []
        normalizers: list[Tensor] = []
        for block in blocks:
            inputs = _select_inputs(block, queries_KGND, keys_NKD, values_NKD)
            attended_KGQD, normalizer_KGQ = (
                torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                    inputs.queries,
                    inputs.keys,
                    inputs.values,
                    attn_mask=inputs.bias_QL,
                    **_FLASH_OPTIONS,
                )
            )
            attended.append(attended_KGQD)
            normalizers.append(normalizer_KGQ)
        attended_KGND = torch.cat(attended, dim=2)
        ctx.save_for_backward(queries_KGND, keys_NKD, values_NKD, attended_KGND, *normalizers)
        ctx.blocks = blocks
        return attended_KGND

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        queries_KGND, keys_NKD, values_NKD, attended_KGND, *normalizers = ctx.saved_tensors
        grad_attended_KGND = gradients[0]
        grad_queries = torch.empty_like(queries_KGND)
        # Many blocks add to one key, which in bfloat16 would lose what each adds.
        grad_keys = torch.zeros(keys_NKD.shape, device=keys_NKD.device)
        grad_values = torch.zeros_like(grad_keys)
        for block, normalizer_KGQ in zip(ctx.blocks, normalizers, strict=True):
            inputs = _select_inputs(block, queries_KGND, keys_NKD, values_NKD)
            block_grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad_attended_KGND[:, :, block.queries],
                inputs.queries,
                inputs.keys,
                inputs.values,
                attended_KGND[:, :, block.queries],
                normalizer_KGQ,
                attn_mask=inputs.bias_QL,
                **_FLASH_OPTIONS,
            )
            grad_queries_KGQD, grad_keys_KGLD, grad_values_KGLD = block_grads
            grad_queries[:, :, block.queries] = grad_queries_KGQD
            # All query heads of a group read the same keys.
            grad_keys_LKD = grad_keys_KGLD.float().sum(dim=1).transpose(0, 1)
            grad_values_LKD = grad_values_KGLD.float().sum(dim=1).transpose(0, 1)
            block.add_to_visible(grad_keys, grad_keys_LKD)
            block.add_to_visible(grad_values, grad_values_LKD)
        return grad_queries, grad_keys.to(keys_NKD), grad_values.to(values_NKD), None


class _BlockInputs(NamedTuple):
    """Inputs of the attention of one block; heads are a batch."""

    queries: Tensor
    """`[K, G, Q, D]`."""
    keys: Tensor
    """`[K, G, L, D]`, a view that repeats each head for its group."""
    values: Tensor
    """As `keys`."""
    bias_QL: Tensor


def _select_inputs(
    block: Block, queries_KGND: Tensor, keys_NKD: Tensor, values_NKD: Tensor
) -> _BlockInputs:
    """Return a block's part of queries, keys and values."""
    group = queries_KGND.shape[1]
    keys_KLD = block.select_visible(keys_NKD).transpose(0, 1)
    values_KLD = block.select_visible(values_NKD).transpose(0, 1)
    # Made for each pass: stored, these would take memory quadratic in the tokens of a row.
    num_seen_by_all = keys_KLD.shape[1] - block.bias_QL.shape[1]
    bias_QL = F.pad(block.bias_QL, (num_seen_by_all, 0)).to(keys_KLD)
    return _BlockInputs(
        queries_KGND[:, :, block.queries],
        keys_KLD.unsqueeze(1).expand(-1, group, -1, -1),
        values_KLD.unsqueeze(1).expand(-1, group, -1, -1),
        bias_QL,
    )


class FlexTrieAttention:
    """Attention within the rows of a trie with torch's flex attention; gradients flow.

    All rows are one sequence, and blocks of 128 by 128 pairs without a visible pair are skipped.
    """

    def __init__(self, trie: TokenTrie, attend: Callable[..., Any] = flex_attention) -> None:
        self.num_tokens = trie.num_tokens
        # Each size is compiled for once, so there are few: powers of two.
        self.size = max(SMALLEST_FLEX, 1 << (trie.num_tokens - 1).bit_length())
        self.block_mask = _build_block_mask(trie, self.size)
        self._attend = attend

    def __call__(
        self, layer: int, queries_NHD: Tensor, keys_NKD: Tensor, values_NKD: Tensor
    ) -> Tensor:
        """Return the attended values `[N, H * D]`; the queries are scaled."""
        num_padding = self.size - self.num_tokens

        def pad(x_NHD: Tensor) -> Tensor:
            padded_NHD = F.pad(x_NHD, (0, 0, 0, 0, 0, num_padding))
            return padded_NHD.transpose(0, 1).unsqueeze(0)

        attended_1HND: Tensor = self._attend(
            pad(queries_NHD),
            pad(keys_NKD),
            pad(values_NKD),
            block_mask=self.block_mask,
            scale=1.0,
            enable_gqa=True,
        )
        attended_HND = attended_1HND[0, :, : self.num_tokens]
        return attended_HND.transpose(0, 1).flatten(1)


def _build_block_mask(trie: TokenTrie, size: int) -> BlockMask:
    """Return the mask that shows each token itself and its ancestors: earlier tokens not yet ended.

    A row's tokens end within the row, so rows need no separate masks. Padding sees itself.
    """
    device = trie.ids_N.device
    lengths = torch.tensor(trie.row_lengths, device=device)
    starts = lengths.cumsum(0) - lengths
    # The given size of the output saves a synchronisation.
    starts_N = torch.repeat_interleave(starts, lengths, output_size=trie.num_tokens)
    padding = torch.arange(trie.num_tokens, size, device=device)
    ends_N = torch.cat([trie.ends_N + starts_N, padding + 1])

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < ends_N[key])

    # The queries that see a key are those from itself to its end, so that the ends in a block of
    # keys decide which blocks of queries see any or all of it: no pair of tokens is looked at.
    ends_KB = ends_N.view(-1, FLEX_BLOCK)
    first_end_K, last_end_K = ends_KB.amin(dim=1), ends_KB.amax(dim=1)
    starts_Q1 = torch.arange(0, size, FLEX_BLOCK, device=device)[:, None]
    is_diagonal_QK = starts_Q1 == starts_Q1.T
    is_below_QK = starts_Q1 > starts_Q1.T
    is_full_QK = is_below_QK & (first_end_K >= starts_Q1 + FLEX_BLOCK)
    is_seen_QK = is_below_QK & (last_end_K > starts_Q1) | is_diagonal_QK
    partial_blocks = _order_seen_first(is_seen_QK & ~is_full_QK)
    full_blocks = _order_seen_first(is_full_QK)
    return BlockMask.from_kv_blocks(
        *partial_blocks,
        *full_blocks,
        BLOCK_SIZE=FLEX_BLOCK,
        mask_mod=sees,
        seq_lengths=(size, size),
    )


def _order_seen_first(is_seen_QK: Tensor) -> tuple[Tensor, Tensor]:
    """Return per query block the number of visible key blocks, and all blocks, visible first.

    Both are int32, with axes for a batch and its heads: `[1, 1, Q]` and `[1, 1, Q, K]`.
    """
    num_seen_Q = is_seen_QK.sum(dim=1, dtype=torch.int32)
    order_QK = is_seen_QK.int().argsort(dim=1, descending=True, stable=True).int()
    return num_seen_Q[None, None], order_QK[None, None]


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
        inputs = [
            torch.randn(1, 2, SMALLEST_FLEX, 64, device="cuda", dtype=torch.bfloat16)
            for _ in range(3)
        ]
        trie = build_trie([range(SMALLEST_FLEX)]).to(inputs[0].device)
        block_mask = _build_block_mask(trie, SMALLEST_FLEX)
        for tensor in inputs:
            tensor.requires_grad_(True)
        with torch.enable_grad():
            attended = compiled(*inputs, block_mask=block_mask, scale=1.0, enable_gqa=True)
            attended.sum().backward()
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
