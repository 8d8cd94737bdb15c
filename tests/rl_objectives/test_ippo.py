"""The loss of IPPO: TorchRL's, closed forms, masks, and degenerate minibatches."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torch.distributions import Categorical
from torchrl.modules import ProbabilisticActor
from torchrl.objectives import KLPENPPOLoss
from torchrl.objectives.multiagent import IPPOLoss

from nip_astra.parameters.trainers import CommonPpoParameters, RlTrainerParameters
from nip_astra.rl_objectives.ippo import IppoObjective
from nip_astra.rl_objectives.objective import frames_of, sum_of_losses, whiten_advantages
from tests.rl_objectives.always_acting import NAMES, AlwaysActing, gradients_of, make_batch


def objective_of(agents: AlwaysActing, **more: Any) -> IppoObjective:
    rl = {name: more.pop(name) for name in ("clip_value", "loss_critic_type") if name in more}
    return IppoObjective(agents, CommonPpoParameters(**more), RlTrainerParameters(**rl))


def our_gradients(objective: IppoObjective, batch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
    objective.zero_grad()
    total = sum_of_losses(objective(batch).items())
    total.backward()
    return total.detach(), gradients_of(objective.agents)


@torch.no_grad()
def move(agents: AlwaysActing, batch: TensorDict, log_ratio: Tensor | float) -> None:
    """Make the policies of today more likely to act as in the batch, by a log-ratio."""
    for number, name in enumerate(NAMES):
        logprobs_B = agents.evaluate(name, batch).logprobs_B
        batch["agents", "logprob"][:, number] = logprobs_B - log_ratio


class Stacked(nn.Module):
    """The agents' linear layers side by side, as TorchRL expects."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, observation_BAD: Tensor) -> Tensor:
        parts = [layer(observation_BAD[:, number]) for number, layer in enumerate(self.layers)]
        return torch.stack(parts, dim=1)


def torchrl_loss(agents: AlwaysActing, cls: type, **options: Any) -> nn.Module:
    policy = TensorDictModule(
        Stacked([agents[name].policy for name in NAMES]),
        in_keys=[("agents", "observation")],
        out_keys=[("agents", "logits")],
    )
    actor = ProbabilisticActor(
        policy,
        in_keys={"logits": ("agents", "logits")},
        out_keys=[("agents", "action")],
        distribution_class=Categorical,
        return_log_prob=True,
        log_prob_key=("agents", "logprob"),
    )
    critic = TensorDictModule(
        Stacked([agents[name].critic for name in NAMES]),
        in_keys=[("agents", "observation")],
        out_keys=[("agents", "value")],
    )
    # It stores coefficients in single precision, in which those of these tests are exact.
    options |= {"normalize_advantage": True, "normalize_advantage_exclude_dims": (-2,)}
    loss = cls(actor, critic, functional=False, **options).double()
    loss.set_keys(
        action=("agents", "action"),
        sample_log_prob=("agents", "logprob"),
        advantage=("agents", "advantage"),
        value_target=("agents", "value_target"),
        value=("agents", "value"),
        reward=("agents", "reward"),
    )
    return loss


def assert_equals_torchrl(
    agents: AlwaysActing, objective: IppoObjective, reference: nn.Module, batch: TensorDict
) -> None:
    """Compare the values and gradients of two losses."""
    value, ours = our_gradients(objective, batch)
    agents.zero_grad()
    # TorchRL takes means over agents, ours the sum.
    expected = len(NAMES) * sum_of_losses(reference(batch.clone()).items())
    expected.backward()
    torch.testing.assert_close(value, expected.detach(), rtol=0, atol=1e-8)
    torch.testing.assert_close(ours, gradients_of(agents), rtol=1e-8, atol=1e-8)
    assert max(float(gradient.abs().max()) for gradient in ours.values()) > 1e-3


@pytest.mark.parametrize("distance", ["l1", "l2", "smooth_l1"])
@pytest.mark.parametrize("clip_value", [None, 0.25])
def test_value_and_gradient_are_those_of_torchrl(
    agents: AlwaysActing, batch: TensorDict, distance: str, clip_value: float | None
) -> None:
    critic = {"loss_critic_type": distance, "clip_value": clip_value}
    ours = {"clip_low": 0.125, "clip_high": 0.125, "entropy_weight": 0.03125, "critic_coef": 0.75}
    theirs = {"clip_epsilon": 0.125, "entropy_coeff": 0.03125, "critic_coeff": 0.75}
    reference = torchrl_loss(agents, IPPOLoss, **theirs, **critic)
    assert_equals_torchrl(agents, objective_of(agents, **ours, **critic), reference, batch)


def test_the_charge_for_divergence_is_torchrls_where_the_sample_is_the_whole_distribution(
    agents: AlwaysActing,
) -> None:
    batch = make_batch(agents, num_frames=6)
    # The old policy is uniform, and each action was taken once in each of two states.
    batch["agents", "observation"][:3] = batch["agents", "observation"][0]
    batch["agents", "observation"][3:] = batch["agents", "observation"][3]
    batch["agents", "action"][:] = torch.tensor([0, 1, 2, 0, 1, 2])[:, None]
    batch["agents", "logprob"][:] = -math.log(3)
    objective = objective_of(agents, loss_type="kl_penalty", kl_beta=0.5, entropy_weight=0.0)
    kl = float(objective(batch)["first/kl"] + objective(batch)["second/kl"]) / 2
    batch["agents", "logits"] = torch.zeros(6, 2, 3, dtype=torch.float64)
    # On target: TorchRL changes beta between the loss and its gradient.
    theirs = {"beta": 0.5, "dtarg": kl, "entropy_coeff": 0.0, "critic_coeff": 1.0}
    reference = torchrl_loss(agents, KLPENPPOLoss, **theirs)
    assert_equals_torchrl(agents, objective, reference, batch)


@pytest.mark.parametrize(
    ("options", "ratios", "loss", "clip_fraction"),
    [
        # min(1.5 * 2, 1.2 * 2) = 2.4 and min(0.5 * -1, 0.8 * -1) = -0.8: no gradients.
        ({}, [1.5, 0.5], -(2.4 - 0.8) / 2, 1.0),
        # min(1.5 * -1, 1.2 * -1) = -1.5 has its gradient.
        ({}, [1.5, 1.5], -(2.4 - 1.5) / 2, 0.5),
        ({"loss": "importance_sampling"}, [1.5, 0.5], -(3.0 - 0.5) / 2, 0.0),
        ({"loss_options": {"dual_clip": 1.4}}, [1.5, 1.5], -(2.4 - 1.4) / 2, 1.0),
        ({"loss_type": "kl_penalty"}, [1.5, 1.5], -(3.0 - 1.5) / 2 - math.log(1.5), 0.0),
    ],
)
def test_the_policy_loss_and_its_metrics_equal_hand_computed_values(
    agents: AlwaysActing,
    options: dict[str, Any],
    ratios: list[float],
    loss: float,
    clip_fraction: float,
) -> None:
    batch = make_batch(agents, num_frames=2)
    ratios_B = torch.tensor(ratios, dtype=torch.float64)
    move(agents, batch, ratios_B.log())
    batch["agents", "advantage"][:, 0, 0] = torch.tensor([2.0, -1.0], dtype=torch.float64)
    objective = objective_of(agents, normalize_advantage=False, kl_beta=1.0, **options)
    result = objective.agent_losses("first", frames_of(batch))
    assert float(result["loss_policy"].detach()) == pytest.approx(loss)
    assert float(result["kl"]) == pytest.approx(-float(ratios_B.log().mean()))
    assert float(result["clip_fraction"]) == clip_fraction
    assert float(result["ratio_outside_clip"]) == 1.0
    # A share of the frames: 1 / 1.25 of ratios 1.5 and 0.5.
    ess = ratios_B.mean().square() / ratios_B.square().mean()
    assert float(result["ess"]) == pytest.approx(float(ess))


@pytest.mark.parametrize("loss_type", ["clip", "kl_penalty"])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("log_ratio", [100.0, -100.0, 1e4])
def test_a_policy_that_went_far_has_a_finite_gradient_in_float32(
    agents: AlwaysActing, log_ratio: float, advantage: float, loss_type: str
) -> None:
    batch = make_batch(agents, num_frames=2)
    batch = batch.apply(lambda x: x.float() if x.is_floating_point() else x)
    agents.float()
    move(agents, batch, log_ratio)
    batch["agents", "advantage"][:] = advantage
    objective = objective_of(agents, normalize_advantage=False, loss_type=loss_type)
    result = objective.agent_losses("first", frames_of(batch))
    assert result["ess"].isfinite()
    sum(value for key, value in result.items() if key.startswith("loss")).backward()
    assert all(bool(weight.grad.isfinite().all()) for weight in agents["first"].parameters())


def test_frames_that_are_masked_and_frames_that_are_left_out_give_one_loss(
    agents: AlwaysActing, batch: TensorDict
) -> None:
    batch["is_acting"][::3, 0] = False
    objective = objective_of(agents)
    left_out = objective.policy_view("first", frames_of(batch))
    masked = left_out._replace(
        frames=frames_of(batch),
        evaluation=agents.evaluate("first", batch),
        is_acting_B=batch["is_acting"][:, 0],
    )
    assert left_out.is_acting_B is None
    assert len(left_out.evaluation.logprobs_B) == 8
    entries, of_masked = (objective._policy_entries("first", view) for view in (left_out, masked))
    assert {"loss_policy", "loss_entropy", "kl", "ess"} <= set(entries)
    for name, value in entries.items():
        assert float(value.detach()) == pytest.approx(float(of_masked[name].detach()), abs=1e-12)


def test_values_are_learned_from_all_frames(agents: AlwaysActing, batch: TensorDict) -> None:
    objective = objective_of(agents)
    _, before = our_gradients(objective, batch)
    batch["is_acting"][:, 0] = False
    _, after = our_gradients(objective, batch)
    name = "agents.first.critic.weight"
    torch.testing.assert_close(after[name], before[name])


@pytest.mark.parametrize("num_frames", [1, 7])
def test_an_agent_that_never_acts_gets_no_policy_gradient_and_has_no_figures(
    agents: AlwaysActing, num_frames: int
) -> None:
    batch = make_batch(agents, num_frames=num_frames)
    batch["is_acting"][:, 0] = False
    objective = objective_of(agents)
    value, gradients = our_gradients(objective, batch)
    assert value.isfinite()
    assert float(gradients["agents.first.policy.weight"].abs().sum()) == 0.0
    assert all(bool(gradient.isfinite().all()) for gradient in gradients.values())
    figures = ("kl", "clip_fraction", "ratio_outside_clip", "ess", "entropy")
    for name, has_figures in (("first", False), ("second", True)):
        losses = objective.agent_losses(name, frames_of(batch))
        is_finite = {key: bool(losses[key].isfinite()) for key in figures}
        assert is_finite == dict.fromkeys(figures, has_figures)


def test_a_minibatch_of_one_frame_or_of_nearly_equal_advantages_is_not_blown_up(
    agents: AlwaysActing,
) -> None:
    assert whiten_advantages(torch.tensor([3.0])).tolist() == [0.0]
    assert whiten_advantages(torch.full((4,), 2.5)).tolist() == [0.0] * 4
    tiny = whiten_advantages(torch.tensor([0.0, 1e-8], dtype=torch.float64))
    assert float(tiny.abs().max()) < 0.01
    objective = objective_of(agents, entropy_weight=0.0)
    value, gradients = our_gradients(objective, make_batch(agents, num_frames=1))
    assert value.isfinite()
    assert float(gradients["agents.first.policy.weight"].abs().sum()) == 0.0


def test_the_weight_of_the_charge_follows_the_divergence_of_the_iteration(
    agents: AlwaysActing, batch: TensorDict
) -> None:
    objective = objective_of(agents, loss_type="kl_penalty", kl_beta=1.0, kl_target=0.1)
    for shift, expected in ((1.0, 2.0), (0.0, 1.0), (0.1, 1.0)):
        move(agents, batch, -shift)
        objective(batch)
        objective.finish_iteration()
        assert objective.beta.tolist() == [expected] * 2, shift
    objective.finish_iteration()
    assert objective.beta.tolist() == [1.0, 1.0], "without a minibatch it stays"
    clipped = objective_of(agents, kl_beta=0.5)
    clipped(batch)
    clipped.finish_iteration()
    assert clipped.beta.tolist() == [0.5, 0.5]
