"""Log-probabilities from hidden states: log-softmax and its gradient, for any split of the rows."""

from __future__ import annotations

import pytest
import torch

from nip_astra.language_models import scoring
from nip_astra.language_models.scoring import token_logprobs, token_logprobs_and_entropy
from nip_astra.language_models.tree_engine.weights import Weights

MOST = 1 << 20


def _weights(matrix_VX: torch.Tensor) -> Weights:
    return Weights(matrix_VX, [], torch.ones(4), lambda x: x @ matrix_VX.T, torch.float64)


@pytest.mark.parametrize("has_entropy", [False, True])
@pytest.mark.parametrize(
    "limits",
    [
        *((MOST, MOST, MOST, MOST), (MOST, MOST, MOST, 22), (0, MOST, 22, 1)),
        *((0, 0, MOST, MOST), (0, 0, 22, 11), (0, 0, 1, 1)),
    ],
)
def test_log_probabilities_entropies_and_gradients_equal_those_of_torch(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, ...], has_entropy: bool
) -> None:
    for name, limit in zip(("JOINT_", "KEPT_", "", "CACHED_"), limits, strict=True):
        monkeypatch.setattr(scoring, f"MAX_{name}LOGITS", limit)
    generator = torch.Generator().manual_seed(0)
    hidden, matrix, rates = (
        torch.randn(shape, generator=generator) for shape in ((7, 4), (11, 4), (2, 7))
    )
    ids = torch.tensor([0, 3, 3, 10, 5, 1, 2])
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
    torch.testing.assert_close(*result, atol=1e-5, rtol=1e-5)


def test_a_token_of_probability_zero_adds_nothing_to_the_entropy() -> None:
    hidden = torch.tensor([[200.0, 0.0, 0.0, 0.0]], requires_grad=True)
    _, entropies = token_logprobs_and_entropy(hidden, torch.tensor([0]), _weights(torch.eye(4)))
    entropies.sum().backward()
    assert entropies.tolist() == [0.0]
    assert torch.isfinite(hidden.grad).all()
