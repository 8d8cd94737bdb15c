"""Over all sequences of a small game, mean gradients are those of the expectations.

Importance weights turn means under one distribution into means under another.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from nip_astra.rl_objectives.advantages import reverse_kl_advantages
from nip_astra.rl_objectives.kl import kl_estimate, sequence_kl_estimate
from nip_astra.rl_objectives.policy_losses import ImportanceLevel, importance_weights, policy_loss

PI = torch.tensor([[0.5, 0.25], [0.2, math.nan]]).log()
MU = torch.tensor([[0.25, 0.5], [0.8, 1.0]]).log()
RARE = MU - torch.tensor([[1e4, 0.0], [0.0, 0.0]])
"""The first token was next to impossible."""
MASK = torch.tensor([[True, True], [True, False]])


@pytest.mark.parametrize(
    ("behaviour", "level", "mode", "most", "expected"),
    [
        (MU, "token", "truncate", 9.0, [[2.0, 0.5], [0.25, 0.0]]),
        (MU, "token", "truncate", 1.5, [[1.5, 0.5], [0.25, 0.0]]),
        (MU, "token", "mask", 1.5, [[0.0, 0.5], [0.25, 0.0]]),
        (MU, "sequence", "truncate", 9.0, [[1.0, 1.0], [0.25, 0.0]]),
        (MU, "sequence", "truncate", 0.5, [[0.5, 0.5], [0.25, 0.0]]),
        (MU, "sequence", "mask", 0.5, [[0.0, 0.0], [0.25, 0.0]]),
        (RARE, "token", "truncate", 3.0, [[3.0, 0.5], [0.25, 0.0]]),
    ],
)
def test_weights_by_hand(
    behaviour: Tensor, level: ImportanceLevel, mode: str, most: float, expected: list[list[float]]
) -> None:
    result = importance_weights(PI, behaviour, MASK, level=level, mode=mode, max_ratio=most)
    torch.testing.assert_close(result, torch.tensor(expected))


# Sequences of two tokens of three: the second depends on the first.
SEQUENCES = torch.tensor(list(itertools.product(range(3), repeat=2)))
ALL = torch.ones(9, 2, dtype=torch.bool)
REWARDS = torch.tensor([1.0, 0.0, 0.3, -1.0, 2.0, 0.1, 0.4, 0.9, -0.2], dtype=torch.float64)


def _logprobs(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """The log-probabilities of the tokens of all sequences, `[9, 2]`."""
    of_all = (logits / temperature).log_softmax(dim=-1)
    first_B, second_B = SEQUENCES.unbind(dim=1)
    return torch.stack([of_all[0, first_B], of_all[1 + first_B, second_B]], dim=1)


def _logits(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 3, generator=generator, dtype=torch.float64).requires_grad_()


def _relative_error(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


def test_weighted_by_whole_sequences_the_mean_gradient_is_that_of_the_expected_reward() -> None:
    logits = _logits(0)
    now, behaviour = _logprobs(logits), _logprobs(logits.detach(), temperature=0.5)
    (exact,) = torch.autograd.grad(
        (now.sum(dim=1).exp() * REWARDS).sum(), logits, retain_graph=True
    )

    def gradient(weights: Tensor | None) -> Tensor:
        chances_B = behaviour.sum(dim=1).exp()
        # The loss is a mean over rows of equal weight.
        advantages_B = REWARDS * chances_B * len(SEQUENCES)
        options = {"loss": "reinforce", "reduction": "sequence_sum", "weights_BT": weights}
        loss = policy_loss(now, None, advantages_B, ALL, **options).loss
        return -torch.autograd.grad(loss, logits, retain_graph=True)[0]

    def weights(level: ImportanceLevel, most: float) -> Tensor:
        return importance_weights(now, behaviour, ALL, level=level, max_ratio=most)

    assert _relative_error(gradient(weights("sequence", 1e9)), exact) < 1e-12
    uncorrected = _relative_error(gradient(None), exact)
    assert uncorrected > 0.3
    # Truncated or per-token weights are closer than none.
    assert 1e-3 < _relative_error(gradient(weights("token", 1e9)), exact) < uncorrected
    assert 1e-3 < _relative_error(gradient(weights("sequence", 2.0)), exact) < uncorrected


def test_of_sequences_only_the_square_of_the_sum_has_the_gradient_of_their_divergence() -> None:
    logits, reference = _logits(1), _logprobs(_logits(2).detach())
    now, behaviour = _logprobs(logits), _logprobs(logits.detach(), temperature=0.5)
    total_B = now.sum(dim=1)

    def gradient(value: Tensor) -> Tensor:
        return torch.autograd.grad(value, logits, retain_graph=True)[0]

    exact = gradient((total_B.exp() * (total_B - reference.sum(dim=1))).sum())
    values_B = sequence_kl_estimate(now, reference, ALL)
    weights = importance_weights(now, behaviour, ALL, level="sequence", max_ratio=1e9)
    weighted_B = sequence_kl_estimate(now, reference, ALL, weights_BT=weights)
    torch.testing.assert_close(weighted_B, values_B)
    for sampler, of_sampler_B in ((now, values_B), (behaviour, weighted_B)):
        mean = (sampler.sum(dim=1).exp().detach() * of_sampler_B).sum()
        assert _relative_error(gradient(mean), exact) < 1e-12
    sum_of_squares_B = kl_estimate(now, reference, "k2").sum(dim=1)
    mean = (total_B.exp().detach() * sum_of_squares_B).sum()
    assert _relative_error(gradient(mean), exact) > 0.1


def test_with_discount_one_distillation_follows_the_divergence_of_sequences() -> None:
    logits, teacher = _logits(1), _logprobs(_logits(2).detach())
    student = _logprobs(logits)
    chances_B = student.sum(dim=1).exp()
    divergence = (chances_B * (student - teacher).sum(dim=1)).sum()
    (exact,) = torch.autograd.grad(divergence, logits, retain_graph=True)

    def error(discount: float) -> float:
        advantages = reverse_kl_advantages(student, teacher, ALL, discount=discount)
        weighted = chances_B[:, None] * advantages * len(SEQUENCES)
        options = {"loss": "importance_sampling", "reduction": "sequence_sum"}
        loss = policy_loss(student, student.detach(), weighted, ALL, **options).loss
        return _relative_error(torch.autograd.grad(loss, logits, retain_graph=True)[0], exact)

    assert error(1.0) < 1e-12 < 1e-3 < error(0.0)
