"""What token-level PPO of an attacker consists of: value head, samples and loss.

Shape suffixes: `N` node, `B` row, `T` token.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor

from nip_astra.rl_objectives.advantages import tree_gae, whiten
from nip_astra.rl_objectives.kl import KlKind, KlParameters, kl_estimate
from nip_astra.rl_objectives.policy_losses import LossParameters, policy_loss
from nip_astra.rl_objectives.reductions import LossOutput, masked_mean, reduce_loss
from nip_astra.rl_objectives.values import explained_variance, value_loss
from nip_astra.rollouts.samples import Sample
from nip_astra.rollouts.tree import RolloutTree
from nip_astra.trainers.ast.node_samples import learning_logprobs, node_samples
from nip_astra.trainers.ast.staleness import CorrectedStalenessParameters


class ValueHead(torch.nn.Module):
    """The return expected before each token, a linear map of the hidden state; 0 at first.

    Parameters
    ----------
    hidden_size : int
        Width of the hidden states.
    trains_model : bool
        Whether gradients flow on into the model.
    """

    def __init__(self, hidden_size: int, *, trains_model: bool) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(hidden_size, 1)
        torch.nn.init.zeros_(self.linear.weight)
        torch.nn.init.zeros_(self.linear.bias)
        self.trains_model = trains_model

    def forward(self, hidden_BTX: Tensor) -> Tensor:
        """Values `[B, T]` float32."""
        values_BT1: Tensor = self.linear(hidden_BTX if self.trains_model else hidden_BTX.detach())
        return values_BT1.squeeze(-1)


class PpoKlParameters(KlParameters):
    """Price of the divergence from the reference, in the reward or in the loss."""

    weight: float = Field(default=0.05, ge=0)
    """Price per nat and token. Larger stays closer to the reference."""
    value: KlKind = "k1"
    """Estimator of the divergence that the reward pays for and that is reported."""
    place: Literal["reward", "loss"] = "reward"
    """Whether the divergence lowers the reward of each token, or is added to the loss."""


class PpoParameters(LossParameters, CorrectedStalenessParameters):
    """Clipping, advantages, value head and the KL penalty."""

    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount from one turn to the next. Smaller looks less far ahead."""
    lam: float = Field(default=0.95, ge=0, le=1)
    """Trade of bias (0) for variance (1) in advantages, per token."""
    whiten_advantages: bool = True
    """Whether an iteration's advantages are brought to mean 0 and standard deviation 1."""
    value_weight: float = Field(default=0.5, ge=0)
    """Weight of the value loss."""
    value_clip_range: float | None = Field(default=None, gt=0)
    """How far a value may go from its old one before its loss is held; null holds nothing."""
    value_lr_factor: float = Field(default=10.0, gt=0)
    """Learning rate of the value head as a multiple of training.lr."""
    value_trains_model: bool = False
    """Whether the value loss also trains the attacker's weights below the head."""
    kl: PpoKlParameters = PpoKlParameters()
    """Price of the divergence from the reference."""
    entropy_weight: float = Field(default=0.0, ge=0)
    """Loss taken off per nat of entropy and token. Larger keeps probes more varied."""


class PpoSamples(NamedTuple):
    """Samples of nodes with `advantage`, `return` and `old_value` of each token, metrics, and the
    mean divergence from the reference, nats per token.
    """

    samples: list[Sample]
    metrics: dict[str, float]
    divergence: float


@torch.no_grad()
def ppo_samples(
    tree: RolloutTree,
    values_NT: Tensor,
    parameters: PpoParameters,
    *,
    kl_weight: float,
) -> PpoSamples:
    """One sample per node with a verdict; see `tree_gae`.

    Parameters
    ----------
    values_NT : Tensor
        Return expected before each token, of the probes' width.
    kl_weight : float
        Price per nat of divergence, paid where it lowers the reward.
    """
    nodes = tree.nodes
    mask_NT = nodes["probe_mask"]
    price = kl_weight if parameters.kl.place == "reward" else 0.0
    kl_NT = kl_estimate(*learning_logprobs(tree), parameters.kl.value, mask_BT=mask_NT)
    is_last_NT = torch.arange(mask_NT.shape[1]) == mask_NT.sum(dim=1, keepdim=True) - 1
    rewards_NT = torch.where(is_last_NT, nodes["reward"][:, None], torch.zeros(()))
    advantages_NT, returns_NT = tree_gae(
        rewards_NT - price * kl_NT,
        values_NT,
        mask_NT,
        nodes["parent"],
        nodes["depth"],
        gamma=parameters.gamma,
        lam=parameters.lam,
    )
    is_rated_N = ~nodes["reward"].isnan()
    used_NT = mask_NT & is_rated_N[:, None]
    if parameters.whiten_advantages:
        advantages_NT = whiten(advantages_NT, used_NT)
    divergence = float(masked_mean(kl_NT, mask_NT))
    samples = node_samples(
        tree,
        is_rated_N.nonzero().flatten().tolist(),
        **{"advantage": advantages_NT, "return": returns_NT, "old_value": values_NT},
    )
    metrics = {
        "kl/reference": divergence,
        "value/mean": float(masked_mean(values_NT, used_NT)),
        "value/explained_variance": float(explained_variance(values_NT, returns_NT, used_NT)),
    }
    return PpoSamples(samples, metrics, divergence)


def ppo_loss(
    logprobs_BT: Tensor,
    values_BT: Tensor,
    batch: TensorDict,
    options: PpoParameters,
    *,
    kl_weight: float,
    normaliser: float | None,
    entropy_BT: Tensor | None = None,
    weights_BT: Tensor | None = None,
) -> LossOutput:
    """Policy, value, divergence and entropy loss of a batch of probes; see `AstPpoTrainer`.

    Parameters
    ----------
    logprobs_BT, values_BT : Tensor
        Of the tokens of the probes, with gradient.
    batch : TensorDict
        `[B, T]`: `old_logprobs`, `reference_logprobs`, `advantage`, `return`, `old_value`, and
        `probe_mask`, True on tokens that count.
    kl_weight : float
        Weight of the divergence from the reference, read where it is in the loss.
    normaliser : float, optional
        Divisor of sums over tokens; their number by default.
    entropy_BT : Tensor, optional
        With gradient; needed where `options.entropy_weight` is not 0.
    weights_BT : Tensor, optional
        Importance weights of the policy's and the divergence's terms.
    """
    mask_BT, is_kl_in_loss = batch["probe_mask"], options.kl.place == "loss"
    loss, metrics = policy_loss(
        logprobs_BT,
        batch["old_logprobs"],
        batch["advantage"],
        mask_BT,
        loss=options.chosen_loss(),
        normaliser=normaliser,
        weights_BT=weights_BT,
        reference_logprobs_BT=batch["reference_logprobs"] if is_kl_in_loss else None,
        kl_weight=kl_weight if is_kl_in_loss else 0.0,
        kl_value=options.kl.value,
        kl_gradient=options.kl.gradient,
        entropy_BT=entropy_BT,
    )
    value, more = value_loss(
        values_BT,
        batch["old_value"],
        batch["return"],
        mask_BT,
        clip_range=options.value_clip_range,
        normaliser=normaliser,
    )
    loss = loss + options.value_weight * value
    if entropy_BT is not None:
        entropy = reduce_loss(entropy_BT, mask_BT, "token", normaliser=normaliser)
        loss -= options.entropy_weight * entropy
    return LossOutput(loss, metrics | more)
