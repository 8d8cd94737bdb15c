"""The reward of a node is the paper's, and silence does not pay."""

from __future__ import annotations

import math

import pytest
import torch

from nip_astra.rl_objectives.rewards import ast_reward, mean_nll, overlong_penalty


def test_mean_nll_is_a_mean_over_scored_tokens() -> None:
    logprobs = torch.tensor([[-1.0, -3.0, -99.0], [-2.0, -99.0, -99.0], [-9.0, -9.0, -9.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]], dtype=torch.bool)
    assert mean_nll(logprobs, mask).tolist() == [2.0, 2.0, 0.0]


def test_reward_by_hand_and_an_empty_probe_is_charged_a_uniform_guess() -> None:
    reward = ast_reward(
        *torch.tensor([[0.8, 0.0], [0.6, 0.0], [2.0, 0.0]]),
        torch.tensor([False, True]),
        w_response=1.0,
        w_combined=0.5,
        w_likelihood=0.1,
        empty_nll=math.log(100),
    )
    # 1.0 * 0.8 + 0.5 * 0.6 - 0.1 * 2.0
    assert reward.tolist() == pytest.approx([0.9, -0.1 * math.log(100)])


@pytest.mark.parametrize("weights", [(0.0, 0.5), (0.5, 0.0), (0.0, 0.0)])
def test_a_score_of_weight_zero_may_be_missing(weights: tuple[float, float]) -> None:
    scores = torch.tensor([0.8, math.nan]), torch.tensor([math.nan, 0.8])
    reward = ast_reward(
        *scores,
        torch.zeros(2),
        torch.zeros(2, dtype=torch.bool),
        **dict(zip(("w_response", "w_combined"), weights, strict=True)),
        w_likelihood=0.1,
        empty_nll=1.0,
    )
    expected = {0.0: [0.0, 0.0], 0.5: [0.4, math.nan]}[weights[0]]
    expected = [math.nan, 0.4] if weights[1] else expected
    assert torch.allclose(reward, torch.tensor(expected), equal_nan=True)


def test_the_penalty_on_overlong_answers_falls_in_a_line() -> None:
    lengths = torch.tensor([5, 8, 9, 10, 12])
    result = overlong_penalty(lengths, max_length=10, margin=2)
    assert result.tolist() == [0.0, 0.0, -0.5, -1.0, -1.0]
