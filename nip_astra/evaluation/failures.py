"""How often an attacker makes the target fail, how plausibly, and in how many ways.

A turn without a verdict (see `Outcome`) enters no denominator; its episode is censored there (see
`failure_rate`).

Shape suffixes: `N` node, `E` episode, `T` token.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from nip_astra.evaluation.measured import Replies
from nip_astra.evaluation.outcomes import Outcome, failure_rate
from nip_astra.rollouts.tree import RolloutTree
from nip_astra.samplers.trees import TreeSampler
from nip_astra.scenario_base.conversation.planted_failures import Discovery, PlantedFailure
from nip_astra.utils.seeding import SeedPart

COLLAPSED_DISTINCT_SHARE = 0.3
"""Below this share of distinct successful probes an attacker counts as collapsed."""
NUM_PROBES_FOR_COLLAPSE = 20
"""Fewer successful probes say nothing about their variety."""


@dataclass(frozen=True)
class FailureReport:
    """What one evaluation found.

    Attributes
    ----------
    failure_rate : float
        Share of episodes in which a response reached the failure threshold: the survival estimate
        where verdicts are missing, NaN where none reaches the last turn.
    failure_rate_interval : tuple[float, float]
        95 %, over opening prompts.
    num_failed, num_known, if_unknown_passed, if_unknown_failed, lowest, highest
        See `FailureRate`.
    mean_score : float
        Mean score of a response.
    mean_reward : float
        Mean reward of a node.
    probe_nll : float
        Mean negative log-likelihood per probe token under the reference, nats.
    distinct_share : float or None
        Distinct successful probes over successful probes; None when no probe succeeded.
    num_distinct_probes : int
        Distinct successful probes.
    plants_found : int or None
        Planted failures met; None where the scenario has none.
    num_episodes : int
        Episodes played, those without verdict included.
    outcomes : dict
        Turns by outcome: failure, none, undetermined, error.
    replies : dict
        Replies of the target, those that are empty and refusals; see `Replies`.
    first_query : dict
        Target queries until each planted failure was first met; None for those not met.
    most_common_probe : str or None
        The successful probe said most often.
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
        plain = asdict(self)
        plain["failure_rate_interval"] = list(self.failure_rate_interval)
        return plain


@dataclass
class FailureTally:
    """Gathers rollouts, part by part, into a `FailureReport`.

    Attributes
    ----------
    trees : list[RolloutTree]
        The rollouts added so far, for tables of conversations.
    """

    planted: Sequence[PlantedFailure]
    failure_threshold: float
    trees: list[RolloutTree] = field(default_factory=list)
    _episodes: list[list[Outcome]] = field(default_factory=list)
    _prompts: list[str] = field(default_factory=list)
    _successes: Counter[str] = field(default_factory=Counter)
    _sums: Counter[str] = field(default_factory=Counter)
    _replies: Replies = field(default_factory=Replies)

    def __post_init__(self) -> None:
        self.discovery = Discovery(self.planted, self.failure_threshold)

    def add(self, tree: RolloutTree) -> None:
        """Count one rollout."""
        self.trees.append(tree)
        nodes = tree.nodes
        scores_N, rewards_N = nodes["response_score"], nodes["reward"]
        self._episodes += outcomes_by_episode(tree, self.failure_threshold)
        self._prompts += tree.prompts
        is_failure_N = scores_N >= self.failure_threshold
        self._successes.update(tree.probes[i] for i in is_failure_N.nonzero().flatten().tolist())
        self._sums["nodes"] += tree.num_nodes
        self._sums["score"] += scores_N[~scores_N.isnan()].double().sum().item()
        self._sums["reward"] += rewards_N[~rewards_N.isnan()].double().sum().item()
        self._sums["rewarded"] += int((~rewards_N.isnan()).sum())
        self._sums["nll"] -= (
            (nodes["reference_logprobs"].double() * nodes["probe_mask"]).sum().item()
        )
        self._sums["tokens"] += int(nodes["probe_mask"].sum())
        self.discovery.update(tree)
        self._replies += Replies.of(tree.replies())

    def report(self) -> FailureReport:
        """The figures of everything added so far."""
        identity = {prompt: index for index, prompt in enumerate(dict.fromkeys(self._prompts))}
        rate = failure_rate(self._episodes, [identity[prompt] for prompt in self._prompts])
        counts = Counter(outcome for episode in self._episodes for outcome in episode)
        num_successes = self._successes.total()
        num_rated = sum(counts[outcome] for outcome in Outcome if outcome.is_known)
        return FailureReport(
            failure_rate=rate.estimate.value,
            failure_rate_interval=(rate.estimate.low, rate.estimate.high),
            mean_score=_mean(self._sums["score"], num_rated),
            mean_reward=_mean(self._sums["reward"], self._sums["rewarded"]),
            probe_nll=self._sums["nll"] / max(self._sums["tokens"], 1),
            distinct_share=len(self._successes) / num_successes if num_successes else None,
            num_successful_probes=num_successes,
            most_common_probe=self._successes.most_common(1)[0][0] if num_successes else None,
            plants_found=self.discovery.num_found if self.planted else None,
            num_plants=len(self.planted) if self.planted else None,
            first_query=dict(self.discovery.first_query),
            num_episodes=rate.num_episodes,
            target_queries=int(self._sums["nodes"]),
            num_failed=rate.num_failed,
            num_known=rate.num_known,
            if_unknown_passed=rate.if_unknown_passed,
            if_unknown_failed=rate.if_unknown_failed,
            lowest=rate.lowest,
            highest=rate.highest,
            num_distinct_probes=len(self._successes),
            outcomes={str(outcome): counts[outcome] for outcome in Outcome},
            replies=self._replies._asdict(),
        )


def outcomes_by_episode(tree: RolloutTree, failure_threshold: float) -> list[list[Outcome]]:
    """The outcomes of each episode's nodes, in their order."""
    scores_N = tree.nodes["response_score"]
    is_missing_N = scores_N.isnan()
    is_error_N = is_missing_N & tree.nodes.get("is_error", torch.zeros_like(is_missing_N))
    found: list[list[Outcome]] = [[] for _ in range(tree.num_episodes)]
    for episode, is_failure, is_missing, is_error in zip(
        tree.nodes["episode"].tolist(),
        (scores_N >= failure_threshold).tolist(),
        is_missing_N.tolist(),
        is_error_N.tolist(),
        strict=True,
    ):
        unknown = Outcome.ERROR if is_error else Outcome.UNDETERMINED
        known = Outcome.FAILURE if is_failure else Outcome.NONE
        found[episode].append(unknown if is_missing else known)
    return found


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
    """Play conversations that do not branch, `batch_size` at a time.

    Parameters
    ----------
    num_episodes : int
        Episode i starts from prompt i, modulo the number of prompts.
    parts : Iterable[int]
        Which batches to play, for instance `range(num_parts)`.
    """
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
    """Play some episodes of conversations that do not branch.

    Parameters
    ----------
    episodes : range
        Episode i starts from prompt i, modulo the number of prompts; it is the same whichever
        episodes are played with it.
    """
    return sampler.sample(
        [prompts[episode % len(prompts)] for episode in episodes],
        tree_width=1,
        tree_depth=num_turns,
        key=key,
        first_episode=episodes.start,
    )
