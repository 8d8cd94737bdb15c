"""The loop that trainers of agents in a protocol share."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement
from torchrl.objectives import LossModule

from nip_astra.errors import CheckpointError, ConfigurationError
from nip_astra.rl_objectives import Objective
from nip_astra.rl_objectives.ippo import IppoObjective
from nip_astra.rl_objectives.objective import Frames, frames_of
from nip_astra.scenario_instance import ScenarioInstance
from nip_astra.trainers.rl_tensordict_base import TensorDictRlTrainer
from nip_astra.trainers.vanilla_ppo import VanillaPpoTrainer
from tests.kit.experiments import RecordingTracker
from tests.kit.toy_protocol_scenario import (
    KIND,
    toy_trainer,
)

pytestmark = pytest.mark.usefixtures("toy_protocol")

AGENTS = ("prover", "verifier")


def weights_of(trainer: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in trainer.agents.state_dict().items()}


def changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    return {name for name, value in before.items() if not torch.equal(value, after[name])}


def parts_changed(trainer: Any) -> set[str]:
    """Train, and give the parts of agents that moved."""
    before = weights_of(trainer)
    trainer.train()
    names = changed(before, weights_of(trainer))
    return {".".join(name.removeprefix("agents.").split(".")[:2]) for name in names}


# ---- what a trainer gives


class LikelyTrainer(TensorDictRlTrainer):
    """A trainer of one method, whose agents make every move likelier."""

    class Likely(Objective):
        def agent_losses(self, name: str, batch: Frames) -> dict[str, Tensor]:
            view = self.policy_view(name, batch)
            return {"loss_likely": -view.mean(view.evaluation.logprobs_B)}

    def _get_loss_module_and_gae(self) -> tuple[LossModule, None]:
        return self.Likely(self.agents), None


def test_a_trainer_takes_one_method() -> None:
    trainer = toy_trainer("my_trainer", trainer_class=LikelyTrainer)
    assert parts_changed(trainer) == {
        f"{agent}.{part}" for agent in AGENTS for part in ("policy_body", "policy_head")
    }
    assert 0 <= trainer.results["after"]["mean_accuracy"] <= 1


def test_the_gae_is_made_from_the_loss_module_as_the_guide_says() -> None:
    trainer = toy_trainer()
    loss_module, gae = trainer._get_loss_module_and_gae()
    assert isinstance(loss_module, Objective)
    assert gae is loss_module.value_estimator
    batch = trainer.collect()
    assert batch["agents", "advantage"].shape == (32, 3, 2, 1)


class PlainLossTrainer(TensorDictRlTrainer):
    """A trainer with a loss module of TorchRL's kind that knows nothing of agents."""

    class PlainLoss(LossModule):
        def __init__(self, agents: Any) -> None:
            super().__init__()
            self.agents = agents
            self.scale = torch.nn.Parameter(torch.ones(()))

        def forward(self, tensordict: TensorDict) -> TensorDict:
            values = torch.stack([self.agents.values(name, tensordict) for name in AGENTS])
            return TensorDict({"loss_value": (values * self.scale - 1).square().mean()})

    def _get_loss_module_and_gae(self) -> tuple[LossModule, None]:
        return self.PlainLoss(self.agents), None


def test_any_loss_module_of_torchrl_may_be_given() -> None:
    trainer = toy_trainer("my_trainer", trainer_class=PlainLossTrainer)
    moved = parts_changed(trainer)
    assert moved == {f"{agent}.{part}" for agent in AGENTS for part in ("value_body", "value_head")}
    assert float(trainer.loss_module.scale.detach()) != 1.0, "its own weights learn as well"


class ForwardTrainer(TensorDictRlTrainer):
    """A trainer whose objective gives the losses of all agents together."""

    class Together(Objective):
        def forward(self, batch: TensorDict) -> TensorDict:
            assert ("next", "agents", "reward") in batch.keys(True)
            logprobs = [self.agents.evaluate(name, frames_of(batch)).logprobs_B for name in AGENTS]
            likely = -torch.stack(logprobs).mean()
            return TensorDict({"loss_likely": likely, "likelihood": likely.exp().detach()})

    def _get_loss_module_and_gae(self) -> tuple[LossModule, None]:
        return self.Together(self.agents), None


def test_an_objective_may_have_a_forward_of_its_own() -> None:
    frozen = {"verifier": {"update_schedule": {"_type": "constant", "is_on": False}}}
    trainer = toy_trainer("my_trainer", trainer_class=ForwardTrainer)
    assert parts_changed(trainer) == {
        f"{agent}.{part}" for agent in AGENTS for part in ("policy_body", "policy_head")
    }
    assert {"loss_likely", "likelihood"} <= set(trainer.state.last)
    trainer = toy_trainer("my_trainer", trainer_class=ForwardTrainer, **{KIND: {"agents": frozen}})
    assert {part.partition(".")[0] for part in parts_changed(trainer)} == {"prover"}


def test_a_forward_of_its_own_wins_over_losses_that_are_inherited() -> None:
    class Doubled(IppoObjective):
        num_calls = 0

        def forward(self, batch: TensorDict) -> TensorDict:
            type(self).num_calls += 1
            losses: TensorDict = super().forward(batch)
            return losses

    class Doubling(VanillaPpoTrainer):
        def _get_loss_module_and_gae(self) -> Any:
            loss_module = Doubled(self.agents, self.hyper_params.ppo, self.rl)
            loss_module.make_value_estimator(gamma=self.rl.gamma, lmbda=self.rl.lmbda)
            return loss_module, loss_module.value_estimator

    plain, own = toy_trainer(), toy_trainer("vanilla_ppo", trainer_class=Doubling)
    assert own.loss_module.has_own_forward()
    assert not own.loss_module.has_parts()
    assert not plain.loss_module.has_own_forward()
    assert plain.loss_module.has_parts()
    for trainer in (plain, own):
        trainer.train()
    assert Doubled.num_calls == own.state.num_optimizer_steps > 0
    for name, value in weights_of(plain).items():
        torch.testing.assert_close(value, weights_of(own)[name])


def test_an_objective_without_losses_is_refused_when_it_is_made() -> None:
    class Empty(Objective):
        """Has no losses."""

    agents = toy_trainer().agents
    with pytest.raises(ConfigurationError) as caught:
        Empty(agents)
    assert "Empty" in str(caught.value)
    assert "agent_losses" in str(caught.value)
    assert "forward" in str(caught.value)


def test_rollouts_may_be_counted_in_place_of_frames() -> None:
    trainer = toy_trainer(rl={"rollouts_per_iteration": 5, "steps_per_env_per_iteration": 4})
    assert trainer.collect().batch_size == (5, 4)
    assert trainer.frames_per_iteration == 20
    trainer.train()
    training = trainer.results["training"]
    assert training["num_frames"] == 20 * training["num_iterations"]


class BufferTrainer(VanillaPpoTrainer):
    """A trainer with a replay buffer of TorchRL."""

    def _get_replay_buffer(self) -> ReplayBuffer:
        return ReplayBuffer(
            storage=LazyTensorStorage(self.rl.frames_per_batch),
            sampler=SamplerWithoutReplacement(),
            batch_size=self.rl.minibatch_size,
        )


def test_a_replay_buffer_of_torchrl_may_be_given() -> None:
    trainer = toy_trainer("my_trainer", trainer_class=BufferTrainer)
    trainer.train()
    assert trainer.state.num_optimizer_steps == 3 * 2 * 3


def test_a_scenario_without_a_protocol_is_refused() -> None:
    trainer = toy_trainer()
    with pytest.raises(ConfigurationError, match="agents that play a protocol"):
        VanillaPpoTrainer(trainer.hyper_params, ScenarioInstance(kind="plain"))


# ---- before and after


def test_observations_are_normalised_by_random_play() -> None:
    trainer = toy_trainer(rl={"normalize_observations": True, "num_normalization_steps": 100})
    trainer.train()
    for name in AGENTS:
        for body in trainer.agents[name].bodies:
            assert 0.1 < float(body.history_mean[0].sum()) < 1
            assert float(body.history_scale[0].min()) > 1
            assert float(body.history_mean[2].sum()) == 0, "the last round is never looked back on"


def test_an_agent_may_read_histories_as_they_are() -> None:
    trainer = toy_trainer(
        rl={"normalize_observations": True, "num_normalization_steps": 100},
        toy_protocol={"agents": {"prover": {"normalize_message_history": False}}},
    )
    trainer._prepare()
    for name in AGENTS:
        for body in trainer.agents[name].bodies:
            assert bool(body.history_mean.any()) == (name != "prover")


def test_normalised_histories_have_mean_zero_and_deviation_one() -> None:
    trainer = toy_trainer(
        rl={"normalize_observations": True, "frames_per_batch": 900, "num_normalization_steps": 900}
    )
    with ExitStack() as stack:
        trainer._build_train_context(stack)
        trainer._prepare()
    frames = trainer.collect().flatten()
    read = trainer.agents["prover"].policy_body.history(frames)[:, 0]
    assert float(read.mean()) == pytest.approx(0.0, abs=0.15)
    assert float(read.std()) == pytest.approx(1.0, abs=0.15)


def test_statistics_are_logged_by_agent_and_for_all() -> None:
    trainer = toy_trainer()
    trainer.tracker = RecordingTracker()
    trainer.train()
    row, *_, last = trainer.tracker.rows
    learned = ("kl", "clip_fraction", "ratio_outside_clip", "ess")
    of_agent = (
        *("mean_step_reward", "mean_episode_reward", "worst_episode_reward", "mean_advantage"),
        *("mean_value", "mean_value_target", "residual_critic_variance", "grad_norm", "lr"),
        *("mean_message_entropy", "std_message_entropy"),
        *("mean_max_message_prob", "std_max_message_prob"),
    )
    of_all = (
        *("mean_episode_length", "mean_accuracy", "std_accuracy"),
        *("worst_datapoint_accuracy", "share_undecided"),
    )
    expected = {*(f"prover/{figure}" for figure in (*of_agent, *learned)), *of_all, *learned}
    assert expected <= row.keys()
    assert "verifier/mean_decision_entropy" in row
    assert "prover/mean_decision_entropy" not in row, "a prover decides nothing"
    assert {"test_mean_accuracy", "verifier/test_mean_episode_reward"} <= last.keys()
    assert trainer.results["kind"] == "interaction_proof"
    assert trainer.results["agents"] == list(AGENTS)


def test_the_tests_before_and_after_are_about_the_same_conversations() -> None:
    schedule = {"update_schedule": {"_type": "constant", "is_on": False}}
    trainer = toy_trainer(toy_protocol={"agents": {"default": schedule}})
    trainer.train()
    assert trainer.results["before"] == trainer.results["after"]


def test_optimizers_of_other_agents_are_refused() -> None:
    optimizers = toy_trainer().optimizers
    state = optimizers.state_dict()
    state["judge"] = state.pop("verifier")
    with pytest.raises(CheckpointError, match="'judge'"):
        optimizers.load_state_dict(state)
