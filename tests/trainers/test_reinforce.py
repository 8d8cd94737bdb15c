"""REINFORCE learns a cooperative game, with rewards to go and with advantages."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

from tests.kit.toy_protocol_scenario import toy_kind, toy_trainer

LEARNING = {
    "num_iterations": 60,
    "frames_per_batch": 384,
    "minibatch_size": 384,
    "num_epochs": 1,
    "lr": 0.03,
    "num_test_iterations": 2,
}


@pytest.fixture(autouse=True)
def _kind() -> Iterator[None]:
    with toy_kind():
        yield


@pytest.mark.parametrize("use_critic", [False, True])
def test_the_prover_learns_to_tell_the_verifier_what_it_cannot_see(use_critic: bool) -> None:
    trainer = toy_trainer(
        "reinforce",
        rl=LEARNING,
        reinforce={"use_advantage_and_critic": use_critic, "entropy_weight": 0.01},
    )
    trainer.train()
    assert trainer.results["before"]["mean_accuracy"] < 0.7
    assert trainer.results["after"]["mean_accuracy"] >= 0.95
    assert ("verifier/mean_value" in trainer.results["after"]) is use_critic


def test_value_functions_rest_where_moves_are_weighted_by_rewards_to_go() -> None:
    trainer = toy_trainer("reinforce", rl={"num_iterations": 1})
    before = {name: value.clone() for name, value in trainer.agents.state_dict().items()}
    trainer.train()
    after = trainer.agents.state_dict()
    moved = {name.split(".")[2] for name, value in before.items() if not value.equal(after[name])}
    assert moved == {"policy_body", "policy_head"}


def test_several_epochs_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        toy_trainer("reinforce", rl={"num_epochs": 3})
    assert "set rl.num_epochs=1 for the exact gradient" in caplog.text


def test_a_reward_to_go_reaches_to_the_end_of_an_episode_that_the_batch_cuts() -> None:
    rounds = {"nip": {"max_message_rounds": 5}, "protocol_common": {"shared_reward": False}}
    short = {"steps_per_env_per_iteration": 2, "frames_per_batch": 64}
    long = {"steps_per_env_per_iteration": 10, "frames_per_batch": 320}
    cut = toy_trainer("reinforce", rl=short, **rounds).collect()
    whole = toy_trainer("reinforce", rl=long, **rounds).collect()[:, :2]
    assert cut["agents", "message"].equal(whole["agents", "message"]), "the same is played"
    assert not cut["next", "done"][:, -1].all()
    torch.testing.assert_close(cut["agents", "reward_to_go"], whole["agents", "reward_to_go"])
