"""Parameters shared by trainers on trajectories."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, JsonValue, model_validator

from nip_astra.language_models.services.training import TrainServiceParameters
from nip_astra.parameters.conditions import where
from nip_astra.parameters.parameters_base import SubParameters
from nip_astra.rl_objectives.advantages import AdvantageParameters
from nip_astra.rl_objectives.kl import KlParameters
from nip_astra.rl_objectives.policy_losses import CorrectionMode, ImportanceLevel, LossParameters
from nip_astra.rl_objectives.reductions import Reduction
from nip_astra.rl_objectives.registry import PolicyLossName
from nip_astra.samplers.executor import AsyncRolloutParameters
from nip_astra.scenario_base.agents import LanguageModelParameters


class RolloutParameters(AsyncRolloutParameters):
    """Parameters of every trainer on trajectories besides `training`, whose
    num_episodes_per_experience is the number of problems per iteration.
    """

    group_size: int = Field(default=8, ge=1, le=10_000)
    """Runs per problem, which are compared with each other. Larger compares more reliably, on fewer
    problems for the same cost."""
    mask_truncated_completions: bool = False
    """Whether trajectories truncated at the token limit are excluded from the loss; they still
    count in the statistics of their group (DAPO, arXiv:2503.14476, section 3.4)."""
    max_resampling_rounds: int = Field(default=0, ge=0)
    """Maximum rounds in which problems with equal rewards in all runs are replaced by other
    problems. Each round samples at most as many problems as are missing, so an iteration costs at
    most this plus 1 times as much."""
    train_service: TrainServiceParameters = TrainServiceParameters()
    """Training service of the policy."""
    algorithm: dict[str, JsonValue] = {}
    """Values for a custom trainer, available as `self.config.algorithm`."""

    @model_validator(mode="after")
    def _can_be_async(self) -> Self:
        backend = self.train_service.backend
        if self.max_staleness and backend != "local":
            raise ValueError(
                f"max_staleness {self.max_staleness} needs weights in this process, not in the "
                f"backend {backend}; set it to 0, or train_service.backend to local"
            )
        return self


class GrpoParameters(AdvantageParameters, RolloutParameters):
    """How rewards become advantages."""

    use_run_ids: bool = True
    """Whether the trajectories of one run, if it has several, count as one."""
    overlong_margin: int = Field(default=0, ge=0)
    """Tokens before the policy's max_new_tokens over which the reward of a trajectory falls
    linearly, by up to 1 (DAPO, eq. 13); 0 for no penalty."""


class PolicyLossParameters(LossParameters):
    """The loss of a trainer in this process."""

    reduction: Reduction | None = None
    """Reduction of the token losses; see `rl_objectives.reductions.reduce_loss`. null uses the
    loss's own: sequence for gspo and sapo, as in their papers, token for most others.
    sum_over_length divides by the policy's max_new_tokens."""
    kl: KlParameters = KlParameters()
    """KL penalty against the untrained policy."""
    rescore: bool = False
    """Whether trajectories are rescored before training, for exact old log-probabilities if sampler
    and trainer compute differently. It takes another pass."""
    correction: Annotated[CorrectionMode | None, where("rescore", True)] = None
    """Weighting of a token's loss by the ratio between trainer and sampler: up to max_mismatch
    (truncate), excluding tokens beyond it (mask), or none (null). Samples of older weights
    (max_staleness) are rescored and truncated if this is null."""
    correction_level: Annotated[ImportanceLevel, where("correction", "truncate", "mask")] = "token"
    """Whether the ratio is per token or per trajectory."""
    max_mismatch: Annotated[float, where("correction", "truncate", "mask")] = Field(
        default=2.0, ge=1
    )
    """Maximum unchanged ratio between trainer and sampler."""


class ImportanceLossParameters(PolicyLossParameters):
    """The loss of a trainer in this process."""

    loss: PolicyLossName = "importance_sampling"
    """Loss of each token, see `rl_objectives.policy_losses`."""


class DistillationParameters(SubParameters):
    """The teacher, and the horizon of the divergence."""

    teacher: LanguageModelParameters | None = None  # type: ignore[valid-type]
    """The teacher's backend and weights, for instance in the folder `model` of a run; it must have
    the student's tokenizer, and reads the student's prompts. There is no default, and training
    requires one."""
    weight: float = Field(default=1.0, gt=0)
    """Advantage per nat of divergence. With an optimizer that normalises gradients it matters only
    relative to other terms."""
    discount: float = Field(default=0.0, ge=0, le=1)
    """Weight of the divergence at later tokens for earlier ones: 0 has low variance, 1 has the
    exact gradient of the divergence between whole answers."""
