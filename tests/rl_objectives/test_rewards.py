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


def test_the_penalty_on_overlong_answers_falls_in_a_line() -> None:
    lengths = torch.tensor([5, 8, 9, 10, 12])
    result = overlong_penalty(lengths, max_length=10, margin=2)
    assert result.tolist() == [0.0, 0.0, -0.5, -1.0, -1.0]
