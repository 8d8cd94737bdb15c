"""Losses and estimates equal those of TorchRL in value and gradient, where TorchRL has them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from nip_astra.rl_objectives.kl import AdaptiveKl
from nip_astra.rl_objectives.policy_losses import PolicyLoss, nll_loss, policy_loss
from nip_astra.rl_objectives.values import value_loss
from tests.rl_objectives.references import assert_same

DOUBLE = torch.float64
NUM_STATES, NUM_ACTIONS, ROWS = 7, 4, 12


@pytest.fixture(scope="module")
def torchrl() -> SimpleNamespace:
    """The reference, imported only if a test requests it."""
    pytest.importorskip("torchrl")
    from tensordict.nn import ProbabilisticTensorDictModule as Probabilistic
    from tensordict.nn import ProbabilisticTensorDictSequential as Sequential
    from tensordict.nn import TensorDictModule
    from torchrl.data.llm.utils import AdaptiveKLController
    from torchrl.objectives import ClipPPOLoss, ReinforceLoss

    actor = Sequential(
        TensorDictModule(
            torch.nn.Embedding(NUM_STATES, NUM_ACTIONS, dtype=DOUBLE), ["state"], ["logits"]
        ),
        Probabilistic(
            in_keys=["logits"],
            out_keys=["action"],
            distribution_class=torch.distributions.Categorical,
            return_log_prob=True,
        ),
    )
    critic = TensorDictModule(
        torch.nn.Embedding(NUM_STATES, 1, dtype=DOUBLE), ["state"], ["state_value"]
    )
    return SimpleNamespace(
        actor=actor,
        critic=critic,
        AdaptiveKLController=AdaptiveKLController,
        ClipPPOLoss=ClipPPOLoss,
        ReinforceLoss=ReinforceLoss,
    )


def random_batch(seed: int = 0) -> TensorDict:
    generator = torch.Generator().manual_seed(seed)

    def noise() -> torch.Tensor:
        return torch.randn(ROWS, 1, generator=generator, dtype=DOUBLE)

    return TensorDict(
        {
            "state": torch.randint(0, NUM_STATES, (ROWS,), generator=generator),
            "action": torch.randint(0, NUM_ACTIONS, (ROWS,), generator=generator),
            "action_log_prob": -noise()[:, 0].abs() - 0.5,
            "advantage": noise(),
            "value_target": noise(),
            "state_value": noise(),
        },
        batch_size=[ROWS],
    )


def logprobs_and_values(
    module: Any, batch: TensorDict
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Parameters of a loss module's actor and critic, and their outputs, `[B, 1]`."""
    parameters = dict(module.named_parameters())
    actor = next(value for name, value in parameters.items() if name.startswith("actor"))
    critic = next(value for name, value in parameters.items() if name.startswith("critic"))
    logprobs = actor[batch["state"]].log_softmax(-1).gather(1, batch["action"][:, None])
    return actor, critic, logprobs, critic[batch["state"]]


EVERY = torch.ones(ROWS, 1, dtype=torch.bool)


# Clips that are exact in float32, since TorchRL converts them to float32 first.
@pytest.mark.parametrize("clip_range", [None, 0.25])
def test_ppo_equals_that_of_torchrl(torchrl: SimpleNamespace, clip_range: float | None) -> None:
    module = torchrl.ClipPPOLoss(
        torchrl.actor,
        torchrl.critic,
        clip_epsilon=(0.25, 0.5),
        entropy_bonus=False,
        critic_coeff=1.0,
        loss_critic_type="l2",
        normalize_advantage=False,
        clip_value=clip_range,
    ).double()
    batch = random_batch()
    theirs = module(batch.clone())
    actor, critic, logprobs, values = logprobs_and_values(module, batch)
    policy = policy_loss(
        *(logprobs, batch["action_log_prob"][:, None], batch["advantage"], EVERY),
        loss=PolicyLoss.of("ppo", clip_low=0.25, clip_high=0.5),
    )
    assert_same(policy.loss, theirs["loss_objective"], actor)
    value = value_loss(
        values, batch["state_value"], batch["value_target"], EVERY, clip_range=clip_range
    )
    # Ours is half the squared error.
    assert_same(2 * value.loss, theirs["loss_critic"], critic)


def test_reinforce_equals_that_of_torchrl(torchrl: SimpleNamespace) -> None:
    module = torchrl.ReinforceLoss(torchrl.actor, torchrl.critic)
    batch = random_batch(1)
    theirs = module(batch.clone())
    actor, _, logprobs, _ = logprobs_and_values(module, batch)
    mine = policy_loss(logprobs, None, batch["advantage"], EVERY, loss="reinforce")
    assert_same(mine.loss, theirs["loss_actor"], actor)


@pytest.mark.parametrize("kl", [0.1, 0.55, 0.62, 4.0])
def test_the_weight_of_the_penalty_moves_as_that_of_torchrl(
    torchrl: SimpleNamespace, kl: float
) -> None:
    theirs = torchrl.AdaptiveKLController(init_kl_coef=0.3, target=0.6, horizon=200)
    mine = AdaptiveKl(weight=0.3, target=0.6, horizon=200)
    for _ in range(3):
        # TorchRL takes penalties, minus the divergence times the weight.
        expected = theirs.update([-kl * theirs.coef] * 16)
        assert mine.update(kl, num_samples=16) == pytest.approx(float(expected), abs=1e-7)


def test_the_likelihood_of_tokens_is_the_cross_entropy_of_torch() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(3, 5, NUM_ACTIONS, generator=generator, dtype=DOUBLE, requires_grad=True)
    tokens = torch.randint(0, NUM_ACTIONS, (3, 5), generator=generator)
    mask = torch.arange(5) < torch.tensor([[5], [2], [3]])
    logprobs = logits.log_softmax(-1).gather(2, tokens[..., None])[..., 0]
    expected = torch.nn.functional.cross_entropy(
        logits.transpose(1, 2), tokens.masked_fill(~mask, -100)
    )
    assert_same(nll_loss(logprobs, mask).loss, expected, logits)
