"""The loop of all trainers that learn a language model: collect, step through what was collected.

A family says what an iteration gathers (`collect`) and what is measured (`measure`,
`evaluate_dev`); a trainer gives the loss of a batch (`loss`). Batches, accumulation, schedule, dev
evaluation, early stopping, checkpoints and saving are done here.

Shape suffixes: `B` sample, `T` token.
"""

from __future__ import annotations

import logging
import math
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from tensordict import TensorDict
from torch import Tensor

from nip_astra.checkpoints.run_state import RunState
from nip_astra.distributed.team import Handler
from nip_astra.errors import (
    BudgetExhaustedError,
    ConfigurationError,
    LostProcessError,
    StopRequested,
)
from nip_astra.language_models.base import LanguageModel
from nip_astra.language_models.services.sharded import ShardedService
from nip_astra.language_models.services.training import LocalTrainingService, TrainingService
from nip_astra.rl_objectives.reductions import LossOutput, as_loss_output
from nip_astra.rollouts.samples import Sample, collate
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
from nip_astra.trainers.language_model.batches import batches_of, in_groups
from nip_astra.trainers.language_model.processes import bytes_read, distribute
from nip_astra.trainers.language_model.state import LanguageModelState
from nip_astra.trainers.language_model.steps import (
    non_finite_error,
    num_tokens_in_step,
    speed_and_memory,
    token_metrics,
    write_step_totals,
)
from nip_astra.trainers.optimization import build_optimizer, learning_rate
from nip_astra.trainers.service_use import refuse_unanswered
from nip_astra.trainers.trainer_base import IterationContext, TensorDictTrainer, attach_progress_bar
from nip_astra.utils.actors import actor_options, using_actors
from nip_astra.utils.forked import get_num_processes, using_processes
from nip_astra.utils.processor import choose_num_processes

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class Experience:
    """What an iteration gathered.

    Attributes
    ----------
    samples : list of Sample
        What is learnt from; an iteration without any takes no step.
    metrics : dict[str, float]
        What is logged of it; `tokens/generated` gives the speed that the bar shows.
    seconds : Mapping[str, float]
        How long parts of the collecting took.
    """

    samples: list[Sample]
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)


def check_experience(found: Any, *, owner: str) -> Experience:
    """What a trainer's `collect` returned, where it is an `Experience` of lists and numbers.

    Parameters
    ----------
    owner : str
        Name of the trainer's class, for the message.

    Raises
    ------
    ConfigurationError
        When it is something else.
    """
    if not isinstance(found, Experience):
        raise _wrong_result(owner, "collect", found, "an Experience(samples, metrics)")
    for name in ("metrics", "seconds"):
        if not isinstance(getattr(found, name), Mapping):
            raise _wrong_result(
                owner, "collect", getattr(found, name), f"a dict of numbers as {name}"
            )
    samples = check_samples(found.samples, owner=owner, hook="collect")
    return replace(found, samples=samples, metrics=dict(found.metrics))


def check_samples(found: Any, *, owner: str, hook: str) -> list[Any]:
    """The samples that a hook returned as a list.

    Raises
    ------
    ConfigurationError
        When it returned something else.
    """
    if not isinstance(found, list | tuple):
        raise _wrong_result(owner, hook, found, "a list of samples, which may be empty")
    return list(found)


def _wrong_result(owner: str, hook: str, found: object, wanted: str) -> ConfigurationError:
    return ConfigurationError(
        f"{hook} of the trainer {owner} returned {str(found)[:60]!r} ({type(found).__name__}). It "
        f"must return {wanted}."
    )


class LanguageModelTrainer(TensorDictTrainer):
    """Base of trainers that learn a language model through a `TrainingService`.

    Attributes
    ----------
    policy : LanguageModel
        What learns.
    modules : ModuleDict
        What learns beside it, from `build_modules`.
    learned : list of Parameter
        The weights of both.
    service : TrainingService
        Through which they learn; by default in this process, over `optimizer`.
    state : LanguageModelState
        How far the run has come.
    """

    State: ClassVar[type[RunState]] = LanguageModelState
    parameter_groups: ClassVar[tuple[str, ...] | None] = ("training",)
    learns_in_processes: ClassVar[bool] = True
    divides_weights: ClassVar[bool] = True
    learns_layer_by_layer: ClassVar[bool] = True
    trained_tokens: ClassVar[str] = "tokens"
    """The column of a batch whose tokens are learnt; its mask says which they are."""
    policy_role: ClassVar[str] = "policy"
    """What the policy is called in checkpoints."""
    _has_warned_of_nothing = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.training = self.hyper_params.training
        self._noted: dict[str, float] = {}
        self.policy = self.build_policy()
        self.modules = torch.nn.ModuleDict(self.build_modules())
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
            # Of weights that were divided, nobody may keep the whole.
            self.learned = self.service.learned

    # ---- hooks

    @abstractmethod
    def build_policy(self) -> LanguageModel:
        """The model that learns; hook of a family."""

    @abstractmethod
    def collect(self, iteration: int) -> Experience:
        """What an iteration learns from; hook of a family. Called without gradients."""

    @abstractmethod
    def loss(self, batch: TensorDict) -> LossOutput:
        """The loss of a batch, a mean over its samples, and scalars to log; hook of a trainer."""

    def collate_fn(self, samples: Sequence[Sample]) -> TensorDict:
        """One batch of samples; hook."""
        return collate(samples)

    def build_modules(self) -> dict[str, torch.nn.Module]:
        """What learns beside the policy, for instance a value head; hook."""
        return {}

    @property
    def modules_lr_factor(self) -> float:
        """Learning rate of what `build_modules` gives, as a multiple of the policy's; hook."""
        return 1.0

    def build_service(self) -> TrainingService:
        """What holds the weights, adds up gradients and steps; hook."""
        return LocalTrainingService(
            self.policy,
            self.optimizer,
            learned=self.learned,
            modules=self.modules,
            role=self.policy_role,
        )

    def samples_of_one_episode(self) -> Sequence[Sample] | None:
        """Play one episode for a dry run; hook of a family. Called without gradients."""
        return None

    def cache_bytes(self, num_episodes: int) -> float:
        """Memory for keys and values of so many episodes played at once; hook of a family."""
        return 0.0

    def num_measure_parts(self) -> int:
        """Parts in which `measure` works; hook of a family. None where nothing is measured."""
        return 0

    def measure(self, when: str, parts: Iterable[int]) -> dict[str, Any]:
        """Figures on held-out data, "before" or "after" training; hook of a family."""
        return {}

    def evaluate_dev(self) -> dict[str, float]:
        """Figures by which the best checkpoint is chosen, the dev metric among them; hook."""
        raise NotImplementedError(f"{type(self).__name__} has no dev evaluation")

    def why_nothing_is_learnt(self, found: Experience) -> str:
        """Why an experience teaches nothing, or "" where it does; hook of a family."""
        return "" if found.samples else "it gave no sample to learn from."

    def progress_figures(self, metrics: Mapping[str, float]) -> dict[str, Any]:
        """What the bar shows of an iteration beside loss and speed; hook."""
        return {}

    def after_backward(self, metrics: Mapping[str, float]) -> None:
        """Look at the gradients of a step before it is taken; hook."""

    # ---- tools of the hooks

    def log_metrics(self, metrics: Mapping[str, float]) -> None:
        """Log figures with those of the iteration in progress."""
        self._noted.update(metrics)

    def loss_of(self, batch: TensorDict) -> LossOutput:
        """What `loss` returns for a batch, checked; see `as_loss_output`."""
        return as_loss_output(self.loss(batch), owner=type(self).__name__)

    def policy_logprobs(self, batch: TensorDict, *names: str) -> tuple[Tensor, ...]:
        """The policy's log-probabilities of continuations of `context`, all by one call.

        Parameters
        ----------
        batch : TensorDict
            Holds `context` and, for each name, tokens and `<name>_mask`.

        Returns
        -------
        tuple[Tensor, ...]
            One `[B, T]` tensor a name, all of the width of the longest, nats, 0 on padding, with
            gradient.
        """
        width = max(batch[name].shape[1] for name in names)
        ids, masks = [], []
        for name in names:
            padding = (0, width - batch[name].shape[1])
            ids.append(torch.nn.functional.pad(batch[name], padding))
            masks.append(torch.nn.functional.pad(batch[f"{name}_mask"], padding))
        logprobs = self.service.logprobs(
            batch["context"].repeat(len(names), 1),
            batch["context_mask"].repeat(len(names), 1),
            torch.cat(ids),
            torch.cat(masks),
        )
        return logprobs.chunk(len(names))

    def num_tokens_in_step(self, batch: TensorDict) -> float:
        """The part of a batch, by samples, of the learnt tokens of the whole optimizer step.

        A sum over tokens divided by it is a mean over the step's tokens once the loop has averaged
        the batches by their samples, however the step is split into batches.
        """
        return num_tokens_in_step(batch, self.trained_tokens)

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
        """Save after another process ended, unless it held a part of the weights."""
        if not isinstance(self.service, ShardedService):
            self._save_checkpoint()

    # ---- the job

    @contextmanager
    def _threads(self) -> Iterator[None]:
        asked = self.scenario_instance.num_parameters, self.settings.num_threads
        # Of several processes of a run none forks more: they share the cores, and connections.
        count = choose_num_processes(*asked) if self.team.size == 1 else 1
        with super()._threads(), using_processes(count):
            self.results["num_processes"] = get_num_processes()
            yield

    def train(self) -> None:
        """Measure the untrained policy, train it, measure it again, save it."""
        self._set_seed()
        self._rewind_records()
        actors = actor_options(self.settings, self.scenario_instance.num_parameters)
        with self._open_progress_bar(), using_actors(actors):
            with ExitStack() as stack:
                self._build_test_context(stack)
                self.run_on_leader(self._run_before_loop)
            with ExitStack() as stack:
                self._build_train_context(stack)
                self._run_train_loop()
            with ExitStack() as stack:
                self._build_test_context(stack)
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
            # The bar is told what is done.
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
                break
            started = time.perf_counter()
            seconds: Mapping[str, float] = {}
            if self.state.samples is None:
                is_last = iteration + 1 == iteration_context.num_iterations
                seconds = (
                    self.run_on_leader(partial(self._collect, iteration, is_last=is_last)) or {}
                )
            collected = time.perf_counter()
            try:
                self._update(iteration)
            except LostProcessError:
                # No step was taken on a part of the gradients.
                self._save_without_others()
                raise
            timings = {
                "time/collect_seconds": collected - started,
                "time/update_seconds": time.perf_counter() - collected,
            }
            timings |= {f"time/{part}_seconds": spent for part, spent in seconds.items()}
            self.run_on_leader(partial(self._finish_iteration, iteration_context, timings))

    @attach_progress_bar(lambda self: self.num_measure_parts())
    def _run_test_loop(self, iteration_context: IterationContext) -> None:
        iteration_context.set_description("After training")
        parts = self._checked(self._parts(iteration_context))
        after = self.measure("after", parts)
        self._refuse_nothing("the evaluation after training", after)
        self.results["after"] = after

    def _checked(self, parts: Iterable[int]) -> Iterator[int]:
        """Parts of a measurement, up to one in which no request to a service was answered."""
        for part in parts:
            yield part
            refuse_unanswered(self.services())

    def _measure_after(self) -> None:
        """What follows training; a family may measure more."""
        self._run_test_loop()

    def _parts(self, iteration_context: IterationContext, start: int = 0) -> Iterator[int]:
        """The parts of a measurement, up to the moment when the run is to stop."""
        for part in iteration_context.iterate(start):
            self._raise_if_stopped()
            yield part

    # ---- one iteration

    def _collect(self, iteration: int, *, is_last: bool = False) -> Mapping[str, float]:
        """Gather what the iteration learns from, and give the seconds by part."""
        self._noted = {}
        try:
            with torch.no_grad():
                found = check_experience(self.collect(iteration), owner=type(self).__name__)
        except BudgetExhaustedError:
            # What was learnt so far is paid for.
            self._save_checkpoint()
            raise
        why = self.why_nothing_is_learnt(found)
        if why and not self._has_warned_of_nothing:
            self._warn(f"nothing was learnt in iteration {iteration + 1}: {why}")
            self._has_warned_of_nothing = True
        metrics = found.metrics | {"num_samples": float(len(found.samples))} | self._noted
        self._check_iteration(metrics, is_last=is_last)
        self.state.begin(found.samples, metrics)
        return found.seconds

    def batches(
        self, samples: Sequence[Sample], *, iteration: int, epoch: int
    ) -> Iterator[TensorDict]:
        """An epoch's batches of an iteration's samples."""
        return batches_of(
            samples,
            self.collate_fn,
            size=self.training.minibatch_size,
            order=self.training.batch_order,
            key=(self.hyper_params.seed, iteration, epoch),
        )

    def _update(self, iteration: int) -> None:
        """Step through the iteration's samples, from where it was left."""
        for number, group in enumerate(self._step_groups(iteration)):
            if number < self.state.num_steps_done:
                continue
            with self.policy.counting() as spent:
                metrics = self._optimizer_step(group)
            self.state.count_step(metrics | token_metrics(spent))
            asked = self.settings.stop_flag() if self.settings.stop_flag else None
            if asked := self.team.broadcast(asked):
                self.run_on_leader(self._save_checkpoint)
                raise StopRequested(asked)

    def _step_groups(self, iteration: int) -> Iterator[list[TensorDict]]:
        """The batches of each optimizer step; the last group of an epoch may be smaller."""
        assert self.state.samples is not None
        for epoch in range(self.training.num_epochs):
            batches = self.batches(self.state.samples, iteration=iteration, epoch=epoch)
            yield from in_groups(batches, self.training.gradient_accumulation_steps)

    def _optimizer_step(self, batches: list[TensorDict]) -> dict[str, float]:
        """Take one step on the mean loss over the samples of all batches."""
        progress = self.state.iteration / self.training.num_iterations
        lr = learning_rate(self.training, step=self.state.num_optimizer_steps, progress=progress)
        self._write_step_totals(batches)
        metrics = self.service.forward_backward(batches, self.loss_of)
        self.after_backward(metrics)
        if not math.isfinite(metrics["loss"]):
            self._stop_on_non_finite(metrics["loss"], math.nan)
        step = self.service.optim_step(lr=lr, max_grad_norm=self.training.max_grad_norm)
        if not step.was_taken:
            # A fault may show in the norm even where the loss is fine.
            self._stop_on_non_finite(metrics["loss"], step.grad_norm)
        return metrics | {"grad_norm": step.grad_norm, "lr": lr}

    def _write_step_totals(self, batches: Sequence[TensorDict]) -> None:
        """Tell each batch of a step what the whole step learns; see `num_tokens_in_step`."""
        write_step_totals(batches, self.trained_tokens)

    def dry_run(self) -> dict[str, Any]:
        """Play one episode, take the gradient of one minibatch, and estimate a whole run."""

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
        with ExitStack() as stack:
            self._build_train_context(stack)
            step = measure_smallest_step(play, learn)
        parts = parts_with_models(self.scenario_instance)
        optimizer_bytes = state_per_weight(self.optimizer) * bytes_of(self.learned)
        memory = memory_of(parts, self.learned, optimizer_bytes)
        work = work_of_language_model(step, self.training, memory)
        one, every = map(self.cache_bytes, (1, self.training.num_episodes_per_experience))
        if every:
            work = replace(work, divided_memory={"keys and values": every})
        if self.settings.sharding != "none":
            work = work.with_sharded_weights(bytes_read(self.policy))
        return estimate_run(
            work, step, self.policy.num_parameters(), extra_cache_bytes=max(every - one, 0.0)
        )

    def _stop_on_non_finite(self, loss: float, norm: float) -> None:
        self.run_on_leader(self._save_checkpoint)
        raise non_finite_error(self.state, loss, norm)

    def _finish_iteration(self, context: IterationContext, timings: dict[str, float]) -> None:
        metrics = self.state.end()
        timings |= speed_and_memory(timings, metrics)
        is_best = False
        period = self.training.eval_period
        if period and self.state.iteration % period == 0:
            with torch.no_grad():
                dev = plain_numbers(self.evaluate_dev())
            metrics |= {f"dev/{name}": value for name, value in dev.items()}
            metric = self.training.dev_metric
            if metric not in dev:
                raise ConfigurationError(
                    f"evaluate_dev of the trainer {type(self).__name__} gave no {metric!r}, the "
                    f"training.dev_metric. It gave: {', '.join(map(str, dev)) or 'nothing'}."
                )
            is_best = self.state.count_evaluation(dev[metric])
        self.tracker.log_metrics(metrics | timings, step=self.state.iteration)
        context.set_postfix(
            loss=metrics.get("loss", "nothing to learn from"),
            **self.progress_figures(metrics),
            tokens_per_second=timings["time/tokens_per_second"],
        )
        is_last = self.state.iteration == context.num_iterations
        every = self.settings.checkpoint_period
        if is_best or is_last or (every and self.state.iteration % every == 0):
            self._save_checkpoint(is_best=is_best)
        self._stop_between_iterations(already_saved=is_last)

    def _stop_between_iterations(self, *, already_saved: bool) -> None:
        try:
            self._raise_if_stopped()
        except StopRequested:
            if not already_saved:
                self._save_checkpoint()
            raise

    # ---- saving

    def save_models(self, directory: Path) -> None:
        """Write policy, modules and optimizer."""
        self.service.save_state(directory)

    def load_models(self, directory: Path) -> None:
        """Read what `save_models` wrote."""
        self.service.load_state(directory)

    def _take_best(self) -> None:
        """Take the weights that did best on the dev data.

        Raises
        ------
        CheckpointError
            When their checkpoint is lost or corrupt.
        """
        store = self._checkpoint_store()
        best = self.team.broadcast("" if store is None else str(store.open_best()))
        if best:
            self.service.load_state(Path(best))
            logger.info("restored the best checkpoint %s", Path(best).name)

    @abstractmethod
    def _write_results(self) -> None:
        """Complete `results`, and write them where there is a run directory."""

    def _warn(self, text: str) -> None:
        self.results.setdefault("warnings", []).append(text)
        logger.warning(text, extra={"told_at_the_end": True})
