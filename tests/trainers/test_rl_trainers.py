"""PPO, MAPPO and REINFORCE learn a cooperative game, each with its own critic and returns."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from nip_astra.errors import ConfigurationError
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.parameters.types import InteractionProtocolType
from tests.kit.learning import Learning
from tests.kit.toy_protocol_scenario import merged, toy_trainer
from tests.trainers.test_rl_tensordict_base import parts_changed

pytestmark = pytest.mark.usefixtures("toy_protocol")

LEARNING = {
    "num_iterations": 22,
    "frames_per_batch": 192,
    "minibatch_size": 192,
    "num_epochs": 4,
    "lr": 0.04,
    "num_test_iterations": 2,
}
ONE_STEP = {
    "num_iterations": 40,
    "frames_per_batch": 384,
    "minibatch_size": 384,
    "num_epochs": 1,
    "lr": 0.03,
}
# With less entropy some seeds settle on messages or decisions that ignore the other agent.
OF_PPO = {"rl": LEARNING, "ppo": {"entropy_weight": 0.05}}
OF_REINFORCE = {"rl": ONE_STEP, "reinforce": {"entropy_weight": 0.1}}
WITH_CRITIC = merged(
    OF_REINFORCE, {"reinforce": {"use_advantage_and_critic": True, "entropy_weight": 0.2}}
)


@pytest.mark.parametrize(
    ("trainer", "more"),
    [
        ("vanilla_ppo", {}),
        ("vanilla_ppo", {"ppo": {"loss_type": "kl_penalty", "entropy_weight": 0.1}}),
        (
            "vanilla_ppo",
            {"rl": {"use_shared_body": True, "clip_value": 0.5, "loss_critic_type": "l2"}},
        ),
        ("vanilla_ppo", {"toy_protocol": {"include_linear_message_space": True}}),
        ("mappo", {}),
        ("reinforce", OF_REINFORCE),
        ("reinforce", WITH_CRITIC),
    ],
)
def test_the_prover_learns_to_inform_the_verifier(
    learning: Learning, trainer: str, more: dict[str, Any]
) -> None:
    built = toy_trainer(trainer, **merged(OF_PPO, more), seed=learning.seed)
    built.train()
    learning.check(built.results["before"]["mean_accuracy"], threshold=0.75, best=0.5)
    learning.check(built.results["after"]["mean_accuracy"], threshold=0.8, best=1.0)
    reward = built.results["after"]["verifier/mean_episode_reward"]
    learning.check(reward, threshold=0.6, best=1.0)


def test_beside_a_random_prover_that_learns_nothing_the_verifier_only_guesses(
    learning: Learning,
) -> None:
    more = {"toy_protocol": {"agents": {"prover": {"is_random": True}}}, "seed": learning.seed}
    trainer = toy_trainer("vanilla_ppo", **merged({"rl": LEARNING}, more))
    trainer.train()
    excess = abs(trainer.results["after"]["mean_accuracy"] - 0.5)
    learning.check(excess, threshold=0.2, best=0.0)
    assert trainer.results["after"]["prover/mean_message_entropy"] == pytest.approx(1.0)
    assert set(trainer.optimizers.optimizers) == {"verifier"}


@pytest.mark.parametrize("protocol", map(str, InteractionProtocolType))
def test_every_protocol_is_trained_in_zero_knowledge(protocol: str) -> None:
    trainer = toy_trainer(
        "vanilla_ppo",
        settings=ExperimentSettings(progress=False, test_run=True),
        interaction_protocol=protocol,
        protocol_common={"zero_knowledge": True},
        rl={"frames_per_batch": 48, "steps_per_env_per_iteration": 8, "num_epochs": 1},
    )
    trainer.train()
    after = trainer.results["after"]
    assert trainer.state.iteration == 1
    assert 0 <= after["mean_accuracy"] <= 1
    assert {name.partition("/")[0] for name in after if "/" in name} == set(trainer.agents.names)


@pytest.mark.parametrize(
    ("trainer", "more"),
    [
        ("vanilla_ppo", {"rl": {**LEARNING, "num_iterations": 8}}),
        ("spg", {"rl": {"num_iterations": 12, "num_epochs": 1}, "spg": {"variant": "pola"}}),
    ],
)
def test_the_simulator_learns_to_speak_as_the_adversarial_verifier_does(
    learning: Learning, trainer: str, more: dict[str, Any]
) -> None:
    # Its reward is the same for any draw, so it learns from its logits or not at all. Of two
    # symbols a similarity is always 1 or -1, without a gradient; of four it is not.
    frozen = {"update_schedule": {"_type": "constant", "is_on": False}}
    trained = {"update_schedule": {"_type": "constant", "is_on": True}}
    agents = {"default": frozen, "simulator": trained}
    built = toy_trainer(
        trainer,
        toy_protocol={"num_symbols": 4, "agents": agents},
        protocol_common={"zero_knowledge": True},
        seed=learning.seed,
        **more,
    )
    built.train()
    before, after = built.results["before"], built.results["after"]
    name = "simulator/mean_step_reward"
    # Similarities of messages and of decisions, at most 1 each, in one of three rounds.
    best = 2 / 3
    learned_share = (after[name] - before[name]) / (best - before[name])
    learning.check(learned_share, threshold=0.3, best=1.0)
    assert after["adversarial_verifier/mean_step_reward"] == pytest.approx(-after[name], abs=1e-5)


def test_values_see_the_label_and_every_channel_and_policies_do_not() -> None:
    trainer = toy_trainer("mappo", interaction_protocol="mnip", mnip={"max_message_rounds": 4})
    agents, prover = trainer.agents, trainer.agents["prover0"]
    assert prover.shape.num_channels == prover.value_body.shape.num_visible == 2
    assert prover.policy_body.shape.num_visible == 1
    frames = trainer.collect().flatten()
    other = frames.clone()
    other["y"] = 1 - frames["y"]
    with torch.no_grad():
        for name in agents.names:
            assert not torch.equal(agents.values(name, frames), agents.values(name, other))
            logprobs = [agents.evaluate(name, some).logprobs_B for some in (frames, other)]
            assert torch.equal(*logprobs)


def test_a_shared_body_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"Set rl\.use_shared_body=false"):
        toy_trainer("mappo", rl={"use_shared_body": True})


def test_value_functions_rest_where_moves_are_weighted_by_rewards_to_go() -> None:
    trainer = toy_trainer("reinforce", rl={"num_iterations": 1})
    moved = {part.partition(".")[2] for part in parts_changed(trainer)}
    assert moved == {"policy_body", "policy_head"}
    assert "verifier/mean_value" not in trainer.results["after"]


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
    assert cut["agents", "message"].equal(whole["agents", "message"]), "the same episodes"
    assert not cut["next", "done"][:, -1].all()
    torch.testing.assert_close(cut["agents", "reward_to_go"], whole["agents", "reward_to_go"])
