"""In-run evaluations of an attacker: before, on the dev prompts, after, and random search."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from nip_astra.evaluation.outcomes import Replies, failure_rate, unknown_warning
from nip_astra.evaluation.playing import play_chains
from nip_astra.evaluation.summary import FailureTally, collapse_of, outcomes_by_episode
from nip_astra.parameters.hyper_parameters import HyperParameters
from nip_astra.rollouts.tree import RolloutTree, merge_trees
from nip_astra.samplers.trees import num_probes_of
from nip_astra.scenario_base.conversation.planted_failures import Discovery
from nip_astra.scenario_instance import ScenarioInstance


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
        return num_trees * num_probes_of(self.scenario.tree_width, self.scenario.tree_depth)

    def _num_episodes(self, split: str) -> int:
        return int(self.options.num_dev_episodes if split == "dev" else self.options.num_episodes)
