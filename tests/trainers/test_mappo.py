"""PPO with value functions that see every channel and the label."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from nip_astra.errors import ConfigurationError
from tests.kit.toy_protocol_scenario import toy_kind, toy_trainer
from tests.trainers.test_vanilla_ppo import LEARNING


@pytest.fixture(autouse=True)
def _kind() -> Iterator[None]:
    with toy_kind():
        yield


def test_the_prover_learns_to_tell_the_verifier_what_it_cannot_see() -> None:
    trainer = toy_trainer("mappo", rl=LEARNING)
    trainer.train()
    assert trainer.results["before"]["mean_accuracy"] < 0.7
    assert trainer.results["after"]["mean_accuracy"] >= 0.95


def test_value_functions_see_every_channel_and_policies_their_own() -> None:
    trainer = toy_trainer("mappo", interaction_protocol="mnip", mnip={"max_message_rounds": 4})
    prover = trainer.agents["prover0"]
    assert prover.shape.num_channels == 2
    assert prover.policy_body.shape.num_visible == 1
    assert prover.value_body.shape.num_visible == 2


def test_the_label_changes_the_value_and_not_the_policy() -> None:
    trainer = toy_trainer("mappo")
    frames = trainer.collect().flatten()
    other = frames.clone()
    other["y"] = 1 - frames["y"]
    with torch.no_grad():
        for name in ("prover", "verifier"):
            agents = trainer.agents
            assert not torch.equal(agents.values(name, frames), agents.values(name, other))
            seen = [agents.evaluate(name, one).logprobs_B for one in (frames, other)]
            assert torch.equal(*seen)


def test_the_label_tells_a_critic_what_the_verifier_itself_cannot_foresee() -> None:
    left = {}
    for name in ("vanilla_ppo", "mappo"):
        trainer = toy_trainer(
            name,
            rl={"num_iterations": 12, "num_epochs": 4, "lr": 0.02},
            # Policies rest, and the verifier accepts whatever the label is.
            toy_protocol={"agents": {"default": {"agent_lr_factor": {"actor": 0.0}}}},
        )
        with torch.no_grad():
            trainer.agents["verifier"].policy_head.decision.bias += torch.tensor([0.0, 6.0, 0.0])
        trainer.train()
        left[name] = trainer.results["after"]["verifier/residual_critic_variance"]
    assert left["mappo"] < 0.3
    assert left["vanilla_ppo"] > 0.8


def test_a_shared_body_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"Set rl\.use_shared_body=false"):
        toy_trainer("mappo", rl={"use_shared_body": True})
