"""Batches of trajectories as samples to learn from, and their log-probabilities.

Shape suffixes: `B` row, `T` token of the trajectory, `R` token after the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from tensordict import TensorDict
from torch import Tensor

from nip_astra.rollouts.batch import Batch
from nip_astra.rollouts.samples import Sample, collate

Score = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""`LanguageModel.logprobs` or `TrainingService.compute_logprobs`."""

ROWS_AT_ONCE = 64
SEPARATE = ("input_ids", "attention_mask", "position_ids", "loss_mask")
"""Fields that a sample holds in another form."""


def score_batch(batch: Batch, score: Score) -> Tensor:
    """Log-probability of each token given those before it, float32 `[B, T]`, without gradient.

    0 for the first token of a row and on padding, which must be on the right.
    """
    parts = []
    for part in batch.split(ROWS_AT_ONCE):
        ids_BT, mask_BT = part.data["input_ids"], part.data["attention_mask"]
        with torch.no_grad():
            found_BR = score(ids_BT[:, :1], mask_BT[:, :1], ids_BT[:, 1:], mask_BT[:, 1:])
        parts.append(torch.nn.functional.pad(found_BR.float().cpu(), (1, 0)))
    return torch.cat(parts) if parts else torch.zeros(0, 0)


def samples_of(batch: Batch) -> list[Sample]:
    """A sample a row: the tokens before the policy first spoke as context, the rest to learn from.

    `context` and `response` are tokens, `is_trained` says which of the response the policy said.
    Every other field of tokens goes with the response, and every field of rows as a number. Fields
    of tokens may leave the first column out, as those of NexRL's `responses` do;
    `advantages` becomes one a token, and `episode` tells the groups apart. Rows of weight 0 and
    rows without a token of the policy's are left out.
    """
    if len(batch) == 0:
        return []
    data = batch.data
    trained_BT, mask_BT = data["loss_mask"] & data["attention_mask"], data["attention_mask"]
    data = data.copy()
    for name, value in data.items():
        if value.ndim == 2 and value.shape == trained_BT[:, 1:].shape:
            data[name] = torch.nn.functional.pad(value, (1, 0))
    advantages = data["advantages"].float() if "advantages" in data else None
    if advantages is not None and advantages.ndim == 1:
        advantages = advantages.unsqueeze(1).expand(mask_BT.shape)
    fields = {n: v for n, v in data.items() if n not in (*SEPARATE, "advantages")}
    if advantages is not None:
        fields["advantages"] = advantages
    per_token = {n: v for n, v in fields.items() if v.shape[:2] == mask_BT.shape}
    per_row = {n: v for n, v in fields.items() if n not in per_token}
    is_used = trained_BT.any(dim=1) & (data["row_weights"] > 0)
    episodes = _episodes_of(batch)
    starts = trained_BT.to(torch.uint8).argmax(dim=1).clamp(min=1).tolist()
    lengths = mask_BT.sum(dim=1).tolist()
    samples = []
    for row in is_used.nonzero().squeeze(1).tolist():
        start, end = starts[row], lengths[row]
        sample = {
            "context": data["input_ids"][row, :start],
            "response": data["input_ids"][row, start:end],
            "is_trained": trained_BT[row, start:end],
            "episode": torch.tensor(episodes[row]),
        }
        sample |= {name: value[row, start:end] for name, value in per_token.items()}
        sample |= {name: value[row] for name, value in per_row.items() if value.ndim == 1}
        samples.append(sample)
    return samples


def _episodes_of(batch: Batch) -> list[int]:
    """A number for each row, the same for those of one group; a row without one is by itself."""
    groups = batch.metadata.get("group_ids") or [None] * len(batch)
    keys = [("row", row) if one is None else ("group", one) for row, one in enumerate(groups)]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return [numbers[key] for key in keys]


def collate_trajectories(samples: Sequence[Sample]) -> TensorDict:
    """One batch of samples, with `trained_mask`: the tokens that are learnt."""
    batch = collate(samples)
    batch["trained_mask"] = batch["is_trained"] & batch["response_mask"]
    return batch
