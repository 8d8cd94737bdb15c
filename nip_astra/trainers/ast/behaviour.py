"""Which log-probabilities of probes are trained if sampling used another distribution.

An attacker sampled at another temperature than 1, cut by `top_k` and `top_p`, or kept from ending
by `min_new_tokens`, acts by another distribution than the model's own. Asynchronous rollouts are
sampled by older weights.

Shape suffixes: `N` node, `B` sample, `T` token.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor

from nip_astra.errors import ConfigurationError
from nip_astra.language_models.base import LanguageModel, SamplingOptions, TokenScorer, pad_left
from nip_astra.language_models.sampling import SamplingDistribution, SupportMask
from nip_astra.parameters.conditions import where, where_above
from nip_astra.parameters.parameters_base import SubParameters
from nip_astra.rl_objectives.kl import kl_estimate
from nip_astra.rl_objectives.policy_losses import (
    ImportanceLevel,
    effective_sample_size,
    importance_weights,
    refuse_token_weights,
)
from nip_astra.rl_objectives.reductions import masked_mean
from nip_astra.rollouts.tree import RolloutTree
from nip_astra.samplers.executor import AsyncRolloutParameters
from nip_astra.scenario_base.agents import Speaker
from nip_astra.scenario_base.chat_agent import TextAttacker

logger = logging.getLogger(__name__)

IS_STALE = where_above("max_staleness", 0)


class BehaviourParameters(SubParameters):
    """The trained distribution if sampling options modify the attacker's.

    At temperature 1 without `top_k`, `top_p` and `min_new_tokens` above 1 there is only one
    distribution, and none of this has any effect.
    """

    logprobs: Literal["sampling", "raw"] = "sampling"
    """sampling: train the sampling distribution, with its temperature and over the tokens kept by
    top_k, top_p and min_new_tokens; it also acts and is compared with the reference. raw: train the
    model at temperature 1 without truncation, which is not the distribution that acts."""
    importance_weights: Annotated[
        Literal["none", "token", "sequence"], where("logprobs", "raw")
    ] = "none"
    """Weight of each token's gradient for raw log-probabilities: none (off-policy); token: ratio of
    the token's probability at temperature 1 to that when sampled; sequence: ratio for the whole
    probe, the only exact one (without truncation), but with high variance."""
    max_importance_weight: Annotated[float, where("importance_weights", "token", "sequence")] = (
        Field(default=2.0, gt=0)
    )
    """Maximum importance weight. Larger has less bias and more variance."""


class Behaviour:
    """Log-probabilities of probes according to `BehaviourParameters`, or raw ones without them.

    Raises ConfigurationError if the distribution sampled from is needed, but sampling is greedy.
    `section` is the dotted path of the parameters.
    """

    def __init__(
        self, parameters: BehaviourParameters | None, sampling: SamplingOptions, section: str
    ) -> None:
        self.sampling, self.section = sampling, section
        self.parameters = parameters or BehaviourParameters(logprobs="raw")
        self.is_reshaped = bool(sampling.modifications)
        self._learns_drawn = self.is_reshaped and self.parameters.logprobs == "sampling"
        level = self.parameters.importance_weights
        has_weights = self.is_reshaped and not self._learns_drawn and level != "none"
        self.level: ImportanceLevel | None = level if has_weights else None  # type: ignore[assignment]  # not "none"
        self._needs_drawn = self._learns_drawn or self.level is not None
        for name, value in {"temperature": 0.0, "top_k": 1}.items():
            if self._needs_drawn and getattr(sampling, name) == value:
                raise ConfigurationError(
                    f"{section} needs the distribution that probes are sampled from, but the "
                    f"attacker's {name} {value:g} makes sampling greedy. Set temperature above 0, "
                    "and top_k above 1 or to null."
                )

    @property
    def warning(self) -> str | None:
        """The warning if gradients are off-policy without a correction."""
        if not self.is_reshaped or self._needs_drawn:
            return None
        return (
            f"probes are sampled with {self.sampling.modifications}, but learned from without "
            "them: gradients are off-policy. Set "
            f"{self.section}.logprobs=sampling, or {self.section}.importance_weights"
        )

    @torch.no_grad()
    def prepare(
        self, tree: RolloutTree, policy: LanguageModel, reference: TokenScorer
    ) -> dict[str, float]:
        """Complete a rollout for `node_samples`, and return metrics.

        Sets `drawn_logprobs` and `drawn_reference_logprobs`, or `importance_weight`, all `[N, T]`;
        where tokens were cut off also `tree.more_of_samples`.
        """
        if not self._needs_drawn:
            return {}
        nodes, mask_NT = tree.nodes, tree.nodes["probe_mask"]
        contexts = [tree.context_of(node) for node in range(tree.num_nodes)]
        rows = *pad_left(contexts, torch.device("cpu")), nodes["probe"], mask_NT
        with policy.rescoring(), reference.rescoring():
            kept = policy.support_mask(*rows, self.sampling) if self.sampling.cuts else None
            drawn = SamplingDistribution(self.sampling, kept)
            drawn_NT = policy.token_scores(*rows, distribution=drawn).logprobs_BT.cpu()
            if self._learns_drawn:
                nodes["drawn_logprobs"] = drawn_NT
                scores = reference.token_scores(*rows, distribution=drawn)
                nodes["drawn_reference_logprobs"] = scores.logprobs_BT.cpu()
                tree.more_of_samples = [] if kept is None else _by_node(kept, mask_NT)
                return {}
            raw_NT = nodes["probe_logprobs"]
            if not policy.samples_as_it_scores:
                raw_NT = policy.token_scores(*rows).logprobs_BT.cpu()
        assert self.level is not None
        weights_NT = importance_weights(
            raw_NT,
            drawn_NT,
            mask_NT,
            level=self.level,
            max_ratio=self.parameters.max_importance_weight,
        )
        nodes["importance_weight"] = weights_NT
        is_most_NT = weights_NT >= self.parameters.max_importance_weight
        return {
            "importance_weight/mean": float(masked_mean(weights_NT, mask_NT)),
            "importance_weight/truncated_share": float(masked_mean(is_most_NT.float(), mask_NT)),
        }

    def drawn(self, batch: TensorDict) -> SamplingDistribution | None:
        """Return the distribution to score a batch's probes under; None for the model's own."""
        if not self._learns_drawn:
            return None
        if not self.sampling.cuts:
            return SamplingDistribution(self.sampling)
        counts_S = batch["num_kept"][batch["probe_mask"]]
        return SamplingDistribution(
            self.sampling, SupportMask(batch["kept"][batch["kept_mask"]], counts_S)
        )


def _by_node(kept: SupportMask, mask_NT: Tensor) -> list[dict[str, Tensor]]:
    """Return each node's kept tokens and their counts, as columns of its sample."""
    lengths = mask_NT.sum(dim=1).tolist()
    counts = torch.split(kept.counts_S, lengths)
    ids = torch.split(kept.ids_K, [int(of_node.sum()) for of_node in counts])
    return [
        {"kept": ids_K, "num_kept": counts_T} for ids_K, counts_T in zip(ids, counts, strict=True)
    ]


def importance_weights_of(batch: TensorDict, device: Any) -> Tensor | None:
    """Return the importance weights of a batch's tokens, `[B, T]`, if it has any."""
    weights_BT: Tensor | None = batch.get("importance_weight", None)
    return None if weights_BT is None else weights_BT.to(device)


# ---- rollouts of older weights


class CorrectedStalenessParameters(AsyncRolloutParameters):
    """Maximum lag of sampling, and the correction of policy gradients for it."""

    staleness_weights: Annotated[ImportanceLevel, IS_STALE] = "token"
    """Weight of the gradients of samples of older weights: `token`, the ratio of each token's
    probabilities under the learning and the sampling weights; `sequence`, the ratio for the whole
    probe, which is exact without truncation but has high variance. Losses with one ratio per probe
    (gspo and rloo) support only sequence."""
    max_staleness_weight: Annotated[float, IS_STALE] = Field(default=2.0, gt=0)
    """Maximum of these ratios. Larger has less bias and more variance."""


def check_weights(
    loss: str, behaviour: Behaviour | None, parameters: CorrectedStalenessParameters, section: str
) -> None:
    """Raise for importance weights that a policy loss cannot take."""
    if behaviour is not None and behaviour.level == "token":
        refuse_token_weights(loss, f"{section}.behaviour.importance_weights=sequence")
    if parameters.max_staleness and parameters.staleness_weights == "token":
        refuse_token_weights(loss, f"{section}.staleness_weights=sequence, or max_staleness=0")


def check_staleness(
    agents: Mapping[str, Speaker | TextAttacker],
    behaviour: Behaviour | None,
    section: str,
    *,
    has_actors: bool,
) -> None:
    """Raise for asynchronous rollouts that cannot run in another process or be corrected."""
    fixed = [
        role
        for role, agent in agents.items()
        if not getattr(agent.language_model, "can_be_copied", False)
    ]
    if fixed:
        raise ConfigurationError(
            f"{section}.max_staleness needs agents that can be copied to actors, but the "
            f"{' and '.join(fixed)} cannot. Set it to 0, or use models of _type huggingface."
        )
    if behaviour is not None and behaviour.is_reshaped:
        raise ConfigurationError(
            f"{section}.max_staleness cannot correct {behaviour.sampling.modifications} of the "
            "attacker. Set it to 0, or leave these out."
        )
    if not has_actors:
        logger.warning(
            "max_staleness saves no time without actors that sample during the update. Set "
            "num_actors in the settings"
        )


@torch.no_grad()
def correct_for_staleness(
    tree: RolloutTree, logprobs_NT: Tensor, parameters: CorrectedStalenessParameters
) -> dict[str, float]:
    """Set importance weights of a tree sampled by older weights, and return metrics.

    Sets `importance_weight` to the truncated `pi / mu` of tokens or probes and `probe_logprobs` to
    log pi (`logprobs_NT`): ratios of the loss then measure the update, weights the lag before it
    (decoupled PPO, arXiv:2110.00641).
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
