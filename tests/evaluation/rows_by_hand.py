"""Hand-made rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nip_astra.evaluation.outcomes import judge
from nip_astra.evaluation.storage import Episode

THRESHOLD = 0.5


def episode(
    number: int, scores: Sequence[float | str | None], *, prompt: str = "hello", **columns: Any
) -> Episode:
    """A chain of turns; a score "error" stands for a failed scorer."""
    return [
        {
            "step": 0,
            "episode": number,
            "depth": depth,
            "node": number * len(scores) + depth,
            "parent": -1 if depth == 0 else number * len(scores) + depth - 1,
            "prompt": prompt,
            "probe": f"probe {number} {depth}",
            "response": f"response {number} {depth}",
            "response_score": None if isinstance(score, str) else score,
            "is_error": score == "error",
            "reference_logprob": -6.0,
            "probe_num_tokens": 3,
            "response_num_tokens": 2,
            **{n: v[depth] if isinstance(v, list) else v for n, v in columns.items()},
        }
        for depth, score in enumerate(scores)
    ]


def judged(*episodes: Episode) -> list[Episode]:
    """Episodes with outcomes."""
    judge(episodes, THRESHOLD)
    return list(episodes)
