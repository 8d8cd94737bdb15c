"""Entropy bonus and gibberish penalty are means over the tokens of a probe."""

from __future__ import annotations

import math

import pytest
import torch

from tests.reward_terms.rollouts import rollout, term_of

NAN = float("nan")
MASK = torch.tensor([[True, True, True], [True, True, False], [False, False, False]])
LOGPROBS = torch.tensor([[-1.0, -2.0, -6.0], [-0.5, -1.5, 99.0], [NAN, math.inf, 1.0]])


def test_the_entropy_bonus_is_the_negative_log_probability_per_token() -> None:
    nodes = rollout(["a b", "c", "d"], logprobs_NT=LOGPROBS, mask_NT=MASK)
    assert term_of("entropy_bonus").values(nodes).tolist() == [3.0, 1.0, 0.0]
    added = term_of("entropy_bonus").added(nodes)
    assert added.tolist() == pytest.approx([0.03, 0.01, 0.0])


def test_the_penalty_is_the_surprisal_under_the_reference_beyond_the_threshold() -> None:
    nodes = rollout(["a b", "c", "d"], reference_NT=LOGPROBS, mask_NT=MASK)
    values = term_of("gibberish_penalty", threshold=2.5).values(nodes)
    assert values.tolist() == [-0.5, 0.0, 0.0]
    assert term_of("gibberish_penalty", threshold=0.0).values(nodes).tolist() == [-3.0, -1.0, 0.0]
    assert term_of("gibberish_penalty", threshold=3.0).values(nodes).tolist() == [0.0] * 3


@pytest.mark.parametrize("name", ["entropy_bonus", "gibberish_penalty"])
def test_padding_and_order_change_nothing(name: str) -> None:
    options = {"threshold": 0.5} if name == "gibberish_penalty" else {}
    term, logprobs = term_of(name, **options), -torch.rand(4, 5) * 3
    mask = torch.arange(5) < torch.tensor([[1], [5], [2], [3]])

    def values(logprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return term.values(
            rollout("abcd", logprobs_NT=logprobs, reference_NT=logprobs, mask_NT=mask)
        )

    plain = values(logprobs, mask)
    wide = torch.nn.functional.pad(logprobs, (0, 3), value=NAN)
    padded = values(wide, torch.nn.functional.pad(mask, (0, 3)))
    assert torch.allclose(plain, padded, atol=1e-6)
    assert torch.equal(values(logprobs.flip(0), mask.flip(0)), plain.flip(0))
