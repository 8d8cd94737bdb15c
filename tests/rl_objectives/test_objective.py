"""The base of objectives: TorchRL's interface over the agents' own weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from torchrl.objectives import LossModule, ValueEstimators

import nip_astra.rl_objectives
from nip_astra.errors import ConfigurationError
from nip_astra.parameters.trainers import CommonPpoParameters, RlTrainerParameters
from nip_astra.rl_objectives.ippo import IppoObjective, ReinforceObjective
from nip_astra.rl_objectives.objective import (
    EpisodeGae,
    Frames,
    Objective,
    frames_of,
    sum_of_losses,
)
from tests.rl_objectives.always_acting import NAMES, AlwaysActing, gradients_of, make_batch


def ippo(agents: AlwaysActing, **parameters: Any) -> IppoObjective:
    return IppoObjective(agents, CommonPpoParameters(**parameters), RlTrainerParameters())


def test_weights_are_the_agents_own_and_each_is_there_once(agents: AlwaysActing) -> None:
    assert issubclass(nip_astra.rl_objectives.Objective, LossModule)
    objective = ippo(agents)
    objective.make_value_estimator(ValueEstimators.GAE, gamma=0.9, lmbda=0.8)
    assert [id(p) for p in objective.parameters()] == [id(p) for p in agents.parameters()]


def test_the_value_estimator_is_made_and_found_as_in_torchrl() -> None:
    objective = ippo(AlwaysActing())
    assert objective.make_value_estimator(ValueEstimators.GAE, gamma=0.9, lmbda=0.8) is objective
    result = objective.value_estimator
    assert (result.gamma, result.lmbda, result.agent_names) == (0.9, 0.8, NAMES)
    assert isinstance(ippo(AlwaysActing()).value_estimator, EpisodeGae), "also without being made"
    with pytest.raises(ConfigurationError, match="TD0"):
        ippo(AlwaysActing()).make_value_estimator(ValueEstimators.TD0)
    with pytest.raises(ConfigurationError, match="gama"):
        ippo(AlwaysActing()).make_value_estimator(ValueEstimators.GAE, gama=0.9)


def test_a_custom_objective_takes_one_method(agents: AlwaysActing) -> None:
    class Likely(Objective):
        def agent_losses(self, name: str, batch: Frames) -> dict[str, Tensor]:
            view = self.policy_view(name, batch)
            return {"loss_likely": -view.mean(view.evaluation.logprobs_B), "count": torch.ones(())}

    result = Likely(agents)(make_batch(agents))
    names = ("loss_likely_first", "loss_likely_second", "first/count", "second/count")
    assert set(result.keys()) == set(names)
    assert result["loss_likely_first"].requires_grad


def test_gradients_by_agent_and_by_part_are_those_of_the_sum_of_all_losses(
    agents: AlwaysActing,
) -> None:
    batch, objective = make_batch(agents, num_frames=300), ippo(agents)
    sum_of_losses(objective(batch).items()).backward()
    of_sum = gradients_of(agents)
    agents.zero_grad()
    whole = objective.compute_gradients(batch, NAMES)
    by_agent = gradients_of(agents)
    torch.testing.assert_close(by_agent, of_sum, rtol=1e-12, atol=1e-15)
    agents.zero_grad()
    losses: dict[str, dict[str, Tensor]] = {name: {} for name in NAMES}
    for name in NAMES:
        assert len(objective.loss_parts(name)) == 2
        for part in range(2):
            losses[name] |= objective.compute_part(name, part, frames_of(batch))
    torch.testing.assert_close(gradients_of(agents), by_agent, rtol=0, atol=0)
    torch.testing.assert_close(losses, whole, rtol=0, atol=0)


def test_an_agent_that_does_not_learn_gets_no_gradient(agents: AlwaysActing) -> None:
    ippo(agents).compute_gradients(make_batch(agents), ["second"])
    assert all(p.grad is None for p in agents["first"].parameters())
    assert all(p.grad is not None for p in agents["second"].parameters())


def test_its_own_state_excludes_that_of_the_agents() -> None:
    objective = ippo(AlwaysActing())
    objective.make_value_estimator()
    assert set(objective.own_state()) == {"beta"}
    other = ippo(AlwaysActing())
    objective.beta.fill_(0.125)
    other.load_own_state(objective.own_state())
    assert other.beta.tolist() == [0.125, 0.125]


def test_reinforce_equals_hand_computed_values(agents: AlwaysActing, batch: TensorDict) -> None:
    result = ReinforceObjective(agents, entropy_weight=0.5)(batch)
    seen = agents.evaluate("first", batch)
    weights_B = batch["agents", "reward_to_go"][:, 0, 0]
    torch.testing.assert_close(
        result["loss_policy_first"], -(seen.logprobs_B * weights_B).mean(), rtol=1e-12, atol=0
    )
    torch.testing.assert_close(result["loss_entropy_first"], -0.5 * seen.entropies_B.mean())
    assert "loss_value_first" not in result.keys()  # noqa: SIM118

    # With a critic it learns values.
    objective = ReinforceObjective(
        agents, RlTrainerParameters(loss_critic_type="l2"), weight="advantage"
    )
    result = objective(batch)
    error_B = agents.values("first", batch) - batch["agents", "value_target"][:, 0, 0]
    torch.testing.assert_close(result["loss_value_first"], error_B.square().mean())
    sum_of_losses(result.items()).backward()
    assert float(agents["first"].critic.weight.grad.abs().sum()) > 0
