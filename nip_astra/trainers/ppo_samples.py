"""What PPO learns from a rollout: rewards, advantages and returns of every sampled token.

Shape suffixes: `N` node, `T` token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nip_astra.rl_objectives.advantages import explained_variance, whiten
from nip_astra.rl_objectives.kl import KlKind, kl_estimate
from nip_astra.rl_objectives.masked import masked_mean
from nip_astra.rl_objectives.token_gae import token_gae
from nip_astra.rollouts.samples import Sample
from nip_astra.rollouts.tree import RolloutTree
from nip_astra.trainers.node_samples import node_samples


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
    *,
    kl_kind: KlKind,
    reward_kl_weight: float,
    gamma: float,
    lam: float,
    whiten_advantages: bool,
) -> PpoSamples:
    """Give one sample a node with a verdict; see `token_gae`.

    Parameters
    ----------
    values_NT : Tensor
        Return expected before each token, of the probes' width.
    reward_kl_weight : float
        What a nat of divergence takes from the reward of its token.
    """
    nodes = tree.nodes
    mask_NT = nodes["probe_mask"]
    kl_NT = kl_estimate(
        nodes["probe_logprobs"], nodes["reference_logprobs"], kl_kind, mask_BT=mask_NT
    )
    is_last_NT = torch.arange(mask_NT.shape[1]) == mask_NT.sum(dim=1, keepdim=True) - 1
    rewards_NT = torch.where(is_last_NT, nodes["reward"][:, None], torch.zeros(()))
    advantages_NT, returns_NT = token_gae(
        rewards_NT - reward_kl_weight * kl_NT,
        values_NT,
        mask_NT,
        nodes["parent"],
        nodes["depth"],
        gamma=gamma,
        lam=lam,
    )
    is_rated_N = ~nodes["reward"].isnan()
    used_NT = mask_NT & is_rated_N[:, None]
    if whiten_advantages:
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
