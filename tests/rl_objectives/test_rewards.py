"""The reward of a node is the paper's, and silence does not pay."""

from __future__ import annotations

import math

import pytest
import torch

from nip_astra.rl_objectives.rewards import ast_reward, mean_nll

WEIGHTS = {"w_response": 1.0, "w_combined": 0.5, "w_likelihood": 0.1, "empty_nll": math.log(100)}


def test_mean_nll_is_a_mean_over_scored_tokens() -> None:
    logprobs = torch.tensor([[-1.0, -3.0, -99.0], [-2.0, -99.0, -99.0], [-9.0, -9.0, -9.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]], dtype=torch.bool)
    assert mean_nll(logprobs, mask).tolist() == [2.0, 2.0, 0.0]


def test_reward_by_hand() -> None:
    reward = ast_reward(
        torch.tensor([0.8]),
        torch.tensor([0.6]),
        torch.tensor([2.0]),
        torch.tensor([False]),
        **WEIGHTS,
    )
    # 1.0 * 0.8 + 0.5 * 0.6 - 0.1 * 2.0
    assert reward.item() == pytest.approx(0.9)


def test_an_empty_probe_is_charged_a_uniform_guess() -> None:
    scores, nll = torch.zeros(2), torch.tensor([0.0, 1.5])
    reward = ast_reward(scores, scores, nll, torch.tensor([True, False]), **WEIGHTS)
    assert reward[0].item() == pytest.approx(-0.1 * math.log(100))
    assert reward[0] < reward[1]
