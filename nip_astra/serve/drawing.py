"""Draw the next token of every row of a batch, each by its own rules.

Shape suffixes: `R` row, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nip_astra.language_models.sampling import keep_likely
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
        Tokens that are never said in a text.

    Returns
    -------
    list of TokenRecord
        The log-probability is no number where the row's logits are none.
    """
    logprobs_RV = logits_RV.log_softmax(dim=1)
    tops = _tops(logprobs_RV, rows)
    texts = [place for place, row in enumerate(rows) if not row.request.tells_ids]
    if len(texts) == len(rows):
        logits_RV.index_fill_(1, banned_ids, float("-inf"))
    elif texts:
        index = torch.tensor(texts, device=logits_RV.device)
        logits_RV[index[:, None], banned_ids] = float("-inf")
    tokens_R = logits_RV.argmax(dim=1)
    drawing = [place for place, row in enumerate(rows) if row.request.temperature > 0]
    if drawing:
        index = torch.tensor(drawing, device=logits_RV.device)
        tokens_R[index] = _sample(logits_RV[index], [rows[place] for place in drawing])
    chosen_R = logprobs_RV.gather(1, tokens_R.unsqueeze(1)).squeeze(1)
    return [
        TokenRecord(token, logprob, top)
        for token, logprob, top in zip(tokens_R.tolist(), chosen_R.tolist(), tops, strict=True)
    ]


def _sample(logits_RV: Tensor, rows: Sequence[Row]) -> Tensor:
    """Draw a token of each row from its tempered distribution, cut to its nucleus.

    The token is the largest of `logit / temperature + Gumbel noise`, the noise of a token being
    the row's own. Inverting the cumulative distribution would take one number a token, but far from
    the likely tokens the last digit of a sum decides which one it is, and that digit depends on the
    size of the batch.
    """
    device = logits_RV.device
    temperatures_R = torch.tensor([row.request.temperature for row in rows], device=device)
    logits_RV = logits_RV / temperatures_R[:, None]
    top_ps = [row.request.top_p for row in rows]
    for top_p in {one for one in top_ps if one < 1.0}:
        index = torch.tensor([i for i, one in enumerate(top_ps) if one == top_p], device=device)
        kept = keep_likely(logits_RV[index], top_k=None, top_p=top_p)
        logits_RV[index] = logits_RV[index].masked_fill(~kept, float("-inf"))
    noise_RV = torch.empty_like(logits_RV)
    for noise_V, row in zip(noise_RV, rows, strict=True):
        noise_V.exponential_(generator=row.generator)
    smallest = torch.finfo(noise_RV.dtype).tiny
    return (logits_RV - noise_RV.clamp_(min=smallest).log_()).argmax(dim=1)


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
