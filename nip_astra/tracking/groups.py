"""Names of metrics as W&B shows them: grouped by what was going on when they were taken.

`metrics.jsonl` keeps the names that trainers give; they are mapped here alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KEPT = ("time", "memory", "tokens")
"""Groups that have their own already."""
EVALUATIONS = ("dev", "before", "after", "random_search")
"""First parts of names of what was measured on prompts or data of no training."""
_TEST = "test_"
_ROLLOUT_GROUPS = ("reward", "message_regression")
_ROLLOUT_FIGURES = (
    *("mean_", "std_", "worst_", "share_", "residual_", "num_episodes", "num_undetermined"),
    *("num_scorer_errors", "probe_", "failure_", "episode_", "distinct_", "plants_", "target_"),
)
INTERVAL = "_interval"
"""How names of intervals end; before it stands the name of what they are of."""


def grouped(name: str) -> str:
    """The name with its group before it: `eval/`, `rollout/`, or `train/` for all the rest.

    What play gives is of the rollout, what learning from it gives is of the training.
    """
    first, figure = name.partition("/")[0], name.rpartition("/")[2]
    if first in KEPT and first != name:
        return name
    if first in EVALUATIONS or figure.startswith(_TEST):
        return f"eval/{name}"
    is_rollout = first in _ROLLOUT_GROUPS or figure.startswith(_ROLLOUT_FIGURES)
    return f"{'rollout' if is_rollout else 'train'}/{name}"


def summary_of(when: str, report: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a report as `<when>/<name>`, and the two ends of each interval."""
    found: dict[str, float] = {}
    for name, value in report.items():
        is_pair = isinstance(value, list | tuple) and len(value) == 2
        if name.endswith(INTERVAL) and is_pair and all(map(_is_number, value)):
            stem = f"{when}/{name.removesuffix(INTERVAL)}"
            found |= {f"{stem}_low": value[0], f"{stem}_high": value[1]}
        elif _is_number(value):
            found[f"{when}/{name}"] = value
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def as_test_metrics(statistics: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of test statistics, named `<agent>/test_<figure>`."""
    metrics = {}
    for name, value in statistics.items():
        agent, slash, figure = name.rpartition("/")
        if isinstance(value, float):
            metrics[f"{agent}{slash}test_{figure}"] = value
    return metrics
