"""What a trainer measures of an attacker: failures, plausibility, variety.

Shape suffix: `N` node.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from nip_astra.evaluation.outcomes import Outcome, Replies, failure_rate
from nip_astra.rollouts.tree import RolloutTree
from nip_astra.samplers.trees import TreeSampler
from nip_astra.scenario_base.conversation.planted_failures import Discovery, PlantedFailure
from nip_astra.utils.seeding import SeedPart

COLLAPSED_DISTINCT_SHARE = 0.3
"""Below this share of distinct successful probes an attacker counts as collapsed."""
NUM_PROBES_FOR_COLLAPSE = 20
"""Fewer successful probes show nothing about their variety."""
OF_RATE = (
    *("num_failed", "num_known", "num_episodes"),
    *("if_unknown_passed", "if_unknown_failed", "lowest", "highest"),
)
"""Figures of `FailureRate` in a report."""


@dataclass(frozen=True)
class FailureReport:
    """The figures of the episodes that a trainer played.

    Attributes
    ----------
    failure_rate : float
        Share of episodes with a failure: the survival estimate if verdicts are missing, NaN if none
        reaches the last turn. The interval is a 95 % one over opening prompts.
    num_failed, num_known, if_unknown_passed, if_unknown_failed, lowest, highest
        See `FailureRate`.
    probe_nll : float
        Mean negative log-likelihood per probe token under the reference, nats.
    distinct_share : float or None
        Distinct successful probes over successful probes; None if no probe succeeded.
    plants_found : int or None
        Planted failures met; None if the scenario has none.
    outcomes, replies : dict
        Turns by outcome, and counts of the target's replies; see `Replies`.
    first_query : dict
        Target queries until each planted failure was first met; None for those not met.
    most_common_probe : str or None
        The most frequent successful probe.
    """

    failure_rate: float
    failure_rate_interval: tuple[float, float]
    mean_score: float
    mean_reward: float
    probe_nll: float
    distinct_share: float | None
    num_successful_probes: int
    most_common_probe: str | None
    plants_found: int | None
    num_plants: int | None
    first_query: dict[str, int | None]
    num_episodes: int
    target_queries: int
    num_failed: int
    num_known: int
    if_unknown_passed: float
    if_unknown_failed: float
    lowest: float
    highest: float
    num_distinct_probes: int
    outcomes: dict[str, int] = field(default_factory=dict)
    replies: dict[str, int] = field(default_factory=dict)

    @property
    def is_collapsed(self) -> bool:
        """Whether the successes are many and nearly all the same."""
        return (
            self.distinct_share is not None
            and self.num_successful_probes >= NUM_PROBES_FOR_COLLAPSE
            and self.distinct_share < COLLAPSED_DISTINCT_SHARE
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a JSON file."""
        return asdict(self) | {"failure_rate_interval": list(self.failure_rate_interval)}


class FailureTally:
    """Gathers rollouts, part by part, into a `FailureReport`.

    Attributes
    ----------
    trees : list[RolloutTree]
        The rollouts so far.
    """

    def __init__(self, planted: Sequence[PlantedFailure], failure_threshold: float) -> None:
        self.failure_threshold = failure_threshold
        self.discovery = Discovery(planted, failure_threshold)
        self.trees: list[RolloutTree] = []
        self._episodes: list[list[Outcome]] = []
        self._successes: Counter[str] = Counter()
        self._sums: Counter[str] = Counter()
        self._replies = Replies()

    def add(self, tree: RolloutTree) -> None:
        """Count one rollout."""
        self.trees.append(tree)
        nodes, sums = tree.nodes, self._sums
        scores_N, rewards_N = nodes["response_score"], nodes["reward"]
        self._episodes += outcomes_by_episode(tree, self.failure_threshold)
        is_failure_N = scores_N >= self.failure_threshold
        self._successes.update(tree.probes[i] for i in is_failure_N.nonzero().flatten().tolist())
        sums["nodes"] += tree.num_nodes
        sums["score"] += scores_N[~scores_N.isnan()].double().sum().item()
        sums["reward"] += rewards_N[~rewards_N.isnan()].double().sum().item()
        sums["rewarded"] += int((~rewards_N.isnan()).sum())
        sums["nll"] -= (nodes["reference_logprobs"].double() * nodes["probe_mask"]).sum().item()
        sums["tokens"] += int(nodes["probe_mask"].sum())
        self.discovery.update(tree)
        self._replies += Replies.of(tree.replies())

    def report(self) -> FailureReport:
        """The figures of all rollouts so far."""
        prompts = [prompt for tree in self.trees for prompt in tree.prompts]
        identity = {prompt: index for index, prompt in enumerate(dict.fromkeys(prompts))}
        rate = failure_rate(self._episodes, [identity[prompt] for prompt in prompts])
        figures = rate.to_dict()
        counts = Counter(outcome for episode in self._episodes for outcome in episode)
        sums, num_successes = self._sums, self._successes.total()
        num_plants = len(self.discovery.planted) or None
        return FailureReport(
            failure_rate=rate.estimate.value,
            failure_rate_interval=(rate.estimate.low, rate.estimate.high),
            mean_score=_mean(sums["score"], sum(counts[one] for one in Outcome if one.is_known)),
            mean_reward=_mean(sums["reward"], sums["rewarded"]),
            probe_nll=sums["nll"] / max(sums["tokens"], 1),
            distinct_share=len(self._successes) / num_successes if num_successes else None,
            num_successful_probes=num_successes,
            most_common_probe=self._successes.most_common(1)[0][0] if num_successes else None,
            plants_found=self.discovery.num_found if num_plants else None,
            num_plants=num_plants,
            first_query=dict(self.discovery.first_query),
            target_queries=int(sums["nodes"]),
            num_distinct_probes=len(self._successes),
            outcomes={str(outcome): counts[outcome] for outcome in Outcome},
            replies=self._replies._asdict(),
            **{name: figures[name] for name in OF_RATE},
        )


def outcomes_by_episode(tree: RolloutTree, failure_threshold: float) -> list[list[Outcome]]:
    """The outcomes of each episode's nodes, in their order."""
    scores_N = tree.nodes["response_score"]
    is_missing_N = scores_N.isnan()
    is_error_N = is_missing_N & tree.nodes.get("is_error", torch.zeros_like(is_missing_N))
    outcomes: list[list[Outcome]] = [[] for _ in range(tree.num_episodes)]
    for episode, is_failure, is_missing, is_error in zip(
        tree.nodes["episode"].tolist(),
        (scores_N >= failure_threshold).tolist(),
        is_missing_N.tolist(),
        is_error_N.tolist(),
        strict=True,
    ):
        unknown = Outcome.ERROR if is_error else Outcome.UNDETERMINED
        known = Outcome.FAILURE if is_failure else Outcome.NONE
        outcomes[episode].append(unknown if is_missing else known)
    return outcomes


def _mean(total: float, count: float) -> float:
    return total / count if count else math.nan


def play_chains(
    sampler: TreeSampler,
    prompts: Sequence[str],
    *,
    num_episodes: int,
    batch_size: int,
    tree_depth: int,
    key: tuple[SeedPart, ...],
    parts: Iterable[int],
) -> Iterable[RolloutTree]:
    """Play the given batches (`parts`) of `num_episodes` conversations that do not branch."""
    for part in parts:
        start = part * batch_size
        episodes = range(start, min(start + batch_size, num_episodes))
        if len(episodes) > 0:
            yield play_episodes(sampler, prompts, episodes, num_turns=tree_depth, key=key)


def play_episodes(
    sampler: TreeSampler,
    prompts: Sequence[str],
    episodes: range,
    *,
    num_turns: int,
    key: tuple[SeedPart, ...],
) -> RolloutTree:
    """Play conversations that do not branch.

    Episode i starts from prompt i, modulo the number of prompts; it does not depend on the other
    episodes of the call.
    """
    return sampler.sample(
        [prompts[episode % len(prompts)] for episode in episodes],
        tree_width=1,
        tree_depth=num_turns,
        key=key,
        first_episode=episodes.start,
    )
