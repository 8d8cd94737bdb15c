"""Parameters that trainers on trajectories share."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, JsonValue, model_validator

from nip_astra.parameters.conditions import where, where_above
from nip_astra.parameters.parameters_base import SubParameters, Url
from nip_astra.rl_objectives.advantages import Baseline
from nip_astra.rl_objectives.importance import CorrectionMode, ImportanceLevel
from nip_astra.rl_objectives.kl import KlKind
from nip_astra.rl_objectives.masked import Reduction
from nip_astra.rl_objectives.run_advantages import Scale
from nip_astra.samplers.async_rollouts import AsyncRolloutParameters

PolicyLoss = Literal["clipped", "importance_sampling", "cispo", "gspo", "sapo"]
"""Losses of `rl_objectives.token_losses`."""


class TrainServiceParameters(SubParameters):
    """Where the policy learns and samples."""

    backend: Literal["local", "http", "tinker"] = "local"
    """local: in this process, on the settings' device. http: at a service that `nip-astra serve
    --train` runs, which has the weights of the policy's model. tinker: at Tinker, or at what
    `nip-astra serve --tinker` runs; it trains adapters (lora.alpha 32) and samples without
    min_new_tokens."""
    base_url: Annotated[Url | None, where("backend", "http", "tinker")] = None
    """Address of the service, for instance http://127.0.0.1:8000; null for that of Tinker."""
    model: Annotated[str | None, where("backend", "http", "tinker")] = None
    """Name of the policy's model at the service; null for the path by which the policy names it."""
    token_variable: Annotated[str | None, where("backend", "http", "tinker")] = None
    """Environment variable with the token that the service asks for; null where it asks for
    none."""
    patience_seconds: Annotated[float, where("backend", "http", "tinker")] = Field(
        default=60.0, ge=0
    )
    """How long a service that does not answer, or is full, is asked again before the run ends."""
    operation_timeout: Annotated[float, where("backend", "http")] = Field(default=3600.0, gt=0)
    """Longest in seconds that one operation, such as a gradient or a rollout, may take."""
    max_answer_mib: Annotated[float, where("backend", "http")] = Field(default=4096.0, gt=0)
    """Largest answer of the service that is read. A saved state of full weights in float32 with
    Adam takes 12 bytes per weight."""

    @model_validator(mode="after")
    def _has_address(self) -> Self:
        if self.backend == "http" and self.base_url is None:
            raise ValueError(
                f"the backend {self.backend} needs base_url, the address of the service; start one "
                "with nip-astra serve --train --model NAME=PATH"
            )
        return self


class RolloutParameters(AsyncRolloutParameters):
    """What every trainer on trajectories reads beside `training`, whose
    num_episodes_per_experience says how many problems an iteration has.
    """

    num_runs: int = Field(default=8, ge=1, le=10_000)
    """Runs of each problem, which are compared with one another. More tell better from worse more
    surely, on fewer problems for the same cost."""
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
                f"max_staleness {self.max_staleness} needs a copy of the weights in this process, "
                f"but the backend {backend} holds them elsewhere; set it to 0, or "
                "train_service.backend to local"
            )
        return self


class GrpoParameters(RolloutParameters):
    """How rewards become advantages."""

    baseline: Baseline = "mean"
    """What the reward of a run is compared with: the mean of its problem's runs, that of the
    others (RLOO), or nothing."""
    scale: Scale = "group"
    """What the difference is divided by: the standard deviation of the problem's runs, that of the
    whole batch, or nothing (Dr. GRPO)."""
    use_run_ids: bool = True
    """Whether the trajectories of one run, where it has several, count as one."""


class PolicyLossParameters(SubParameters):
    """The loss of a trainer that has the weights at hand."""

    loss: PolicyLoss = "clipped"
    """Loss of each token; see `rl_objectives.token_losses`."""
    least_ratio: Annotated[float | None, where("loss", "clipped", "cispo", "gspo")] = Field(
        default=None, ge=0, le=1
    )
    """Smallest ratio that is not clipped; null takes the loss's own, 0.8 for clipped."""
    most_ratio: Annotated[float | None, where("loss", "clipped", "cispo", "gspo")] = Field(
        default=None, ge=1
    )
    """Largest ratio that is not clipped; null takes the loss's own, 1.2 for clipped."""
    dual_clip: Annotated[float | None, where("loss", "clipped")] = Field(default=None, gt=1)
    """Bound on the loss of tokens with negative advantage, as a multiple of that; null for none."""
    reduction: Reduction | None = None
    """How the losses of tokens become one number; see `rl_objectives.masked.reduce_loss`. null
    takes the loss's own: sequence for gspo and sapo, as in their papers, token for the others.
    sum_over_length divides by the policy's max_new_tokens."""
    kl_weight: float = Field(default=0.0, ge=0)
    """Loss per nat of divergence from the untrained policy. Larger stays closer to it."""
    kl_value: Annotated[KlKind, where_above("kl_weight", 0)] = "k3"
    """Estimate of the divergence that is logged."""
    kl_gradient: Annotated[Literal["k2", "k3"], where_above("kl_weight", 0)] = "k2"
    """Estimate whose gradient is taken: k2 pulls as KL(policy || reference) does, k3 as the
    divergence the other way round."""
    rescore: bool = False
    """Whether what was sampled is scored again before it is learnt from, and old log-probabilities
    are those. It takes another pass; where sampler and trainer compute differently it is exact."""
    correction: Annotated[CorrectionMode | None, where("rescore", True)] = None
    """How the ratio between trainer and sampler weighs the loss of a token: up to most_mismatch
    (truncate), with tokens beyond it left out (mask), or not (null). Samples of older weights
    (max_staleness) are rescored and truncated where this is null."""
    correction_level: Annotated[ImportanceLevel, where("correction", "truncate", "mask")] = "token"
    """Whether the ratio is of each token or of whole trajectories."""
    most_mismatch: Annotated[float, where("correction", "truncate", "mask")] = Field(
        default=2.0, ge=1
    )
    """Largest ratio between trainer and sampler that is taken as it is."""
