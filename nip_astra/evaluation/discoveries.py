"""Planted failures in stored rows: which were found, and after how many tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nip_astra.evaluation.outcomes import Outcome
from nip_astra.evaluation.rows import Episode, Row
from nip_astra.scenario_base.conversation.planted_failures import PlantedFailure


def plants_met(
    planted: Sequence[PlantedFailure], row: Row, previous: Row | None
) -> list[PlantedFailure]:
    """The planted failures that a probe meets, after the one before it."""
    before = None if previous is None else str(previous["probe"])
    return [plant for plant in planted if plant.matches(str(row["probe"]), before)]


def tokens_of(row: Row) -> int:
    """The tokens that a turn took: probe and response; 0 where they were not counted."""
    return int(row.get("probe_num_tokens") or 0) + int(row.get("response_num_tokens") or 0)


def find_plants(
    episodes: Sequence[Episode], planted: Sequence[PlantedFailure]
) -> dict[str, Any] | None:
    """Recall of planted failures against tokens spent; None where nothing is planted.

    A planted failure is found where a probe meets it and the target fails on that probe. Episodes
    count in their order; tokens are those of probes and responses.
    """
    if not planted:
        return None
    first: dict[str, dict[str, int]] = {}
    by_tokens: list[list[int]] = []
    tokens = queries = 0
    for episode in episodes:
        for previous, row in zip([None, *episode[:-1]], episode, strict=True):
            tokens += tokens_of(row)
            queries += 1
            if row["outcome"] != Outcome.FAILURE:
                continue
            new = [p.name for p in plants_met(planted, row, previous) if p.name not in first]
            first |= {name: {"tokens": tokens, "target_queries": queries} for name in new}
            if new:
                by_tokens.append([tokens, len(first)])
    return {
        "found": len(first),
        "total": len(planted),
        "recall": len(first) / len(planted),
        "by_tokens": by_tokens,
        "tokens": tokens,
        "first": {plant.name: first.get(plant.name) for plant in planted},
    }
