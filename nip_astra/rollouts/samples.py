"""Training samples: small dictionaries of tensors, and the batches made of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

Sample = dict[str, Tensor]
"""One training sample: tensors of 0 or 1 dimensions on the CPU, equal names in all samples."""

LEFT_PADDED = frozenset({"context"})
"""Sequences that end where a continuation begins."""


def collate(samples: Sequence[Sample]) -> TensorDict:
    """One batch: numbers are stacked, sequences padded, each with its mask.

    A sequence `x` becomes `x` `[B, T]`, padded with 0 on the right (`context`: on the left), and
    `x_mask` `[B, T]` bool.
    """
    batch: dict[str, Tensor] = {}
    for name, first in samples[0].items():
        values = [sample[name] for sample in samples]
        if first.ndim == 0:
            batch[name] = torch.stack(values)
            continue
        side = "left" if name in LEFT_PADDED else "right"
        ones = [torch.ones(len(value), dtype=torch.bool) for value in values]
        batch[name] = pad_sequence(values, batch_first=True, padding_side=side)
        batch[f"{name}_mask"] = pad_sequence(ones, batch_first=True, padding_side=side)
    return TensorDict(batch, batch_size=[len(samples)])
