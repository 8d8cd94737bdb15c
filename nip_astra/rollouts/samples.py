"""Training samples: small dictionaries of tensors, and the batches made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from nip_astra.errors import DataError

Sample = dict[str, Tensor]
"""One training sample: tensors of 0 or 1 dimensions on the CPU, equal names in all samples."""

LEFT_PADDED = frozenset({"context"})
"""Sequences that end where a continuation begins."""


def collate(samples: Sequence[Sample]) -> TensorDict:
    """One batch: numbers are stacked, sequences padded, each with its mask.

    A sequence `x` becomes `x` `[B, T]`, padded with 0 on the right (`context`: on the left), and
    `x_mask` `[B, T]` bool.

    Raises
    ------
    DataError
        When samples are no dictionaries of such tensors, or have other names than the first.
    """
    _check(samples)
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


def _check(samples: Sequence[Sample]) -> None:
    first = samples[0]
    for sample in samples:
        if not isinstance(sample, Mapping):
            raise DataError(
                f"a sample is {str(sample)[:60]!r} ({type(sample).__name__}). Samples are dicts of "
                "tensors."
            )
        if sample.keys() != first.keys():
            raise DataError(
                f"samples of one batch have the names {sorted(first)} and {sorted(sample)}. Give "
                "all of them the same."
            )
        for name, value in sample.items():
            if not isinstance(value, Tensor) or value.ndim != first[name].ndim:
                shown = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise DataError(
                    f"{name!r} of a sample is {shown}. Give a number or a sequence as a tensor, "
                    "the same in all samples."
                )
