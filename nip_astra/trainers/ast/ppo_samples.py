"""What PPO learns from a rollout: rewards, advantages and returns of every sampled token.

Shape suffixes: `N` node, `T` token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from nip_astra.rl_objectives.advantages import explained_variance, whiten
from nip_astra.rl_objectives.kl import kl_estimate
from nip_astra.rl_objectives.masked import masked_mean
from nip_astra.rl_objectives.token_gae import token_gae
from nip_astra.rollouts.samples import Sample
from nip_astra.rollouts.tree import RolloutTree
from nip_astra.trainers.ast.kl_penalty import KlParameters
from nip_astra.trainers.ast.node_samples import learning_logprobs, node_samples
from nip_astra.trainers.ast.staleness import CorrectedStalenessParameters


class PpoParameters(CorrectedStalenessParameters):
    """Clipping, advantages, value head and what holds the attacker near the reference."""

    clip_range: float = Field(default=0.2, gt=0)
    """How far the ratio may go from 1. Larger takes larger steps."""
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
    kl: KlParameters = KlParameters()
    """Price of the divergence from the reference."""
    entropy_weight: float = Field(default=0.0, ge=0)
    """Loss taken off per nat of entropy and token. Larger keeps probes more varied."""


class PpoSamples(NamedTuple):
    """Samples of nodes with `advantage`, `return` and `old_value` of each token, what to log, and
    the mean divergence from the reference, nats per token.
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
    """One sample a node with a verdict; see `token_gae`.

    Parameters
    ----------
    values_NT : Tensor
        Return expected before each token, of the probes' width.
    kl_weight : float
        What a nat of divergence takes from the reward of its token.
    """
    nodes = tree.nodes
    mask_NT = nodes["probe_mask"]
    kl_NT = kl_estimate(*learning_logprobs(tree), parameters.kl.kind, mask_BT=mask_NT)
    is_last_NT = torch.arange(mask_NT.shape[1]) == mask_NT.sum(dim=1, keepdim=True) - 1
    rewards_NT = torch.where(is_last_NT, nodes["reward"][:, None], torch.zeros(()))
    advantages_NT, returns_NT = token_gae(
        rewards_NT - kl_weight * kl_NT,
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
