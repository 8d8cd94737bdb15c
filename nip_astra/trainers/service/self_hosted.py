"""Trainers on batches of trajectories, with the weights in this process.

Shape suffixes: `B` row, `T` token.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from tensordict import TensorDict
from torch import Tensor

from nip_astra.errors import ConfigurationError, counted
from nip_astra.language_models.services.training import LocalTrainingService
from nip_astra.parameters.types import TrainerType
from nip_astra.rl_objectives import policy_losses
from nip_astra.rl_objectives.advantages import codes_of
from nip_astra.rl_objectives.kl import AdaptiveKl
from nip_astra.rl_objectives.policy_losses import importance_weights, refuse_token_weights
from nip_astra.rl_objectives.reductions import LossOutput, masked_sum
from nip_astra.rollouts.batch import Batch
from nip_astra.rollouts.samples import IS_EXCLUDED, Sample, samples_of, score_batch
from nip_astra.rollouts.trajectory import Trajectory
from nip_astra.scenario_base.agents import ConversationAgent
from nip_astra.trainers.language_model_base import HAS_GIVEN_OLD, Experience
from nip_astra.trainers.registry import register_trainer
from nip_astra.trainers.service.base import (
    DistillationParameters,
    GrpoParameters,
    ImportanceLossParameters,
    PolicyLossParameters,
    RolloutParameters,
    ServiceTrainer,
    logprobs_before_update,
)
from nip_astra.trainers.service.contract import check_batch, check_takes
from nip_astra.trainers.service.metrics import mismatch_metrics


def policy_loss(
    logprobs_BT: Tensor,
    batch: TensorDict,
    options: PolicyLossParameters,
    *,
    normaliser: float | None,
    max_length: int | None,
    kl_weight: float | None = None,
    old_logprobs_BT: Tensor | None = None,
) -> LossOutput:
    """Compute a batch's loss from the parameters; see `rl_objectives.policy_losses.policy_loss`.

    `batch` has `old_logprobs`, unless `old_logprobs_BT` replaces them, `advantages`,
    `trained_mask`, `reference_logprobs` if `options.kl.weight` is above 0, and optionally
    `correction_weights`. `kl_weight` replaces an adapted weight.
    """
    batch = batch.to(logprobs_BT.device)
    has_reference = options.kl.weight > 0
    return policy_losses.policy_loss(
        logprobs_BT,
        batch["old_logprobs"] if old_logprobs_BT is None else old_logprobs_BT,
        batch["advantages"],
        batch["trained_mask"],
        loss=options.chosen_loss(),
        reduction=options.reduction,
        normaliser=normaliser,
        max_length=max_length,
        weights_BT=batch.get("correction_weights", None),
        reference_logprobs_BT=batch["reference_logprobs"] if has_reference else None,
        kl_weight=options.kl.weight if kl_weight is None else kl_weight,
        kl_value=options.kl.value,
        kl_gradient=options.kl.gradient,
        is_kl_weighted=options.kl.by_ratio,
    )


class SelfHostedTrainer(ServiceTrainer):
    """Base of trainers on batches; subclasses implement `_prepare_batch`, which sets advantages.

    The loss is that of `policy_loss` in the parameters; a subclass may override `loss` of a batch,
    which has each token field of the prepared batch beside `old_logprobs`.
    """

    class Parameters(RolloutParameters):
        """Rollouts, and the loss."""

        policy_loss: PolicyLossParameters = PolicyLossParameters()
        """The loss of a batch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        options = self.parameters.policy_loss
        is_corrected = options.correction is not None or self.parameters.max_staleness > 0
        if is_corrected and options.correction_level == "token":
            refuse_token_weights(
                options.loss,
                "policy_loss.correction_level=sequence (with correction=truncate)",
            )
        if self._temperature == 0.0:
            raise ConfigurationError(
                "policy_loss.logprobs=tempered needs a temperature above 0. Set it, or set "
                "policy_loss.logprobs to raw."
            )
        if is_corrected and self._temperature != 1.0:
            raise ConfigurationError(
                f"policy_loss.logprobs=tempered with temperature {self._temperature:g} cannot be "
                "corrected for another sampler. Leave out correction and max_staleness, or set it "
                "to raw."
            )

    @property
    def _temperature(self) -> float:
        """The temperature of the log-probabilities that are trained."""
        is_tempered = self.parameters.policy_loss.logprobs == "tempered"
        return float(self.agent.sampling.temperature) if is_tempered else 1.0

    @abstractmethod
    def _prepare_batch(self, batch: Batch) -> tuple[Batch, dict[str, Any]]:
        """Hook: set the advantages of a batch, and return it with metrics.

        Parameters
        ----------
        batch : Batch
            `input_ids`, `attention_mask`, `position_ids`, `loss_mask`, `logprobs` `[B, T]`,
            `rewards` `[B]`; `metadata["group_ids"]` and `["run_ids"]`.

        Returns
        -------
        tuple of Batch and dict
            The batch with `values["advantages"]`, floating, `[B]` or `[B, T]`, and numbers by name.
        """

    def prepare(self, trajectories: list[Trajectory]) -> tuple[list[Sample], dict[str, float]]:
        batch = self.batch_type.from_trajectories(trajectories, global_step=self._iteration)
        if len(batch) == 0:
            return [], {}
        options = self.parameters.policy_loss
        mismatch: dict[str, float] = {}
        if self._needs_rescoring(len(batch)):
            mismatch = self._rescore(batch, options)
        if options.kl.weight > 0:
            agent: ConversationAgent = self.scenario_instance.agents["reference"]
            reference = agent.token_scorer(to="measure the policy's divergence from it")
            batch.values["reference_logprobs"] = self.score(
                reference, batch, temperature=self._temperature
            )
            others = (batch.values[name] for name in ("reference_logprobs", "loss_mask"))
            mismatch |= self.kl.adapt(logprobs_before_update(batch), *others)
        if not self._is_checked:
            check_takes(self._prepare_batch, "batch")
        is_rescored = "old_logprobs" in batch.values
        given = self._prepare_batch(batch)
        if not self._is_checked:
            given = check_batch(given, trainer=type(self).__name__, num_rows=len(batch))
            self._is_checked = True
        batch, metrics = given
        if "old_logprobs" in batch.values and not is_rescored:
            batch.values[HAS_GIVEN_OLD] = torch.ones(len(batch))
        batch.values["old_logprobs"] = logprobs_before_update(batch)
        self.dump("prepared_batch", batch)
        return self.learnt_samples(batch), {**mismatch, **metrics}

    def learnt_samples(self, batch: Batch) -> list[Sample]:
        """Return the samples of a prepared batch; truncated ones stay in means over rows."""
        if self.parameters.mask_truncated_completions and "is_cut" in batch.values:
            batch.values[IS_EXCLUDED] = (batch.values["is_cut"] != 0).float()
        return samples_of(batch)

    def loss(self, batch: TensorDict) -> LossOutput:
        options = self.parameters.policy_loss
        (logprobs_BT,) = self.policy_logprobs(batch, "response", temperature=self._temperature)
        reduction = options.reduction or options.chosen_loss().reduction
        return policy_loss(
            logprobs_BT,
            batch,
            options,
            normaliser=self.token_normaliser(batch, reduction),
            max_length=self.agent.sampling.max_new_tokens,
            kl_weight=self.kl.weight,
            old_logprobs_BT=self.old_logprobs(batch, logprobs_BT),
        )

    @cached_property
    def kl(self) -> AdaptiveKl:
        """The weight of the KL penalty, fixed or adapted."""
        options: PolicyLossParameters = self.parameters.policy_loss
        return options.kl.controller()

    def trainer_state(self) -> dict[str, Any]:
        return super().trainer_state() | ({"kl": self.kl.state()} if self.kl.target else {})

    def load_trainer_state(self, state: dict[str, Any]) -> None:
        super().load_trainer_state(state)
        if "kl" in state:
            self.kl.load_state(state["kl"])

    def why_nothing_is_learnt(self, found: Experience) -> str:
        has_other_loss = type(self).loss is not SelfHostedTrainer.loss
        if not found.samples or has_other_loss:
            return super().why_nothing_is_learnt(found)
        is_learned = [not bool(sample.get(IS_EXCLUDED, 0)) for sample in found.samples]
        if not any(is_learned):
            return (
                f"all {counted(len(found.samples), 'trajectory')} are truncated, and "
                "mask_truncated_completions excludes them. Raise max_new_tokens."
            )
        learned = itertools.compress(found.samples, is_learned)
        if any(bool(sample["advantages"][sample["is_trained"]].any()) for sample in learned):
            return ""
        penalty = self.parameters.policy_loss.kl.weight > 0
        rest = "; the step follows the KL penalty alone." if penalty else "."
        return f"all advantages are 0, of {counted(sum(is_learned), 'trajectory')}{rest}"

    def _compute_old_log_probs(self, batch: Batch) -> Tensor:
        """Rescore the policy's own log-probabilities before the update, `[B, T]`."""
        return score_batch(
            batch, partial(self.service.compute_logprobs, temperature=self._temperature)
        )

    def _needs_rescoring(self, num_rows: int) -> bool:
        """Return whether an iteration's samples are scored by the trainer before its first step."""
        options = self.parameters.policy_loss
        if options.rescore or options.correction or self.parameters.max_staleness:
            return True
        is_tempered = self._temperature != 1.0
        if is_tempered and options.kl.target is not None:
            # The divergence is measured before the update.
            return True
        if self.num_steps_with(num_rows) == 1:
            return False
        if is_tempered:
            return True
        is_here = isinstance(self.service, LocalTrainingService)
        samples_as_it_scores = is_here and self.policy.samples_as_it_scores
        return options.rescore is None and not samples_as_it_scores

    def _rescore(self, batch: Batch, options: PolicyLossParameters) -> dict[str, float]:
        """Rescore the samples and measure the mismatch of sampler and trainer.

        Samples of older weights are corrected for it: by default truncated, see `correction`.
        """
        if self._temperature != 1.0:
            # Log-probabilities of sampling are those at temperature 1: there is no mismatch.
            batch.values["old_logprobs"] = self._compute_old_log_probs(batch)
            return {}
        if "logprobs" not in batch.values:
            raise ConfigurationError(
                "rescore, correction and max_staleness need trajectories with log-probabilities. "
                "Leave them out."
            )
        sampled_BT, mask_BT = batch.values["logprobs"], batch.values["loss_mask"]
        scored_BT = self._compute_old_log_probs(batch)
        batch.values["old_logprobs"] = scored_BT
        correction = options.correction or ("truncate" if self._staleness else None)
        if correction is not None:
            batch.values["correction_weights"] = importance_weights(
                scored_BT,
                sampled_BT,
                mask_BT,
                level=options.correction_level,
                mode=correction,
                max_ratio=options.max_mismatch,
            )
        return mismatch_metrics(sampled_BT, scored_BT, mask_BT, level=options.correction_level)


@register_trainer(TrainerType.SELF_HOSTED_GRPO)
class SelfHostedGrpoTrainer(SelfHostedTrainer):
    """GRPO of a language model on the problems of a task.

    With `m_k` the mean reward of run k of a problem, mu and std their mean and unbiased standard
    deviation, each token of a trajectory has the advantage `A = (r - mu) / (std + 1e-6)` (GRPO,
    arXiv:2402.03300, with NexRL's count by runs; see `rl_objectives.advantages`). The loss is
    `max(-ratio A, -clip(ratio) A) + kl.weight KL(pi || ref)` in the defaults of `policy_loss`, a
    mean over the tokens of the policy.

    Hooks: `_reward_fn`, the rewards of tokens, and `_compute_advantage`, which learns from their
    sum. A subclass may also set `values["token_level_scores"]`, or `token_level_rewards`, which
    come first, before it calls `_prepare_batch` or `_compute_advantage` of this class.
    """

    class Parameters(GrpoParameters):
        """How rewards become advantages, and the loss."""

        policy_loss: PolicyLossParameters = PolicyLossParameters()
        """The loss of a batch."""

    def _prepare_batch(self, batch: Batch) -> tuple[Batch, dict[str, Any]]:
        if (self.config.get("algorithm") or {}).get("use_kl_in_reward", False):
            raise ConfigurationError(
                "algorithm.use_kl_in_reward has no effect. Override _prepare_batch: subtract the "
                "penalty from values['token_level_scores'], then call the base method."
            )
        batch = batch.strip(pad_token_id=self._pad_token_id)
        if "token_level_scores" not in batch.values:
            batch.values["token_level_scores"] = self._reward_fn(batch)
        return self._compute_advantage(batch), {}

    def _reward_fn(self, batch: Batch) -> Tensor:
        """Return the reward of each trajectory at the last token of the policy, `[B, T]`."""
        mask_BT = batch.values["loss_mask"]
        place_T = torch.arange(mask_BT.shape[1])
        last_B = torch.where(mask_BT, place_T, -1).amax(dim=1)
        is_last_BT = (place_T == last_B[:, None]) & mask_BT
        return torch.where(is_last_BT, batch.values["rewards"].nan_to_num()[:, None], 0.0)

    def _compute_advantage(self, batch: Batch) -> Batch:
        """Set `advantages`, exclude trajectories without a reward, and log statistics."""
        options = self.parameters
        runs = codes_of(batch.metadata["run_ids"]) if options.use_run_ids else None
        groups = batch.metadata["uid" if "uid" in batch.metadata else "group_ids"]  # as in NexRL
        found = options.advantages(self._rewards_of_rows(batch).double(), codes_of(groups), runs)
        batch.values["advantages"] = found.advantages_N.float()
        batch.values["row_weights"] = batch.values["row_weights"] * found.is_used_N
        self.log_metrics(found.metrics())
        return batch

    def _rewards_of_rows(self, batch: Batch) -> Tensor:
        """Return the reward of each trajectory, `[B]`: the sum over the tokens of the policy.

        Token rewards may lack the first column, like those of NexRL's `responses`.
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
                f"values[{name!r}] of {type(self).__name__} is not a tensor [{rows}, {width}]. "
                "Give one number per token."
            )
        mask_BT = mask_BT[:, -of_tokens.shape[1] :]
        if not of_tokens[mask_BT].isfinite().all():
            raise ConfigurationError(
                f"values[{name!r}] of {type(self).__name__} holds NaN or infinity at trained "
                "tokens."
            )
        # A trajectory without a reward stays without.
        return torch.where(rewards_B.isnan(), rewards_B, masked_sum(of_tokens, mask_BT, dim=1))


@register_trainer(TrainerType.SELF_HOSTED_OPD)
class SelfHostedOpdTrainer(SelfHostedTrainer):
    """On-policy distillation from a teacher, on the student's own samples.

    Each token has the advantage `A_t = -weight (log S_t - log T_t)`, with a `discount` the sum over
    what follows; its policy gradient is that of KL(student || teacher), exactly so in expectation
    (`rl_objectives.advantages`). Rewards are only logged.
    """

    learns_from_rewards: ClassVar[bool] = False

    class Parameters(RolloutParameters):
        """The teacher and the loss."""

        distillation: DistillationParameters = DistillationParameters()
        """The teacher of the student."""
        policy_loss: ImportanceLossParameters = ImportanceLossParameters()
        """The loss of a batch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.teacher = self.load_teacher()

    def _prepare_batch(self, batch: Batch) -> tuple[Batch, dict[str, Any]]:
        return batch, self.imitate(self.teacher, batch)
