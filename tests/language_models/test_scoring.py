"""Log-probabilities from hidden states: log-softmax and its gradient, for any split of the rows."""

from __future__ import annotations

import pytest
import torch

from nip_astra.language_models import scoring
from nip_astra.language_models.scoring import token_logprobs, token_logprobs_and_entropy
from nip_astra.language_models.tree_engine.weights import Weights


def _weights(matrix_VX: torch.Tensor) -> Weights:
    return Weights(matrix_VX, [], torch.ones(4), lambda x: x @ matrix_VX.T, torch.float64)


@pytest.mark.parametrize("has_entropy", [False, True])
@pytest.mark.parametrize(
    ("joint", "kept", "at_once", "cached"),
    [
        (1 << 20, 1 << 20, 1 << 20, 1 << 20),
        (1 << 20, 1 << 20, 1 << 20, 22),
        (0, 1 << 20, 22, 1),
        (0, 0, 1 << 20, 1 << 20),
        (0, 0, 22, 11),
        (0, 0, 1, 1),
    ],
)
def test_log_probabilities_entropies_and_gradients_equal_those_of_torch(
    monkeypatch: pytest.MonkeyPatch,
    joint: int,
    kept: int,
    at_once: int,
    cached: int,
    has_entropy: bool,
) -> None:
    monkeypatch.setattr(scoring, "MAX_JOINT_LOGITS", joint)
    monkeypatch.setattr(scoring, "MAX_KEPT_LOGITS", kept)
    monkeypatch.setattr(scoring, "MAX_LOGITS", at_once)
    monkeypatch.setattr(scoring, "MAX_CACHED_LOGITS", cached)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(7, 4, generator=generator)
    matrix = torch.randn(11, 4, generator=generator)
    ids = torch.tensor([0, 3, 3, 10, 5, 1, 2])
    rates = torch.randn(2, 7, generator=generator)
    result = []
    for is_ours in (True, False):
        x, w = hidden.clone().requires_grad_(), matrix.clone().requires_grad_()
        values: tuple[torch.Tensor, ...]
        if not is_ours:
            all_logprobs = (x @ w.T).log_softmax(-1)
            entropies = torch.distributions.Categorical(logits=all_logprobs).entropy()
            values = (all_logprobs[torch.arange(7), ids], entropies)[: 1 + has_entropy]
        elif has_entropy:
            values = token_logprobs_and_entropy(x, ids, _weights(w))
        else:
            values = (token_logprobs(x, ids, _weights(w)),)
            assert not token_logprobs(x.detach(), ids, _weights(w.detach())).requires_grad
        torch.stack([v * r for v, r in zip(values, rates, strict=False)]).sum().backward()
        result.append([*(value.detach() for value in values), x.grad, w.grad])
    for ours, expected in zip(*result, strict=True):
        assert torch.allclose(ours, expected, atol=1e-5)


def test_a_token_of_probability_zero_adds_nothing_to_the_entropy() -> None:
    hidden = torch.tensor([[200.0, 0.0, 0.0, 0.0]], requires_grad=True)
    _, entropies = token_logprobs_and_entropy(hidden, torch.tensor([0]), _weights(torch.eye(4)))
    entropies.sum().backward()
    assert entropies.tolist() == [0.0]
    assert torch.isfinite(hidden.grad).all()
