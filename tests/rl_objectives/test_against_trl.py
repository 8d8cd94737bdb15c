"""Losses equal those of TRL's trainers in value and gradient, where TRL has them.

TRL's losses are methods of trainers; they are called with a stand-in for the trainer, so that
their own code runs on given log-probabilities.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from nip_astra.rl_objectives.advantages import Scale, group_advantages
from nip_astra.rl_objectives.policy_losses import GROUP_VARIANTS, PolicyLoss
from nip_astra.rl_objectives.preference import (
    PreferenceKind,
    preference_loss,
    sequence_logprobs,
)
from tests.rl_objectives.batches import loss_of_variant
from tests.rl_objectives.references import (
    assert_same,
    grpo_of_trl,
    loss_of_trl,
    model_with_logprobs,
    trl_trainer,
)

DOUBLE = torch.float64
MAX_LENGTH = 11


def random_batch(seed: int, scale: float) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows, tokens = 8, 6
    old = -torch.rand(rows, tokens, generator=generator, dtype=DOUBLE) * 3
    noise = torch.randn(rows, tokens, generator=generator, dtype=DOUBLE)
    lengths = torch.randint(1, tokens + 1, (rows, 1), generator=generator)
    return {
        "logprobs": old + scale * noise,
        "old": old,
        "reference": -torch.rand(rows, tokens, generator=generator, dtype=DOUBLE) * 3,
        "advantages": torch.randn(rows, generator=generator, dtype=DOUBLE),
        "mask": torch.arange(tokens) < lengths,
    }


def inputs_of(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return batch["logprobs"], batch["old"], batch["advantages"], batch["mask"]


def variant_of_trl(
    trl: SimpleNamespace, name: str, batch: dict[str, torch.Tensor], *, kl_weight: float
) -> torch.Tensor:
    variant = GROUP_VARIANTS[name]
    clip = PolicyLoss.of(variant.loss, clip_high=variant.clip_high).options
    return grpo_of_trl(
        trl,
        inputs_of(batch),
        {"ref_per_token_logps": batch["reference"]},
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
    batch = random_batch(3, scale)
    batch["logprobs"].requires_grad_()
    loss = loss_of_variant(
        name,
        *inputs_of(batch),
        max_length=MAX_LENGTH,
        reference_logprobs_BT=batch["reference"],
        kl_weight=kl_weight,
    ).loss
    assert_same(loss, variant_of_trl(trl, name, batch, kl_weight=kl_weight), batch["logprobs"])


@pytest.mark.parametrize("scale", [0.05, 0.5])
def test_rloo_equals_rloo_of_trl(trl: SimpleNamespace, scale: float) -> None:
    batch = random_batch(4, scale)
    logprobs = batch["logprobs"].requires_grad_()
    old = {"old_logps": (batch["old"] * batch["mask"]).sum(1)}
    given = (logprobs, batch["mask"], batch["advantages"])
    theirs = loss_of_trl(trl.RLOOTrainer, *given, old, epsilon_low=0.2, epsilon_high=0.2)
    mine = loss_of_variant("rloo", *inputs_of(batch)).loss
    assert_same(mine, theirs, logprobs)


@pytest.mark.parametrize("scale", ["group", "batch"])
def test_the_deviation_of_a_group_or_of_the_batch_is_that_of_trl(
    trl: SimpleNamespace, scale: Scale
) -> None:
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randn(6, 4, generator=generator, dtype=DOUBLE) + torch.arange(6)[:, None]
    rewards[torch.rand(6, 4, generator=generator) < 0.2] = torch.nan
    rewards[5] = 0.3
    group_N = torch.arange(6).repeat_interleave(4)
    result = group_advantages(rewards.flatten(), group_N, scale=scale, std_epsilon=1e-4)
    is_group = scale == "group"
    deviation = trl.nanstd(rewards, dim=1)[:, None] if is_group else trl.nanstd(rewards.flatten())
    expected = (rewards - rewards.nanmean(dim=1, keepdim=True)) / (deviation + 1e-4)
    # TRL's correction count / (count - 1) is a division of integers, which gives float32.
    assert torch.allclose(
        result.advantages_N, expected.flatten().nan_to_num(0.0), rtol=0, atol=1e-6
    )


# ---- preferences


def dpo_of_trl(
    trl: SimpleNamespace,
    loss_type: str,
    chosen: torch.Tensor,
    rejected: torch.Tensor,
    batch: dict[str, torch.Tensor],
    **attributes: float,
) -> torch.Tensor:
    """Call TRL's loss of pairs: rows 0 to 3 are chosen, rows 4 to 7 rejected."""
    mask = batch["mask"]
    masked = torch.cat([chosen, rejected]) * mask
    trainer = trl_trainer(
        **{"label_smoothing": 0.0} | attributes,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=[loss_type],
        loss_weights=[1.0],
        use_weighting=False,
    )
    # TRL drops the first position, which has no log-probability: a prompt token fills it.
    completion = torch.nn.functional.pad(mask, (1, 0))
    reference = (batch["reference"] * mask).sum(dim=1)
    inputs = {
        "input_ids": torch.zeros(8, completion.shape[1], dtype=torch.long),
        "attention_mask": torch.ones(8, completion.shape[1]),
        "completion_mask": completion,
        "ref_chosen_logps": reference[:4],
        "ref_rejected_logps": reference[4:],
    }
    loss = trl.DPOTrainer._compute_loss(trainer, model_with_logprobs(masked), inputs, False)
    assert isinstance(loss, torch.Tensor)
    return loss


@pytest.mark.parametrize(
    ("kind", "theirs", "label_smoothing", "length_normalised"),
    [
        ("sigmoid", "sigmoid", 0.0, False),
        ("sigmoid", "sigmoid_norm", 0.0, True),
        ("hinge", "hinge", 0.0, False),
        ("robust", "robust", 0.2, False),
        ("ipo", "ipo", 0.0, True),
    ],
)
@pytest.mark.parametrize("beta", [0.1, 0.5])
def test_preference_losses_equal_dpo_of_trl(
    trl: SimpleNamespace,
    kind: PreferenceKind,
    theirs: str,
    label_smoothing: float,
    length_normalised: bool,
    beta: float,
) -> None:
    batch = random_batch(6, 0.5)
    chosen = batch["logprobs"][:4].clone().requires_grad_()
    rejected = batch["logprobs"][4:].clone().requires_grad_()

    def logratios(logprobs: torch.Tensor) -> torch.Tensor:
        sums = sequence_logprobs(logprobs, batch["mask"], length_normalised=length_normalised)
        return sums[:4] - sums[4:]

    mine = preference_loss(
        logratios(torch.cat([chosen, rejected])),
        logratios(batch["reference"]),
        kind=kind,
        beta=beta,
        label_smoothing=label_smoothing,
    ).loss
    other = dpo_of_trl(
        trl, theirs, chosen, rejected, batch, beta=beta, label_smoothing=label_smoothing
    )
    assert_same(mine, other, chosen, rejected)
