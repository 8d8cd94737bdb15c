"""The DPO loss equals what one works out by hand, in value and in gradient."""

from __future__ import annotations

import math

import pytest
import torch

from nip_astra.rl_objectives.preference import dpo_loss

POLICY = torch.tensor([1.5, -0.3, 0.0, 4.0], dtype=torch.float64)
REFERENCE = torch.tensor([1.0, 0.4, 0.0, -2.0], dtype=torch.float64)


def _independent_loss(policy: list[float], reference: list[float], beta: float) -> float:
    """Bradley-Terry likelihood of the implicit rewards, written out (arXiv:2305.18290, eq. 7)."""
    total = 0.0
    for p, r in zip(policy, reference, strict=True):
        total += math.log1p(math.exp(-beta * (p - r)))
    return total / len(policy)


@pytest.mark.parametrize("beta", [0.05, 0.3, 2.0])
def test_loss_and_gradient_equal_an_independent_implementation(beta: float) -> None:
    policy = POLICY.clone().requires_grad_()
    loss = dpo_loss(policy, REFERENCE, beta=beta).loss
    loss.backward()
    assert loss.item() == pytest.approx(
        _independent_loss(POLICY.tolist(), REFERENCE.tolist(), beta), abs=1e-12
    )
    # d/dx of -log sigmoid(beta x) is -beta * sigmoid(-beta x), and the mean divides by 4.
    expected = [
        -beta / (1.0 + math.exp(beta * (p - r))) / 4.0
        for p, r in zip(POLICY.tolist(), REFERENCE.tolist(), strict=True)
    ]
    assert policy.grad.tolist() == pytest.approx(expected, abs=1e-12)


def test_a_policy_at_its_reference_loses_log_two() -> None:
    output = dpo_loss(REFERENCE, REFERENCE, beta=0.1)
    assert output.loss.item() == pytest.approx(math.log(2.0), abs=1e-12)
    assert output.metrics["preference_margin"] == 0.0
    assert output.metrics["preference_accuracy"] == 0.0


def test_one_pair_by_hand() -> None:
    # beta * (2 - 1) = 0.5; -log sigmoid(0.5) = log(1 + e^-0.5) = 0.474076984...
    output = dpo_loss(torch.tensor([2.0]).double(), torch.tensor([1.0]).double(), beta=0.5)
    assert output.loss.item() == pytest.approx(0.4740769841801067, abs=1e-12)


def test_loss_does_not_depend_on_the_order_of_pairs_and_splits_into_micro_batches() -> None:
    whole = dpo_loss(POLICY, REFERENCE, beta=0.2).loss
    order = torch.tensor([2, 0, 3, 1])
    assert torch.allclose(dpo_loss(POLICY[order], REFERENCE[order], beta=0.2).loss, whole)
    first = dpo_loss(POLICY[:3], REFERENCE[:3], beta=0.2).loss
    last = dpo_loss(POLICY[3:], REFERENCE[3:], beta=0.2).loss
    assert torch.allclose(0.75 * first + 0.25 * last, whole)


def test_no_gradient_reaches_the_reference() -> None:
    reference = REFERENCE.clone().requires_grad_()
    dpo_loss(POLICY.clone().requires_grad_(), reference, beta=0.2).loss.backward()
    assert reference.grad is None


def test_large_margins_stay_finite() -> None:
    policy = torch.tensor([1e4, -1e4]).requires_grad_()
    loss = dpo_loss(policy, torch.zeros(2), beta=1.0).loss
    loss.backward()
    assert loss.isfinite()
    assert policy.grad.isfinite().all()
