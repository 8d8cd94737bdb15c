"""Token-level PPO of an attacker, with a value head on its model.

Shape suffixes: `N` node, `B` row, `T` token.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor
from torch.nn.functional import pad

from nip_astra.parameters.conditions import where, where_above
from nip_astra.parameters.types import TrainerType
from nip_astra.rl_objectives.advantages import tree_gae, whiten
from nip_astra.rl_objectives.kl import AdaptiveKl, KlKind, KlParameters, kl_estimate
from nip_astra.rl_objectives.policy_losses import LossParameters, policy_loss
from nip_astra.rl_objectives.reductions import LossOutput, masked_mean, reduce_loss
from nip_astra.rl_objectives.values import explained_variance, value_loss
from nip_astra.rollouts.samples import Sample, collate
from nip_astra.rollouts.tree import RolloutTree
from nip_astra.trainers.ast.base import AstTrainer
from nip_astra.trainers.ast.behaviour import (
    BehaviourParameters,
    CorrectedStalenessParameters,
    check_weights,
    importance_weights_of,
)
from nip_astra.trainers.ast.rollouts import learning_logprobs, node_samples
from nip_astra.trainers.registry import register_trainer


class ValueHead(torch.nn.Module):
    """The expected return before each token: a linear map of the hidden state, initially 0.

    With `trains_model` gradients flow into the model.
    """

    def __init__(self, hidden_size: int, *, trains_model: bool) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(hidden_size, 1)
        torch.nn.init.zeros_(self.linear.weight)
        torch.nn.init.zeros_(self.linear.bias)
        self.trains_model = trains_model

    def forward(self, hidden_BTX: Tensor) -> Tensor:
        """Return values `[B, T]` float32."""
        values_BT1: Tensor = self.linear(hidden_BTX if self.trains_model else hidden_BTX.detach())
        return values_BT1.squeeze(-1)


class PpoKlParameters(KlParameters):
    """KL penalty, in the reward or in the loss."""

    weight: float = Field(default=0.05, ge=0)
    """Penalty per nat and token. Larger stays closer to the reference."""
    value: KlKind = "k1"
    """Estimator of the divergence in the reward and in metrics."""
    place: Literal["reward", "loss"] = "reward"
    """Whether the divergence is subtracted from each token's reward, or added to the loss."""
    gradient: Annotated[Literal["k2", "k3"], where_above("weight", 0), where("place", "loss")] = (
        "k2"
    )
    """Estimator whose gradient is taken: k2 acts as KL(policy || reference), k3 as the reverse."""


class PpoParameters(LossParameters, CorrectedStalenessParameters):
    """Clipping, advantages, value head and KL penalty."""

    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount from one turn to the next. Smaller looks less far ahead."""
    lam: float = Field(default=0.95, ge=0, le=1)
    """Trade-off between bias (0) and variance (1) of advantages, per token."""
    whiten_advantages: bool = True
    """Whether an iteration's advantages are normalised to mean 0 and standard deviation 1."""
    value_weight: float = Field(default=0.5, ge=0)
    """Weight of the value loss."""
    value_clip_range: float | None = Field(default=None, gt=0)
    """Clip range of values about the old values; null does not clip."""
    value_lr_factor: float = Field(default=10.0, gt=0)
    """Learning rate of the value head as a multiple of training.lr."""
    value_trains_model: bool = False
    """Whether the value loss also trains the attacker's weights below the head."""
    kl: PpoKlParameters = PpoKlParameters()
    """KL penalty."""
    entropy_weight: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus per token. Larger keeps probes more varied."""


@torch.no_grad()
def ppo_samples(
    tree: RolloutTree,
    values_NT: Tensor,
    parameters: PpoParameters,
    *,
    kl_weight: float,
) -> tuple[list[Sample], dict[str, float]]:
    """Return a sample per node with a verdict, with `advantage`, `return`, `old_value` per token.

    Also metrics. `values_NT` is the expected return before each token, as wide as the probes.
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
    samples = node_samples(
        tree,
        is_rated_N.nonzero().flatten().tolist(),
        **{"advantage": advantages_NT, "return": returns_NT, "old_value": values_NT},
    )
    metrics = {
        "kl/reference": float(masked_mean(kl_NT, mask_NT)),
        "value/mean": float(masked_mean(values_NT, used_NT)),
        "value/explained_variance": float(explained_variance(values_NT, returns_NT, used_NT)),
    }
    return samples, metrics


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
    old_logprobs_BT: Tensor | None = None,
) -> LossOutput:
    """Compute policy, value, divergence and entropy loss of a batch of probes; see `AstPpoTrainer`.

    Parameters
    ----------
    logprobs_BT, values_BT : Tensor
        Of the tokens of the probes, with gradient.
    batch : TensorDict
        `[B, T]`: `old_logprobs`, `reference_logprobs`, `advantage`, `return`, `old_value`, and
        `probe_mask`, True on tokens that count.
    normaliser : float, optional
        Divisor of sums over tokens; their number by default.
    entropy_BT : Tensor, optional
        With gradient; needed if `options.entropy_weight` is not 0.
    weights_BT : Tensor, optional
        Importance weights of policy loss and divergence.
    old_logprobs_BT : Tensor, optional
        Replaces those of the batch.
    """
    mask_BT, is_kl_in_loss = batch["probe_mask"], options.kl.place == "loss"
    loss, metrics = policy_loss(
        logprobs_BT,
        batch["old_logprobs"] if old_logprobs_BT is None else old_logprobs_BT,
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


@register_trainer(TrainerType.AST_PPO)
class AstPpoTrainer(AstTrainer):
    """Token-level proximal policy optimisation with a value head.

    Loss: that of `loss`, by default `-min(r A, clip(r) A)` (arXiv:1707.06347, eq. 7) with
    `r = pi / pi_old` of each token,
    `+ value_weight * 0.5 * (V - return)^2` (clipped about the old value),
    `+ kl.weight * KL(pi || ref)` or as much less reward, `- entropy_weight * entropy`; means over
    the tokens that the attacker sampled. Old log-probabilities are those of sampling (`behaviour`;
    importance weights multiply policy loss and divergence, not the value loss). Advantages are
    estimated over all tokens of a conversation, its turns one after the other, at branches with the
    mean over the children (`rl_objectives.advantages.tree_gae`, arXiv:1506.02438); tree_width 1 is
    plain PPO on conversations.
    """

    compares_with_sampler = True
    kl: AdaptiveKl

    class Parameters(PpoParameters):
        """Clipping, advantages, value head and KL penalty."""

        behaviour: BehaviourParameters = BehaviourParameters()
        """Which log-probabilities are trained if sampling is tempered or truncated."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kl = self.parameters.kl.controller()
        check_weights(self.parameters.loss, self.behaviour, self.parameters, "ast_ppo")

    def build_modules(self) -> dict[str, torch.nn.Module]:
        head = ValueHead(self.policy.hidden_size, trains_model=self.parameters.value_trains_model)
        return {"value_head": head.to(next(self.policy.parameters()).device)}

    @property
    def modules_lr_factor(self) -> float:
        return float(self.parameters.value_lr_factor)

    @torch.no_grad()
    def probe_logprobs(self, tree: RolloutTree) -> Tensor:
        """Return the attacker's log-probabilities; store the values of that pass in the tree."""
        batch = collate(node_samples(tree, range(tree.num_nodes)))
        scores = self.policy.token_scores(
            *(batch["context"], batch["context_mask"], batch["probe"], batch["probe_mask"]),
            needs_hidden=True,
        )
        values_BT = self.modules["value_head"](scores.hidden_BTX)
        # A batch is as wide as its longest probe.
        padding = (0, tree.nodes["probe"].shape[1] - values_BT.shape[1])
        tree.nodes["value"] = pad(values_BT, padding).cpu()
        return pad(scores.logprobs_BT, padding).cpu()

    @torch.no_grad()
    def flatten(self, tree: RolloutTree) -> list[Sample]:
        if "value" not in tree.nodes:
            with self.policy.rescoring():
                self.probe_logprobs(tree)
        values_NT = tree.nodes.pop("value")
        samples, metrics = ppo_samples(tree, values_NT, self.parameters, kl_weight=self.kl.weight)
        self.log_metrics(metrics | {"kl/weight": self.kl.weight})
        self.kl.update(metrics["kl/reference"], num_samples=tree.num_nodes)
        return samples

    def loss(self, batch: TensorDict) -> LossOutput:
        options = self.parameters
        scores = self.policy_scores(
            batch, needs_hidden=True, needs_entropy=options.entropy_weight > 0
        )
        return ppo_loss(
            scores.logprobs_BT,
            self.modules["value_head"](scores.hidden_BTX),
            batch.to(scores.logprobs_BT.device),
            options,
            kl_weight=self.kl.weight,
            weights_BT=importance_weights_of(batch, scores.logprobs_BT.device),
            normaliser=self.num_tokens_in_step(batch),
            entropy_BT=scores.entropy_BT,
            old_logprobs_BT=self.old_logprobs(batch, scores.logprobs_BT),
        )
