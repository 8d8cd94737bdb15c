"""On-policy distillation has the gradient of the exact reverse KL."""

from __future__ import annotations

import itertools

import torch

from nip_astra.rl_objectives.advantages import reverse_kl_advantages
from nip_astra.rl_objectives.policy_losses import PolicyLoss

DOUBLE = torch.float64
IMPORTANCE_SAMPLING = PolicyLoss.of("importance_sampling")


def test_with_discount_one_the_gradient_is_that_of_the_divergence_of_sequences() -> None:
    """Two positions, the second conditioned on the first token: sums over all sequences."""
    generator = torch.Generator().manual_seed(1)
    student, teacher = torch.randn(2, 4, 3, generator=generator, dtype=DOUBLE)
    student.requires_grad_()
    pairs = list(itertools.product(range(3), range(3)))
    rows = torch.tensor([[0, 1 + first] for first, _ in pairs])
    tokens = torch.tensor(pairs)
    student_BT, teacher_BT = (x.log_softmax(1)[rows, tokens] for x in (student, teacher))
    weight_B = student_BT.sum(1).exp()
    exact = torch.autograd.grad(
        (weight_B * (student_BT - teacher_BT).sum(1)).sum(), student, retain_graph=True
    )[0]
    mask = torch.ones(9, 2, dtype=torch.bool)
    result = []
    for discount in (1.0, 0.0):
        advantages = reverse_kl_advantages(student_BT, teacher_BT, mask, discount=discount)
        loss = IMPORTANCE_SAMPLING.of_tokens(student_BT, student_BT.detach(), advantages, mask)
        total = (weight_B.detach() * loss.sum(1)).sum()
        result.append(torch.autograd.grad(total, student, retain_graph=True)[0])
    assert torch.allclose(result[0], exact, atol=1e-12)
    assert not torch.allclose(result[1], exact, atol=1e-3)


def test_later_gaps_count_over_masked_tokens_without_being_discounted_for_them() -> None:
    student = torch.tensor([[1.0, 9.0, 2.0, 4.0]], dtype=DOUBLE)
    mask = torch.tensor([[True, False, True, True]])
    result = reverse_kl_advantages(
        student, torch.zeros_like(student), mask, weight=2.0, discount=0.5
    )
    assert result.tolist() == [[-2 * (1 + 1 + 1), 0.0, -2 * (2 + 2), -8.0]]
