"""How well a policy answers problems that it does not learn from."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from nip_astra.samplers.tasks import TaskRollout
from nip_astra.scenario_base.tasks.base import Episode
from nip_astra.scenario_base.tasks.rewards import reward_figures
from nip_astra.utils.intervals import Interval, exact_rate_interval, rate_estimate


def pass_at_k(num_right: int, num_runs: int, k: int) -> float:
    """Chance that at least one of k runs is right, unbiased (arXiv:2107.03374, eq. 1)."""
    if num_runs - num_right < k:
        return 1.0
    return 1.0 - math.comb(num_runs - num_right, k) / math.comb(num_runs, k)


RECORD_COLUMNS = ("problem", "reward", "messages", "details")
"""Of `rollout_rows`; rows of tasks with one reward have no details."""


def rollout_rows(rollout: TaskRollout, problems: Sequence[int], count: int) -> list[list[Any]]:
    """Messages and rewards of the first episodes, for records."""
    num_runs = len(rollout.episodes) // max(len(problems), 1)
    rows: list[list[Any]] = []
    for i, one in enumerate(rollout.episodes[:count]):
        rows.append([problems[i // num_runs], one.reward, [[m.role, m.text] for m in one.messages]])
        if one.rewards:
            rows[-1].append({"rewards": one.rewards, **one.extra})
    return rows


@dataclass
class Tally:
    """Rewards of episodes by problem.

    Attributes
    ----------
    success_reward : float
        Reward from which a run is right.
    problems, rewards : list
        Of each run with a reward.
    episodes : list of Episode
        All runs.
    """

    success_reward: float
    problems: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    num_runs: int = 0
    episodes: list[Episode] = field(default_factory=list)

    def add(self, rollout: TaskRollout, problems: Sequence[int], num_runs: int) -> None:
        """Count the episodes of some problems, of which each has so many beside each other."""
        self.episodes += rollout.episodes
        for index, episode in enumerate(rollout.episodes):
            self.num_runs += 1
            if episode.reward is not None:
                self.problems.append(problems[index // num_runs])
                self.rewards.append(episode.reward)

    def report(self, num_runs: int) -> dict[str, Any]:
        """Share of right runs with its 95 % interval, mean reward, and for more runs pass@k with
        its interval over problems, which for pass@1 is that of a share of right runs.
        """
        is_right = [float(reward >= self.success_reward) for reward in self.rewards]
        rate = rate_estimate(is_right, self.problems)
        mean = sum(self.rewards) / len(self.rewards) if self.rewards else math.nan
        figures: dict[str, Any] = {
            "accuracy": rate.value,
            "accuracy_interval": [rate.low, rate.high],
            "mean_reward": mean,
            "num_right": int(sum(is_right)),
            "num_answers": len(self.rewards),
            "num_problems": len(set(self.problems)),
            "num_without_reward": self.num_runs - len(self.rewards),
        }
        figures |= reward_figures(self.episodes)
        return figures | (self._pass_at_k(num_runs) if num_runs > 1 else {})

    def _pass_at_k(self, num_runs: int) -> dict[str, Any]:
        """For k of 1, 2, 4 ... over the problems of which every run has a reward, and how many."""
        counts = Counter(self.problems)
        rights: dict[int, list[float]] = {
            problem: [] for problem, count in counts.items() if count == num_runs
        }
        for problem, reward in zip(self.problems, self.rewards, strict=True):
            if problem in rights:
                rights[problem].append(float(reward >= self.success_reward))
        figures: dict[str, Any] = {"num_complete_problems": len(rights)}
        k = 1
        while k <= num_runs and rights:
            chances = [pass_at_k(int(sum(one)), num_runs, k) for one in rights.values()]
            chance = sum(chances) / len(chances)
            # Chances spread no wider than outcomes of 0 or 1, so that this covers enough.
            interval = exact_rate_interval(chance, len(chances))
            if k == 1:  # the share of right runs
                problems = [problem for problem in rights for _ in range(num_runs)]
                rate = rate_estimate([right for one in rights.values() for right in one], problems)
                interval = Interval(rate.low, rate.high)
            figures[f"pass_at_{k}"] = chance
            figures[f"pass_at_{k}_interval"] = list(interval)
            k *= 2
        return figures
