"""GRPO of a language model on the problems of a task."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nip_astra.errors import ConfigurationError
from nip_astra.parameters.types import TrainerType
from nip_astra.rl_objectives.advantages import codes_of
from nip_astra.rl_objectives.reductions import masked_sum
from nip_astra.rollouts.batch import Batch
from nip_astra.trainers.registry import register_trainer
from nip_astra.trainers.self_hosted_base import SelfHostedTrainer
from nip_astra.trainers.service.parameters import GrpoParameters, PolicyLossParameters


@register_trainer(TrainerType.SELF_HOSTED_GRPO)
class SelfHostedGrpoTrainer(SelfHostedTrainer):
    """Raise the runs that did better than others on the same problem, lower those that did worse.

    With `m_k` the mean reward of run k of a problem, mu and std their mean and unbiased standard
    deviation, each token of a trajectory has the advantage `A = (r - mu) / (std + 1e-6)` (GRPO,
    arXiv:2402.03300, with NexRL's count by runs; see `rl_objectives.advantages`). The loss is
    `max(-ratio A, -clip(ratio) A) + kl.weight KL(pi || ref)` in the defaults of `policy_loss`, a
    mean over the tokens that the policy said.

    Hooks: `_reward_fn`, the rewards of tokens, and `_compute_advantage`, which learns from their
    sum. A subclass may also set `values["token_level_scores"]`, or `token_level_rewards`, which
    come first, before it calls `_prepare_batch` or `_compute_advantage` of this class.
    """

    class Parameters(GrpoParameters):
        """How rewards become advantages, and the loss."""

        policy_loss: PolicyLossParameters = PolicyLossParameters()
        """The loss of a batch."""

    def _prepare_batch(self, batch: Batch) -> tuple[Batch, dict[str, Any]]:
        if self.config.algorithm.get("use_kl_in_reward", False):
            raise ConfigurationError(
                "algorithm.use_kl_in_reward has no effect here. Leave it out, and override "
                "_prepare_batch: subtract the penalty from values['token_level_scores'], then call "
                "super()._prepare_batch(batch)."
            )
        batch = batch.strip(pad_token_id=self._pad_token_id)
        if "token_level_scores" not in batch.values:
            batch.values["token_level_scores"] = self._reward_fn(batch)
        return self._compute_advantage(batch), {}

    def _reward_fn(self, batch: Batch) -> Tensor:
        """The reward of each trajectory at the last token that the policy said, `[B, T]`."""
        mask_BT = batch.values["loss_mask"]
        place_T = torch.arange(mask_BT.shape[1])
        last_B = torch.where(mask_BT, place_T, -1).amax(dim=1)
        is_last_BT = (place_T == last_B[:, None]) & mask_BT
        return torch.where(is_last_BT, batch.values["rewards"].nan_to_num()[:, None], 0.0)

    def _compute_advantage(self, batch: Batch) -> Batch:
        """Set `advantages`, leave out trajectories without a reward, and log statistics."""
        options = self.parameters
        runs = codes_of(batch.metadata["run_ids"]) if options.use_run_ids else None
        groups = batch.metadata["uid" if "uid" in batch.metadata else "group_ids"]  # as in NexRL
        found = options.advantages(self._rewards_of_rows(batch).double(), codes_of(groups), runs)
        batch.values["advantages"] = found.advantages_N.float()
        batch.values["row_weights"] = batch.values["row_weights"] * found.is_used_N
        self.log_metrics(found.metrics())
        return batch

    def _rewards_of_rows(self, batch: Batch) -> Tensor:
        """The reward of each trajectory, `[B]`: the sum over the tokens that the policy said.

        Rewards of tokens may leave the first column out, as those of NexRL's `responses` do.
        """
        rewards_B: Tensor = batch.values["rewards"]
        names = ("token_level_rewards", "token_level_scores")
        name = next((name for name in names if name in batch.values), None)
        if name is None:
            return rewards_B
        of_tokens, mask_BT = batch.values[name], batch.values["loss_mask"]
        rows, width = mask_BT.shape
        if list(getattr(of_tokens, "shape", ())) not in ([rows, width], [rows, width - 1]):
            raise ConfigurationError(
                f"values[{name!r}] of {type(self).__name__} is no tensor [{rows}, {width}]. Give "
                "one number a token."
            )
        mask_BT = mask_BT[:, -of_tokens.shape[1] :]
        if not of_tokens[mask_BT].isfinite().all():
            raise ConfigurationError(
                f"values[{name!r}] of {type(self).__name__} holds NaN or infinity where tokens are "
                "learnt. Give finite numbers."
            )
        # A trajectory without a reward stays without.
        return torch.where(rewards_B.isnan(), rewards_B, masked_sum(of_tokens, mask_BT, dim=1))
