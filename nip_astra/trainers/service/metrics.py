"""Metrics of rollouts, of their advantages, and of held-out problems.

Shape suffixes: `B` row, `T` token.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nip_astra.evaluation.storage import text_hash
from nip_astra.rl_objectives.kl import kl_estimate
from nip_astra.rl_objectives.policy_losses import (
    ImportanceLevel,
    effective_sample_size,
    importance_weights,
)
from nip_astra.rl_objectives.reductions import masked_mean
from nip_astra.rollouts.batch import Batch, length_mask, pad_rows
from nip_astra.rollouts.trajectory import Trajectory, advantages_of
from nip_astra.samplers.tasks import TaskRollout
from nip_astra.scenario_base.tasks.base import Episode
from nip_astra.scenario_base.tasks.rewards import episode_figures
from nip_astra.utils.intervals import Interval, exact_rate_interval, rate_estimate
from nip_astra.utils.statistics import hit_at_k

Metrics = MutableMapping[str, Any]
RECORD_COLUMNS = ("problem", "reward", "messages", "details")
"""Columns of `rollout_rows`; without details if the task has one reward."""
ANSWER_COLUMNS = (
    *("problem", "run", "problem_hash", "prompt", "solution", "answer", "messages"),
    *("reward", "is_correct", "details"),
)
"""Columns of `answer_rows`; without details if the task has one reward."""


def log_rollout_metrics(
    trajectories: Sequence[Trajectory] | Batch, metrics: Metrics | None = None
) -> Metrics:
    """Add statistics of trajectories to `metrics`, and return them.

    `rollout/reward_{mean,std,min,max}` over trajectories with a reward, `rollout/num_trajectories`,
    `rollout/num_groups`, `rollout/prompt_tokens_mean`, `rollout/response_tokens_{mean,max}` and,
    where they are known, `rollout/truncated_fraction`: of trajectories in which a turn had no room
    to end, and `rollout/entropy`: nats per token of the policy that sampled, estimated from its
    samples (`-log pi`, without bias where it samples at temperature 1).
    """
    metrics = {} if metrics is None else metrics
    rows = trajectories.to_trajectories() if isinstance(trajectories, Batch) else trajectories
    rewards = torch.tensor([one.reward for one in rows if one.reward is not None])
    metrics.update(_figures("rollout/reward", rewards[~rewards.isnan()]))
    metrics["rollout/num_trajectories"] = float(len(rows))
    metrics["rollout/num_groups"] = float(
        len({id(one) if one.group_id is None else one.group_id for one in rows})
    )
    if len(rows):
        sizes = torch.tensor([len(one) for one in rows])
        mask_BT = length_mask(sizes)
        own_BT = pad_rows([one.loss_mask for one in rows], mask_BT)
        counts = own_BT.sum(dim=1)
        lengths = counts.float()
        prompts = torch.where(counts > 0, own_BT.to(torch.uint8).argmax(dim=1), sizes).float()
        metrics["rollout/prompt_tokens_mean"] = float(prompts.mean())
        metrics["rollout/response_tokens_mean"] = float(lengths.mean())
        metrics["rollout/response_tokens_max"] = float(lengths.max())
        logprobs = [one.logprobs for one in rows if one.logprobs is not None]
        if len(logprobs) == len(rows) and counts.sum() > 0:
            own = pad_rows(logprobs, mask_BT)[own_BT]
            sums = _sums(pad_rows([own], length_mask(counts)), counts)
            metrics["rollout/entropy"] = sum(-x for x in sums.tolist()) / float(lengths.sum())
        cut = [float(x) for one in rows if (x := one.extras.get("is_cut")) is not None]
        if cut:
            metrics["rollout/truncated_fraction"] = sum(cut) / len(cut)
    return metrics


def without_accuracy(figures: dict[str, Any]) -> dict[str, Any]:
    """Return figures of `Tally.report` without those of correct answers."""
    prefixes = ("accuracy", "num_correct", "pass_at_", "num_complete_problems")
    return {name: value for name, value in figures.items() if not name.startswith(prefixes)}


def log_kept_rewards(trajectories: Sequence[Trajectory], metrics: Metrics) -> Metrics:
    """Add `rollout/kept_reward_{mean,std,min,max}`: rewards after uninformative groups are out."""
    rewards = torch.tensor([one.reward for one in trajectories if one.reward is not None])
    metrics.update(_figures("rollout/kept_reward", rewards))
    return metrics


def log_grpo_metrics(trajectories: Sequence[Trajectory], metrics: Metrics) -> Metrics:
    """Add statistics of advantages and groups to `metrics`, and return them.

    Those of `GroupAdvantages.metrics`, of the trajectories' own advantages.
    """
    found = advantages_of(trajectories)
    metrics.update(found.metrics())
    values = [one.advantage for one in trajectories if one.advantage is not None]
    flat = [torch.as_tensor(value, dtype=torch.float64).reshape(-1) for value in values]
    metrics.update(_figures("grpo/advantage", torch.cat(flat) if flat else torch.zeros(0)))
    return metrics


def _sums(values_BT: Tensor, lengths_B: Tensor) -> Tensor:
    """Sum the first `lengths_B` values of each row, with the rounding of a single row."""
    sums_B = values_BT.new_zeros(len(values_BT))
    for length in set(lengths_B.tolist()):
        is_this_B = lengths_B == length
        sums_B[is_this_B] = values_BT[is_this_B, :length].sum(dim=1)
    return sums_B


def _figures(name: str, values: Tensor) -> dict[str, float]:
    if len(values) == 0:
        return {}
    return {
        f"{name}_mean": float(values.mean()),
        f"{name}_std": float(values.std()) if len(values) > 1 else 0.0,
        f"{name}_min": float(values.min()),
        f"{name}_max": float(values.max()),
    }


def mismatch_metrics(
    sampled_BT: Tensor, scored_BT: Tensor, mask_BT: Tensor, *, level: ImportanceLevel = "token"
) -> dict[str, float]:
    """Measure differences between the log-probabilities of sampler and trainer.

    `mismatch/kl` (k3 of KL(sampler || policy), nats per token), `mismatch/largest_gap` (nats) and
    `mismatch/effective_sample_size` (share; 1 where the two agree).
    """
    weights_BT = importance_weights(
        scored_BT, sampled_BT, mask_BT, level=level, max_ratio=torch.inf
    )
    kl_BT = kl_estimate(sampled_BT, scored_BT, "k3", mask_BT=mask_BT)
    gap_BT = (sampled_BT - scored_BT).abs() * mask_BT
    return {
        "mismatch/kl": float(masked_mean(kl_BT, mask_BT)),
        "mismatch/largest_gap": float(gap_BT.max()),
        "mismatch/effective_sample_size": float(effective_sample_size(weights_BT, mask_BT)),
    }


# ---- held-out problems


def rollout_rows(rollout: TaskRollout, problems: Sequence[int], count: int) -> list[list[Any]]:
    """Return transcripts and rewards of the first episodes, for records."""
    num_runs = len(rollout.episodes) // max(len(problems), 1)
    rows: list[list[Any]] = []
    for i, one in enumerate(rollout.episodes[:count]):
        messages = [message.to_plain() for message in one.messages]
        rows.append([problems[i // num_runs], one.reward, messages])
        if one.rewards:
            rows[-1].append({"rewards": one.rewards, **one.extra})
    return rows


def answer_rows(
    rollout: TaskRollout, problems: Sequence[int], success_reward: float | None
) -> list[tuple[Any, ...]]:
    """Return a row of `ANSWER_COLUMNS` for each run of some problems."""
    num_runs = len(rollout.episodes) // max(len(problems), 1)
    return [
        (
            problems[place // num_runs],
            place % num_runs,
            *_texts_of(episode),
            episode.reward,
            episode.is_correct(success_reward),
            *([{"rewards": episode.rewards, **episode.extra}] if episode.rewards else []),
        )
        for place, episode in enumerate(rollout.episodes)
    ]


def _texts_of(episode: Episode) -> tuple[Any, ...]:
    messages, environment = episode.messages, episode.environment
    own = [place for place, one in enumerate(messages) if one.role == "assistant"]
    prompt = messages[: own[0]] if own else messages
    columns = [f"{name}={value}" for name, value in environment.columns]
    texts = [*(f"{one.role}: {one.text}" for one in prompt), *columns, str(environment.solution)]
    return (
        # Identifies the problem, whatever its number.
        text_hash(texts),
        "\n\n".join(one.text for one in prompt),
        environment.solution,
        messages[own[-1]].text if own else "",
        [message.to_plain() for message in messages],
    )


@dataclass
class Tally:
    """Rewards of episodes, with the problem of each, and whether they are correct.

    There is no accuracy if the correctness of an episode with a reward is unknown, since its reward
    exceeds 1 and there is no `success_reward`.
    """

    success_reward: float | None
    problems: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    num_runs: int = 0
    is_correct: list[bool | None] = field(default_factory=list)
    episodes: list[Episode] = field(default_factory=list)

    def add(self, rollout: TaskRollout, problems: Sequence[int], num_runs: int) -> None:
        """Count the episodes of some problems, with `num_runs` adjacent episodes each."""
        self.episodes += rollout.episodes
        for index, episode in enumerate(rollout.episodes):
            self.num_runs += 1
            if episode.reward is not None:
                self.is_correct.append(episode.is_correct(self.success_reward))
                self.problems.append(problems[index // num_runs])
                self.rewards.append(episode.reward)

    def report(self, num_runs: int) -> dict[str, Any]:
        """Return the share of correct runs with its 95 % interval, the mean reward, and for several
        runs pass@k with its interval over problems; for pass@1 it is that of a share.
        """
        figures: dict[str, Any] = {}
        if None not in self.is_correct:
            is_correct = [float(bool(right)) for right in self.is_correct]
            rate = rate_estimate(is_correct, self.problems)
            figures["accuracy"] = rate.value
            figures["accuracy_interval"] = [rate.low, rate.high]
        mean = sum(self.rewards) / len(self.rewards) if self.rewards else math.nan
        figures["mean_reward"] = mean
        if None not in self.is_correct:
            figures["num_correct"] = int(sum(is_correct))
        figures |= {
            "num_answers": len(self.rewards),
            "num_problems": len(set(self.problems)),
            "num_without_reward": self.num_runs - len(self.rewards),
        }
        figures |= episode_figures(self.episodes)
        has_chances = num_runs > 1 and None not in self.is_correct
        return figures | (self._pass_at_k(num_runs) if has_chances else {})

    def _pass_at_k(self, num_runs: int) -> dict[str, Any]:
        """Return pass@k, k = 1, 2, 4, ..., of problems whose runs all have rewards, and their
        number.
        """
        counts = Counter(self.problems)
        rights: dict[int, list[float]] = {
            problem: [] for problem, count in counts.items() if count == num_runs
        }
        for problem, is_correct in zip(self.problems, self.is_correct, strict=True):
            if problem in rights:
                rights[problem].append(float(bool(is_correct)))
        figures: dict[str, Any] = {"num_complete_problems": len(rights)}
        k = 1
        while k <= num_runs and rights:
            chances = [hit_at_k(num_runs, int(sum(one)), k) for one in rights.values()]
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
