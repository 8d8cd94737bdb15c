"""Which tokens a model draws: no special ones, and no end of a turn before its time.

Shape suffixes: `B` row, `T` token, `V` vocabulary, `S` scored position.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nip_astra.language_models.drawn import DrawRule
from nip_astra.language_models.sampling import sample_tokens
from nip_astra.language_models.tokens import Drawn, SamplingOptions


class TokenDraw:
    """Draws tokens of a model's distributions, and says by which rule tokens were drawn.

    Parameters
    ----------
    banned_ids : Sequence[int]
        Tokens that are never drawn.
    end_ids : tuple[int, ...]
        Tokens that end a turn.
    """

    def __init__(
        self, banned_ids: Sequence[int], end_ids: tuple[int, ...], device: torch.device
    ) -> None:
        self.banned_ids = torch.tensor(banned_ids, dtype=torch.long, device=device)
        self._own_end_ids = end_ids
        self._device = device
        self._end_ids: dict[tuple[int, ...], Tensor] = {}

    def draw(
        self, logits_BV: Tensor, uniforms_B: Tensor, position: int, options: SamplingOptions
    ) -> tuple[Tensor, Tensor]:
        """Draw a token of each row; the logits are used up."""
        logprobs_BV = logits_BV.log_softmax(dim=1)
        logits_BV.index_fill_(1, self.banned_ids, float("-inf"))
        if position < options.min_new_tokens:
            logits_BV.index_fill_(1, self._ends(options), float("-inf"))
        token_B = sample_tokens(
            logits_BV,
            uniforms_B,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
        )
        return token_B, logprobs_BV.gather(1, token_B.unsqueeze(1)).squeeze(1)

    def rule_of(self, drawn: Drawn, mask_BT: Tensor) -> DrawRule:
        """The rule by which the tokens of a mask were drawn."""
        options = drawn.options
        return DrawRule(
            temperature=options.temperature,
            banned_ids=self.banned_ids,
            end_ids=self._ends(options),
            is_early_S=(mask_BT.nonzero()[:, 1] < options.min_new_tokens).to(self._device),
            kept=None if drawn.kept is None else drawn.kept.to(self._device),
        )

    def _ends(self, options: SamplingOptions) -> Tensor:
        """The end tokens on the device; making them anew each step would wait for it."""
        ids = (*self._own_end_ids, *options.end_ids)
        if ids not in self._end_ids:
            self._end_ids[ids] = torch.tensor(ids, device=self._device)
        return self._end_ids[ids]
