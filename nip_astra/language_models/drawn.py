"""The distribution that tokens are drawn from: tempered, and cut to what may be drawn.

Shape suffixes: `B` row, `S` scored position, `V` vocabulary, `K` kept token of any position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from nip_astra.language_models.sampling import keep_likely


class KeptTokens(NamedTuple):
    """What cuts left to be drawn at each position.

    Attributes
    ----------
    ids_K : Tensor
        int32; the tokens kept at the first position, then those at the second, and so on.
    counts_S : Tensor
        int64; how many there are at each position, at least 1.
    """

    ids_K: Tensor
    counts_S: Tensor

    def at(self, positions: Sequence[int]) -> KeptTokens:
        """What is kept at some of the positions, in the order asked for."""
        parts = torch.split(self.ids_K, self.counts_S.tolist())
        ids = [parts[position] for position in positions]
        index = torch.tensor(positions, dtype=torch.long, device=self.counts_S.device)
        return KeptTokens(torch.cat([self.ids_K[:0], *ids]), self.counts_S[index])

    def to(self, device: torch.device) -> KeptTokens:
        """The same on a device."""
        return KeptTokens(self.ids_K.to(device), self.counts_S.to(device))


@dataclass(frozen=True)
class DrawRule:
    """How the logits of scored positions become those of the distribution drawn from.

    Attributes
    ----------
    temperature : float
        > 0; logits are divided by it.
    banned_ids : Tensor
        Tokens that are never drawn.
    end_ids : Tensor
        Tokens that are not drawn where a turn may not end yet.
    is_early_S : Tensor
        bool; True at those positions.
    kept : KeptTokens or None
        Tokens that `top_k` and `top_p` left, from which others are not drawn; None where nothing
        is cut.
    """

    temperature: float
    banned_ids: Tensor
    end_ids: Tensor
    is_early_S: Tensor
    kept: KeptTokens | None = None

    def at(self, positions: Sequence[int]) -> DrawRule:
        """The rule of some of the positions."""
        index = torch.tensor(positions, dtype=torch.long, device=self.is_early_S.device)
        kept = None if self.kept is None else self.kept.at(positions)
        return replace(self, is_early_S=self.is_early_S[index], kept=kept)

    def apply(self, logits_SV: Tensor) -> Tensor:
        """Logits whose softmax is the distribution drawn from; gradients flow.

        The tokens kept stay what they were while the logits change, so that the distribution is
        one over the same tokens before and after a step.
        """
        if self.kept is not None:
            rows_K = torch.arange(len(logits_SV), device=logits_SV.device)
            rows_K = rows_K.repeat_interleave(self.kept.counts_S)
            is_out_SV = torch.ones_like(logits_SV, dtype=torch.bool)
            is_out_SV[rows_K, self.kept.ids_K.long()] = False
        else:
            is_out_SV = torch.zeros_like(logits_SV, dtype=torch.bool)
            is_out_SV[:, self.banned_ids] = True
            is_out_SV[:, self.end_ids] |= self.is_early_S.unsqueeze(1)
        return (logits_SV / self.temperature).masked_fill(is_out_SV, float("-inf"))

    def keep(
        self, logits_SV: Tensor, ids_S: Tensor, *, top_k: int | None, top_p: float
    ) -> KeptTokens:
        """What cuts leave of the distribution; the token that was drawn is always left.

        Where sampling took another path through the model, rounding may have moved that token to
        the other side of the cut.
        """
        is_kept_SV = keep_likely(self.apply(logits_SV), top_k=top_k, top_p=top_p)
        is_kept_SV.scatter_(1, ids_S.unsqueeze(1), True)
        return KeptTokens(is_kept_SV.nonzero()[:, 1].int(), is_kept_SV.sum(dim=1))
