"""The loop of trainers of chat models that follow an interaction protocol in text.

An iteration has five stages: play rollouts, log their statistics, test, submit fine-tuning jobs,
and wait for these. The state is saved after each, answers are kept on arrival, and jobs have fixed
names, so that a killed run continues from any point and pays for nothing twice.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import shutil
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from inspect import signature
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from nip_astra.checkpoints.run_state import RunState
from nip_astra.errors import ConfigurationError, DataError, ServiceError
from nip_astra.language_models.services.fine_tuning import FineTuningOptions, JobStatus
from nip_astra.language_models.services.retrying import RetryingChatModel
from nip_astra.parameters.trainers import guess_replacement_proportion
from nip_astra.samplers.text_rollouts import (
    AnswerJournal,
    TextNode,
    TextRolloutSampler,
    rollouts_of,
)
from nip_astra.scenario_base.text.game import TextEpisode
from nip_astra.scenario_base.text.models import GROUPS, JobPlan, folder_of_group, models_of_run
from nip_astra.scenarios.pure_text_base import PURE_TEXT, PureTextScenarioInstance
from nip_astra.tracking.run_directory import write_atomically
from nip_astra.tracking.tracker import plain_numbers
from nip_astra.trainers.protocol.statistics import COLUMNS, as_of_test
from nip_astra.trainers.service_use import (
    cost_metrics,
    refuse_unanswered,
    services_used,
    total_cost,
    usage_metrics,
)
from nip_astra.trainers.text.analysis import (
    JUDGE,
    log_analyses,
    log_analyses_artifact,
    open_analyses,
)
from nip_astra.trainers.text.rollouts import (
    RolloutFiles,
    episode_rows,
    held_out_episodes,
    rollout_statistics,
    shuffled,
    statistics_with_interval,
    train_episodes,
)
from nip_astra.trainers.trainer_base import IterationContext, Trainer, attach_progress_bar
from nip_astra.utils.actors import actor_options, forget_kept_models, using_actors
from nip_astra.utils.nested_array_dict import NestedArrayDict

logger = logging.getLogger(__name__)

Split = Literal["train", "test"]
FIRST_LOOK, LONGEST_WAIT = 0.02, 10.0
"""Shortest and longest wait between two looks at jobs, in seconds; each doubles the last."""
NUM_DRY_RUN_ROLLOUTS = 4
"""Number of rollouts of each kind in a dry run."""


class Stage(StrEnum):
    """Stages of an iteration, in order; the state is saved after each."""

    SAMPLE_ROLLOUTS = "sample_rollouts"
    LOG_STATS = "log_stats"
    TEST = "test_during_training"
    CREATE_FINE_TUNE_JOBS = "create_fine_tune_jobs"
    AWAIT_FINE_TUNE_JOBS = "await_fine_tune_jobs"


STAGES = tuple(Stage)


@dataclass
class TextRunState(RunState):
    """Counters and figures of a run; all plain values.

    Attributes
    ----------
    run_key : str
        Names the run at its services, where two runs may have the same name.
    stage : str
        The next `Stage`.
    after : dict or None
        Statistics of the last test.
    last : dict
        Statistics of the last iteration's rollouts.
    num_requests, prompt_tokens, completion_tokens : int
        Requests to chat models, and their cost.
    num_jobs : int
        Fine-tuning jobs submitted.
    groups : dict
        State of each group of agents.
    """

    run_key: str = field(default_factory=lambda: secrets.token_hex(6))
    stage: str = str(Stage.SAMPLE_ROLLOUTS)
    after: dict[str, Any] | None = None
    last: dict[str, Any] = field(default_factory=dict)
    num_requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    num_jobs: int = 0
    groups: dict[str, Any] = field(default_factory=dict)

    @property
    def update_count(self) -> int:
        """Completed stages, over all iterations."""
        return self.iteration * len(STAGES) + STAGES.index(Stage(self.stage))

    def advance(self) -> None:
        """Move to the next stage, which may be the first of the next iteration."""
        place = STAGES.index(Stage(self.stage)) + 1
        self.iteration += place == len(STAGES)
        self.stage = str(STAGES[place % len(STAGES)])

    def costs(self) -> dict[str, int]:
        """Return the requests to services so far."""
        return {
            "num_requests": self.num_requests,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "num_jobs": self.num_jobs,
        }


class PureTextRlTrainer(Trainer):
    """Base of trainers of chat models. Subclasses implement `_stage_create_fine_tune_jobs`.

    Hooks: `_sample_rollouts`, `_get_log_stats`, `_stage_create_fine_tune_jobs`, and for further
    state `trainer_state` and `load_trainer_state`.

    Attributes
    ----------
    text_rl : TextRlParameters
        Parameters of the family.
    instance : PureTextScenarioInstance
        The built components.
    agent_names : tuple of str
        In the order of every dimension `A` of rollouts.
    shared_model_groups : Mapping of PureTextSharedModelGroup
        By name; each submits its jobs.
    analyses : RolloutAnalyses or None
        Questions to a judge about rollouts, where the parameters have some.
    state : TextRunState
        Progress of the run.
    """

    evaluation_family: ClassVar[str | None] = "text_protocol"
    State: ClassVar[type[RunState]] = TextRunState
    trainer_type: ClassVar[str] = PURE_TEXT
    figures: ClassVar[tuple[str, ...] | None] = (
        *("mean_accuracy", "accuracy_of_*", "accuracy_where_*", "worst_datapoint_accuracy"),
        *("share_undecided", "mean_episode_length", "mean_decision", "num_*"),
        *("*/mean_episode_reward", "*/std_episode_reward", "*/share_*"),
    )
    plays_on_actors: ClassVar[bool] = True
    parameter_groups: ClassVar[tuple[str, ...] | None] = ("text_rl",)
    num_branches: int = 1
    """Continuations of each training rollout in each round."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        instance = self.scenario_instance
        if not isinstance(instance, PureTextScenarioInstance):
            raise ConfigurationError(
                f"the trainer {self.hyper_params.trainer!r} needs chat models, which a scenario of "
                f"kind {instance.kind!r} does not build. Choose another --scenario."
            )
        self.instance, self.game = instance, instance.game
        self.text_rl = self.hyper_params.text_rl
        self.agent_names = instance.game.protocol.agent_names
        self.shared_model_groups = instance.shared_model_groups
        self.sampler = TextRolloutSampler(instance.game, instance.agents)
        self.files = RolloutFiles(self.run_directory, instance.game.protocol)
        self.analyses = open_analyses(instance, self.settings)
        self._rollouts: NestedArrayDict | None = None
        self._may_have_dead_jobs = False
        self._services_used: dict[str, Any] = {}

    # ---- hooks

    def _sample_rollouts(self, split: Split, iteration: int) -> NestedArrayDict:
        """Sample an iteration's rollouts, for training or a test; stored answers are reused."""
        num_branches = self.num_branches if split == "train" else 1
        return self._play(split, iteration, num_branches=num_branches)

    def _get_log_stats(self, rollouts: NestedArrayDict, *, train: bool = True) -> dict[str, float]:
        """Return metrics of rollouts; `train` is whether they are for training.

        Names are equal in both cases: those of a test get the prefix `test_` when logged.
        """
        return rollout_statistics(rollouts, self.agent_names, self.instance.groupings)

    @abstractmethod
    def _stage_create_fine_tune_jobs(self, rollouts: NestedArrayDict) -> None:
        """Submit jobs for the groups in `shared_model_groups`, from an iteration's rollouts.

        A run that is killed in this stage repeats it: it must submit the same jobs, in the same
        order, which are then recognised and not repeated.
        """

    # ---- the job

    def train(self) -> None:
        """Run all iterations, and write the results."""
        self._set_seed()
        self._rewind_records()
        self._prepare_groups()
        try:
            with self._open_progress_bar(), using_actors(actor_options(self.settings)):
                self._run_train_loop()
            self._publish_models(self._write_models, role="agents")
        finally:
            self.close()
        self._write_results()

    def rerun_tests(self, base_run: Path) -> None:
        """Test the trained models of a finished run again, without training."""
        self._set_seed()
        self.take_up_models(models_of_run(base_run))
        # As the base run was tested last, so that the same models give the same figures.
        self.state.iteration = self.text_rl.num_iterations - 1
        try:
            with using_actors(actor_options(self.settings)):
                self._stage_test(self.state.iteration)
        finally:
            self.close()
        self._write_results()

    def take_up_models(self, groups: Mapping[str, Any]) -> None:
        """Load the models of a run for the agents; see `models_of_run`."""
        self._prepare_groups()
        self.state.groups = dict(groups)
        self._take_up_groups()

    @attach_progress_bar(lambda self: self.text_rl.num_iterations)
    def _run_train_loop(self, iteration_context: IterationContext) -> None:
        num_iterations = iteration_context.num_iterations
        if self.state.update_count == 0:
            # Before anything is paid for, so that the run's key at its services is known.
            self._save_checkpoint()
        for iteration in iteration_context.iterate(self.state.iteration):
            is_last = iteration == num_iterations - 1
            # A test run sees that jobs work as well.
            trains = not is_last or self.settings.test_run
            while self.state.iteration == iteration:
                stage = Stage(self.state.stage)
                iteration_context.set_description(stage.replace("_", " ").capitalize())
                self._run_stage(stage, iteration, is_last=is_last, trains=trains)
                self.state.advance()
                self._save_checkpoint()
                iteration_context.set_postfix(
                    accuracy=self.state.last.get("mean_accuracy", float("nan")),
                    **usage_metrics(self.state.costs(), self.services()),
                )
                self._raise_if_stopped()

    def _run_stage(self, stage: Stage, iteration: int, *, is_last: bool, trains: bool) -> None:
        if stage == Stage.SAMPLE_ROLLOUTS:
            self._rollouts = self._sampled("train", iteration)
            self.files.keep(self._rollouts, "train", iteration)
        elif stage == Stage.LOG_STATS:
            self._stage_log_stats(iteration)
        elif stage == Stage.TEST:
            if self.is_test_due(iteration, is_last=is_last):
                self._stage_test(iteration)
        elif stage == Stage.CREATE_FINE_TUNE_JOBS:
            if trains:
                self._stage_create_fine_tune_jobs(self._rollouts_to_learn_from(iteration))
                self._note_groups()
        elif trains:
            if self._may_have_dead_jobs:
                self._submit_dead_jobs_again(iteration)
            self._stage_await_fine_tune_jobs()

    # ---- stages

    def _stage_log_stats(self, iteration: int) -> None:
        rollouts = self._rollouts_of(iteration)
        self.state.last = self._statistics_of(rollouts, train=True)
        if self.instance.analysis is not None and self.instance.analysis.are_train_rollouts_judged:
            self.state.last |= self._analyse(rollouts, "train", iteration)
        figures = cost_metrics(self.state.costs(), self.services())
        self.tracker.log_metrics(self.state.last | figures, step=iteration + 1)
        if iteration % self.settings.rollout_sample_period == 0:
            self._log_rows(rollouts, "train", iteration + 1, self.settings.num_rollout_samples)

    def is_test_due(self, iteration: int, *, is_last: bool) -> bool:
        """Return whether agents are tested in an iteration."""
        scheme = self.text_rl.test_scheme
        if scheme == "first_and_last":
            return iteration == 0 or is_last
        return scheme == "all" or (scheme == "last" and is_last)

    def _stage_test(self, iteration: int) -> None:
        rollouts = self._sampled("test", iteration)
        self.files.keep(rollouts, "test", iteration)
        report = self.figures_of(rollouts) | self._analyse(rollouts, "test", iteration)
        self.tracker.log_metrics(as_of_test(report), step=iteration + 1)
        if self.state.before is None and iteration == 0:
            self.state.before = report
        self.state.after = report
        table = "evaluation" if iteration else "before"
        self._log_rows(rollouts, table, iteration + 1, len(rollouts))

    def _stage_await_fine_tune_jobs(self) -> None:
        """Wait until all jobs have ended, and continue with their models."""
        wait = FIRST_LOOK
        while not all(
            group.get_fine_tune_job_status() in (None, JobStatus.SUCCEEDED)
            for group in self.shared_model_groups.values()
        ):
            self._raise_if_stopped()
            time.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT)
        for group in self.shared_model_groups.values():
            group.switch_to_next_model()
        forget_kept_models()
        self._note_groups()

    def _submit_dead_jobs_again(self, iteration: int) -> None:
        """Resubmit the jobs that died before this process started, under their next keys."""
        self._may_have_dead_jobs = False
        groups = list(self.shared_model_groups.values())
        dead = [group for group in groups if group.drop_dead_job()]
        if not dead:
            return
        logger.warning("jobs of %s have died and are submitted again", [one.name for one in dead])
        for group in groups:
            group.is_waiting = group not in dead
        self._stage_create_fine_tune_jobs(self._rollouts_to_learn_from(iteration))
        self._note_groups()
        self._save_checkpoint()

    # ---- calls of hooks, which a base class with other signatures overrides

    def _sampled(self, split: Split, iteration: int) -> NestedArrayDict:
        """Return the rollouts of the hook `_sample_rollouts`."""
        return self._sample_rollouts(split, iteration)

    def _statistics_of(self, rollouts: NestedArrayDict, *, train: bool) -> dict[str, Any]:
        """Return the metrics of the hook `_get_log_stats`, which may lack `train`."""
        takes_train = "train" in signature(self._get_log_stats).parameters
        options = {"train": train} if takes_train else {}
        return plain_numbers(self._get_log_stats(rollouts, **options))

    def _rollouts_to_learn_from(self, iteration: int) -> NestedArrayDict:
        """Return the rollouts for the hook `_stage_create_fine_tune_jobs`."""
        return self._rollouts_of(iteration)

    # ---- rollouts

    def _play(self, split: Split, iteration: int, *, num_branches: int = 1) -> NestedArrayDict:
        """Sample rollouts; answers in the journal of this sampling are reused."""
        # The models of an earlier iteration are no longer available.
        journal = self.files.journal(
            split, iteration, self.state.run_key, is_replayed=iteration < self.state.iteration
        )
        ends = self.sample_text(
            self.episodes(split, iteration),
            key=(self.hyper_params.seed, split, iteration),
            journal=journal,
            num_branches=num_branches,
        )
        self._count_requests(journal)
        return rollouts_of(self.game, ends)

    def _count_requests(self, journal: AnswerJournal) -> None:
        """Add the requests of a sampling to the costs."""
        prompt_tokens, completion_tokens = journal.tokens()
        self.state.num_requests += len(journal)
        self.state.prompt_tokens += prompt_tokens
        self.state.completion_tokens += completion_tokens

    def sample_text(
        self,
        episodes: Sequence[TextEpisode],
        *,
        key: tuple[str | int, ...],
        journal: AnswerJournal,
        num_branches: int = 1,
    ) -> list[TextNode]:
        """Sample episodes, up to a round in which no chat model request was answered."""

        def after_round(number: int) -> None:
            self._raise_if_stopped()
            refuse_unanswered(self.services())

        try:
            return self.instance.loop.run(
                self.sampler.sample(
                    episodes,
                    key=key,
                    num_branches=num_branches,
                    journal=journal,
                    after_round=after_round,
                )
            )
        except ServiceError:
            refuse_unanswered(self.services())
            raise

    def episodes(self, split: Split, iteration: int) -> list[TextEpisode]:
        """Return the episodes of an iteration, for training or a test."""
        seed, count = self.hyper_params.seed, self.text_rl.rollouts_per_iteration
        if split == "train":
            return list(train_episodes(self.instance, seed=seed, iteration=iteration, count=count))
        tested = None if self.text_rl.test_on_whole_dataset else count
        return list(held_out_episodes(self.instance, seed=seed, count=tested))

    def _split_for_guess_replacement(
        self, rollouts: NestedArrayDict, iteration: int
    ) -> tuple[NestedArrayDict, NestedArrayDict]:
        """Split rollouts into those in which the verifier's decision is replaced, and others."""
        proportion = guess_replacement_proportion(self.text_rl, iteration)
        order = shuffled(len(rollouts), self.hyper_params.seed, "guess replacement", iteration)
        num_replaced = int(proportion * len(rollouts))
        chosen, others = sorted(order[:num_replaced]), sorted(order[num_replaced:])
        return (
            rollouts[np.array(chosen, dtype=np.int64)],
            rollouts[np.array(others, dtype=np.int64)],
        )

    def _rollouts_of(self, iteration: int) -> NestedArrayDict:
        """Return the training rollouts of this or an earlier iteration."""
        if self._rollouts is not None and iteration == self.state.iteration:
            return self._rollouts
        try:
            return self.files.load("train", iteration)
        except DataError as error:
            logger.warning("%s; rebuilding the rollouts from their answers", error)
        costs = self.state.costs()
        rollouts = self._sample_rollouts("train", iteration)
        for name, counted_before in costs.items():
            setattr(self.state, name, counted_before)
        self.files.keep(rollouts, "train", iteration)
        return rollouts

    def figures_of(self, rollouts: NestedArrayDict) -> dict[str, Any]:
        """Return figures of rollouts for results: the logged ones, with an interval."""
        measured = statistics_with_interval(rollouts, self.agent_names, self.instance.groupings)
        return measured | self._statistics_of(rollouts, train=False)

    def _analyse(self, rollouts: NestedArrayDict, split: Split, iteration: int) -> dict[str, float]:
        """Return metrics of a judge's verdicts on rollouts, if there is a judge."""
        if self.analyses is None:
            return {}
        # A resumed run repeats a stage, perhaps with another judge.
        found = self.analyses.analyse(rollouts, split, iteration, is_overwritten=True)
        log_analyses(found, self.tracker, step=iteration + 1)
        return {name: value for one in found for name, value in one.figures.items()}

    def _log_rows(self, rollouts: NestedArrayDict, table: str, step: int, num_rows: int) -> None:
        rows = episode_rows(
            rollouts,
            self.game,
            num_episodes=min(num_rows, len(rollouts)),
            step=step,
            seed=self.hyper_params.seed,
        )
        self.tracker.log_table(table, COLUMNS, rows, step=step)

    # ---- groups

    def _prepare_groups(self) -> None:
        plan = JobPlan(
            run_key=self.state.run_key,
            seed=self.hyper_params.seed,
            min_examples=self.text_rl.min_fine_tune_examples,
            options=FineTuningOptions(
                num_epochs=self.text_rl.num_fine_tune_epochs,
                batch_size=self.text_rl.fine_tune_minibatch_size,
                lr_multiplier=self.text_rl.fine_tune_lr_multiplier,
                nll_weight=self.text_rl.fine_tune_nll_weight,
                freeze_embeddings=self.text_rl.fine_tune_freeze_embeddings,
                lr_schedule=self.text_rl.fine_tune_lr_schedule,
                truncate_prompts=self.text_rl.fine_tune_truncate_prompts,
                trained_weights=self.text_rl.fine_tune_trained_weights,
            ),
        )
        for group in self.shared_model_groups.values():
            group.plan = plan
        self._take_up_groups()

    def _take_up_groups(self) -> None:
        for name, group in self.shared_model_groups.items():
            state = self.state.groups.get(name)
            if state is None:
                continue
            group.set_state(state)
            trained_weights = group.plan.options.trained_weights
            if "trained_weights" not in state and trained_weights is not None:
                logger.warning(
                    "this run began before jobs had the option trained_weights: those of the group "
                    "%r go on to train %s weights.",
                    name,
                    trained_weights,
                )

    def _note_groups(self) -> None:
        groups = self.shared_model_groups
        self.state.groups = {name: group.get_state() for name, group in groups.items()}
        self.state.num_jobs = sum(len(list(filter(None, one.job_ids))) for one in groups.values())

    def close(self) -> None:
        """Close the connections to models; they reopen on use."""
        self._services_used = services_used(self.services())

        async def close() -> None:
            await asyncio.gather(*(one.close() for one in self.shared_model_groups.values()))

        self.instance.loop.run(close())
        self.instance.loop.close()

    # ---- saving

    def resume(self, checkpoint: Path) -> None:
        """Restore the state of a checkpoint."""
        super().resume(checkpoint)
        of_jobs = (Stage.CREATE_FINE_TUNE_JOBS, Stage.AWAIT_FINE_TUNE_JOBS)
        self._may_have_dead_jobs = self.state.stage in of_jobs

    def _write_models(self, folder: Path) -> None:
        """Copy models trained here, and record the locations of all others."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for name, group in self.shared_model_groups.items():
            group.save_model(folder / folder_of_group(name))
        self._note_groups()
        write_atomically(folder / GROUPS, json.dumps(self.state.groups, indent=2))

    def _write_results(self) -> None:
        self._note_groups()
        state = self.state
        results = {
            "kind": "interaction_proof",
            "protocol": self.hyper_params.interaction_protocol,
            "agents": list(self.agent_names),
            "before": state.before,
            # Without a test, the last rollouts of training are all that is known.
            "after": state.after if state.after is not None else state.last,
            "models": {name: one.model_name for name, one in self.shared_model_groups.items()},
            "groups": state.groups,
            "training": {
                "num_iterations": state.iteration,
                "last": state.last,
                **state.costs(),
            },
        }
        if self.run_directory is not None:
            run_id, folder = self.run_directory.run_id, self.run_directory.rollouts_dir
            self.tracker.log_artifact(folder, name=f"rollouts-{run_id}", type="rollouts")
            log_analyses_artifact(self.tracker, self.run_directory)
        self.store_results(results | self._services_used)

    def services(self) -> dict[str, RetryingChatModel]:
        """Return the open models, by group, and the judge."""
        models_by_group = {
            name: group.models()[-1:] for name, group in self.shared_model_groups.items()
        }
        if self.analyses is not None:
            models_by_group[JUDGE] = [self.analyses.model]
        return {
            name: model
            for name, models in models_by_group.items()
            for model in models
            if isinstance(model, RetryingChatModel)
        }

    def dry_run(self) -> dict[str, Any]:
        """Sample a few rollouts as in training and in tests, and extrapolate to a whole run.

        The time is an upper bound: a local model answers many requests in hardly more time than a
        few.
        """
        self._prepare_groups()
        try:
            num_iterations = self.text_rl.num_iterations
            num_tests = sum(
                self.is_test_due(number, is_last=number == num_iterations - 1)
                for number in range(num_iterations)
            )
            num_played = num_iterations * len(self.episodes("train", 0))
            num_tested = num_tests * len(self.episodes("test", 0))
            played = self._measured(self.num_branches)
            tested = played if self.num_branches == 1 else self._measured(1)
            if (analysis := self.instance.analysis) and not analysis.are_train_rollouts_judged:
                played = played | {"num_judge_requests": 0.0}
            totals = {
                name: num_played * played[name] + num_tested * tested[name] for name in played
            }
            hours, cost = totals.pop("hours"), totals.pop("cost")
            is_priced = total_cost(self.services()) is not None
        finally:
            self.close()
        learning = [one for one in self.shared_model_groups.values() if not one.is_frozen]
        return {
            "num_iterations": num_iterations,
            "num_rollouts": num_played + num_tested,
            "num_jobs": (num_iterations - 1) * len(learning),
            "seconds_per_episode": 3600 * hours / max(num_played + num_tested, 1),
            **{name: round(value) for name, value in totals.items()},
            "estimated_training_hours": hours,
            **({"cost": cost} if is_priced else {}),
        }

    def _measured(self, num_branches: int) -> dict[str, float]:
        """Return requests, tokens, cost and hours of an episode, means over a few."""
        episodes, journal = self.episodes("train", 0)[:NUM_DRY_RUN_ROLLOUTS], AnswerJournal()
        key = (self.hyper_params.seed, "dry run", num_branches)
        for group in self.shared_model_groups.values():
            # Loading one takes longer than playing a few rollouts, and is done once.
            _ = group.model
        started, cost_before = time.perf_counter(), total_cost(self.services()) or 0.0
        ends = self.instance.loop.run(
            self.sampler.sample(episodes, key=key, num_branches=num_branches, journal=journal)
        )
        hours = (time.perf_counter() - started) / 3600
        prompt_tokens, completion_tokens = journal.tokens()
        cost = (total_cost(self.services()) or 0.0) - cost_before
        found = {
            "num_requests": len(journal),
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "cost": cost,
            "hours": hours,
        }
        if self.analyses is not None:
            counts = self.analyses.count_requests(rollouts_of(self.game, ends))
            found["num_judge_requests"] = sum(counts.values())
        return {name: value / len(episodes) for name, value in found.items()}
