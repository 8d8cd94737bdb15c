"""Batches of random log-probabilities for the tests of losses."""

from __future__ import annotations

import torch

from nip_astra.rl_objectives.policy_losses import GROUP_VARIANTS, PolicyLoss, policy_loss
from nip_astra.rl_objectives.reductions import LossOutput

DOUBLE = torch.float64
Batch = dict[str, torch.Tensor]


def random_batch(seed: int = 0, rows: int = 6, tokens: int = 5, *, scale: float = 0.3) -> Batch:
    """A batch whose policy moved by a scale, by default enough that clips act on both sides."""
    generator = torch.Generator().manual_seed(seed)

    def logprobs() -> torch.Tensor:
        return -torch.rand(rows, tokens, generator=generator, dtype=DOUBLE) * 2

    lengths = torch.randint(1, tokens + 1, (rows, 1), generator=generator)
    old = logprobs()
    noise = torch.randn(rows, tokens, generator=generator, dtype=DOUBLE)
    return {
        "logprobs_BT": old + scale * noise,
        "old_logprobs_BT": old,
        "advantages": torch.randn(rows, generator=generator, dtype=DOUBLE),
        "mask_BT": torch.arange(tokens) < lengths,
        "reference_logprobs_BT": logprobs(),
        "entropy_BT": torch.rand(rows, tokens, generator=generator, dtype=DOUBLE),
    }


def inputs_of(batch: Batch) -> tuple[torch.Tensor, ...]:
    """The positional arguments of a policy loss."""
    return batch["logprobs_BT"], batch["old_logprobs_BT"], batch["advantages"], batch["mask_BT"]


def loss_of_variant(name: str, *inputs: torch.Tensor, **options: object) -> LossOutput:
    """The policy loss of a variant; the longest sequence has 9 tokens."""
    variant = GROUP_VARIANTS[name]
    given = {
        "loss": PolicyLoss.of(variant.loss, clip_high=variant.clip_high),
        "reduction": variant.reduction,
        "max_length": 9,
        "kl_gradient": "k3",
    }
    return policy_loss(*inputs, **{**given, **options})


def without(batch: Batch, *names: str) -> Batch:
    return {name: tensor for name, tensor in batch.items() if name not in names}
