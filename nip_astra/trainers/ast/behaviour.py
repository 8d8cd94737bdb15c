"""Which probabilities a policy gradient takes for those that probes were sampled with.

An attacker may be sampled at another temperature than 1, or cut by `top_k` and `top_p`. It then
acts by another distribution than the model's own, and a gradient of the model's own
log-probabilities is off-policy from the first step.

Shape suffixes: `N` node, `B` sample, `T` token.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor

from nip_astra.errors import ConfigurationError
from nip_astra.language_models.base import (
    LanguageModel,
    SamplingOptions,
    TokenScorer,
    pad_left,
)
from nip_astra.language_models.sampling import SamplingDistribution, SupportMask
from nip_astra.parameters.conditions import where
from nip_astra.parameters.parameters_base import SubParameters
from nip_astra.rl_objectives.policy_losses import ImportanceLevel, importance_weights
from nip_astra.rl_objectives.reductions import masked_mean
from nip_astra.rollouts.tree import RolloutTree


class BehaviourParameters(SubParameters):
    """What is learnt where sampling reshapes the attacker's distribution.

    At temperature 1 without `top_k` and `top_p` there is one distribution alone, and none of this
    changes anything.
    """

    logprobs: Literal["sampling", "raw"] = "sampling"
    """sampling: of the distribution sampled from, tempered, and over the tokens that the cuts left;
    it is what learns, what is compared with the reference, and what acts. raw: of the model at
    temperature 1 with nothing cut off, which is not what acts."""
    importance_weights: Annotated[
        Literal["none", "token", "sequence"], where("logprobs", "raw")
    ] = "none"
    """What each token's gradient is multiplied by so that raw log-probabilities may be learnt from:
    none, which leaves them off-policy; token: how much likelier the token is at temperature 1 than
    where it was sampled; sequence: how much likelier the whole probe is, which alone is exact where
    nothing is truncated or cut, at the price of much variance."""
    max_importance_weight: Annotated[float, where("importance_weights", "token", "sequence")] = (
        Field(default=2.0, gt=0)
    )
    """Weights are truncated to it. Larger has less bias and more variance."""


class Behaviour:
    """Takes probabilities of probes as `BehaviourParameters` say.

    Parameters
    ----------
    parameters : BehaviourParameters, optional
        None where a trainer has no such section: raw log-probabilities without weights.
    sampling : SamplingOptions
        How probes are drawn.
    section : str
        Dotted path of the parameters, for messages.

    Attributes
    ----------
    is_reshaped : bool
        Whether probes are drawn from another distribution than the model's own.

    Raises
    ------
    ConfigurationError
        Where probes are drawn greedily, at temperature 0 or `top_k` 1.
    """

    def __init__(
        self, parameters: BehaviourParameters | None, sampling: SamplingOptions, section: str
    ) -> None:
        self.sampling = sampling
        self.section = section
        raw = BehaviourParameters(logprobs="raw")
        self.parameters = raw if parameters is None else parameters
        self.is_reshaped = sampling.temperature != 1.0 or sampling.cuts
        greedy = {"temperature": 0.0, "top_k": 1}
        given = [name for name, value in greedy.items() if getattr(sampling, name) == value]
        if self._needs_drawn and given:
            raise ConfigurationError(
                f"{section} asks for the distribution that probes are sampled from, but the "
                f"attacker's {given[0]} is {greedy[given[0]]:g}, where the likeliest token is "
                "taken and siblings are all alike. Set the attacker's temperature above 0 and its "
                "top_k above 1, or to null."
            )

    @property
    def _learns_drawn(self) -> bool:
        return self.is_reshaped and self.parameters.logprobs == "sampling"

    @property
    def level(self) -> ImportanceLevel | None:
        """Over what importance weights are taken, where there are any."""
        level = self.parameters.importance_weights
        if not self.is_reshaped or self._learns_drawn or level == "none":
            return None
        return level

    @property
    def _needs_drawn(self) -> bool:
        return self._learns_drawn or self.level is not None

    @property
    def warning(self) -> str | None:
        """What is to be said where gradients are off-policy and nothing corrects them."""
        if not self.is_reshaped or self._needs_drawn:
            return None
        usual = {"temperature": 1.0, "top_k": None, "top_p": 1.0}
        given = {name: getattr(self.sampling, name) for name in usual}
        words = [f"{name} {given[name]:g}" for name in usual if given[name] != usual[name]]
        return (
            f"probes are sampled with {', '.join(words)}, but learnt from by the model's own "
            "log-probabilities (temperature 1, nothing cut off): gradients are off-policy and not "
            f"corrected. Set {self.section}.logprobs=sampling to learn the distribution sampled "
            f"from, or {self.section}.importance_weights to correct for it"
        )

    @torch.no_grad()
    def prepare(
        self, tree: RolloutTree, policy: LanguageModel, reference: TokenScorer
    ) -> dict[str, float]:
        """Add to a rollout what `node_samples` takes for its learning, and give what to log.

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
        """The distribution under which the probes of a batch are scored; None: the model's own."""
        if not self._learns_drawn:
            return None
        if not self.sampling.cuts:
            return SamplingDistribution(self.sampling)
        counts_S = batch["num_kept"][batch["probe_mask"]]
        return SamplingDistribution(
            self.sampling, SupportMask(batch["kept"][batch["kept_mask"]], counts_S)
        )


def _by_node(kept: SupportMask, mask_NT: Tensor) -> list[dict[str, Tensor]]:
    """Each node's kept tokens and their numbers, as columns of its sample."""
    lengths = mask_NT.sum(dim=1).tolist()
    counts = torch.split(kept.counts_S, lengths)
    ids = torch.split(kept.ids_K, [int(of_node.sum()) for of_node in counts])
    return [
        {"kept": ids_K, "num_kept": counts_T} for ids_K, counts_T in zip(ids, counts, strict=True)
    ]


def importance_weights_of(batch: TensorDict, device: Any) -> Tensor | None:
    """The importance weights of a batch's tokens, `[B, T]`, where it has any."""
    if "importance_weight" not in batch.keys():  # noqa: SIM118 - iteration gives rows
        return None
    weights_BT: Tensor = batch["importance_weight"].to(device)
    return weights_BT
