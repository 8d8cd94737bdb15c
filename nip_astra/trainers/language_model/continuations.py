"""Several continuations of each context of a batch, scored together.

Shape suffixes: `B` sample, `T` token, `C` context position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from tensordict import TensorDict
from torch import Tensor

Score = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""`(context_BC, context_mask_BC, ids_BT, mask_BT) -> logprobs_BT`."""


def logprobs_of(score: Score, batch: TensorDict, names: Sequence[str]) -> tuple[Tensor, ...]:
    """Log-probabilities of continuations of `context`, all by one call.

    Parameters
    ----------
    batch : TensorDict
        Holds `context` and, for each name, tokens and `<name>_mask`.

    Returns
    -------
    tuple[Tensor, ...]
        One `[B, T]` tensor a name, all of the width of the longest, nats, 0 on padding.
    """
    width = max(batch[name].shape[1] for name in names)
    ids, masks = [], []
    for name in names:
        padding = (0, width - batch[name].shape[1])
        ids.append(torch.nn.functional.pad(batch[name], padding))
        masks.append(torch.nn.functional.pad(batch[f"{name}_mask"], padding))
    logprobs = score(
        batch["context"].repeat(len(names), 1),
        batch["context_mask"].repeat(len(names), 1),
        torch.cat(ids),
        torch.cat(masks),
    )
    return logprobs.chunk(len(names))
