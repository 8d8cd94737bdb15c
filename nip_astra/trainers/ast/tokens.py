"""How much work an AST iteration took beside the least that it could have taken."""

from __future__ import annotations

from collections.abc import Mapping

from nip_astra.language_models.base import TokenCount
from nip_astra.rollouts.tree import RolloutTree


def rollout_token_metrics(counts: Mapping[str, TokenCount], tree: RolloutTree) -> dict[str, float]:
    """For each role, the tokens forwarded for a rollout and their ratio to the unique ones.

    A token is unique by itself and all that precedes it in the conversation. The reference reads
    only to score. What was forwarded to score the attacker's own probes again stands apart.
    """
    metrics = {}
    for role, count in counts.items():
        unique = tree.num_unique_tokens.get(role, 0) or count.scored
        metrics[f"tokens/{role}_forwarded"] = float(count.forwarded)
        metrics[f"tokens/{role}_forwarded_per_unique"] = count.forwarded / max(unique, 1)
    metrics["tokens/rescored"] = float(sum(count.rescored for count in counts.values()))
    return metrics
