"""The base of trainers on trajectories, in this process or through a service.

Shape suffixes: `B` row, `T` token.
"""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from omegaconf import DictConfig, OmegaConf
from pydantic import Field, JsonValue, model_validator
from tensordict import TensorDict
from torch import Tensor

from nip_astra.checkpoints.run_state import Part
from nip_astra.checkpoints.tensors import DUMPS, StageDumps
from nip_astra.deadlines import DaemonThread, result_within_deadlines
from nip_astra.distributed.sharding import full_tensor
from nip_astra.distributed.team import Handler
from nip_astra.errors import ConfigurationError, ModelLoadError, counted
from nip_astra.evaluation.outcomes import Known
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.language_models.base import LanguageModel, TokenScorer, as_language_model, as_scorer
from nip_astra.language_models.services.training import (
    TRAINING_SERVICES,
    LocalTrainingService,
    TrainingService,
    TrainingServiceRequest,
    TrainServiceParameters,
)
from nip_astra.parameters.conditions import where, where_above
from nip_astra.parameters.hyper_parameters import HyperParameters
from nip_astra.parameters.parameters_base import SubParameters
from nip_astra.parameters.types import ScenarioType
from nip_astra.rl_objectives.advantages import AdvantageParameters, reverse_kl_advantages
from nip_astra.rl_objectives.kl import KlParameters
from nip_astra.rl_objectives.policy_losses import CorrectionMode, ImportanceLevel, LossParameters
from nip_astra.rl_objectives.reductions import Reduction, masked_mean
from nip_astra.rl_objectives.registry import PolicyLossName
from nip_astra.rl_objectives.rewards import overlong_penalty
from nip_astra.rollouts.batch import Batch
from nip_astra.rollouts.samples import Sample, collate_trajectories, samples_of, score_batch
from nip_astra.rollouts.trajectory import Trajectory, zero_variance_of
from nip_astra.samplers.executor import (
    RUN_PARTS,
    AsyncRolloutParameters,
    AsyncRollouts,
    run_requested,
)
from nip_astra.samplers.tasks import TaskPlan, TaskRollout, play_task, requested_part
from nip_astra.scenario_base.agents import (
    ConversationAgent,
    LanguageModelParameters,
    load_language_model,
)
from nip_astra.scenario_base.tasks.base import Episode, Split, TrainingProgress
from nip_astra.scenario_base.tasks.rewards import episode_figures
from nip_astra.scenario_instance import ScenarioInstance
from nip_astra.tracking.tracker import flat_figures
from nip_astra.trainers.language_model_base import Experience, LanguageModelTrainer
from nip_astra.trainers.service.contract import (
    Parts,
    as_config,
    built_of_parts,
    takes_config_alone,
)
from nip_astra.trainers.service.metrics import (
    ANSWER_COLUMNS,
    RECORD_COLUMNS,
    Tally,
    answer_rows,
    log_kept_rewards,
    log_rollout_metrics,
    rollout_rows,
    without_accuracy,
)
from nip_astra.trainers.service_use import (
    estimate_services,
    service_metrics,
    services_used,
    warnings_about_services,
)
from nip_astra.utils.actors import actor_options, using_actors
from nip_astra.utils.devices import resolve_device
from nip_astra.utils.seeding import derive_seed, derived_generator

logger = logging.getLogger(__name__)


# ---- parameters


class RolloutParameters(AsyncRolloutParameters):
    """Parameters of every trainer on trajectories besides `training`, whose
    num_episodes_per_experience is the number of problems per iteration.
    """

    group_size: int = Field(default=8, ge=1, le=10_000)
    """Runs per problem, which are compared with each other. Larger compares more reliably, on fewer
    problems for the same cost."""
    mask_truncated_completions: bool = False
    """Whether the tokens of trajectories truncated at the token limit are excluded from the loss;
    they still count in the statistics of their group (DAPO, arXiv:2503.14476, section 3.4), and as
    trajectories where the loss is a mean over these, as in TRL."""
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

    @model_validator(mode="after")
    def _has_runs_to_compare(self) -> Self:
        is_compared = self.advantage == "group" and self.baseline != "none" and self.use_run_ids
        if self.group_size == 1 and is_compared:
            raise ValueError(
                "group_size 1 leaves nothing to compare: all advantages are 0; set it to 2 or "
                "more, or baseline and scale to none"
            )
        return self


class PolicyKlParameters(KlParameters):
    """KL penalty of the loss."""

    by_ratio: Annotated[bool, where_above("weight", 0)] = False
    """Whether the divergence of a token is multiplied by the loss's ratio, as by TRL's
    use_bias_correction_kl (arXiv:2512.02556, eq. 7). With gradient k3 it acts as KL(policy ||
    reference), also on samples of earlier weights."""


class PolicyLossParameters(LossParameters):
    """The loss of a trainer in this process."""

    reduction: Reduction | None = None
    """Reduction of the token losses; see `rl_objectives.reductions.reduce_loss`. null uses the
    loss's own: sequence for gspo and sapo, as in their papers, token for most others.
    sum_over_length divides by the policy's max_new_tokens."""
    kl: PolicyKlParameters = PolicyKlParameters()
    """KL penalty against the untrained policy."""
    logprobs: Literal["raw", "tempered"] = "raw"
    """Distribution whose log-probabilities are trained: raw, the model's at temperature 1, whatever
    temperature it is sampled at; tempered, at the policy's temperature and over the whole
    vocabulary, as in TRL, for policy and reference."""
    rescore: bool | None = None
    """Whether trajectories are rescored before training, which takes another pass. Old
    log-probabilities are the trainer's own: in an iteration's first optimizer step those of the
    step, in later ones rescored or, if false, those of sampling. null rescores where there are
    later steps and the sampler computes differently (in bfloat16, at a service, or tempered).
    correction and max_staleness rescore in any case."""
    correction: CorrectionMode | None = None
    """Weighting of a token's loss by the ratio between trainer and sampler: up to max_mismatch
    (truncate), excluding tokens beyond it (mask), or none (null), which truncates samples of older
    weights (max_staleness)."""
    correction_level: Annotated[ImportanceLevel, where("correction", "truncate", "mask")] = "token"
    """Whether the ratio is per token or per trajectory, as gspo and rloo need."""
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


# ---- rollouts


@dataclass(frozen=True)
class CollectedRollout:
    """Trajectories to learn from, metrics, and tables of transcripts for the run's records."""

    trajectories: list[Trajectory]
    metrics: dict[str, float]
    records: list[list[list[Any]]] = field(default_factory=list)

    def to_plain(self) -> dict[str, Any]:
        """Return plain values and tensors for a checkpoint."""
        return {
            "trajectories": [one.to_plain() for one in self.trajectories],
            "metrics": self.metrics,
            "records": self.records,
        }

    @classmethod
    def from_plain(cls, _iteration: int, plain: Mapping[str, Any]) -> CollectedRollout:
        """Restore the rollout of `to_plain`."""
        rows = [Trajectory(**fields) for fields in plain["trajectories"]]
        return cls(rows, plain["metrics"], plain["records"])


class SamplingThread:
    """Collects rollouts in a second thread, with a copy of the policy's weights.

    `sampler` is the policy's `sampler_copy`, which only this thread uses.
    """

    def __init__(
        self,
        collect: Callable[[int], CollectedRollout],
        policy: LanguageModel,
        sampler: LanguageModel,
    ) -> None:
        self._collect, self._policy, self._sampler = collect, policy, sampler
        # One thread: weights stay during a rollout, and rollouts keep their order.
        self._thread = DaemonThread("async-rollouts")

    def begin(self, iterations: Sequence[int]) -> list[Callable[[], CollectedRollout]]:
        """Start rollouts with the current weights."""
        weights = self._policy.weight_copy()
        rollouts = [
            self._thread.submit(partial(self._run, iteration, weights)) for iteration in iterations
        ]
        return [partial(result_within_deadlines, rollout) for rollout in rollouts]

    def _run(self, iteration: int, weights: Mapping[str, Tensor]) -> CollectedRollout:
        # Grad mode belongs to a thread.
        with torch.no_grad():
            self._sampler.take_weights(weights)
            return self._collect(iteration)


def check_who_plays(
    hyper_params: HyperParameters,
    scenario_instance: ScenarioInstance,
    settings: ExperimentSettings | None,
) -> None:
    """Raise if rollouts of a service or engine would be split, and warn of idle actors."""
    agent = scenario_instance.agents.get("policy")
    options = getattr(hyper_params, scenario_instance.kind, None)
    num_parts = int(getattr(options, "num_rollout_parts", 1))
    num_actors = 0 if settings is None else settings.num_actors
    if agent is None or (num_parts == 1 and not num_actors):
        return
    model = agent.language_model
    service = getattr(getattr(hyper_params, hyper_params.trainer, None), "train_service", None)
    sampler = "" if model.is_in_this_process else type(model).__name__
    if service is not None and service.backend != "local":
        sampler = f"the service {service.backend!r}"
    if sampler and num_parts > 1:
        raise ConfigurationError(
            f"task.num_rollout_parts is {num_parts}, but {sampler} samples whole rollouts. Set it "
            "to 1."
        )
    task = vars(scenario_instance).get("task")
    if sampler and getattr(task, "scorer", None) is None:
        raise ConfigurationError(
            f"num_actors is {num_actors}, but {sampler} samples whole rollouts and the task has no "
            "scorer. Set it to 0."
        )
    if not sampler and num_actors > num_parts:
        logger.warning(
            "%d of %d actors have nothing to play, since rollouts are cut into %d: set "
            "task.num_rollout_parts to a multiple of num_actors",
            num_actors - num_parts,
            num_actors,
            num_parts,
        )


def informative_groups(
    trajectories: Sequence[Trajectory],
    *,
    needs_spread: bool = True,
    use_run_ids: bool = True,
) -> tuple[list[Trajectory], list[Trajectory]]:
    """Split trajectories into those of informative groups, and the others.

    A group without any reward is not informative, nor, if `needs_spread`, one of equal rewards.
    """
    if not trajectories:
        return [], []
    groups = dict.fromkeys(one.group_id for one in trajectories)
    are_flat = zero_variance_of(trajectories, use_run_ids=use_run_ids)
    is_flat = dict(zip(groups, are_flat, strict=True))
    known = {one.group_id for one in trajectories if one.reward is not None}
    # Minibatches depend on this order: groups of equal rewards come last.
    ordered = sorted(trajectories, key=lambda one: is_flat[one.group_id])
    informative: list[Trajectory] = []
    others: list[Trajectory] = []
    for one in ordered:
        teaches = one.group_id in known and not (needs_spread and is_flat[one.group_id])
        (informative if teaches else others).append(one)
    return informative, others


def logprobs_before_update(batch: Batch) -> Tensor:
    """Return the rescored log-probabilities of a batch, or else those of sampling, `[B, T]`."""
    name = "old_logprobs" if "old_logprobs" in batch.values else "logprobs"
    found: Tensor = batch.values[name]
    return found


# ---- the trainer


class ServiceTrainer(LanguageModelTrainer):
    """Base of trainers that sample problems of a task and learn from the trajectories.

    A subclass gives `prepare`: samples from trajectories. It is built as every trainer is; a class
    whose `__init__` takes a `config` alone gets the values of `config_of_run`. To try its hooks,
    either is built from a mapping of values alone.

    Attributes
    ----------
    config : DictConfig
        Values for custom trainers: `config.algorithm.my_param`, `config.algorithm.get("x", 0.5)`.
    parts : tuple or None
        Hyper-parameters, scenario instance and settings; None for a trainer of values alone.
    """

    evaluation_family: ClassVar[str | None] = "task"
    scenario_kinds: ClassVar[tuple[str, ...]] = (str(ScenarioType.TASK),)
    plays_on_actors: ClassVar[bool] = True
    trained_tokens: ClassVar[str] = "trained"
    figures: ClassVar[tuple[str, ...] | None] = (
        *("accuracy", "mean_reward", "pass_at_*", "num_*", "rewards/*"),
        *("tools/*", "environment/*"),
        *("dev/accuracy*", "dev/mean_reward*", "dev/pass_at_*"),
    )
    samples_in_training: ClassVar[bool] = True
    """Whether training samples the policy."""
    _async: AsyncRollouts[CollectedRollout] | None
    learns_from_rewards: ClassVar[bool] = True
    """Whether groups of equal rewards may be replaced (`max_resampling_rounds`)."""
    batch_type: ClassVar[type[Batch]] = Batch
    """Class of the batches that hooks get."""
    parts: Parts | None = None

    class Parameters(RolloutParameters):
        """Rollouts and the training service."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        own = vars(cls).get("__init__")
        if own is not None and takes_config_alone(own):
            cls.__init__ = built_of_parts(own)  # type: ignore[method-assign]  # see the docstring

    def __init__(
        self,
        hyper_params: HyperParameters | DictConfig | Mapping[str, Any],
        scenario_instance: ScenarioInstance | None = None,
        settings: ExperimentSettings | None = None,
    ) -> None:
        if isinstance(hyper_params, HyperParameters):
            assert scenario_instance is not None
            self.parts = (hyper_params, scenario_instance, settings)
            self.config = self.config_of_run(hyper_params)
        else:
            self.config = as_config(hyper_params)
        self._config = self.config
        self._pad_token_id = 0
        self._is_checked = False
        self._iteration = 0
        self._dumps = StageDumps(None, period=0)
        self._staleness = 0
        self._num_drawn: int | None = None
        if self.parts is None:
            # Of values alone: there is no policy, and hooks can be tried.
            self.parameters = self.Parameters.from_dict(self._own_values())
            self._noted: dict[str, float] = {}
            return
        check_who_plays(*self.parts)
        super().__init__(*self.parts)
        task = self.scenario_instance.task
        if task is None:
            raise ConfigurationError(
                f"the scenario {self.hyper_params.scenario!r} has no task, which the trainer "
                f"{self.hyper_params.trainer!r} needs. Choose one of kind 'task'."
            )
        self.task = task
        self.agent: ConversationAgent = self.scenario_instance.agents["policy"]
        self.options = getattr(self.hyper_params, self.scenario_instance.kind)
        policy_loss = getattr(self.parameters, "policy_loss", None)
        is_tempered = getattr(policy_loss, "logprobs", "raw") == "tempered"
        sampling = self.agent.sampling
        learned_sampling = replace(sampling, temperature=1.0) if is_tempered else sampling
        modifications = learned_sampling.modifications
        if self.samples_in_training and modifications:
            advice = f"Leave these out of {self.scenario_instance.kind}.policy"
            if hasattr(policy_loss, "logprobs") and not is_tempered:
                advice += f", or set {self.hyper_params.trainer}.policy_loss.logprobs to tempered"
            self._warn(
                f"problems are sampled with {modifications}, but learned from without them: "
                f"gradients are off-policy. {advice}"
            )
        if self.training.eval_period and task.num_problems("dev") == 0:
            raise ConfigurationError(
                "training.eval_period needs held-out problems, and there are none. Set it to 0, or "
                "give task.task.dev."
            )
        directory = self.run_directory
        self._dumps = StageDumps(
            None if directory is None else directory.path / DUMPS, period=self.settings.dump_period
        )
        self._sampler, self._sampling_agent = self.policy, self.agent
        # The leader of a team samples asynchronous rollouts alone.
        if self.parameters.max_staleness and self.samples_in_training and self.team.is_leader:
            self._sampler = self.policy.sampler_copy()
            self._sampling_agent = replace(self.agent, language_model=self._sampler)
            self._async = AsyncRollouts(
                SamplingThread(self._play_iteration, self.policy, self._sampler).begin,
                CollectedRollout.to_plain,
                CollectedRollout.from_plain,
                max_staleness=self.parameters.max_staleness,
                num_iterations=self.training.num_iterations,
            )
        self._pad_token_id = int(self.agent.language_model.tokenizer.pad_token_id or 0)

    @classmethod
    def config_of_run(cls, hyper_params: HyperParameters) -> DictConfig:
        """Return the values that a run passes to its trainer."""
        section = getattr(hyper_params, hyper_params.trainer, None)
        service = getattr(section, "train_service", None)
        return as_config(
            {
                "algorithm": getattr(section, "algorithm", {}),
                "train_service": {} if service is None else service.to_dict(),
                "total_train_steps": hyper_params.training.num_iterations,
            }
        )

    def _own_values(self) -> dict[str, Any]:
        """Return the values of the config that are parameters of this class."""
        names = self.Parameters.model_fields.keys() - {"train_service"}
        values: Any = OmegaConf.to_container(self.config)
        return {
            name: value for name, value in values.items() if name in names and value is not None
        }

    # ---- hooks

    @abstractmethod
    def prepare(self, trajectories: list[Trajectory]) -> tuple[list[Sample], dict[str, float]]:
        """Hook of a family: return training samples from trajectories, and metrics."""

    def build_policy(self) -> LanguageModel:
        model = self.scenario_instance.agents["policy"].language_model
        return as_language_model(model, role="policy")

    def build_service(self) -> TrainingService:
        """Build the registered service named by `train_service.backend`."""
        request = TrainingServiceRequest(
            self.parameters.train_service,
            self.policy,
            self.policy_role,
            self.training,
            self.optimizer,
            self.learned,
            self.modules,
            derive_seed(self.hyper_params.seed, "adapter"),
            self.scenario_instance.scenario_dir,
        )
        return TRAINING_SERVICES.get(request.parameters.backend).open(request)

    def collate_fn(self, samples: Sequence[Sample]) -> TensorDict:
        return collate_trajectories(samples)

    def after_backward(self, metrics: Mapping[str, float]) -> None:
        self.dump("loss", dict(metrics))
        self._dump_whole("gradients", [one.grad for one in self.learned if one.grad is not None])

    def _optimizer_step(self, batches: list[TensorDict]) -> dict[str, float]:
        for number, batch in enumerate(batches):
            self.dump(f"batch_{number}", dict(batch.items()))
        metrics = super()._optimizer_step(batches)
        self._dump_whole("weights", self.learned)
        return metrics

    def _dump_whole(self, stage: str, tensors: Sequence[Tensor]) -> None:
        """Dump tensors that may be sharded, after gathering them."""
        if not self._dumps.period or self.state.iteration % self._dumps.period:
            return
        whole = ((str(i), full_tensor(one.detach())) for i, one in enumerate(tensors))
        # One at a time: only the leader keeps them.
        self.dump(stage, {name: one for name, one in whole if self.team.is_leader})

    # ---- playing

    def collect(self, iteration: int) -> Experience:
        """Sample an iteration's problems and prepare the training samples."""
        self._iteration = iteration
        played = self._rollout_of(iteration)
        trajectories, metrics = played.trajectories, dict(played.metrics)
        for rows in played.records:
            columns = RECORD_COLUMNS[: len(rows[0])]
            self.tracker.log_table("train", columns, rows, step=iteration + 1)
        if "rollout/num_trajectories" not in metrics:
            log_rollout_metrics(trajectories, metrics)
        known = [one for one in trajectories if one.reward is not None]
        metrics.setdefault("rollout/num_without_reward", float(len(trajectories) - len(known)))
        if self._dumps.is_due(self.state.iteration):
            self.dump("trajectories", Batch.from_trajectories(trajectories))
        samples, more = self.prepare(known)
        self.dump("samples", {"samples": samples})
        services = service_metrics(self.scenario_instance.services)
        return Experience(samples, metrics | services | self._noted | more)

    def _rollout_of(self, iteration: int) -> CollectedRollout:
        """Return the rollout of an iteration, sampled now or earlier."""
        if self._async is None:
            return self._play_iteration(iteration)
        played, self._staleness = self._async.take(iteration)
        self._async.begin_next(iteration)
        played.metrics["rollout/staleness"] = float(self._staleness)
        return played

    def _next_problem(self, iteration: int) -> int:
        """Return the position of the first problem that no earlier iteration has drawn."""
        rounds = self.parameters.max_resampling_rounds
        if rounds and self._num_drawn is not None:
            return self._num_drawn
        # In runs begun by earlier versions each iteration reserved those of all rounds.
        num_reserved: int = self.training.num_episodes_per_experience * (rounds + 1)
        return iteration * num_reserved

    def _play_iteration(self, iteration: int) -> CollectedRollout:
        """Sample problems, replacing uninformative ones."""
        wanted = self.training.num_episodes_per_experience
        rounds = self.parameters.max_resampling_rounds
        first = self._next_problem(iteration)
        self.task.progress = TrainingProgress(iteration, self.training.num_iterations)
        kept: list[Trajectory] = []
        dead: list[Trajectory] = []
        records = []
        episodes: list[Episode] = []
        num_played = num_live = 0
        options = self.parameters
        margin = getattr(options, "overlong_margin", 0)
        # Only the baseline of GRPO gives groups of equal rewards no signal.
        needs_spread = (
            self.learns_from_rewards
            and getattr(options, "baseline", "mean") != "none"
            and getattr(options, "advantage", "group") == "group"
        )
        generated = 0
        earlier: list[int] = []
        # What evaluations have sampled is left out.
        self._sampler.take_metrics()
        for _ in range(rounds + 1):
            missing = wanted - num_live
            start = first + num_played
            problems = [self.problem(number) for number in range(start, start + missing)]
            key = ("rollout", iteration)
            with self._sampler.counting() as spent:
                rollout = self._play("train", problems, key, self._sampling_agent, earlier=earlier)
            generated += spent.generated
            earlier += problems
            if iteration % self.settings.rollout_sample_period == 0:
                records.append(rollout_rows(rollout, problems, self.settings.num_rollout_samples))
            episodes += rollout.episodes
            if margin:
                self._penalise_length(rollout.trajectories, margin)
            num_played += missing
            live, others = informative_groups(
                rollout.trajectories,
                needs_spread=needs_spread,
                use_run_ids=getattr(options, "use_run_ids", True),
            )
            num_live += len({one.group_id for one in live})
            kept += live
            dead += others
            if num_live >= wanted:
                break
        metrics = {
            "rollout/num_problems_sampled": float(num_played),
            "rollout/zero_variance_fraction": 1 - num_live / num_played,
            "tokens/generated": float(generated),
            **self._sampler.take_metrics(),
            **episode_figures(episodes),
        }
        self._num_drawn = first + num_played
        # Figures are of all that was sampled: those of the kept groups alone would be chosen by it.
        played = [*kept, *dead]
        log_rollout_metrics(played, metrics)
        num_unrewarded = sum(trajectory.reward is None for trajectory in played)
        metrics["rollout/num_without_reward"] = float(num_unrewarded)
        if rounds == 0:
            # Without resampling every problem stays.
            return CollectedRollout(played, metrics, records)
        return CollectedRollout(kept, dict(log_kept_rewards(kept, metrics)), records)

    def _penalise_length(self, trajectories: Sequence[Trajectory], margin: int) -> None:
        """Subtract DAPO's penalty on overlong answers from rewards."""
        max_length = self.agent.sampling.max_new_tokens
        lengths = torch.tensor([one.num_response_tokens for one in trajectories])
        penalties = overlong_penalty(lengths, max_length=max_length, margin=margin)
        for trajectory, penalty in zip(trajectories, penalties.tolist(), strict=True):
            if trajectory.reward is not None:
                trajectory.reward += penalty

    def learnt_samples(self, batch: Batch) -> list[Sample]:
        """Return the samples of a prepared batch, without truncated ones if these are masked."""
        if self.parameters.mask_truncated_completions and "is_cut" in batch.values:
            is_whole_B = batch.values["is_cut"] == 0
            batch.values["row_weights"] = batch.values["row_weights"] * is_whole_B
        return samples_of(batch)

    def problem(self, number: int) -> int:
        """Return the problem at a position of the run: the dataset in random order, repeatedly."""
        count = self.task.num_problems("train")
        if count is None:
            return number
        epoch, place = divmod(number, count)
        generator = derived_generator(self.hyper_params.seed, "problems", epoch)
        return int(torch.randperm(count, generator=generator)[place])

    def _play(
        self,
        split: Split,
        problems: Sequence[int],
        key: tuple[str, int],
        agent: ConversationAgent | None = None,
        *,
        num_runs: int | None = None,
        earlier: Sequence[int] = (),
    ) -> TaskRollout:
        """Sample problems with the current weights, or with another agent; see `TaskPlan`."""
        runs = num_runs or self.parameters.group_size
        is_of_now = agent is None or agent is self.agent
        service = self.service
        is_own_draw = (
            isinstance(service, LocalTrainingService)
            and type(service).sample is LocalTrainingService.sample
            and service.model is self.agent.language_model
        )
        # Only the leader has weights of before, or all of divided ones.
        is_whole = is_of_now and self.settings.sharding == "none"
        return play_task(
            agent or self.agent,
            self.task,
            problems,
            TaskPlan(
                *(split, runs, self.options.max_turns),
                key=(self.hyper_params.seed, *key),
                earlier=tuple(earlier),
            ),
            num_parts=self.options.num_rollout_parts,
            team=self.team if is_whole else None,
            sample=None if is_own_draw or not is_of_now else service.sample,
        )

    def handlers(self) -> dict[str, Handler]:
        """Return the base's handlers and that of rollout parts."""
        run = partial(run_requested, partial(requested_part, self.agent, self.task))
        return super().handlers() | {RUN_PARTS: run}

    def _wait_for_playing(self) -> None:
        """Wait for asynchronous rollouts: tokenizers and tasks are not thread-safe."""
        if self._async is not None:
            self._async.wait()

    def _wait_for_drawn(self) -> int | None:
        """Return the number of problems drawn so far, those of rollouts ahead included."""
        self._wait_for_playing()
        return self._num_drawn

    def _set_drawn(self, count: int | None) -> None:
        self._num_drawn = count

    def kept_parts(self) -> dict[str, Part]:
        parts = super().kept_parts()
        if self.parameters.max_resampling_rounds:
            # A cache to runs begun by earlier versions, which go on as they began.
            parts["problems"] = Part(self._wait_for_drawn, self._set_drawn, is_memory=True)
        for number, scorer in enumerate(self.task.scorers, start=1):
            name = f"verdicts {number}"
            parts[name] = Part(scorer.verdicts, scorer.load_verdicts, is_memory=True)
        return parts

    # ---- measuring

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Enter the run's evaluation context, for evaluations apart from training."""
        self._set_seed()
        actors = actor_options(self.settings, self.scenario_instance.num_parameters)
        with using_actors(actors), self.test_context():
            yield

    def held_out(self, split: Split, limit: int) -> list[int]:
        """Return the first problems of a split, at most all of it."""
        count = self.task.num_problems(split)
        return list(range(limit if count is None else min(limit, count)))

    def play_held_out(self, split: Split, problems: Sequence[int], num_runs: int) -> TaskRollout:
        """Sample problems, with the same randomness in every call."""
        return self._play(split, problems, ("evaluation", 0), num_runs=num_runs)

    def known_of(self, figures: Mapping[str, Any]) -> Known | None:
        """Return the answers with a reward; None without held-out problems."""
        if not figures:
            return None
        if "rollout/num_without_reward" in figures:
            without, count = (
                figures["rollout/num_without_reward"],
                figures["rollout/num_trajectories"],
            )
            is_nothing = without == count
        else:
            without, is_nothing = figures["num_without_reward"], figures["num_problems"] == 0
        return Known(0, int(without), "answers", "reward") if is_nothing else None

    def num_measure_parts(self) -> int:
        options = self.options.evaluation
        size: int = options.batch_size
        return math.ceil(len(self.held_out("test", options.num_problems)) / size)

    def measure(self, when: str, parts: Iterable[int]) -> dict[str, Any]:
        """Sample the held-out problems, with the same randomness before and after training."""
        self._wait_for_playing()
        options = self.options.evaluation
        problems = self.held_out("test", options.num_problems)
        if not problems:
            return {}
        tally = Tally(options.success_reward)
        rows: list[tuple[Any, ...]] = []
        for part in parts:
            some = problems[part * options.batch_size : (part + 1) * options.batch_size]
            rollout = self.play_held_out("test", some, options.num_runs)
            tally.add(rollout, some, options.num_runs)
            rows += answer_rows(rollout, some, options.success_reward)
        name = "before" if when == "before" else "evaluation"
        columns = ANSWER_COLUMNS[: len(rows[0])]
        self.tracker.log_table(name, columns, rows, step=self.state.iteration)
        return tally.report(options.num_runs)

    def evaluate_dev(self) -> dict[str, float]:
        self._wait_for_playing()
        options = self.options.evaluation
        problems = self.held_out("dev", options.num_dev_problems)
        tally = Tally(options.success_reward)
        num_runs = options.num_dev_runs
        played = self.play_held_out("dev", problems, num_runs)
        tally.add(played, problems, num_runs)
        figures = flat_figures(tally.report(num_runs))
        return {n: v for n, v in figures.items() if not n.startswith("num_")}

    def why_nothing_is_learnt(self, found: Experience) -> str:
        if found.samples:
            return ""
        return (
            f"none of {counted(found.metrics['rollout/num_trajectories'], 'trajectory')} teaches "
            "anything: advantages are 0, or rewards are missing."
        )

    def progress_figures(self, metrics: Mapping[str, float]) -> dict[str, Any]:
        return {"reward": metrics.get("rollout/reward_mean", math.nan)}

    def _write_results(self) -> None:
        for text in warnings_about_services(self.scenario_instance.services):
            self._warn(text)
        if self.task.num_problems("test") == 0:
            self._warn(
                f"no problem was held out: the task has {self.task.num_problems('train')}. Give "
                "held-out problems as task.task.test, or more training problems."
            )
        if self.state.iteration and not self.has_learned():
            self._warn(
                "nothing was learned: all advantages were 0. Compare runs of one problem "
                "(group_id) and raise group_size until some of them are right and some are wrong."
            )
        before, after = self.state.before, self.results.get("after", {})
        if before and after and ("accuracy" in before) is not ("accuracy" in after):
            # The reward exceeds 1 in one of them: what is right is unknown in both.
            before, self.results["after"] = without_accuracy(before), without_accuracy(after)
        self.store_results(
            {
                "kind": "task",
                "before": before,
                "training": self.training_results(),
                **services_used(self.scenario_instance.services),
            }
        )

    def has_learned(self) -> bool:
        """Return whether any optimizer step was taken."""
        return bool(self.state.num_optimizer_steps)

    def dry_run(self) -> dict[str, Any]:
        """Sample one problem, compute the gradient of one minibatch, and estimate a whole run."""
        services = self.scenario_instance.services
        with self.train_context():
            if services:
                with torch.no_grad():
                    self._play("train", [self.problem(0)], ("evaluation", 0), num_runs=1)
            estimate = estimate_services(services, self._num_episodes_of_run())
        return super().dry_run() | estimate

    def _num_episodes_of_run(self) -> int:
        """Return the episodes of training, without resampling, and of all evaluations."""
        training, options = self.training, self.options.evaluation
        num_iterations, period = training.num_iterations, training.eval_period
        played = training.num_episodes_per_experience * self.parameters.group_size
        tested = len(self.held_out("test", options.num_problems)) * options.num_runs
        dev = len(self.held_out("dev", options.num_dev_problems)) * options.num_dev_runs
        num_dev = num_iterations // period if period else 0
        trained = num_iterations * played if self.samples_in_training else 0
        return int(trained + num_dev * dev + 2 * tested)

    def samples_of_one_episode(self) -> Sequence[Sample]:
        self._iteration = 0
        known = [one for one in self._trajectories_of(self.problem(0)) if one.reward is not None]
        return self.prepare(known)[0]

    def _trajectories_of(self, problem: int) -> list[Trajectory]:
        """Return the trajectories of a training problem."""
        return self._play("train", [problem], ("rollout", 0)).trajectories

    # ---- tools of the hooks

    def dump(self, stage: str, values: Batch | Mapping[str, Any]) -> None:
        """Write a stage of the iteration for `compare-dumps`, every `settings.dump_period`."""
        if self._dumps.is_due(self.state.iteration):
            plain = values.to_plain() if isinstance(values, Batch) else values
            self._dumps.write(self.state.iteration, stage, plain)

    def _log_rollout_metrics(self, batch: Batch | Sequence[Trajectory]) -> None:
        """Log metrics of the rollout with those of the iteration."""
        self.log_metrics(log_rollout_metrics(batch))

    def score(self, model: TokenScorer, batch: Batch, *, temperature: float = 1.0) -> Tensor:
        """Return another model's log-probabilities of a batch's tokens, `[B, T]`, no gradient."""
        return score_batch(batch, partial(model.tempered_logprobs, temperature=temperature))

    def imitate(self, teacher: TokenScorer, batch: Batch) -> dict[str, float]:
        """Set `advantages` and `teacher_logprobs` for distillation; return the divergence.

        The student is the learning policy where the batch was rescored, else the one that sampled.
        """
        options = self.parameters.distillation
        student_BT, mask_BT = logprobs_before_update(batch), batch.values["loss_mask"]
        teacher_BT = batch.values["teacher_logprobs"] = self.score(teacher, batch)
        batch.values["advantages"] = reverse_kl_advantages(
            student_BT, teacher_BT, mask_BT, weight=options.weight, discount=options.discount
        )
        return {"opd/reverse_kl": float(masked_mean(student_BT - teacher_BT, mask_BT))}

    def load_teacher(self, chosen: SubParameters | None = None) -> TokenScorer:
        """Load a frozen model, by default the one named by `distillation.teacher`."""
        name = self.hyper_params.trainer
        chosen = chosen or self.parameters.distillation.teacher
        if chosen is None:
            raise ConfigurationError(
                f"{name} has no teacher. Set {name}.distillation.teacher to a model with the "
                "student's tokenizer, for instance {_type: huggingface, model: runs/RUN/model}."
            )
        loaded = load_language_model(
            chosen,
            device=resolve_device(self.settings.device),
            scenario_dir=self.scenario_instance.scenario_dir,
            trainable=False,
        )
        teacher = as_scorer(loaded, role="teacher", to="score what the student says")
        own, others = self.policy.tokenizer.get_vocab(), teacher.tokenizer.get_vocab()
        if own != others:
            raise ModelLoadError(
                f"the teacher {getattr(chosen, 'model', '')!r} and the student differ in "
                f"{len(set(own.items()) ^ set(others.items()))} tokens. Choose a teacher with the "
                "student's tokenizer."
            )
        return teacher
