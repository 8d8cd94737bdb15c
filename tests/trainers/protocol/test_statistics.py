"""Statistics of play by hand.

Shapes: E environments, T rounds, A agents.
"""

from __future__ import annotations

import math

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from nip_astra.trainers.protocol.statistics import (
    EpisodeLedger,
    MetricSums,
    episode_statistics,
    first_episodes,
    frame_statistics,
    mean_over_agents,
    policy_figures,
    read,
)
from tests.kit.toy_protocol_scenario import toy_trainer

NAMES = ("prover", "verifier")


def batch_of(
    reward_ET: list[list[float]],
    done_ET: list[list[bool]],
    decision_ET: list[list[int]],
    *,
    y_E: list[int],
    datapoint_ET: list[list[int]],
) -> TensorDict:
    """A batch in which the second agent gets twice the reward of the first."""
    reward = torch.tensor(reward_ET)
    size = reward.shape
    reward_ETA1 = torch.stack([reward, 2 * reward], dim=-1)[..., None]
    done = torch.tensor(done_ET)[..., None]
    following = {
        "agents": TensorDict({"reward": reward_ETA1}, batch_size=size),
        "done": done,
        "terminated": done,
        "decision": torch.tensor(decision_ET),
    }
    content = {
        "y": torch.tensor(y_E)[:, None, None].expand(*size, 1),
        "datapoint_id": torch.tensor(datapoint_ET),
        "agents": TensorDict({}, batch_size=size),
        "next": TensorDict(following, batch_size=size),
    }
    return TensorDict(content, batch_size=size)


def example() -> TensorDict:
    # The first environment ends an episode on datapoint 7 rightly and one on 8 without a decision;
    # the second ends one on 7 wrongly, and goes on.
    return batch_of(
        [[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]],
        [[False, True, True], [True, False, False]],
        [[2, 1, 2], [0, 2, 2]],
        y_E=[1, 1],
        datapoint_ET=[[7, 7, 8], [7, 9, 9]],
    )


def test_episodes_are_counted_from_their_first_round_to_their_last() -> None:
    ended = EpisodeLedger().ended(example())
    assert ended.datapoint_N.tolist() == [7, 8, 7]
    assert ended.reward_NA.tolist() == [[3.0, 6.0], [4.0, 8.0], [8.0, 16.0]]
    assert ended.num_rounds_N.tolist() == [2.0, 1.0, 1.0]
    assert ended.is_right_N.tolist() == [1.0, 0.0, 0.0]
    assert ended.is_undecided_N.tolist() == [0.0, 1.0, 0.0]


def test_the_first_episode_of_each_environment_is_told_from_the_rest() -> None:
    counts_ET = first_episodes(example())
    assert counts_ET.tolist() == [[True, True, False], [True, False, False]]
    ended = EpisodeLedger().ended(example(), counts_ET)
    assert ended.num_rounds_N.tolist() == [2.0, 1.0]


def test_an_episode_goes_on_into_the_next_batch() -> None:
    ledger = EpisodeLedger()
    ledger.ended(example())
    resumed = EpisodeLedger()
    resumed.load_state(ledger.state(), torch.device("cpu"))
    following = batch_of(
        [[1.0], [1.0]],
        [[False], [True]],
        [[2], [1]],
        y_E=[1, 1],
        datapoint_ET=[[3], [9]],
    )
    for one in (ledger, resumed):
        ended = one.ended(following)
        assert ended.reward_NA.tolist() == [[49.0, 98.0]]
        assert ended.num_rounds_N.tolist() == [3.0]


def test_the_worst_is_the_smallest_mean_of_a_datapoint() -> None:
    found = read(episode_statistics(EpisodeLedger().ended(example()), NAMES))
    assert found["mean_accuracy"] == pytest.approx(1 / 3)
    assert found["std_accuracy"] == pytest.approx(math.sqrt(2) / 3)
    assert found["worst_datapoint_accuracy"] == 0.0
    assert found["share_undecided"] == pytest.approx(1 / 3)
    assert found["mean_episode_length"] == pytest.approx(4 / 3)
    assert found["prover/mean_episode_reward"] == 5.0
    assert found["prover/worst_episode_reward"] == 4.0, "datapoint 7 has (3 + 8) / 2"
    assert found["verifier/worst_episode_reward"] == 8.0


def test_where_no_episode_ends_nothing_is_said_of_episodes() -> None:
    batch = batch_of([[1.0]], [[False]], [[2]], y_E=[0], datapoint_ET=[[0]])
    assert episode_statistics(EpisodeLedger().ended(batch), NAMES) == {}


def test_the_critics_variance_is_what_it_does_not_foresee() -> None:
    batch = example()
    target = torch.tensor([[0.0, 2.0, 4.0], [0.0, 2.0, 4.0]])[..., None, None].expand(2, 3, 2, 1)
    batch["agents", "value_target"] = target
    batch["agents", "advantage"] = target
    value = torch.stack([target[..., 0, 0] - 5, torch.ones(2, 3)], dim=-1)[..., None]
    batch["agents", "value"] = value
    found = read(frame_statistics(batch, NAMES))
    assert found["prover/residual_critic_variance"] == pytest.approx(0.0, abs=1e-6)
    assert found["verifier/residual_critic_variance"] == pytest.approx(1.0)
    assert found["prover/mean_value"] == pytest.approx(-3.0)
    assert found["prover/mean_step_reward"] == pytest.approx(63 / 6)


def test_numbers_that_are_not_finite_are_left_out() -> None:
    found = read({"a/x": torch.tensor(1.5), "b": torch.tensor(math.nan), "c": torch.tensor(3)})
    assert found == {"a/x": 1.5, "c": 3.0}
    assert read({}) == {}


def test_figures_of_frames_leave_out_frames_without_one() -> None:
    sums = MetricSums()
    sums.add({"a/x": torch.tensor([1.0, math.nan]), "loss": torch.tensor(1.0)})
    sums.add({"a/x": torch.tensor([3.0]), "loss": torch.tensor(2.0)})
    assert read(sums.result()) == {"a/mean_x": 2.0, "a/std_x": 1.0, "loss": 1.5}


def test_minibatches_that_say_nothing_of_an_agent_do_not_count() -> None:
    sums = MetricSums()
    for ess, kl in ((1.0, math.nan), (math.nan, math.nan), (0.5, math.nan)):
        sums.add({"a/ess": torch.tensor(ess), "a/kl": torch.tensor(kl)})
    found = sums.result()
    assert read(found) == {"a/ess": 0.75}
    found |= {"b/ess": torch.tensor(0.25), "b/kl": torch.tensor(2.0)}
    assert read(mean_over_agents(found, ("a", "b"), ("ess", "kl"))) == {"ess": 0.5, "kl": 2.0}


@pytest.mark.usefixtures("toy_protocol")
def test_entropies_are_shares_of_the_largest_where_an_agent_has_a_choice() -> None:
    trainer = toy_trainer()
    for name in NAMES:
        head = trainer.agents[name].policy_head
        for weight in head.parameters():
            weight.data.zero_()
    trainer.agents["prover"].policy_head.message.bias.data[0] = 100.0
    batch = trainer.collect()
    found = policy_figures(batch, NAMES)
    turns_ET: Tensor = batch["active_mask"][..., 0, 0].flatten()
    assert torch.equal(found["prover/message_entropy"].isfinite(), turns_ET)
    assert found["prover/message_entropy"][turns_ET].abs().max() < 1e-6
    assert found["prover/max_message_prob"][turns_ET].min() > 0.999
    verifier = found["verifier/message_entropy"]
    torch.testing.assert_close(verifier[verifier.isfinite()], torch.ones(int((~turns_ET).sum())))
    decisions = found["verifier/decision_entropy"]
    torch.testing.assert_close(decisions[decisions.isfinite()], torch.ones(int((~turns_ET).sum())))
    assert not bool(found["prover/decision_entropy"].isfinite().any())
