"""The loop of all trainers of language models.

A family defines `collect`, `measure` and `evaluate_dev`, a trainer the `loss` of a batch.

Shape suffixes: `B` sample, `T` token.
"""

from __future__ import annotations

import logging
import math
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from tensordict import TensorDict
from torch import Tensor

from nip_astra.checkpoints.run_state import (
    Part,
    RunState,
    global_generators,
    set_global_generators,
)
from nip_astra.distributed.team import Handler, Team
from nip_astra.errors import (
    BudgetExhaustedError,
    CallDeadlineError,
    ConfigurationError,
    LostProcessError,
    NonFiniteLossError,
    StopRequested,
    UnknownNameError,
)
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.language_models.base import LanguageModel
from nip_astra.language_models.services.sharded import (
    DataParallelService,
    ShardedService,
    find_learner,
)
from nip_astra.language_models.services.training import LocalTrainingService, TrainingService
from nip_astra.rl_objectives.reductions import (
    TOKEN_REDUCTIONS,
    LossOutput,
    Reduction,
    as_loss_output,
)
from nip_astra.rollouts.samples import Sample, collate
from nip_astra.samplers.executor import AsyncRollouts
from nip_astra.tracking.tracker import plain_numbers
from nip_astra.trainers.dry_run import (
    bytes_of,
    estimate_run,
    measure_smallest_step,
    memory_of,
    parts_with_models,
    state_per_weight,
    work_of_language_model,
)
from nip_astra.trainers.optimization import build_optimizer, learning_rate
from nip_astra.trainers.service_use import refuse_unanswered
from nip_astra.trainers.trainer_base import IterationContext, TensorDictTrainer, attach_progress_bar
from nip_astra.utils.actors import actor_options, using_actors
from nip_astra.utils.forked import get_num_processes, using_processes
from nip_astra.utils.module_names import check_module_names
from nip_astra.utils.processor import choose_num_processes, peak_memory_bytes
from nip_astra.utils.seeding import derived_generator

logger = logging.getLogger(__name__)
T = TypeVar("T")
BatchT = TypeVar("BatchT")

STEP_TOTALS = "step_totals"
"""Column of a batch: trained tokens and samples of the whole optimizer step, int64 `[B, 2]`."""
MINIBATCH_TOTALS = "minibatch_totals"
"""Column of a batch: trained tokens and samples of the minibatch, int64 `[B, 2]`; processes may
take parts of it."""
IS_FIRST_STEP = "is_first_step"
"""Column of the batches of an iteration's first optimizer step; bool `[B]`, True."""
HAS_GIVEN_OLD = "has_given_old"
"""Column `[B]` of samples whose `old_logprobs` are not the trainer's own, as with older weights."""


@dataclass
class LanguageModelState(RunState):
    """Counters and partly used experience.

    `samples` are those of the iteration in progress, None between iterations, and `num_steps_done`
    the optimizer steps taken on them; `iteration_metrics` and `step_sums` are the metrics so far.
    `iteration_seconds` are the durations of its parts so far, in all processes of the run.
    """

    samples: list[Sample] | None = None
    num_steps_done: int = 0
    iteration_metrics: dict[str, float] = field(default_factory=dict)
    step_sums: dict[str, float] = field(default_factory=dict)
    iteration_seconds: dict[str, float] = field(default_factory=dict)

    @property
    def update_count(self) -> int:
        """A number that grows with every step and every iteration."""
        return self.num_optimizer_steps + self.iteration

    def begin(
        self,
        samples: list[Sample],
        metrics: dict[str, float],
        seconds: Mapping[str, float] = {},
    ) -> None:
        """Start using the experience of an iteration."""
        self.iteration_seconds = {name: float(spent) for name, spent in seconds.items()}
        # Figures of NumPy and torch would not be held by a checkpoint.
        self.iteration_metrics, self.step_sums = plain_numbers(metrics), {}
        self.samples, self.num_steps_done = samples, 0

    def count_step(self, metrics: dict[str, float], seconds: float = 0.0) -> None:
        """Count one optimizer step, and accumulate its metrics and its duration."""
        spent = self.iteration_seconds.get("update", 0.0)
        self.iteration_seconds["update"] = spent + seconds
        self.num_steps_done += 1
        self.num_optimizer_steps += 1
        for name, value in plain_numbers(metrics).items():
            self.step_sums[name] = self.step_sums.get(name, 0.0) + value

    def end(self) -> dict[str, float]:
        """Finish the iteration; return its metrics, with means over steps."""
        count = max(self.num_steps_done, 1)
        means = {name: value / count for name, value in self.step_sums.items()}
        metrics = self.iteration_metrics | means | {"num_steps": float(self.num_steps_done)}
        self.samples, self.num_steps_done = None, 0
        self.iteration_metrics, self.step_sums, self.iteration_seconds = {}, {}, {}
        self.iteration += 1
        return metrics


@dataclass(frozen=True)
class Experience:
    """The samples and metrics collected in an iteration; without samples it takes no step.

    `tokens/generated` of the metrics gives the speed in the progress bar; `seconds` are durations
    of parts of collecting.
    """

    samples: list[Sample]
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)


def check_experience(found: Any, *, owner: str) -> Experience:
    """Check that `collect` of class `owner` returned a valid `Experience`, and return it."""
    if not isinstance(found, Experience):
        raise _wrong_result(owner, "collect", found, "an Experience(samples, metrics)")
    for name in ("metrics", "seconds"):
        value = getattr(found, name)
        if not isinstance(value, Mapping):
            raise _wrong_result(owner, "collect", value, f"a dict of numbers as {name}")
    samples = check_samples(found.samples, owner=owner, hook="collect")
    return replace(found, samples=samples, metrics=dict(found.metrics))


def check_samples(found: Any, *, owner: str, hook: str) -> list[Any]:
    """Return the samples from a hook if they are a list, else raise."""
    if not isinstance(found, list | tuple):
        raise _wrong_result(owner, hook, found, "a list of samples, which may be empty")
    return list(found)


def _wrong_result(owner: str, hook: str, found: object, wanted: str) -> ConfigurationError:
    return ConfigurationError(
        f"{hook} of the trainer {owner} returned {str(found)[:60]!r} ({type(found).__name__}). It "
        f"must return {wanted}."
    )


NOTHING_LEARNED = "nothing was learned in iteration"
"""Beginning of a warning that a run gives once, also if it is resumed."""


class LanguageModelTrainer(TensorDictTrainer):
    """Base of trainers of a language model through a `TrainingService`.

    Attributes
    ----------
    policy : LanguageModel
    modules : ModuleDict
        Further modules that learn, from `build_modules`.
    learned : list of Parameter
        The weights of both.
    service : TrainingService
        Through which they learn; by default in this process, over `optimizer`.
    """

    State: ClassVar[type[RunState]] = LanguageModelState
    parameter_groups: ClassVar[tuple[str, ...] | None] = ("training",)
    learns_in_processes: ClassVar[bool] = True
    divides_weights: ClassVar[bool] = True
    learns_layer_by_layer: ClassVar[bool] = True
    trained_tokens: ClassVar[str] = "tokens"
    """Column of trained tokens in a batch, with a mask column."""
    policy_role: ClassVar[str] = "policy"
    """Name of the policy in checkpoints."""
    _async: AsyncRollouts[Any] | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.training = self.hyper_params.training
        metric, known = f"dev/{self.training.dev_metric}", self.declared_figures()
        if self.training.eval_period and known and not any(fnmatchcase(metric, n) for n in known):
            of_dev = [name.removeprefix("dev/") for name in known if name.startswith("dev/")]
            advice = "Name one by training.dev_metric."
            raise UnknownNameError("dev_metric", self.training.dev_metric, of_dev, advice)
        self._noted: dict[str, float] = {}
        self.policy = self.build_policy()
        modules_by_name = self.build_modules()
        check_module_names(modules_by_name, owner=f"build_modules of {type(self).__name__}")
        self.modules = torch.nn.ModuleDict(modules_by_name)
        policy, modules = list(self.policy.parameters()), list(self.modules.parameters())
        self.learned = [*policy, *modules]
        self.optimizer = build_optimizer(
            self.training, policy, more=[(modules, self.modules_lr_factor)]
        )
        agents = self.scenario_instance.agents.values()
        self.service = distribute(
            self.build_service(),
            self.policy,
            [getattr(agent, "language_model", None) for agent in agents],
            self.team,
            self.settings,
        )
        if isinstance(self.service, LocalTrainingService):
            # No process may keep whole copies of sharded weights.
            self.learned = self.service.learned

    # ---- hooks

    @abstractmethod
    def build_policy(self) -> LanguageModel:
        """Hook of a family: build the trained model."""

    @abstractmethod
    def collect(self, iteration: int) -> Experience:
        """Hook of a family: collect the experience of an iteration. Called without gradients."""

    @abstractmethod
    def loss(self, batch: TensorDict) -> LossOutput:
        """Hook of a trainer: return a batch's loss, a mean over samples, and scalars to log."""

    def collate_fn(self, samples: Sequence[Sample]) -> TensorDict:
        """Hook: return one batch of samples."""
        return collate(samples)

    def build_modules(self) -> dict[str, torch.nn.Module]:
        """Hook: build further trained modules, for instance a value head."""
        return {}

    @property
    def modules_lr_factor(self) -> float:
        """Hook: learning rate of `build_modules`, as a multiple of the policy's."""
        return 1.0

    def build_service(self) -> TrainingService:
        """Hook: build the service that holds the weights, accumulates gradients and steps."""
        return LocalTrainingService(
            self.policy,
            self.optimizer,
            learned=self.learned,
            modules=self.modules,
            role=self.policy_role,
        )

    def samples_of_one_episode(self) -> Sequence[Sample] | None:
        """Hook of a family: sample one episode for a dry run. Called without gradients."""
        return None

    def cache_bytes(self, num_episodes: int) -> float:
        """Hook of a family: return the memory for keys and values of episodes sampled together."""
        return 0.0

    def num_measure_parts(self) -> int:
        """Hook of a family: number of parts of `measure`; None without measurements."""
        return 0

    def measure(self, when: str, parts: Iterable[int]) -> dict[str, Any]:
        """Hook of a family: return figures on held-out data, "before" or "after" training."""
        return {}

    def evaluate_dev(self) -> dict[str, float]:
        """Hook: return the figures that select the best checkpoint, including the dev metric."""
        raise NotImplementedError(f"{type(self).__name__} has no dev evaluation")

    def why_nothing_is_learnt(self, found: Experience) -> str:
        """Hook of a family: return why an experience has nothing to learn from, or ""."""
        return "" if found.samples else "no sample to learn from."

    def progress_figures(self, metrics: Mapping[str, float]) -> dict[str, Any]:
        """Hook: return an iteration's figures for the progress bar, before loss and speed."""
        return {}

    def after_backward(self, metrics: Mapping[str, float]) -> None:
        """Hook: inspect the gradients of a step before it is taken."""

    # ---- tools of the hooks

    def log_metrics(self, metrics: Mapping[str, float]) -> None:
        """Log metrics of the experience being collected; `loss` returns its own."""
        self._noted.update(metrics)

    def loss_of(self, batch: TensorDict) -> LossOutput:
        """Return the checked result of `loss` for a batch; see `as_loss_output`."""
        return as_loss_output(self.loss(batch), owner=type(self).__name__)

    def policy_logprobs(
        self, batch: TensorDict, *names: str, temperature: float = 1.0
    ) -> tuple[Tensor, ...]:
        """Return the policy's log-probabilities of continuations of `context`, from one call.

        `batch` has for each name tokens and `<name>_mask`. Returns a `[B, T]` tensor per name, all
        as wide as the longest, nats, 0 on padding, with gradient. For `temperature` see
        `TrainingService.tempered_logprobs`.
        """
        width = max(batch[name].shape[1] for name in names)
        ids, masks = [], []
        for name in names:
            padding = (0, width - batch[name].shape[1])
            ids.append(torch.nn.functional.pad(batch[name], padding))
            masks.append(torch.nn.functional.pad(batch[f"{name}_mask"], padding))
        logprobs = self.service.tempered_logprobs(
            batch["context"].repeat(len(names), 1),
            batch["context_mask"].repeat(len(names), 1),
            torch.cat(ids),
            torch.cat(masks),
            temperature,
        )
        return logprobs.chunk(len(names))

    def old_logprobs(self, batch: TensorDict, logprobs_BT: Tensor) -> Tensor:
        """Return the log-probabilities before the iteration's first optimizer step, no gradient.

        Within that step they are `logprobs_BT`, the policy's own: ratios are exactly 1 in every
        precision. Later they are `old_logprobs` of the batch.
        """
        if IS_FIRST_STEP in batch.keys() and HAS_GIVEN_OLD not in batch.keys():  # noqa: SIM118 - `in` of a TensorDict asks for values
            return logprobs_BT.detach()
        old_BT: Tensor = batch["old_logprobs"].to(logprobs_BT.device)
        return old_BT

    def num_tokens_in_step(self, batch: TensorDict) -> float:
        """Return the trained tokens of the optimizer step, times the batch's share of its samples.

        A sum over tokens divided by it, averaged by samples, is a mean over the step's tokens.
        """
        totals = batch.get(STEP_TOTALS, None)
        if totals is None:
            return float(int(batch[f"{self.trained_tokens}_mask"].sum()))
        return _share_of_tokens(totals, len(batch))

    def token_normaliser(self, batch: TensorDict, reduction: Reduction) -> float | None:
        """Return the divisor of a sum over tokens by a reduction's name; None if it has none."""
        if reduction not in TOKEN_REDUCTIONS:
            return None
        if reduction == "minibatch_token" and batch.get(MINIBATCH_TOTALS, None) is not None:
            return _share_of_tokens(batch[MINIBATCH_TOTALS], len(batch))
        return self.num_tokens_in_step(batch)

    def num_steps_with(self, num_samples: int) -> int:
        """Return the optimizer steps of an iteration with so many samples."""
        num_batches = math.ceil(num_samples / self.training.minibatch_size)
        per_epoch = math.ceil(num_batches / self.training.gradient_accumulation_steps)
        return per_epoch * self.training.num_epochs

    # ---- several processes

    def run_on_leader(
        self, work: Callable[[], T], handlers: Mapping[str, Handler] = {}
    ) -> T | None:
        try:
            if isinstance(self.service, ShardedService):
                self.service.gather()
                handlers = {**handlers, **self.service.handlers()}
            return super().run_on_leader(work, handlers)
        except LostProcessError:
            # Nothing was learned since the last step.
            self._save_without_others()
            raise

    def _save_without_others(self) -> None:
        """Save after another process ended, unless it held a shard of the weights."""
        if not isinstance(self.service, ShardedService):
            self._save_checkpoint()

    # ---- the job

    @contextmanager
    def _threads(self) -> Iterator[None]:
        sizes = self.scenario_instance.num_parameters, self.settings.num_threads
        # Of several processes of a run none forks more: they share the cores, and connections.
        count = choose_num_processes(*sizes) if self.team.size == 1 else 1
        with super()._threads(), using_processes(count):
            self.results["num_processes"] = get_num_processes()
            yield

    def train(self) -> None:
        """Evaluate the untrained policy, train it, evaluate it again, save it."""
        self._set_seed()
        if self.training.eval_period and self.team.is_leader and self._checkpoint_store() is None:
            self._warn(
                "no run directory keeps the weights of the best dev evaluation, so the last ones "
                "are measured. Train by run_experiment"
            )
        self._rewind_records()
        actors = actor_options(self.settings, self.scenario_instance.num_parameters)
        with self._open_progress_bar(), using_actors(actors):
            with self.test_context():
                self.run_on_leader(self._run_before_loop)
            with self.train_context():
                self._run_train_loop()
            with self.test_context():
                if self.state.best_dev_value is not None:
                    self._take_best()
                self.run_on_leader(self._measure_after)
        if self.team.is_leader:
            self._publish_models(self.service.save_weights_for_sampler, role=self.policy_role)
            self._write_results()

    @attach_progress_bar(lambda self: self.num_measure_parts())
    def _run_before_loop(self, iteration_context: IterationContext) -> None:
        iteration_context.set_description("Before training")
        is_done = self.state.before is not None
        start = self.num_measure_parts() if is_done else 0
        parts = self._parts(iteration_context, start)
        if is_done:
            # The bar counts what is done.
            list(parts)
        else:
            before = self.measure("before", self._checked(parts))
            self._refuse_nothing("the evaluation before training", before)
            self.state.before = before
        self._raise_if_stopped()

    @attach_progress_bar(lambda self: self.training.num_iterations)
    def _run_train_loop(self, iteration_context: IterationContext) -> None:
        iteration_context.set_description("Training")
        for iteration in iteration_context.iterate(self.state.iteration):
            if self.state.has_stopped_early(self.training):
                self.state.log_early_stop(self.training)
                break
            if self.state.samples is None:
                is_last = iteration + 1 == iteration_context.num_iterations
                self.run_on_leader(partial(self._collect, iteration, is_last=is_last))
            try:
                self._update(iteration)
            except LostProcessError:
                # No step was taken on a part of the gradients.
                self._save_without_others()
                raise
            self.run_on_leader(partial(self._finish_iteration, iteration_context))

    @attach_progress_bar(lambda self: self.num_measure_parts())
    def _run_test_loop(self, iteration_context: IterationContext) -> None:
        iteration_context.set_description("After training")
        parts = self._checked(self._parts(iteration_context))
        after = self.measure("after", parts)
        self._refuse_nothing("the evaluation after training", after)
        self.results["after"] = after

    def _checked(self, parts: Iterable[int]) -> Iterator[int]:
        """Yield parts of a measurement, up to one in which no service request was answered."""
        for part in parts:
            yield part
            refuse_unanswered(self.services())

    def _measure_after(self) -> None:
        """Evaluate after training; a family may extend it."""
        self._run_test_loop()

    def _parts(self, iteration_context: IterationContext, start: int = 0) -> Iterator[int]:
        """Yield the parts of a measurement until the run is stopped."""
        for part in iteration_context.iterate(start):
            self._raise_if_stopped()
            yield part

    # ---- one iteration

    def _collect(self, iteration: int, *, is_last: bool = False) -> None:
        """Collect the experience of an iteration."""
        started = time.perf_counter()
        generators = global_generators()
        self._noted = {}
        try:
            with torch.no_grad():
                found = check_experience(self.collect(iteration), owner=type(self).__name__)
        except (BudgetExhaustedError, CallDeadlineError):
            # The steps so far are paid for. The resumed run collects this iteration again.
            set_global_generators(generators)
            self._save_checkpoint()
            raise
        why = self.why_nothing_is_learnt(found)
        warned = self.results.get("warnings", [])
        if why and not any(text.startswith(NOTHING_LEARNED) for text in warned):
            self._warn(f"{NOTHING_LEARNED} {iteration + 1}: {why}")
        metrics = found.metrics | {"num_samples": float(len(found.samples))} | self._noted
        self._check_iteration(metrics, is_last=is_last)
        seconds = {"collect": time.perf_counter() - started, **found.seconds}
        self.state.begin(found.samples, metrics, seconds)

    def batches(
        self, samples: Sequence[Sample], *, iteration: int, epoch: int
    ) -> Iterator[TensorDict]:
        """Yield an epoch's batches of an iteration's samples."""
        return batches_of(
            samples,
            self.collate_fn,
            size=self.training.minibatch_size,
            order=self.training.batch_order,
            key=(self.hyper_params.seed, iteration, epoch),
        )

    def _update(self, iteration: int) -> None:
        """Step through the iteration's samples, continuing after the last completed step."""
        for number, group in enumerate(self._step_groups(iteration)):
            if number < self.state.num_steps_done:
                continue
            started = time.perf_counter()
            generators = global_generators()
            try:
                with self.policy.counting() as spent:
                    metrics = self._optimizer_step(group)
            except CallDeadlineError:
                # Hooks precede the step on the weights; the resumed run repeats it.
                set_global_generators(generators)
                self.run_on_leader(self._save_checkpoint)
                raise
            self.state.count_step(
                {
                    **metrics,
                    "tokens/update_forwarded": float(spent.forwarded),
                    "tokens/update_forwarded_per_unique": spent.forwarded / max(spent.scored, 1),
                },
                time.perf_counter() - started,
            )
            if signal_name := self.team.broadcast(self.stop_flag()):
                self.run_on_leader(self._save_checkpoint)
                raise StopRequested(signal_name)

    def _step_groups(self, iteration: int) -> Iterator[list[TensorDict]]:
        """Yield the batches of each optimizer step; the last group of an epoch may be smaller."""
        assert self.state.samples is not None
        for epoch in range(self.training.num_epochs):
            batches = self.batches(self.state.samples, iteration=iteration, epoch=epoch)
            yield from in_groups(batches, self.training.gradient_accumulation_steps)

    def _optimizer_step(self, batches: list[TensorDict]) -> dict[str, float]:
        """Take one step on the mean loss over the samples of all batches."""
        state, num_iterations = self.state, self.training.num_iterations
        num_before = state.num_optimizer_steps - state.num_steps_done
        per_iteration = self.num_steps_with(len(state.samples or ()))
        lr = learning_rate(
            self.training,
            step=state.num_optimizer_steps,
            progress=state.iteration / num_iterations,
            num_steps=num_before + (num_iterations - state.iteration) * per_iteration,
        )
        self._write_step_totals(batches)
        if self.state.num_steps_done == 0:
            self._mark_first_step(batches)
        metrics = self.service.forward_backward(batches, self.loss_of)
        self.after_backward(metrics)
        if not math.isfinite(metrics["loss"]):
            self._stop_on_non_finite(metrics["loss"], math.nan)
        step = self.service.optim_step(lr=lr, max_grad_norm=self.training.max_grad_norm)
        if not step.was_taken:
            # A fault may show in the norm even where the loss is fine.
            self._stop_on_non_finite(metrics["loss"], step.grad_norm)
        return metrics | {"grad_norm": step.grad_norm, "lr": lr}

    def _mark_first_step(self, batches: Sequence[TensorDict]) -> None:
        """Mark the batches of an iteration's first step, before which no weight has changed."""
        for batch in batches:
            batch[IS_FIRST_STEP] = torch.ones(len(batch), dtype=torch.bool)

    def _write_step_totals(self, batches: Sequence[TensorDict]) -> None:
        """Add the totals of step and minibatch to each batch; see `token_normaliser`."""
        name = f"{self.trained_tokens}_mask"
        if any(batch.get(name, None) is None for batch in batches):
            return
        num_tokens = [int(batch[name].sum()) for batch in batches]
        step_totals = [sum(num_tokens), sum(map(len, batches))]
        for batch, count in zip(batches, num_tokens, strict=True):
            batch[STEP_TOTALS] = torch.tensor([step_totals]).expand(len(batch), 2)
            batch[MINIBATCH_TOTALS] = torch.tensor([[count, len(batch)]]).expand(len(batch), 2)

    def dry_run(self) -> dict[str, Any]:
        """Sample one episode, compute the gradient of one minibatch, and estimate a whole run."""

        @torch.no_grad()
        def play() -> tuple[Sequence[Sample], float]:
            with self.policy.counting() as spent:
                samples = self.samples_of_one_episode()
            return samples or (), float(spent.generated)

        def learn(samples: Sequence[Sample]) -> tuple[float | None, int]:
            for batch in self.batches(samples, iteration=0, epoch=0):
                self._write_step_totals([batch])
                loss = self.service.forward_backward([batch], self.loss_of)["loss"]
                self.optimizer.zero_grad(set_to_none=True)
                return loss, len(batch)
            return None, 0

        if type(self).samples_of_one_episode is LanguageModelTrainer.samples_of_one_episode:
            return super().dry_run()
        with self.train_context():
            step = measure_smallest_step(play, learn)
        parts = parts_with_models(self.scenario_instance)
        optimizer_bytes = state_per_weight(self.optimizer) * bytes_of(self.learned)
        memory = memory_of(parts, self.learned, optimizer_bytes)
        work = work_of_language_model(step, self.training, memory)
        one, every = map(self.cache_bytes, (1, self.training.num_episodes_per_experience))
        if every:
            work = replace(work, divided_memory={"keys and values": every})
        if self.settings.sharding != "none":
            learner = find_learner(self.policy)
            gathered = [] if learner is None else list(learner.module.parameters())
            work = work.with_sharded_weights(bytes_of(gathered))
        return estimate_run(
            work, step, self.policy.num_parameters(), extra_cache_bytes=max(every - one, 0.0)
        )

    def _stop_on_non_finite(self, loss: float, norm: float) -> None:
        self.run_on_leader(self._save_checkpoint)
        raise NonFiniteLossError(
            f"optimizer step {self.state.num_optimizer_steps + 1} (iteration "
            f"{self.state.iteration + 1}) has loss {loss} and gradient norm {norm}; the weights "
            "before it are saved. Lower training.lr or training.max_grad_norm."
        )

    def _finish_iteration(self, context: IterationContext) -> None:
        seconds = {"update": 0.0, **self.state.iteration_seconds}
        metrics = self.state.end()
        timings = {f"time/{part}_seconds": spent for part, spent in seconds.items()}
        timings["memory/peak_gib"] = peak_memory_bytes() / 2**30
        speed = math.nan
        # A checkpoint of an older version does not tell how long an iteration had taken.
        if "collect" in seconds:
            spent = max(seconds["collect"] + seconds["update"], 1e-9)
            speed = timings["time/tokens_per_second"] = metrics.get("tokens/generated", 0) / spent
        is_best = False
        period = self.training.eval_period
        if period and self.state.iteration % period == 0:
            with torch.no_grad():
                dev = plain_numbers(self.evaluate_dev())
            metrics |= {f"dev/{name}": value for name, value in dev.items()}
            metric = self.training.dev_metric
            if metric not in dev:
                raise ConfigurationError(
                    f"evaluate_dev of {type(self).__name__} returned no {metric!r}, the "
                    f"training.dev_metric, but: {', '.join(map(str, dev)) or 'nothing'}."
                )
            is_best = self.state.count_evaluation(dev[metric])
        self.tracker.log_metrics(metrics | timings, step=self.state.iteration)
        context.set_postfix(
            **self.progress_figures(metrics),
            loss=metrics.get("loss", "nothing to learn from"),
            tokens_per_second=speed,
        )
        is_last = self.state.iteration == context.num_iterations
        self._checkpoint_or_stop(is_last=is_last, is_best=is_best)

    # ---- saving

    def kept_parts(self) -> dict[str, Part]:
        """Return asynchronous rollouts, whose part waits for rollouts in progress.

        A mark tells that reasoning is split from messages, if an agent's messages may have it.
        """
        parts = super().kept_parts()
        if self._async is not None:
            parts["played_ahead"] = Part(self._async.state, self._async.load_state)
        if self._thinking_roles:
            change = f"from here on messages of {', '.join(self._thinking_roles)} are without it"
            parts["reasoning apart from messages"] = Part(
                lambda: True, lambda is_apart: None, is_memory=True, if_missing=change
            )
        return parts

    @property
    def _thinking_roles(self) -> list[str]:
        """Return the roles of models whose messages may have reasoning."""
        return [
            role
            for role, agent in self.scenario_instance.agents.items()
            if getattr(getattr(agent, "message_format", None), "has_marks", False)
        ]

    def save_models(self, directory: Path) -> None:
        """Write policy, modules and optimizer."""
        self.service.save_state(directory)

    def load_models(self, directory: Path) -> None:
        """Load the result of `save_models`."""
        self.service.load_state(directory)

    def _take_best(self) -> None:
        """Load the weights with the best dev evaluation."""
        store = self._checkpoint_store()
        best = self.team.broadcast("" if store is None else str(store.open_best()))
        if best:
            self.service.load_state(Path(best))
            logger.info("restored the best checkpoint %s", Path(best).name)

    def training_results(self) -> dict[str, Any]:
        """Return how far training came and the best dev evaluation, for `results`."""
        state, best = self.state, self.state.best_dev_value
        return {
            "num_iterations": state.iteration,
            "stopped_early": state.iteration < self.training.num_iterations,
            "num_optimizer_steps": state.num_optimizer_steps,
            "best_dev": None
            if best is None
            else {"metric": self.training.dev_metric, "value": best},
        }

    @abstractmethod
    def _write_results(self) -> None:
        """Complete `results`, and write them if there is a run directory."""

    def _warn(self, text: str) -> None:
        self.results.setdefault("warnings", []).append(text)
        logger.warning(text, extra={"is_repeated_at_end": True})


# ---- batches and optimizer steps


def _share_of_tokens(totals_B2: Tensor, num_rows: int) -> float:
    """Return a total of tokens times the share that some rows have in its samples, at least 1."""
    num_tokens, num_samples = totals_B2[0].tolist()
    return float(max(num_tokens, 1) * num_rows / num_samples)


def batches_of(
    samples: Sequence[Sample],
    collate: Callable[[Sequence[Sample]], BatchT],
    *,
    size: int,
    order: str,
    key: tuple[int, int, int],
) -> Iterator[BatchT]:
    """Yield the samples in batches, in random order; one batch may be smaller.

    With order "by_episode" samples of an episode are adjacent, in their given order. `key` is seed,
    iteration and epoch.
    """
    seed, iteration, epoch = key
    generator = derived_generator(seed, "shuffle", iteration, epoch)
    places = torch.randperm(len(samples), generator=generator).tolist()
    if order == "by_episode":
        places = _by_episode(samples, places)
    parts = [places[i : i + size] for i in range(0, len(places), size)]
    if order == "by_episode":
        again = torch.randperm(len(parts), generator=generator).tolist()
        parts = [parts[i] for i in again]
    for part in parts:
        yield collate([samples[i] for i in part])


def in_groups(batches: Iterable[BatchT], size: int) -> Iterator[list[BatchT]]:
    """Yield consecutive batches in groups; the last may be smaller."""
    group: list[BatchT] = []
    for batch in batches:
        group.append(batch)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group


def _by_episode(samples: Sequence[Sample], order: Sequence[int]) -> list[int]:
    """Group the samples by episode, in the order of the episodes' first samples."""
    if any("episode" not in sample for sample in samples):
        raise ConfigurationError(
            "training.batch_order=by_episode needs samples with 'episode'. Add "
            "tree.nodes['episode'][node] in flatten, or set training.batch_order to shuffled."
        )
    episodes: list[Any] = [int(sample["episode"]) for sample in samples]
    rank = {episode: i for i, episode in enumerate(dict.fromkeys(episodes[i] for i in order))}
    return sorted(range(len(samples)), key=lambda i: rank[episodes[i]])


# ---- several processes


def distribute(
    service: TrainingService,
    policy: LanguageModel,
    others: Iterable[object],
    team: Team,
    settings: ExperimentSettings,
) -> TrainingService:
    """Return the service by which a team of processes trains a policy, as the settings require.

    `others` are models whose log-probabilities are compared with the policy's.
    """
    learner = find_learner(policy)
    is_local = isinstance(service, LocalTrainingService)
    if settings.gradient_checkpointing:
        if not is_local or learner is None:
            holder = type(policy if is_local else service).__name__
            raise ConfigurationError(
                "gradient_checkpointing needs a policy with known layers, not "
                f"{holder}. Set it to false."
            )
        learner.recompute_layers()
    if team.size == 1:
        return service
    if type(service) is not LocalTrainingService:
        raise ConfigurationError(
            f"{team.size} processes cannot train a policy that learns by {type(service).__name__}: "
            "each must hold its weights. Start the run without torchrun."
        )
    if settings.sharding == "none":
        return DataParallelService(service, team)
    if learner is None:
        raise ConfigurationError(
            "sharding=fsdp needs a policy of _type huggingface or vllm, not "
            f"{type(policy).__name__}. Set sharding to none, or another _type."
        )
    for model in map(find_learner, (policy, *others)):
        if model is not None:
            # Compared log-probabilities need the same forward pass as the sharded one.
            model.scores_by_module = True
    return ShardedService(service, team)
