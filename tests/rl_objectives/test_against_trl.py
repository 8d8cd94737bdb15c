"""Losses equal those of TRL's trainers in value and gradient, where TRL has them.

TRL's losses are methods of trainers; they are called with a stand-in for the trainer, so that
their own code runs on given log-probabilities.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from nip_astra.rl_objectives.policy_losses import GROUP_VARIANTS, PolicyLoss
from tests.rl_objectives.batches import Batch, loss_of_variant, random_batch
from tests.rl_objectives.references import assert_same, grpo_of_trl, loss_of_trl

DOUBLE = torch.float64
MAX_LENGTH = 11


def batch_of_trl(seed: int, scale: float) -> Batch:
    """Eight rows, with old log-probabilities from which the policy moved by a scale."""
    return random_batch(seed, rows=8, tokens=6, scale=scale)


def inputs_of(batch: Batch) -> tuple[torch.Tensor, ...]:
    return batch["logprobs_BT"], batch["old_logprobs_BT"], batch["advantages"], batch["mask_BT"]


def variant_of_trl(
    trl: SimpleNamespace, name: str, batch: Batch, *, kl_weight: float
) -> torch.Tensor:
    variant = GROUP_VARIANTS[name]
    clip = PolicyLoss.of(variant.loss, clip_high=variant.clip_high).options
    return grpo_of_trl(
        trl,
        inputs_of(batch),
        {"ref_per_token_logps": batch["reference_logprobs_BT"]},
        loss_type={"gspo": "grpo"}.get(name, name),
        importance_sampling_level="sequence" if name == "gspo" else "token",
        epsilon_low=clip["clip_low"],
        epsilon_high=clip["clip_high"] if name != "cispo" else 1 + clip["clip_high"],
        beta=kl_weight,
        max_completion_length=MAX_LENGTH,
    )


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "cispo", "gspo"])
@pytest.mark.parametrize("kl_weight", [0.0, 0.2])
@pytest.mark.parametrize("scale", [0.05, 0.5, 2.0])
def test_group_variants_equal_grpo_of_trl(
    trl: SimpleNamespace, name: str, kl_weight: float, scale: float
) -> None:
    batch = batch_of_trl(3, scale)
    batch["logprobs_BT"].requires_grad_()
    loss = loss_of_variant(
        name,
        *inputs_of(batch),
        max_length=MAX_LENGTH,
        reference_logprobs_BT=batch["reference_logprobs_BT"],
        kl_weight=kl_weight,
    ).loss
    assert_same(loss, variant_of_trl(trl, name, batch, kl_weight=kl_weight), batch["logprobs_BT"])


@pytest.mark.parametrize("scale", [0.05, 0.5])
def test_rloo_equals_rloo_of_trl(trl: SimpleNamespace, scale: float) -> None:
    batch = batch_of_trl(4, scale)
    logprobs = batch["logprobs_BT"].requires_grad_()
    old = {"old_logps": (batch["old_logprobs_BT"] * batch["mask_BT"]).sum(1)}
    given = (logprobs, batch["mask_BT"], batch["advantages"])
    theirs = loss_of_trl(trl.RLOOTrainer, *given, old, epsilon_low=0.2, epsilon_high=0.2)
    mine = loss_of_variant("rloo", *inputs_of(batch)).loss
    assert_same(mine, theirs, logprobs)
