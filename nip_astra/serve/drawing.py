"""Draw the next token of every row of a batch, each by its own rules.

Shape suffixes: `R` row, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nip_astra.language_models.sampling import sample_tokens
from nip_astra.serve.generation import TokenRecord
from nip_astra.serve.rows import Row


@torch.no_grad()
def draw_tokens(logits_RV: Tensor, rows: Sequence[Row], banned_ids: Tensor) -> list[TokenRecord]:
    """Draw a token a row.

    Parameters
    ----------
    logits_RV : Tensor
        float32; used up.
    banned_ids : Tensor
        Tokens that are never said.

    Returns
    -------
    list of TokenRecord
        The log-probability is no number where the row's logits are none.
    """
    logprobs_RV = logits_RV.log_softmax(dim=1)
    tops = _tops(logprobs_RV, rows)
    logits_RV.index_fill_(1, banned_ids, float("-inf"))
    tokens_R = torch.empty(len(rows), dtype=torch.long, device=logits_RV.device)
    uniforms_R = torch.tensor(
        [row.uniforms[row.num_tokens] for row in rows], device=logits_RV.device
    )
    groups: dict[tuple[float, float], list[int]] = {}
    for place, row in enumerate(rows):
        groups.setdefault((row.request.temperature, row.request.top_p), []).append(place)
    for (temperature, top_p), places in groups.items():
        index = slice(None) if len(groups) == 1 else torch.tensor(places, device=tokens_R.device)
        tokens_R[index] = sample_tokens(
            logits_RV[index], uniforms_R[index], temperature=temperature, top_p=top_p
        )
    chosen_R = logprobs_RV.gather(1, tokens_R.unsqueeze(1)).squeeze(1)
    return [
        TokenRecord(token, logprob, top)
        for token, logprob, top in zip(tokens_R.tolist(), chosen_R.tolist(), tops, strict=True)
    ]


def _tops(logprobs_RV: Tensor, rows: Sequence[Row]) -> list[tuple[tuple[int, float], ...]]:
    numbers = [row.request.num_top or 0 for row in rows]
    most = min(max(numbers), logprobs_RV.shape[1])
    if most == 0:
        return [()] * len(rows)
    values, tokens = logprobs_RV.topk(most, dim=1)
    return [
        tuple(zip(ids[:number], found[:number], strict=True))
        for ids, found, number in zip(tokens.tolist(), values.tolist(), numbers, strict=True)
    ]
