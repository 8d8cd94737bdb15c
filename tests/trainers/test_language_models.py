"""Requirements on every trainer of a language model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nip_astra.rollouts.samples import Sample
from nip_astra.run import prepare_experiment
from tests.kit.resuming import short_experiment


def prepared(name: str, folder: Path, *overrides: str) -> tuple[Any, list[Sample]]:
    """A trainer whose policy has moved from its reference, and samples from before."""
    resolved = short_experiment(name, folder, "training.num_episodes_per_experience=4", *overrides)
    trainer: Any = prepare_experiment(resolved, progress=False).trainer
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        samples = trainer.collect(0).samples
        for weight in trainer.learned:
            weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.05)
    for number, sample in enumerate(samples):
        # Farther away, so that the divergence of pairs is above 0 and differs between batches.
        for name in sample.keys() & {"reference_chosen"}:
            sample[name] = sample[name] - 1.0 * number
    return trainer, samples


def gradients(trainer: Any, *parts: list[Sample]) -> tuple[float, list[Tensor]]:
    """The loss of a step over batches, and its gradients."""
    batches = [trainer.collate_fn(part) for part in parts]
    trainer._write_step_totals(batches)
    loss = trainer.service.forward_backward(batches, trainer.loss)["loss"]
    grads = [weight.grad.clone() for weight in trainer.learned if weight.grad is not None]
    trainer.optimizer.zero_grad(set_to_none=True)
    return loss, grads


REDUCTIONS = (
    "token",
    "sequence",
    "sequence_sum",
    "sum_over_length",
)  # minibatch_token depends on it


@pytest.mark.parametrize(
    ("name", "option"),
    [
        *((name, "seed=0") for name in ("ast_dpo", "ast_ppo", "ast_reinforce", "ast_sft")),
        # Its baseline is the divergence of all pairs of a step.
        ("ast_dpo", "ast_dpo.loss=kto"),
        ("ast_grpo", "ast_grpo.variant=dapo"),
        *(("self_hosted_grpo", f"self_hosted_grpo.policy_loss.reduction={r}") for r in REDUCTIONS),
        ("remote_api_grpo", "seed=0"),
    ],
)
def test_a_step_does_not_depend_on_its_split_into_batches(
    name: str, option: str, tmp_path: Path
) -> None:
    trainer, samples = prepared(name, tmp_path / "scenario", option)
    assert len(samples) > 6
    loss, whole = gradients(trainer, samples)
    split_loss, split = gradients(trainer, samples[:5], samples[5:6], samples[6:])
    assert split_loss == pytest.approx(loss, rel=1e-4, abs=1e-6)
    largest = max(float(grad.abs().max()) for grad in whole)
    assert largest > 1e-4
    for mine, theirs in zip(whole, split, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-4 * largest)
