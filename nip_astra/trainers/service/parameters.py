"""Parameters that trainers on trajectories share."""

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
    """What every trainer on trajectories reads beside `training`, whose
    num_episodes_per_experience is the number of problems of an iteration.
    """

    group_size: int = Field(default=8, ge=1, le=10_000)
    """Runs of each problem, which are compared with one another. More separate better from worse
    more surely, on fewer problems for the same cost."""
    mask_truncated_completions: bool = False
    """Whether trajectories that were cut at the token limit are left out of the loss; they still
    count in the statistics of their group (DAPO, arXiv:2503.14476, section 3.4)."""
    max_resampling_rounds: int = Field(default=0, ge=0)
    """How often problems whose runs all have one reward are replaced by further ones. Each round
    plays at most as many problems as are missing, so an iteration costs at most this plus 1 times
    as much."""
    train_service: TrainServiceParameters = TrainServiceParameters()
    """Where the policy learns."""
    algorithm: dict[str, JsonValue] = {}
    """Values for a trainer of one's own, which reads them as `self.config.algorithm`."""

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
    """Whether the trajectories of one run, where it has several, count as one."""
    overlong_margin: int = Field(default=0, ge=0)
    """Tokens before the policy's max_new_tokens over which the reward of a longer trajectory falls
    linearly, by up to 1 (DAPO, eq. 13); 0 for no penalty."""


class PolicyLossParameters(LossParameters):
    """The loss of a trainer that reads the weights."""

    reduction: Reduction | None = None
    """How the losses of tokens become one number; see `rl_objectives.reductions.reduce_loss`. null
    takes the loss's own: sequence for gspo and sapo, as in their papers, token for most others.
    sum_over_length divides by the policy's max_new_tokens."""
    kl: KlParameters = KlParameters()
    """Price of the divergence from the untrained policy."""
    rescore: bool = False
    """Whether trajectories are scored again before they are learned from, for old log-probabilities
    that are exact where sampler and trainer compute differently. It takes another pass."""
    correction: Annotated[CorrectionMode | None, where("rescore", True)] = None
    """How the ratio between trainer and sampler weighs the loss of a token: up to max_mismatch
    (truncate), with tokens beyond it left out (mask), or not (null). Samples of older weights
    (max_staleness) are rescored and truncated where this is null."""
    correction_level: Annotated[ImportanceLevel, where("correction", "truncate", "mask")] = "token"
    """Whether the ratio is of each token or of whole trajectories."""
    max_mismatch: Annotated[float, where("correction", "truncate", "mask")] = Field(
        default=2.0, ge=1
    )
    """Largest ratio between trainer and sampler that is taken as it is."""


class ImportanceLossParameters(PolicyLossParameters):
    """The loss of a trainer that reads the weights."""

    loss: PolicyLossName = "importance_sampling"
    """Loss of each token, see `rl_objectives.policy_losses`."""


class DistillationParameters(SubParameters):
    """Whom the student learns from, and how far it looks ahead."""

    teacher: LanguageModelParameters | None = None  # type: ignore[valid-type]
    """The teacher's backend and weights, for instance those in the folder `model` of a run; it must
    have the student's tokens, and reads the student's prompts. There is none by default, and
    without one nothing is trained."""
    weight: float = Field(default=1.0, gt=0)
    """Advantage per nat of divergence. With an optimizer that divides by the size of gradients it
    matters beside other terms alone."""
    discount: float = Field(default=0.0, ge=0, le=1)
    """How much the divergence at later tokens counts for earlier ones: 0 is of low variance, 1 has
    the exact gradient of the divergence of whole answers."""
