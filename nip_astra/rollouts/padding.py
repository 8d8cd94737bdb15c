"""Padding of batches of tokens: found by mask, never by comparing ids.

Shape suffixes: `B` row, `T` token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def length_mask(lengths: Sequence[int] | Tensor, width: int | None = None) -> Tensor:
    """Bool `[B, T]`, True on the first `lengths[b]` places of row b."""
    lengths_B = torch.as_tensor(lengths, dtype=torch.int64)
    if width is None:
        width = int(lengths_B.max()) if len(lengths_B) else 0
    return torch.arange(width, device=lengths_B.device) < lengths_B.unsqueeze(1)


def pad_rows(rows: Sequence[Tensor], mask_BT: Tensor, fill: float = 0) -> Tensor:
    """Rows of different lengths as one tensor, padded on the right; one copy, no loop over rows.

    Parameters
    ----------
    mask_BT : Tensor
        `length_mask` of the rows' lengths.
    """
    flat = torch.cat(list(rows)) if rows else torch.zeros(0)
    return flat.new_full(mask_BT.shape, fill).masked_scatter_(mask_BT, flat)


def compute_position_id_with_mask(attention_mask_BT: Tensor) -> Tensor:
    """The place of each token in its row, int64 `[B, T]` from 0; padding on the left stays at 0."""
    return (attention_mask_BT.to(torch.int64).cumsum(dim=1) - 1).clamp(min=0)


def used_columns(mask_BT: Tensor) -> tuple[int, int]:
    """First column where any row has a token, and the one after the last; (0, 0) where none has."""
    used = mask_BT.any(dim=0).nonzero().squeeze(1)
    return (int(used[0]), int(used[-1]) + 1) if len(used) else (0, 0)


def widened(values: Tensor, width: int) -> Tensor:
    """Values `[B, T, ...]` with zeros on the right up to a width."""
    missing = width - values.shape[1]
    if missing <= 0:
        return values
    return torch.cat([values, values.new_zeros(values.shape[0], missing, *values.shape[2:])], dim=1)
