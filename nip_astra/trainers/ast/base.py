"""Adaptive stress testing: trainers that learn from conversation trees which probes cause failures.

`Rollouts.play` samples and scores a tree, `prepare` adds reward terms and credit, `flatten` makes
training samples, and `loss` is the loss of a batch.

Shape suffixes: `N` node, `B` sample, `T` token.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import torch
from tensordict import TensorDict
from torch import Tensor

from nip_astra.checkpoints.run_state import Part, RunState
from nip_astra.distributed.team import Handler
from nip_astra.errors import ConfigurationError
from nip_astra.evaluation.outcomes import Known, Replies, failure_rate, known_turns, unknown_warning
from nip_astra.evaluation.playing import play_chains
from nip_astra.evaluation.summary import RUN_FIGURES, FailureTally, collapse_of, outcomes_by_episode
from nip_astra.language_models.base import (
    LanguageModel,
    TokenCount,
    TokenScores,
    as_language_model,
    pad_left,
)
from nip_astra.language_models.vllm import SamplerGap
from nip_astra.parameters.hyper_parameters import HyperParameters
from nip_astra.parameters.training import TrainingConfiguration
from nip_astra.parameters.types import ScenarioType
from nip_astra.rl_objectives.kl import AdaptiveKl
from nip_astra.rl_objectives.reductions import LossOutput
from nip_astra.rollouts.samples import Sample
from nip_astra.rollouts.tree import RolloutTree, merge_trees
from nip_astra.samplers.executor import RUN_PARTS, AsyncRollouts, run_requested
from nip_astra.samplers.trees import MAX_PROBES, count_probes
from nip_astra.scenario_base.conversation.planted_failures import Discovery
from nip_astra.scenario_instance import ScenarioInstance
from nip_astra.scorers.base import Scorer
from nip_astra.trainers.ast.behaviour import (
    Behaviour,
    CorrectedStalenessParameters,
    check_staleness,
    correct_for_staleness,
)
from nip_astra.trainers.ast.rollouts import RewardShaping, Rollouts, credit_of
from nip_astra.trainers.language_model_base import (
    Experience,
    LanguageModelState,
    LanguageModelTrainer,
    check_samples,
)
from nip_astra.trainers.service_use import (
    estimate_services,
    service_metrics,
    services_used,
    warnings_about_services,
)
from nip_astra.trainers.trainer_base import IterationContext, attach_progress_bar

CountedTree = tuple[RolloutTree, dict[str, TokenCount]]
"""A tree, and the tokens used, by role."""
ROLES = ("attacker", "target", "reference")
DEV_FIGURES = ("failure_rate", "mean_score", "mean_reward", "probe_nll", "distinct_share")
"""Figures of a dev evaluation that are logged as `dev/<name>`."""


@dataclass
class AstState(LanguageModelState):
    """Counters and partly used experience of an AST run, and the planted failures found.

    `num_queries` are target queries in training, `first_query` those until each planted failure.
    """

    num_queries: int = 0
    first_query: dict[str, int | None] = field(default_factory=dict)


class AstTrainer(LanguageModelTrainer):
    """Base of trainers of an attacker on conversation trees against a frozen target.

    Hooks: `flatten` and `loss`, which every trainer defines, and `collate_fn`, `credit`,
    `build_modules`, `modules_lr_factor`, `trainer_state`, `load_trainer_state`. ASTRA-RL calls
    `loss` `step`: either name may be defined or called.

    Attributes
    ----------
    policy : LanguageModel
        The attacker's model.
    rollouts : Rollouts
        Plays the trees of an iteration.
    compares_with_sampler : bool
        Whether the loss compares with the log-probabilities at sampling. Probes are scored again
        if the model samples and scores by different paths.
    behaviour : Behaviour or None
        Which probabilities of probes are learned from, by the trainer's `behaviour` parameters.
    """

    evaluation_family: ClassVar[str | None] = "conversation"
    State: ClassVar[type[RunState]] = AstState
    scenario_kinds: ClassVar[tuple[str, ...]] = (str(ScenarioType.AST_CHAT),)
    plays_on_actors: ClassVar[bool] = True
    trained_tokens: ClassVar[str] = "probe"
    policy_role: ClassVar[str] = "attacker"
    figures: ClassVar[tuple[str, ...] | None] = (
        *RUN_FIGURES,
        "plants_found_held_out",
        *(f"dev/{name}" for name in DEV_FIGURES),
    )
    compares_with_sampler: ClassVar[bool] = False
    kl: AdaptiveKl | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # One hook with two names: what a class defines under one, it has under the other.
        if "step" in vars(cls) and "loss" not in vars(cls):
            cls.loss = cls.step  # type: ignore[method-assign, assignment]
        elif "loss" in vars(cls) and "step" not in vars(cls):
            cls.step = cls.loss  # type: ignore[method-assign]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        sampler = self.scenario_instance.sampler
        if sampler is None:
            raise ConfigurationError("an AST trainer needs a scenario that builds a tree sampler")
        self.scenario = getattr(self.hyper_params, self.scenario_instance.kind)
        self.sampler = sampler
        # Only the leader has all of sharded weights.
        sampler.team = self.team if self.settings.sharding == "none" else None
        _check_size(self.training, self.scenario.tree_width, self.scenario.tree_depth)
        self.behaviour = self._behaviour()
        self.shaping = RewardShaping(self.scenario_instance.reward_terms)
        self.rollouts = Rollouts(
            sampler,
            self.scenario_instance.datasets["train"],
            num_episodes=self.training.num_episodes_per_experience,
            tree_width=self.scenario.tree_width,
            tree_depth=self.scenario.tree_depth,
            seed=self.hyper_params.seed,
        )
        self.evaluation = AstEvaluation(self.hyper_params, self.scenario_instance)
        self._models = {role: getattr(sampler, role).language_model for role in ROLES}
        self._async = self._async_rollouts()

    # ---- hooks

    @abstractmethod
    def flatten(self, tree: RolloutTree) -> list[Sample]:
        """Hook: return the training samples of a rollout; may call `log_metrics`."""

    def step(self, batch: TensorDict) -> LossOutput:
        """Another name of `loss`."""
        return self.loss(batch)

    def credit(self, tree: RolloutTree) -> Tensor:
        """Hook: return each node's credit, `[N]`, from its reward and the rewards that follow."""
        parameters = getattr(self.parameters, "credit", None)
        return tree.nodes["reward"] if parameters is None else credit_of(tree, parameters)

    def trainer_state(self) -> dict[str, Any]:
        return {} if self.kl is None else dict(self.kl.state())

    def load_trainer_state(self, state: dict[str, Any]) -> None:
        if self.kl is not None:
            self.kl.load_state(state)

    # ---- tools of the hooks

    @torch.no_grad()
    def probe_logprobs(self, tree: RolloutTree) -> Tensor:
        """Return the attacker's log-probabilities of every probe, `[N, T]`, nats, 0 on padding."""
        contexts = [tree.context_of(node) for node in range(tree.num_nodes)]
        padded = pad_left(contexts, torch.device("cpu"))
        return self.policy.logprobs(*padded, tree.nodes["probe"], tree.nodes["probe_mask"]).cpu()

    def policy_scores(
        self, batch: TensorDict, *, needs_entropy: bool = False, needs_hidden: bool = False
    ) -> TokenScores:
        """Score the tokens of `probe` after `context` under the attacker, with gradient.

        Under the distribution of `behaviour`; `probe_logprobs` are always the model's own. For
        `needs_entropy` and `needs_hidden` see `LanguageModel.token_scores`.
        """
        distribution = self.behaviour.drawn(batch) if self.behaviour is not None else None
        return self.policy.token_scores(
            *(batch["context"], batch["context_mask"], batch["probe"], batch["probe_mask"]),
            needs_entropy=needs_entropy,
            needs_hidden=needs_hidden,
            distribution=distribution,
        )

    def _behaviour(self) -> Behaviour | None:
        """Return the `behaviour` of the parameters; warn if gradients are off-policy."""
        parameters = getattr(self.parameters, "behaviour", None)
        if parameters is None and not self.compares_with_sampler:
            return None
        section = f"{self.hyper_params.trainer}.behaviour"
        found = Behaviour(parameters, self.attacker.sampling, section)
        if found.warning:
            self._warn(found.warning)
        return found

    # ---- several processes

    def handlers(self) -> dict[str, Handler]:
        return super().handlers() | {
            RUN_PARTS: lambda request: run_requested(self.sampler.requested_part, request)
        }

    # ---- from episodes to samples

    def build_policy(self) -> LanguageModel:
        self.attacker = self.scenario_instance.agents["attacker"]
        return as_language_model(self.attacker.language_model, role="attacker")

    def collect(self, iteration: int) -> Experience:
        """Sample the iteration's episodes, and return their training samples and metrics."""
        # What evaluations have sampled is left out.
        self.policy.take_metrics()
        tree, found, counts = self._played_and_digested(iteration)
        discovery = self._discovery()
        discovery.update(tree)
        self.state.num_queries = discovery.num_queries
        self.state.first_query = discovery.first_query
        self.shaping.observe(tree)
        metrics = self.evaluation.tree_metrics(tree) | {
            "target_queries": float(self.state.num_queries),
            "tokens/generated": float(sum(count.generated for count in counts.values())),
            **rollout_token_metrics(counts, tree),
            **self.policy.take_metrics(),
            **found.metrics,
            **service_metrics(self.scenario_instance.services),
        }
        if discovery.planted:
            metrics["plants_found"] = float(discovery.num_found)
        if self._async is not None:
            metrics["rollout/staleness"] = float(tree.staleness)
        if iteration % self.settings.rollout_sample_period == 0:
            self.tracker.log_table(
                "train",
                *rollout_table([tree], num_episodes=self.settings.num_rollout_samples),
                step=iteration + 1,
            )
        return Experience(found.samples, metrics, tree.seconds)

    def _played_and_digested(
        self, iteration: int
    ) -> tuple[RolloutTree, Experience, dict[str, TokenCount]]:
        """Return a rollout, its training samples, and the tokens used for both, by role."""
        if self._async is None:
            with self._counting() as counts:
                tree = self.rollouts.play(iteration)
                return tree, self.digest(tree), counts
        (tree, counts), tree.staleness = self._async.take(iteration)
        # Actors would rate it only after the next rollout.
        self.sampler.rate(tree)
        self._async.begin_next(iteration)
        with self._counting() as more:
            found = self.digest(tree)
        return tree, found, _add_counts(counts, more)

    @contextmanager
    def _counting(self) -> Iterator[dict[str, TokenCount]]:
        with ExitStack() as stack:
            yield {
                role: stack.enter_context(model.counting()) for role, model in self._models.items()
            }

    def _async_rollouts(self) -> AsyncRollouts[CountedTree] | None:
        """Return the buffer of asynchronous rollouts, if enabled by the parameters."""
        max_staleness = getattr(self.parameters, "max_staleness", 0)
        if not max_staleness:
            return None
        check_staleness(
            {"attacker": self.sampler.attacker, "target": self.sampler.target},
            self.behaviour,
            self.hyper_params.trainer,
            has_actors=self.settings.num_actors > 0,
        )
        return AsyncRollouts(
            lambda iterations: [self._begin_rollout(one) for one in iterations],
            lambda one: {
                "tree": one[0].to_plain(),
                "counts": {role: asdict(count) for role, count in one[1].items()},
            },
            self._rollout_from_plain,
            max_staleness=max_staleness,
            num_iterations=self.training.num_iterations,
        )

    def _begin_rollout(self, iteration: int) -> Callable[[], CountedTree]:
        with self._counting() as counts:
            finish = self.rollouts.begin(iteration)

        def wait() -> CountedTree:
            with self._counting() as more:
                tree = finish()
            return tree, _add_counts(counts, more)

        return wait

    def _rollout_from_plain(self, iteration: int, plain: Mapping[str, Any]) -> CountedTree:
        # Columns of a prompt are not plain values.
        tree = RolloutTree.from_plain(plain["tree"], self.rollouts.prompts_of(iteration))
        return tree, {role: TokenCount(**count) for role, count in plain["counts"].items()}

    def digest(self, tree: RolloutTree) -> Experience:
        """Return the training samples and metrics of a rollout; completes its nodes."""
        metrics = self.prepare(tree)
        found = check_samples(self.flatten(tree), owner=type(self).__name__, hook="flatten")
        return Experience(found, metrics)

    def prepare(self, tree: RolloutTree) -> dict[str, float]:
        """Add reward terms and credit to a training rollout; return metrics."""
        gap = SamplerGap()
        corrected: dict[str, float] = {}
        if tree.staleness and isinstance(self.parameters, CorrectedStalenessParameters):
            with self.policy.rescoring():
                scored_NT = self.probe_logprobs(tree)
            corrected = correct_for_staleness(tree, scored_NT, self.parameters)
        elif self.compares_with_sampler and not self.policy.samples_as_it_scores:
            nodes, mask_NT = tree.nodes, tree.nodes["probe_mask"]
            with self.policy.rescoring():
                scored_NT = self.probe_logprobs(tree)
            gap.note(nodes["probe_logprobs"][mask_NT], scored_NT[mask_NT])
            nodes["probe_logprobs"] = scored_NT
        metrics = corrected | gap.take()
        if self.behaviour is not None:
            reference = self.sampler.reference.token_scorer(to="score probes")
            metrics |= self.behaviour.prepare(tree, self.policy, reference)
        metrics |= self.shaping.apply(tree)
        tree.nodes["credit"] = self.credit(tree)
        return metrics

    def _discovery(self) -> Discovery:
        return Discovery(
            self.scenario_instance.planted_failures,
            self.scenario.failure_threshold,
            self.state.num_queries,
            dict(self.state.first_query),
        )

    # ---- measurements

    def num_measure_parts(self) -> int:
        return self.evaluation.num_parts("test")

    def measure(self, when: str, parts: Iterable[int]) -> dict[str, Any]:
        tally = self.evaluation.run("test", parts)
        report = tally.report()
        if when == "before":
            self.tracker.log_table("before", *rollout_table(tally.trees), step=0)
            return report
        for text in (
            *warnings_about(report, self.state.num_optimizer_steps),
            *warnings_about_services(self.scenario_instance.services),
        ):
            self._warn(text)
        self.tracker.log_table("evaluation", *rollout_table(tally.trees), step=self.state.iteration)
        return report

    def known_of(self, figures: Mapping[str, Any]) -> Known | None:
        """Return the turns with a verdict; none are needed if a reward is known without them."""
        known = [figures.get(name, 0.0) for name in ("mean_score", "mean_reward")]
        if not all(math.isnan(one) for one in known):
            return None
        counts = {"undetermined": "num_undetermined", "error": "num_scorer_errors"}
        outcomes = figures.get("outcomes") or {
            name: int(figures[metric]) for name, metric in counts.items()
        }
        return known_turns(outcomes)

    def _measure_after(self) -> None:
        super()._measure_after()
        self._run_random_search_loop()

    @attach_progress_bar(lambda self: self.evaluation.num_random_search_parts())
    def _run_random_search_loop(self, iteration_context: IterationContext) -> None:
        if iteration_context.num_iterations == 0:
            self.results["random_search"] = None
            return
        iteration_context.set_description("Random search")
        self.results["random_search"] = self.evaluation.random_search(
            self.state.num_queries + self.results["after"]["target_queries"],
            self._parts(iteration_context),
        )

    def evaluate_dev(self) -> dict[str, float]:
        report = self.evaluation.dev_report()
        return {name: report[name] for name in DEV_FIGURES}

    def progress_figures(self, metrics: Mapping[str, float]) -> dict[str, Any]:
        return {"failures": metrics["failure_rate"], "reward": metrics["mean_reward"]}

    # ---- saving

    def kept_parts(self) -> dict[str, Part]:
        """Return the states of reward terms and of the scorer's cache."""
        parts = super().kept_parts()
        parts["terms"] = Part(self.shaping.state, self.shaping.load_state)
        # A sampler of one's own need not say who rates.
        scorer = getattr(self.sampler, "scorer", None)
        if isinstance(scorer, Scorer):
            parts["verdicts"] = Part(scorer.verdicts, scorer.load_verdicts)
        return parts

    def _write_results(self) -> None:
        found, state = self._discovery(), self.state
        results = {
            "kind": "conversation",
            "before": state.before,
            "training": {
                **self.training_results(),
                "target_queries": found.num_queries,
                "plants_found": found.num_found if found.planted else None,
                "num_plants": len(found.planted) if found.planted else None,
                "plants": dict(found.first_query),
            },
            "planted_failures": [
                {"name": plant.name, "description": plant.description, "rarity": plant.rarity}
                for plant in found.planted
            ],
            "truncated_contexts": {
                role: agent.num_truncated_contexts
                for role, agent in self.scenario_instance.agents.items()
            },
            **services_used(self.scenario_instance.services),
        }
        self.store_results(results)

    def components_to_time(self) -> dict[str, Callable[[], object]]:
        """Return `rollout`, and if it gave samples `update`, and `loss` of one batch."""

        @torch.no_grad()
        def rollout() -> Experience:
            return self.digest(self.rollouts.play(0))

        samples = rollout().samples
        if not samples:
            return {"rollout": rollout}
        batch = next(iter(self.batches(samples, iteration=0, epoch=0)))

        def update() -> None:
            self.state.begin(samples, {})
            self._update(0)

        @torch.no_grad()
        def loss() -> None:
            self.loss_of(batch)

        return {"rollout": rollout, "update": update, "loss": loss}

    def samples_of_one_episode(self) -> Sequence[Sample]:
        return self.digest(self.rollouts.play_one()).samples

    def cache_bytes(self, num_episodes: int) -> float:
        size = self.rollouts.cache_bytes(num_episodes)
        limit = self.rollouts.sampler.max_cache_bytes
        return float(size if limit is None else min(size, limit))

    def dry_run(self) -> dict[str, Any]:
        """Sample one tree, compute the gradient of one minibatch, and estimate a whole run."""
        estimate = super().dry_run()
        per_tree = count_probes(self.scenario.tree_width, self.scenario.tree_depth)
        num_episodes = self.evaluation.num_queries_of_run() / per_tree
        at_once = self.training.num_episodes_per_experience
        return {
            **estimate,
            "predicted_rollout_gib": self.cache_bytes(at_once) / 2**30,
            "training_target_queries": self.evaluation.num_training_queries(),
            **estimate_services(self.scenario_instance.services, num_episodes),
        }


def _check_size(training: TrainingConfiguration, tree_width: int, tree_depth: int) -> None:
    """Raise for iterations that do not fit into memory."""
    num_probes = training.num_episodes_per_experience * count_probes(tree_width, tree_depth)
    if num_probes > MAX_PROBES:
        raise ConfigurationError(
            f"{training.num_episodes_per_experience:,} episodes of tree_width {tree_width} and "
            f"tree_depth {tree_depth} make {num_probes:,} probes per iteration; at most "
            f"{MAX_PROBES:,} are possible. Lower training.num_episodes_per_experience or the tree."
        )


def _add_counts(
    counts: dict[str, TokenCount], more: Mapping[str, TokenCount]
) -> dict[str, TokenCount]:
    for role, spent in more.items():
        counts[role].add(spent)
    return counts


def rollout_token_metrics(counts: Mapping[str, TokenCount], tree: RolloutTree) -> dict[str, float]:
    """Return, for each role, the tokens forwarded for a rollout and their ratio to the unique ones.

    A token is unique by itself and all that precedes it in the conversation. `tokens/rescored` are
    those forwarded to score the attacker's probes again.
    """
    metrics = {}
    for role, count in counts.items():
        unique = tree.num_unique_tokens.get(role, 0) or count.scored
        metrics[f"tokens/{role}_forwarded"] = float(count.forwarded)
        metrics[f"tokens/{role}_forwarded_per_unique"] = count.forwarded / max(unique, 1)
    metrics["tokens/rescored"] = float(sum(count.rescored for count in counts.values()))
    return metrics


# ---- evaluations in a run: before, on the dev prompts, after, and random search


def rollout_table(
    trees: Sequence[RolloutTree], *, num_episodes: int | None = None
) -> tuple[list[str], list[list[Any]]]:
    """Return columns and rows of conversations, a row per node, numbered through all trees.

    With `num_episodes`, the whole trees of that number of episodes, the worst failures first.
    """
    if not trees:
        return [], []
    tree = trees[0] if len(trees) == 1 else merge_trees(trees)
    rows = list(tree.rows())
    if num_episodes is not None:
        worst = torch.full((tree.num_episodes,), -math.inf)
        scores_N = tree.nodes["response_score"].nan_to_num(nan=-math.inf)
        worst = worst.scatter_reduce(0, tree.nodes["episode"], scores_N, "amax")
        kept = set(worst.argsort(descending=True, stable=True)[:num_episodes].tolist())
        rows = [row for row in rows if row["episode"] in kept]
    columns = list(rows[0]) if rows else []
    return columns, [list(row.values()) for row in rows]


def warnings_about(after: Mapping[str, Any], num_optimizer_steps: int) -> list[str]:
    """Return warnings about a finished run, from the trained attacker's held-out figures."""
    unknown = unknown_warning(after, after["outcomes"])
    warnings = [] if unknown is None else [unknown]
    if num_optimizer_steps == 0:
        warnings.append(
            "nothing was learned: no iteration had a training sample. Raise the scenario's "
            "tree_width or training.num_episodes_per_experience, or lower the trainer's margins."
        )
    names = ("num_successful_probes", "distinct_share", "most_common_probe")
    collapse = collapse_of(*(after[name] for name in names))
    if collapse is not None:
        advice = "Raise training.num_episodes_per_experience or beta, or lower training.lr."
        warnings.append(f"{collapse}. {advice}")
    return [*warnings, *Replies.read(after["replies"]).warnings()]


class AstEvaluation:
    """Samples held-out conversations with the current attacker and counts failures."""

    def __init__(self, hyper_params: HyperParameters, instance: ScenarioInstance) -> None:
        assert instance.sampler is not None
        self.seed = hyper_params.seed
        self.training = hyper_params.training
        self.scenario: Any = getattr(hyper_params, instance.kind)
        self.options = self.scenario.evaluation
        self.instance = instance
        self.sampler = instance.sampler

    def num_parts(self, split: str) -> int:
        """Return the number of batches of an evaluation."""
        return -(-self._num_episodes(split) // int(self.options.batch_size))

    def run(self, split: str, parts: Iterable[int]) -> FailureTally:
        """Sample the given batches of a split's conversations."""
        tally = FailureTally(self.instance.planted_failures, self.scenario.failure_threshold)
        trees = play_chains(
            self.sampler,
            self.instance.datasets[split],
            num_episodes=self._num_episodes(split),
            batch_size=self.options.batch_size,
            tree_depth=self.scenario.tree_depth,
            key=(self.seed, "evaluate", split),
            parts=parts,
        )
        for tree in trees:
            tally.add(tree)
        return tally

    @torch.no_grad()
    def dev_report(self) -> dict[str, Any]:
        """Evaluate the attacker on the dev prompts."""
        return self.run("dev", range(self.num_parts("dev"))).report()

    def num_queries_of_run(self) -> int:
        """Return the target queries of a run: training, evaluations, and random search."""
        depth = self.scenario.tree_depth
        period = self.training.eval_period
        num_dev = self.training.num_iterations // period if period else 0
        chains = 2 * self._num_episodes("test") + num_dev * self._num_episodes("dev")
        chains += self.num_random_search_parts() * self.options.batch_size
        return self.num_training_queries() + int(chains * depth)

    def num_random_search_parts(self) -> int:
        """Return the number of batches of a random search, 0 without one."""
        is_used = self.options.use_random_search
        if not (bool(self.instance.planted_failures) if is_used is None else is_used):
            return 0
        depth = self.scenario.tree_depth
        num_queries = self.num_training_queries() + self._num_episodes("test") * depth
        return int(-(-num_queries // (self.options.batch_size * depth)))

    def random_search(self, num_queries: int, parts: Iterable[int]) -> dict[str, Any]:
        """Run random search with the untrained attacker and `num_queries` target queries."""
        depth = self.scenario.tree_depth
        found = Discovery(self.instance.planted_failures, self.scenario.failure_threshold)
        trees = play_chains(
            # The reference need not score its own probes.
            self.sampler.with_attacker(self.instance.agents["reference"], asks_reference=False),
            self.instance.datasets["train"],
            num_episodes=math.ceil(num_queries / depth),
            batch_size=self.options.batch_size,
            tree_depth=depth,
            key=(self.seed, "random search"),
            parts=parts,
        )
        num_failures = 0
        for tree in trees:
            found.update(tree)
            scores_N = tree.nodes["response_score"]
            num_failures += int((scores_N >= self.scenario.failure_threshold).sum())
        return {
            "plants_found": found.num_found if found.planted else None,
            "num_plants": len(found.planted) if found.planted else None,
            "plants": dict(found.first_query),
            "target_queries": found.num_queries,
            "failing_responses": num_failures,
        }

    def tree_metrics(self, tree: RolloutTree) -> dict[str, float]:
        """Return the figures of a training rollout, over nodes.

        In a branching tree, an episode's nodes count in order, level by level.
        """
        nodes = tree.nodes
        outcomes = outcomes_by_episode(tree, self.scenario.failure_threshold)
        rate = failure_rate(outcomes, range(tree.num_episodes))
        scores_N = nodes["response_score"]
        is_rated_N = ~scores_N.isnan()
        is_failure_N = scores_N >= self.scenario.failure_threshold
        successes = [tree.probes[i] for i in is_failure_N.nonzero().flatten().tolist()]
        num_tokens = nodes["probe_mask"].sum()
        nll, entropy = (
            -(nodes[name] * nodes["probe_mask"]).sum() / num_tokens.clamp(min=1)
            for name in ("reference_logprobs", "probe_logprobs")
        )
        return {
            "mean_reward": float(nodes["reward"].nanmean()),
            "mean_score": float(scores_N.nanmean()),
            "failure_rate": float(is_failure_N[is_rated_N].float().mean()),
            # In single precision, as all metrics of nodes.
            "episode_failure_rate": float(torch.tensor(rate.estimate.value)),
            "num_undetermined": float((~is_rated_N & ~nodes["is_error"]).sum()),
            "num_scorer_errors": float(nodes["is_error"].sum()),
            "probe_nll": float(nll),
            # Both estimated from the samples, so that nothing is forwarded for them.
            "rollout/entropy": float(entropy),
            "rollout/kl": float(nll - entropy),
            "probe_length": float(num_tokens) / tree.num_nodes,
            "distinct_share": len(set(successes)) / len(successes) if successes else math.nan,
        }

    def num_training_queries(self) -> int:
        """Return the number of target queries of training."""
        num_trees = self.training.num_iterations * self.training.num_episodes_per_experience
        return num_trees * count_probes(self.scenario.tree_width, self.scenario.tree_depth)

    def _num_episodes(self, split: str) -> int:
        return int(self.options.num_dev_episodes if split == "dev" else self.options.num_episodes)
