"""The loop of adaptive stress testing: play, learn, and measure on held-out prompts.

A trainer of the family gives two hooks: `flatten`, training samples from a tree, and `step`, the
loss of a batch. Everything else (collection, reward terms, credit, accumulation, schedules, dev
evaluation, early stopping, checkpoints, results) is done here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from tensordict import TensorDict

from nip_astra.errors import (
    BudgetExhaustedError,
    ConfigurationError,
    NonFiniteLossError,
    StopRequested,
)
from nip_astra.language_models.vllm_backend.sampler_gap import SamplerGap
from nip_astra.parameters.types import ScenarioType
from nip_astra.rollouts.tree import RolloutTree
from nip_astra.samplers.sizes import num_probes_of
from nip_astra.scenario_base.conversation.planted_failures import Discovery
from nip_astra.scorers.base import Scorer
from nip_astra.tracking.groups import summary_of
from nip_astra.trainers.ast.behaviour import Behaviour
from nip_astra.trainers.ast.checkpoints import AstCheckpoints
from nip_astra.trainers.ast.dry_run import check_size, estimate_cost, estimate_services
from nip_astra.trainers.ast.evaluation import AstEvaluation, rollout_table, warnings_about
from nip_astra.trainers.ast.harness import Harness
from nip_astra.trainers.ast.hooks import AstHooks
from nip_astra.trainers.ast.results import service_metrics, training_summary
from nip_astra.trainers.ast.rewards import RewardShaping
from nip_astra.trainers.ast.state import AstState
from nip_astra.trainers.ast.tokens import rollout_token_metrics, update_token_metrics
from nip_astra.trainers.optimization import (
    Gradients,
    accumulate_gradients,
    build_optimizer,
    learning_rate,
)
from nip_astra.trainers.timing import Components, components_of_stress_test
from nip_astra.trainers.trainer_base import (
    IterationContext,
    TensorDictTrainer,
    attach_progress_bar,
)
from nip_astra.utils.forked import get_num_processes, using_processes
from nip_astra.utils.processor import choose_num_processes, peak_memory_bytes

logger = logging.getLogger(__name__)

DEV_FIGURES = ("failure_rate", "mean_score", "mean_reward", "probe_nll", "distinct_share")
"""Figures of a dev evaluation that are logged as `dev/<name>`."""


class AstTrainer(AstHooks, TensorDictTrainer):
    """Train an attacker by playing trees of conversation against a frozen target.

    The hooks stand in `AstHooks`; a trainer defines `flatten` and `step`.
    """

    scenario_kinds: ClassVar[tuple[str, ...]] = (str(ScenarioType.AST_CHAT),)
    parameter_groups: ClassVar[tuple[str, ...] | None] = ("training",)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        sampler = self.scenario_instance.sampler
        if sampler is None:
            raise ConfigurationError("an AST trainer needs a scenario that builds a tree sampler")
        self.training = self.hyper_params.training
        self.scenario = getattr(self.hyper_params, self.scenario_instance.kind)
        self.sampler = sampler
        self.attacker = self.scenario_instance.agents["attacker"]
        self.policy = self.attacker.language_model
        self.behaviour = self._behaviour()
        self.modules = torch.nn.ModuleDict(self.build_modules())
        policy, modules = list(self.policy.parameters()), list(self.modules.parameters())
        self.learned = [*policy, *modules]
        self.optimizer = build_optimizer(
            self.training, policy, more=[(modules, self.modules_lr_factor)]
        )
        check_size(self.training, self.scenario.tree_width, self.scenario.tree_depth)
        self.shaping = RewardShaping(self.scenario_instance.reward_terms)
        self.harness = Harness(
            sampler,
            self,
            self.scenario_instance.datasets["train"],
            num_episodes_per_experience=self.training.num_episodes_per_experience,
            batch_size=self.training.batch_size,
            tree_width=self.scenario.tree_width,
            tree_depth=self.scenario.tree_depth,
            seed=self.hyper_params.seed,
            batch_order=self.training.batch_order,
            prepare=self.prepare,
        )
        self.evaluation = AstEvaluation(self.hyper_params, self.scenario_instance)
        self.checkpoints = AstCheckpoints(
            self._checkpoint_store(), self.policy, self.modules, self.optimizer, self.tracker
        )
        self.state = AstState()

    # ---- the job

    @contextmanager
    def _threads(self) -> Iterator[None]:
        asked = self.scenario_instance.num_parameters, self.settings.num_threads
        with super()._threads(), using_processes(choose_num_processes(*asked)):
            self.results["num_processes"] = get_num_processes()
            yield

    def train(self) -> None:
        """Measure the untrained attacker, train it, measure it again, save it."""
        self._set_seed()
        self.checkpoints.rewind_records()
        with self._open_progress_bar():
            with ExitStack() as stack:
                self._build_test_context(stack)
                self._run_before_loop()
            with ExitStack() as stack:
                self._build_train_context(stack)
                self._run_train_loop()
            with ExitStack() as stack:
                self._build_test_context(stack)
                if self.state.best_dev_value is not None:
                    # The weights that did best on the dev prompts.
                    self.checkpoints.restore_best()
                self._run_test_loop()
                self._run_random_search_loop()
        self._save_models()
        self._write_results()

    @attach_progress_bar(lambda self: self.evaluation.num_parts("test"))
    def _run_before_loop(self, iteration_context: IterationContext) -> None:
        iteration_context.set_description("Before training")
        done = self.evaluation.num_parts("test") if self.state.before is not None else 0
        tally = self.evaluation.run("test", self._parts(iteration_context, done))
        if self.state.before is None:
            self.state.before = tally.report().to_dict()
            self.tracker.log_table("before", *rollout_table(tally.trees), step=0)
        self._raise_if_stopped()

    @attach_progress_bar(lambda self: self.training.training_steps)
    def _run_train_loop(self, iteration_context: IterationContext) -> None:
        iteration_context.set_description("Training")
        for iteration in iteration_context.iterate(self.state.iteration):
            if self._has_stopped_early():
                break
            started = time.perf_counter()
            parts = self._collect_or_save(iteration) if self.state.samples is None else {}
            collected = time.perf_counter()
            self._update(iteration)
            timings = {
                "time/collect_seconds": collected - started,
                "time/update_seconds": time.perf_counter() - collected,
            }
            timings |= {f"time/{part}_seconds": seconds for part, seconds in parts.items()}
            self._finish_iteration(iteration_context, timings)

    @attach_progress_bar(lambda self: self.evaluation.num_parts("test"))
    def _run_test_loop(self, iteration_context: IterationContext) -> None:
        iteration_context.set_description("After training")
        tally = self.evaluation.run("test", self._parts(iteration_context))
        found = self._discovery()
        for tree in tally.trees:
            found.update(tree)
        after = tally.report()
        for text in warnings_about(after, self.state.num_optimizer_steps):
            self._warn(text)
        self.results["after"] = after.to_dict() | {
            "plants_found": found.num_found if found.planted else None,
            "plants_found_held_out": after.plants_found,
            "target_queries": found.num_queries,
            "first_query": dict(found.first_query),
        }
        self.tracker.log_table("evaluation", *rollout_table(tally.trees), step=self.state.iteration)

    @attach_progress_bar(lambda self: self.evaluation.num_random_search_parts())
    def _run_random_search_loop(self, iteration_context: IterationContext) -> None:
        if iteration_context.num_iterations == 0:
            self.results["random_search"] = None
            return
        iteration_context.set_description("Random search")
        self.results["random_search"] = self.evaluation.random_search(
            self.results["after"]["target_queries"], self._parts(iteration_context)
        )

    def _parts(self, iteration_context: IterationContext, start: int = 0) -> Iterator[int]:
        """The batches of an evaluation, up to the moment when the run is to stop."""
        for part in iteration_context.iterate(start):
            self._raise_if_stopped()
            yield part

    # ---- one iteration

    def _behaviour(self) -> Behaviour | None:
        """Return what probabilities are learnt from, and warn where they are off-policy."""
        parameters = getattr(self.parameters, "behaviour", None)
        if parameters is None and not self.compares_with_sampler:
            return None
        section = f"{self.hyper_params.trainer}.behaviour"
        found = Behaviour(parameters, self.attacker.sampling, section)
        if found.warning:
            self._warn(found.warning)
        return found

    def prepare(self, tree: RolloutTree) -> dict[str, float]:
        """Add reward terms and credit to a training rollout, and give what to log."""
        gap = SamplerGap()
        if self.compares_with_sampler and not self.policy.samples_as_it_scores:
            nodes, mask_NT = tree.nodes, tree.nodes["probe_mask"]
            with self.policy.rescoring():
                scored_NT = self.probe_logprobs(tree)
            gap.note(nodes["probe_logprobs"][mask_NT], scored_NT[mask_NT])
            nodes["probe_logprobs"] = scored_NT
        metrics = gap.take()
        if self.behaviour is not None:
            reference = self.sampler.reference.language_model
            metrics |= self.behaviour.prepare(tree, self.policy, reference)
        metrics |= self.shaping.apply(tree)
        tree.nodes["credit"] = self.credit(tree)
        return metrics

    def _collect_or_save(self, iteration: int) -> dict[str, float]:
        """Collect; where nothing more may be spent, what was learnt so far is saved."""
        try:
            return self._collect(iteration)
        except BudgetExhaustedError:
            self._save_checkpoint()
            raise

    def _collect(self, iteration: int) -> dict[str, float]:
        """Play the iteration's episodes, keep what they teach, and give the seconds by part."""
        models = {
            role: getattr(self.sampler, role).language_model
            for role in ("attacker", "target", "reference")
        }
        # What evaluations have sampled is left out.
        self.policy.take_metrics()
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            counts = {role: stack.enter_context(model.counting()) for role, model in models.items()}
            experience = self.harness.experience(iteration)
        tree = experience.tree
        discovery = self._discovery()
        discovery.update(tree)
        self.state.num_queries = discovery.num_queries
        self.state.first_query = discovery.first_query
        self.shaping.observe(tree)
        metrics = self.evaluation.tree_metrics(tree) | {
            "num_samples": float(len(experience.samples)),
            "target_queries": float(self.state.num_queries),
            "tokens/generated": float(sum(count.generated for count in counts.values())),
            **rollout_token_metrics(counts, tree),
            **self.policy.take_metrics(),
            **experience.metrics,
            **self.flatten_metrics,
            **service_metrics(self.scenario_instance.services),
        }
        if discovery.planted:
            metrics["plants_found"] = float(discovery.num_found)
        self.state.begin(experience.samples, metrics)
        if iteration % self.settings.rollout_sample_period == 0:
            self.tracker.log_table(
                "train",
                *rollout_table([tree], num_episodes=self.settings.num_rollout_samples),
                step=iteration + 1,
            )
        return tree.seconds

    def _update(self, iteration: int) -> None:
        """Step through the iteration's samples, from where it was left."""
        for number, group in enumerate(self._step_groups(iteration)):
            if number < self.state.num_steps_done:
                continue
            with self.policy.counting() as spent:
                metrics = self._optimizer_step(group)
            self.state.count_step(metrics | update_token_metrics(spent))
            if self.settings.stop_flag and self.settings.stop_flag():
                self._save_checkpoint()
                self._raise_if_stopped()

    def _step_groups(self, iteration: int) -> Iterator[list[TensorDict]]:
        """The batches of each optimizer step; the last group of an epoch may be smaller."""
        assert self.state.samples is not None
        size = self.training.gradient_accumulation_steps
        for epoch in range(self.training.num_epochs):
            group: list[TensorDict] = []
            batches = self.harness.batches(self.state.samples, iteration=iteration, epoch=epoch)
            for batch in batches:
                group.append(batch)
                if len(group) == size:
                    yield group
                    group = []
            if group:
                yield group

    def _optimizer_step(self, batches: list[TensorDict]) -> dict[str, float]:
        """Take one step on the mean loss over the samples of all batches."""
        progress = self.state.iteration / self.training.training_steps
        lr = learning_rate(self.training, step=self.state.num_optimizer_steps, progress=progress)
        for parameter_group in self.optimizer.param_groups:
            parameter_group["lr"] = lr * parameter_group["lr_factor"]
        self.optimizer.zero_grad(set_to_none=True)
        self._step_batches = batches
        gradients = accumulate_gradients(
            batches, self.harness.step, self.learned, max_grad_norm=self.training.max_grad_norm
        )
        self._step_batches = []
        if not gradients.are_finite:
            self._stop_on_non_finite(gradients)
        self.optimizer.step()
        return gradients.metrics | {"grad_norm": gradients.norm, "lr": lr}

    def _stop_on_non_finite(self, gradients: Gradients) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self._save_checkpoint()
        raise NonFiniteLossError(
            f"optimizer step {self.state.num_optimizer_steps + 1} (iteration "
            f"{self.state.iteration + 1}) has loss {gradients.metrics['loss']} and gradient norm "
            f"{gradients.norm}; the weights before it are saved. Lower training.lr or "
            "training.max_grad_norm, and look at the iteration's rollouts."
        )

    def _finish_iteration(self, context: IterationContext, timings: dict[str, float]) -> None:
        metrics = self.state.end()
        seconds = timings["time/collect_seconds"] + timings["time/update_seconds"]
        timings["time/tokens_per_second"] = metrics["tokens/generated"] / max(seconds, 1e-9)
        timings["memory/peak_gib"] = peak_memory_bytes() / 2**30
        is_best = False
        period = self.training.eval_period
        if period and self.state.iteration % period == 0:
            dev = self.evaluation.dev_report().to_dict()
            metrics |= {f"dev/{name}": dev[name] for name in DEV_FIGURES}
            is_best = self.state.count_evaluation(dev[self.training.dev_metric])
        self.tracker.log_metrics(metrics | timings, step=self.state.iteration)
        context.set_postfix(
            loss=metrics.get("loss", "nothing to learn from"),
            reward=metrics["mean_reward"],
            failures=metrics["failure_rate"],
            tokens_per_second=timings["time/tokens_per_second"],
        )
        is_last = self.state.iteration == context.num_iterations
        every = self.settings.checkpoint_period
        if is_best or is_last or (every and self.state.iteration % every == 0):
            self._save_checkpoint(is_best=is_best)
        self._stop_between_iterations(already_saved=is_last)

    def _has_stopped_early(self) -> bool:
        """Say whether the dev evaluations have brought nothing better for too long."""
        patience = self.training.early_stopping_patience
        if patience is None or self.state.num_evals_since_best < patience:
            return False
        logger.info(
            "stopped after iteration %d: no better dev/%s in %d evaluations",
            self.state.iteration,
            self.training.dev_metric,
            self.state.num_evals_since_best,
        )
        return True

    def _stop_between_iterations(self, *, already_saved: bool) -> None:
        try:
            self._raise_if_stopped()
        except StopRequested:
            if not already_saved:
                self._save_checkpoint()
            raise

    def _discovery(self) -> Discovery:
        return Discovery(
            self.scenario_instance.planted_failures,
            self.scenario.failure_threshold,
            self.state.num_queries,
            dict(self.state.first_query),
        )

    # ---- saving

    @property
    def _scorer(self) -> Scorer | None:
        """What rates, where the sampler says so; a sampler of one's own need not."""
        scorer = getattr(self.sampler, "scorer", None)
        return scorer if isinstance(scorer, Scorer) else None

    def _save_checkpoint(self, *, is_best: bool = False) -> None:
        scorer = self._scorer
        self.state.memory = {
            "trainer": self.trainer_state(),
            "terms": self.shaping.state(),
            "verdicts": None if scorer is None else scorer.verdicts(),
        }
        self.checkpoints.save(self.state, trainer=self.hyper_params.trainer, is_best=is_best)

    def resume(self, checkpoint: Path) -> None:
        """Take up weights, optimizer, counters and half-used experience of a checkpoint."""
        self.state = self.checkpoints.load(checkpoint)
        self.load_trainer_state(self.state.memory["trainer"])
        self.shaping.load_state(self.state.memory["terms"])
        if self._scorer is not None:
            self._scorer.load_verdicts(self.state.memory["verdicts"])

    def _save_models(self) -> None:
        if self.run_directory is None:
            return
        model_dir = self.run_directory.path / "model"
        self.policy.save_pretrained(model_dir)
        self.results["model_dir"] = str(model_dir)
        self.checkpoints.log(self.run_directory.run_id)
        self.tracker.log_artifact(
            model_dir, name=f"attacker-{self.run_directory.run_id}", type="model"
        )

    def _write_results(self) -> None:
        self.results |= training_summary(
            self.state, self._discovery(), self.scenario_instance, self.training
        )
        self.results.setdefault("warnings", [])
        for when in ("before", "after", "random_search"):
            self.tracker.log_summary(summary_of(when, self.results.get(when) or {}))
        if self.run_directory is not None:
            self.run_directory.write_json("results.json", self.results)

    def _warn(self, text: str) -> None:
        self.results.setdefault("warnings", []).append(text)
        logger.warning(text)

    def components_to_time(self) -> Components:
        return components_of_stress_test(self)

    def dry_run(self) -> dict[str, Any]:
        """Play one episode, step on what it gives, and estimate a whole run."""
        with ExitStack() as stack:
            self._build_train_context(stack)
            estimate = estimate_cost(self.harness, self.optimizer, self.training)
            services = self.scenario_instance.services
            per_episode = num_probes_of(self.scenario.tree_width, self.scenario.tree_depth)
            num_queries = self.evaluation.num_queries_of_run()
            return estimate | estimate_services(services, num_queries / per_episode)
