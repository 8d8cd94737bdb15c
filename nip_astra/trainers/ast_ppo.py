"""Token-level PPO of an attacker, with a value head on the model that acts."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn.functional import pad

from nip_astra.parameters.types import TrainerType
from nip_astra.rl_objectives.reductions import LossOutput
from nip_astra.rollouts.samples import Sample, collate
from nip_astra.rollouts.tree import RolloutTree
from nip_astra.trainers.ast.behaviour import BehaviourParameters, importance_weights_of
from nip_astra.trainers.ast.node_samples import node_samples
from nip_astra.trainers.ast.ppo import PpoParameters, ValueHead, ppo_loss, ppo_samples
from nip_astra.trainers.ast_base import AstTrainer
from nip_astra.trainers.registry import register_trainer


@register_trainer(TrainerType.AST_PPO)
class AstPpoTrainer(AstTrainer):
    """Raise the tokens that led to more than was expected.

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

    class Parameters(PpoParameters):
        """Clipping, advantages, value head and what holds the attacker near the reference."""

        behaviour: BehaviourParameters = BehaviourParameters()
        """Which log-probabilities are learnt from where sampling is tempered or cut."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kl = self.parameters.kl.controller()

    def build_modules(self) -> dict[str, torch.nn.Module]:
        """The value head."""
        head = ValueHead(self.policy.hidden_size, trains_model=self.parameters.value_trains_model)
        return {"value_head": head.to(next(self.policy.parameters()).device)}

    @property
    def modules_lr_factor(self) -> float:
        """Learning rate of the value head as a multiple of the attacker's."""
        return float(self.parameters.value_lr_factor)

    def trainer_state(self) -> dict[str, Any]:
        """The weight of the divergence, which may have been adapted."""
        return dict(self.kl.state())

    def load_trainer_state(self, state: dict[str, Any]) -> None:
        """Restore the weight of the divergence."""
        self.kl.load_state(state)

    @torch.no_grad()
    def probe_logprobs(self, tree: RolloutTree) -> Tensor:
        """The attacker's log-probabilities; the values of that pass go into the tree."""
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
        """One sample a node, with advantage, return and old value of each token."""
        if "value" not in tree.nodes:
            with self.policy.rescoring():
                self.probe_logprobs(tree)
        values_NT = tree.nodes.pop("value")
        found = ppo_samples(tree, values_NT, self.parameters, kl_weight=self.kl.weight)
        self.log_metrics(found.metrics | {"kl/weight": self.kl.weight})
        self.kl.update(found.divergence, num_samples=tree.num_nodes)
        return found.samples

    def loss(self, batch: TensorDict) -> LossOutput:
        """Policy, value, divergence and entropy loss of a batch of probes."""
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
        )
