"""Learning from rollouts of older weights: its parameters, checks and correction.

Shape suffixes: `N` node, `T` token.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from nip_astra.errors import ConfigurationError
from nip_astra.parameters.conditions import where_above
from nip_astra.rl_objectives.kl import kl_estimate
from nip_astra.rl_objectives.policy_losses import (
    ImportanceLevel,
    effective_sample_size,
    importance_weights,
)
from nip_astra.rl_objectives.reductions import masked_mean
from nip_astra.rollouts.tree import RolloutTree
from nip_astra.samplers.async_rollouts import AsyncRolloutParameters
from nip_astra.scenario_base.agents import Speaker
from nip_astra.scenario_base.text_attackers import TextAttacker
from nip_astra.trainers.ast.behaviour import Behaviour

logger = logging.getLogger(__name__)

IS_STALE = where_above("max_staleness", 0)


class CorrectedStalenessParameters(AsyncRolloutParameters):
    """How far sampling may be ahead of learning, and how policy gradients are corrected."""

    staleness_weights: Annotated[ImportanceLevel, IS_STALE] = "token"
    """Factor of the gradients of samples of older weights: `token`, the ratio of each token's
    probabilities under the learning and the sampling weights; `sequence`, the ratio of the whole
    probe, which is exact without truncation but has much variance. Losses with one ratio a probe
    (variants gspo and rloo of ast_grpo) take sequence only."""
    max_staleness_weight: Annotated[float, IS_STALE] = Field(default=2.0, gt=0)
    """Those ratios are truncated to it. Larger has less bias and more variance."""


def check_staleness(
    agents: Mapping[str, Speaker | TextAttacker],
    behaviour: Behaviour | None,
    section: str,
    *,
    has_actors: bool,
) -> None:
    """Refuse asynchronous rollouts that no other process could sample or no weight correct.

    Raises
    ------
    ConfigurationError
        Where an agent cannot be copied to another process, or a policy gradient needs the tempered
        or truncated distribution of older weights.
    """
    fixed = [role for role, agent in agents.items() if not _can_be_copied(agent)]
    if fixed:
        raise ConfigurationError(
            f"{section}.max_staleness needs agents that can be copied to actors, but the "
            f"{' and '.join(fixed)} cannot. Set it to 0, or use models of _type huggingface."
        )
    if behaviour is not None and behaviour.is_reshaped:
        raise ConfigurationError(
            f"{section}.max_staleness cannot correct tempered or truncated sampling: the "
            "probabilities under older weights are unknown. Set it to 0, or the attacker's "
            "temperature to 1, top_k to null and top_p to 1."
        )
    if not has_actors:
        logger.warning(
            "max_staleness saves no time without actors that sample during the update. Set "
            "num_actors in the settings"
        )


def _can_be_copied(agent: Speaker | TextAttacker) -> bool:
    return bool(getattr(agent.language_model, "can_be_copied", False))


@torch.no_grad()
def correct_for_staleness(
    tree: RolloutTree, logprobs_NT: Tensor, parameters: CorrectedStalenessParameters
) -> dict[str, float]:
    """Weight a tree that older weights sampled, and return metrics.

    Sets `importance_weight` to the truncated `pi / mu` of tokens or probes and `probe_logprobs` to
    log pi: ratios of the loss then measure the update, weights the lag before it (decoupled PPO,
    arXiv:2110.00641).

    Parameters
    ----------
    logprobs_NT : Tensor
        log pi of the probes under the learning weights, nats.
    """
    nodes, mask_NT = tree.nodes, tree.nodes["probe_mask"]
    sampled_NT = nodes["probe_logprobs"]
    most = parameters.max_staleness_weight
    weights_NT = importance_weights(
        logprobs_NT, sampled_NT, mask_NT, level=parameters.staleness_weights, max_ratio=most
    )
    nodes["importance_weight"] = weights_NT
    nodes["probe_logprobs"] = logprobs_NT
    kl_NT = kl_estimate(sampled_NT, logprobs_NT, "k3", mask_BT=mask_NT)
    return {
        "staleness/kl": float(masked_mean(kl_NT, mask_NT)),
        "staleness/effective_sample_size": float(effective_sample_size(weights_NT, mask_NT)),
        "staleness/truncated_share": float(masked_mean((weights_NT >= most).float(), mask_NT)),
    }
