"""Independent PPO learns a cooperative game and plays every protocol."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.parameters.types import InteractionProtocolType
from nip_astra.scenario_base.protocol.tensordict_agents import AgentBody
from tests.kit.toy_protocol_scenario import merged, toy_kind, toy_trainer

LEARNING = {
    "num_iterations": 16,
    "frames_per_batch": 192,
    "minibatch_size": 96,
    "num_epochs": 4,
    "lr": 0.02,
    "num_test_iterations": 2,
}


@pytest.fixture(autouse=True)
def _kind() -> Iterator[None]:
    with toy_kind():
        yield


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"ppo": {"loss_type": "kl_penalty"}},
        {"rl": {"use_shared_body": True, "clip_value": 0.5, "loss_critic_type": "l2"}},
        {"toy_protocol": {"include_linear_message_space": True}},
    ],
)
def test_the_prover_learns_to_tell_the_verifier_what_it_cannot_see(more: dict[str, Any]) -> None:
    trainer = toy_trainer("vanilla_ppo", **merged({"rl": LEARNING}, more))
    trainer.train()
    assert trainer.results["before"]["mean_accuracy"] < 0.7
    assert trainer.results["after"]["mean_accuracy"] >= 0.95
    assert trainer.results["after"]["verifier/mean_episode_reward"] > 0.9


def test_without_the_prover_the_verifier_only_guesses() -> None:
    more = {"toy_protocol": {"agents": {"prover": {"is_random": True}}}}
    trainer = toy_trainer("vanilla_ppo", **merged({"rl": LEARNING}, more))
    trainer.train()
    assert 0.35 < trainer.results["after"]["mean_accuracy"] < 0.65


PROTOCOLS = [
    *(pytest.param(str(one), False, id=str(one)) for one in InteractionProtocolType),
    *(pytest.param(str(one), True, id=f"zk_{one}") for one in InteractionProtocolType),
]


@pytest.mark.parametrize(("protocol", "is_zero_knowledge"), PROTOCOLS)
def test_every_protocol_is_trained(protocol: str, is_zero_knowledge: bool) -> None:
    trainer = toy_trainer(
        "vanilla_ppo",
        settings=ExperimentSettings(progress=False, test_run=True),
        interaction_protocol=protocol,
        protocol_common={"zero_knowledge": is_zero_knowledge},
        rl={"frames_per_batch": 48, "steps_per_env_per_iteration": 8, "num_epochs": 1},
    )
    trainer.train()
    after = trainer.results["after"]
    assert trainer.state.iteration == 1
    assert 0 <= after["mean_accuracy"] <= 1
    assert {name.partition("/")[0] for name in after if "/" in name} == set(trainer.agents.names)


def test_policy_and_value_function_have_bodies_of_their_own_unless_they_share() -> None:
    for shares, count in ((False, 2), (True, 1)):
        trainer = toy_trainer("vanilla_ppo", rl={"use_shared_body": shares})
        bodies = trainer.agents["prover"].bodies
        assert len(bodies) == count
        assert all(isinstance(body, AgentBody) for body in bodies)


def test_the_simulator_learns_to_speak_as_the_adversarial_verifier_does() -> None:
    # Its reward is the same whatever it draws, so that it learns from its logits or not at all.
    frozen = {"update_schedule": {"_type": "constant", "is_on": False}}
    learning = {"update_schedule": {"_type": "constant", "is_on": True}}
    more = {
        "toy_protocol": {"agents": {"default": frozen, "simulator": learning}},
        "protocol_common": {"zero_knowledge": True},
        "rl": {"num_iterations": 20},
    }
    trainer = toy_trainer("vanilla_ppo", **merged({"rl": LEARNING}, more))
    trainer.train()
    before, after = trainer.results["before"], trainer.results["after"]
    name = "simulator/mean_step_reward"
    assert after[name] > before[name] + 0.2
    assert after["adversarial_verifier/mean_step_reward"] == pytest.approx(-after[name], abs=1e-5)
