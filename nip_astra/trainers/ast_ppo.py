"""Token-level PPO of an attacker, with a value head on the model that acts."""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor

from nip_astra.parameters.parameters_base import SubParameters
from nip_astra.parameters.types import TrainerType
from nip_astra.rl_objectives.kl import AdaptiveKl, KlKind, kl_estimate
from nip_astra.rl_objectives.masked import reduce_loss
from nip_astra.rl_objectives.outputs import LossOutput
from nip_astra.rl_objectives.policy_gradient import ppo_policy_loss, value_loss
from nip_astra.rollouts.samples import Sample, collate
from nip_astra.rollouts.tree import RolloutTree
from nip_astra.trainers.ast_base import AstTrainer
from nip_astra.trainers.node_samples import node_samples
from nip_astra.trainers.ppo_samples import ppo_samples
from nip_astra.trainers.registry import register_trainer
from nip_astra.trainers.value_head import ValueHead


@register_trainer(TrainerType.AST_PPO)
class AstPpoTrainer(AstTrainer):
    """Raise the tokens that led to more than was expected.

    Loss: `-min(r A, clip(r) A)` (arXiv:1707.06347, eq. 7) with `r = pi / pi_old` of each token,
    `+ value_weight * 0.5 * (V - return)^2` (clipped about the old value),
    `+ kl_weight * KL(pi || ref)` or as much less reward, `- entropy_weight * entropy`; means over
    the tokens that the attacker sampled. Old log-probabilities are those of sampling. Advantages
    are estimated over all tokens of a conversation, its turns one after the other, at branches
    with the mean over the children (`rl_objectives.token_gae`, arXiv:1506.02438); tree_width 1 is
    plain PPO on conversations.
    """

    class Parameters(SubParameters):
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
        kl_weight: float = Field(default=0.05, ge=0)
        """Weight of the divergence from the reference, per token. Larger stays closer to it."""
        kl_kind: KlKind = "k1"
        """Estimator of the divergence. In the loss k1 has no gradient on average: take k2 there."""
        kl_place: Literal["reward", "loss"] = "reward"
        """Whether the divergence lowers the reward of each token, or is added to the loss."""
        kl_target: float | None = Field(default=None, gt=0)
        """Divergence per token, in nats, that kl_weight is adapted to hold; null keeps it."""
        kl_horizon: float = Field(default=2000.0, gt=0)
        """Probes over which an adapted kl_weight changes by at most a fifth."""
        entropy_weight: float = Field(default=0.0, ge=0)
        """Loss taken off per nat of entropy and token. Larger keeps probes more varied."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kl_weight = self.parameters.kl_weight
        self._adaptive = self.parameters.kl_target and AdaptiveKl(
            weight=self.kl_weight,
            target=self.parameters.kl_target,
            horizon=self.parameters.kl_horizon,
        )

    def build_modules(self) -> dict[str, torch.nn.Module]:
        """Give the value head."""
        size = self.policy.hidden_size
        head = ValueHead(size, trains_model=self.parameters.value_trains_model)
        return {"value_head": head.to(next(self.policy.parameters()).device)}

    @property
    def modules_lr_factor(self) -> float:
        """Learning rate of the value head as a multiple of the attacker's."""
        return float(self.parameters.value_lr_factor)

    def trainer_state(self) -> dict[str, Any]:
        """Give the weight of the divergence, which may have been adapted."""
        return {"kl_weight": self.kl_weight}

    def load_trainer_state(self, state: dict[str, Any]) -> None:
        """Take the weight of the divergence."""
        self.kl_weight = state["kl_weight"]
        if self._adaptive:
            self._adaptive.load_state({"weight": self.kl_weight})

    @torch.no_grad()
    def flatten(self, tree: RolloutTree) -> list[Sample]:
        """Give one sample a node, with advantage, return and old value of each token."""
        options = self.parameters
        values_NT = torch.zeros(tree.nodes["probe"].shape)
        found_NT = self._values(collate(node_samples(tree, range(tree.num_nodes))))
        values_NT[:, : found_NT.shape[1]] = found_NT.cpu()
        found = ppo_samples(
            tree,
            values_NT,
            kl_kind=options.kl_kind,
            reward_kl_weight=self.kl_weight if options.kl_place == "reward" else 0.0,
            gamma=options.gamma,
            lam=options.lam,
            whiten_advantages=options.whiten_advantages,
        )
        self.flatten_metrics = found.metrics | {"kl/weight": self.kl_weight}
        if self._adaptive:
            self.kl_weight = self._adaptive.update(found.divergence, num_samples=tree.num_nodes)
        return found.samples

    def _values(self, batch: TensorDict) -> Tensor:
        hidden_BTX = self.policy_scores(batch, needs_hidden=True).hidden_BTX
        values: Tensor = self.modules["value_head"](hidden_BTX)
        return values

    def step(self, batch: TensorDict) -> LossOutput:
        """Give policy, value, divergence and entropy loss of a batch of probes."""
        options = self.parameters
        scores = self.policy_scores(
            batch, needs_hidden=True, needs_entropy=options.entropy_weight > 0
        )
        return ppo_loss(
            scores.logprobs_BT,
            self.modules["value_head"](scores.hidden_BTX),
            batch.to(scores.logprobs_BT.device),
            options,
            kl_weight=self.kl_weight,
            normaliser=self.num_tokens_in_step(batch),
            entropy_BT=scores.entropy_BT,
        )


def ppo_loss(
    logprobs_BT: Tensor,
    values_BT: Tensor,
    batch: TensorDict,
    options: AstPpoTrainer.Parameters,
    *,
    kl_weight: float,
    normaliser: float | None,
    entropy_BT: Tensor | None = None,
) -> LossOutput:
    """Policy, value, divergence and entropy loss of a batch of probes; see `AstPpoTrainer`.

    Parameters
    ----------
    logprobs_BT, values_BT : Tensor
        Of the tokens of the probes, with gradient.
    batch : TensorDict
        `[B, T]`: `old_logprobs`, `reference_logprobs`, `advantage`, `return`, `old_value`, and
        `probe_mask`, True on tokens that count.
    normaliser : float, optional
        What sums over tokens are divided by; their number by default.
    entropy_BT : Tensor, optional
        With gradient; needed where `options.entropy_weight` is not 0.
    """
    mask_BT = batch["probe_mask"]
    loss, metrics = ppo_policy_loss(
        logprobs_BT,
        batch["old_logprobs"],
        batch["advantage"],
        mask_BT,
        clip_low=options.clip_range,
        clip_high=options.clip_range,
        normaliser=normaliser,
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
    loss, metrics = loss + options.value_weight * value, metrics | more
    if options.kl_place == "loss":
        kl_BT = kl_estimate(
            logprobs_BT, batch["reference_logprobs"], options.kl_kind, mask_BT=mask_BT
        )
        loss += kl_weight * reduce_loss(kl_BT, mask_BT, "token", normaliser=normaliser)
    if entropy_BT is not None:
        entropy = reduce_loss(entropy_BT, mask_BT, "token", normaliser=normaliser)
        loss -= options.entropy_weight * entropy
    return LossOutput(loss, metrics)
