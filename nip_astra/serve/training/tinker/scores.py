"""How likely a model finds tokens, those of the text and others in their place.

Shape suffixes: `B` row, `T` token, `K` candidate, `X` hidden unit, `N` any place, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from nip_astra.language_models.huggingface import HuggingFaceLanguageModel
from nip_astra.serve.training.tinker.messages import Datum, Likeliest

PLACES_AT_ONCE = 1024


def target_logprobs(policy: HuggingFaceLanguageModel, data: Sequence[Datum]) -> list[Tensor]:
    """Log-probabilities of the targets of data, of their shapes, with gradient, in one pass.

    Where each target is the token that the model reads next, as in training mostly, they come the
    way all log-probabilities of the package do, and equal those to the bit.
    """
    found: dict[int, Tensor] = {}
    plain = [number for number, one in enumerate(data) if _follows(one)]
    if plain:
        rows = [data[number] for number in plain]
        logprobs_BT = policy.logprobs(*_rows([(one.ids[0], one.targets) for one in rows]))
        for place, number in enumerate(plain):
            found[number] = logprobs_BT[place, : len(data[number].ids)]
    others = [number for number in range(len(data)) if number not in found]
    if others:
        hidden = hidden_states(policy, [data[number].ids for number in others])
        for number, hidden_TX in zip(others, hidden, strict=True):
            logprobs_TV = policy.logits_of(hidden_TX).log_softmax(dim=-1)
            targets = data[number].targets.to(hidden_TX.device)
            chosen_TK = logprobs_TV.gather(1, targets.reshape(len(targets), -1))
            found[number] = chosen_TK.reshape(targets.shape)
    return [found[number] for number in range(len(data))]


def _follows(datum: Datum) -> bool:
    targets = datum.targets
    return targets.ndim == 1 and list(datum.ids[1:]) == targets[:-1].tolist()


def _rows(rows: Sequence[tuple[int, Tensor]]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    context_B1 = torch.tensor([[first] for first, _ in rows])
    lengths = torch.tensor([len(ids) for _, ids in rows])
    ids_BT = pad_sequence([ids for _, ids in rows], batch_first=True)
    mask_BT = torch.arange(ids_BT.shape[1]) < lengths[:, None]
    return context_B1, torch.ones_like(context_B1, dtype=torch.bool), ids_BT, mask_BT


def hidden_states(policy: HuggingFaceLanguageModel, texts: Sequence[Sequence[int]]) -> list[Tensor]:
    """The last hidden state after each token of texts, `[T, X]` a text, with gradient."""
    # What follows the last token is not looked at.
    rows = _rows([(ids[0], torch.tensor([*ids[1:], ids[-1]])) for ids in texts])
    scores = policy.token_scores(*rows, needs_hidden=True)
    assert scores.hidden_BTX is not None
    return [scores.hidden_BTX[place, : len(ids)] for place, ids in enumerate(texts)]


@torch.no_grad()
def logprobs_after(policy: HuggingFaceLanguageModel, hidden_TX: Tensor) -> list[Tensor]:
    """Log-probabilities of all tokens after each place, `[N, V]` a part of the places."""
    parts = torch.split(hidden_TX, PLACES_AT_ONCE)
    return [policy.logits_of(part).log_softmax(dim=-1).cpu() for part in parts]


def likeliest(parts: Sequence[Tensor], count: int) -> Likeliest:
    """The likeliest tokens at each place, from parts of `logprobs_after`."""
    found = [part.topk(min(count, part.shape[1]), dim=1) for part in parts]
    return Likeliest(
        torch.cat([one.indices for one in found]), torch.cat([one.values for one in found])
    )
