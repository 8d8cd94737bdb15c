"""Sampling draws exactly from the set and the distribution that the options define."""

from __future__ import annotations

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from nip_astra.language_models.sampling import sample_tokens


def _frequencies(logits: torch.Tensor, **options: float) -> torch.Tensor:
    # A fine grid of uniform numbers gives the distribution without chance.
    uniforms = (torch.arange(20_000) + 0.5) / 20_000
    drawn = sample_tokens(logits.expand(len(uniforms), -1), uniforms, **options)
    return torch.bincount(drawn, minlength=logits.shape[-1]) / len(uniforms)


@pytest.mark.parametrize("top_k", [None, 1, 5])
@pytest.mark.parametrize("top_p", [1.0, 0.7])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_draws_follow_the_distribution_of_the_hugging_face_warpers(
    top_k: int | None, top_p: float, temperature: float
) -> None:
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(0))
    expected = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k is not None:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1.0:
        expected = TopPLogitsWarper(top_p)(None, expected)
    found = _frequencies(logits, top_k=top_k, top_p=top_p, temperature=temperature)
    assert torch.allclose(found, expected.softmax(-1)[0], atol=2e-4)
    assert torch.equal(found > 0, expected[0] > float("-inf"))


def test_zero_temperature_is_greedy() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0]])
    assert sample_tokens(logits, torch.tensor([0.99]), temperature=0.0).tolist() == [1]


def test_a_forbidden_token_is_never_drawn_even_by_the_largest_uniform_number() -> None:
    logits = torch.tensor([[1.0, 0.0, float("-inf")]])
    largest = torch.tensor([1.0 - 2.0**-24])
    assert sample_tokens(logits, largest).tolist() == [1]
    assert sample_tokens(logits, torch.tensor([0.0])).tolist() == [0]
