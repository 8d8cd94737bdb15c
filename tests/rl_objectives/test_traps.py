"""Our choice where libraries use the same name for different numbers.

One test per trap, which states the choice and that other libraries' numbers differ.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nip_astra.language_models.base import SamplingOptions
from nip_astra.language_models.huggingface import HuggingFaceLanguageModel
from nip_astra.rl_objectives.advantages import gae, group_advantages
from nip_astra.rl_objectives.kl import kl_estimate
from nip_astra.rl_objectives.preference import preference_loss, sequence_logprobs
from nip_astra.rl_objectives.reductions import masked_mean, reduce_loss
from nip_astra.rollouts.trajectory import Trajectory
from nip_astra.trainers.ast.dpo import select_pairs
from nip_astra.trainers.service.metrics import log_rollout_metrics
from tests.kit.tiny import make_language_model
from tests.rollouts.test_tree_and_pairs import make_tree

DOUBLE = torch.float64


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=DOUBLE)


def test_group_std_is_unbiased_plus_1e_6_as_in_verl_and_not_1e_4_as_in_trl() -> None:
    found = group_advantages(tensor(1, 0), torch.zeros(2, dtype=torch.int64)).advantages_N
    assert found[0].item() == pytest.approx(0.5 / (0.5**0.5 + 1e-6), abs=1e-12)
    assert found[0].item() != pytest.approx(0.5 / (0.5**0.5 + 1e-4), abs=1e-6)


def test_the_default_reduction_is_the_sum_over_tokens_of_the_whole_batch() -> None:
    losses = torch.tensor([[1.0, 1.0, 1.0], [4.0, 0.0, 0.0]])
    mask = torch.tensor([[True, True, True], [True, False, False]])
    assert reduce_loss(losses, mask, "token").item() == 7 / 4
    # A part is divided by the token count of the whole, so that parts add up.
    parts = [reduce_loss(losses[i : i + 1], mask[i : i + 1], "token", normaliser=4) for i in (0, 1)]
    assert float(sum(parts)) == 7 / 4


def test_k3_is_not_diluted_by_padding_as_in_torchrl_nor_clamped_at_10_as_in_verl() -> None:
    policy, reference = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.5, 0.0]])
    mask = torch.tensor([[True, False]])
    kl = kl_estimate(policy, reference, "k3", mask_BT=mask)
    expected = torch.tensor(-0.5).exp() - 1 + 0.5
    assert masked_mean(kl, mask).item() == pytest.approx(expected.item())
    assert kl.mean().item() == pytest.approx(expected.item() / 2)  # a plain mean would be
    far = kl_estimate(tensor(-5), tensor(-1), "k3")
    assert far.item() == pytest.approx(torch.tensor(4.0).exp().item() - 5, rel=1e-6)
    assert far.item() > 10


def test_ipo_takes_the_sum_as_the_paper_and_online_dpo_or_the_mean_as_dpo_of_trl() -> None:
    logprobs, mask = torch.tensor([[-1.0, -3.0]]), torch.ones(1, 2, dtype=torch.bool)
    nothing = torch.zeros(1)
    losses = [
        preference_loss(
            sequence_logprobs(logprobs, mask, length_normalised=is_mean),
            nothing,
            kind="ipo",
            beta=0.5,
        ).loss.item()
        for is_mean in (False, True)
    ]
    assert losses == [pytest.approx((-4 - 1) ** 2), pytest.approx((-2 - 1) ** 2)]


def test_ties_are_left_out_and_counted_where_online_dpo_of_trl_prefers_the_first() -> None:
    found = select_pairs(make_tree([0.5, 0.5], [0.5, 0.5], [[1], [2]]), min_reward_difference=0.0)
    assert (found.chosen, found.num_ties) == ([], 1)


def test_logged_entropy_and_kl_leave_out_tokens_after_the_end() -> None:
    row = Trajectory([5, 6, 7], [0, 1, 0], logprobs=[0, -1, -9], reward=1.0)
    assert log_rollout_metrics([row])["rollout/entropy"] == 1.0
    mask = torch.tensor([[True, False]])
    kl = kl_estimate(torch.tensor([[-1.0, -9.0]]), torch.tensor([[-1.0, 0.0]]), "k1", mask_BT=mask)
    assert masked_mean(kl, mask).item() == 0.0


def test_logprobs_are_the_models_own_whatever_temperature_it_samples_at(tmp_path: Path) -> None:
    # TRL and verl divide logits by the temperature in training; here both sides are raw.
    path = make_language_model(tmp_path / "model")
    parameters = HuggingFaceLanguageModel.Parameters(model=str(path))
    model = HuggingFaceLanguageModel.load(
        parameters, device=torch.device("cpu"), scenario_dir=None, trainable=True
    )
    options = SamplingOptions(max_new_tokens=4, temperature=0.3)
    said = model.generate([[5, 6, 7]], 2, torch.rand(2, 4), options)
    context = torch.tensor([[5, 6, 7]]).expand(2, 3)
    with torch.no_grad():
        scored = model.logprobs(
            context, torch.ones(2, 3, dtype=torch.bool), said.ids_BT, said.mask_BT
        )
    torch.testing.assert_close(said.logprobs_BT, scored, atol=1e-5, rtol=0)


def test_gae_is_exact_in_float64_where_the_vectorised_gae_of_torchrl_is_off_by_5e_7() -> None:
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 3, 40, generator=generator, dtype=DOUBLE)
    found = gae(rewards, values, torch.ones(3, 40, dtype=torch.bool), gamma=0.99, lam=0.95)
    expected, later = torch.zeros(3, 40, dtype=DOUBLE), torch.zeros(3, dtype=DOUBLE)
    following = torch.zeros(3, dtype=DOUBLE)
    for place in reversed(range(40)):
        delta = rewards[:, place] + 0.99 * following - values[:, place]
        later = delta + 0.99 * 0.95 * later
        expected[:, place], following = later, values[:, place]
    assert (found.advantages - expected).abs().max() < 1e-12
