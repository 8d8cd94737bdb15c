"""A run of tiny models, and what is in its evaluations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SMALL = (
    "training.num_iterations=2",
    "ast_chat.evaluation.use_random_search=false",
    # Where about half of a random target's replies fail.
    "ast_chat.failure_threshold=0.5",
)


def figures_of(run: Path, name: str = "test") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "evaluations" / name / "evaluation.json").read_text())
    return found
