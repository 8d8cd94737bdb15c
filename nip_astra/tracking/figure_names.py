"""Names of figures and columns in files of earlier versions, and their current names.

This is the only table of them. It applies wherever stored files are read (`RunDirectory.read_json`,
`read_rows`, `read_records` and the report), to the figures that a user names (`--fail-if`,
`--metric`, objectives of sweeps, `training.dev_metric`), and to the records that a resumed run
sends to its trackers. Old and new runs thus meet under the new names. Renamed parameters are in
`nip_astra.parameters.conversion`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

CURRENT_NAMES = {
    "clip_share": "clip_fraction",
    "outside_share": "ratio_outside_clip",
    "outside_fraction": "ratio_outside_clip",
    "groups/zero_variance": "grpo/zero_variance_fraction",
    "groups/used_share": "grpo/used_fraction",
    "grpo/zero_variance_share": "grpo/zero_variance_fraction",
    "grpo/used_share": "grpo/used_fraction",
    "rollout/dead_share": "rollout/zero_variance_fraction",
    "rollout/dropped_share": "rollout/dropped_fraction",
    "rollout/cut_share": "rollout/truncated_fraction",
    "rollout/played_problems": "rollout/num_problems_sampled",
    "rollout/without_reward": "rollout/num_without_reward",
    "is_right": "is_correct",
    "num_right": "num_correct",
    "accuracy_if_undecided_right": "accuracy_if_undecided_correct",
    "num_remembered": "num_cached",
}
"""Current names by old name; an old name may follow a prefix such as `dev/` or `<agent>/`."""
_CACHE_SIZE = 4096


@lru_cache(_CACHE_SIZE)
def current_figure_name(name: str) -> str:
    """Return the current name of a figure or column; a prefix that ends with a slash is kept."""
    for old, new in CURRENT_NAMES.items():
        if name == old or name.endswith(f"/{old}"):
            return name.removesuffix(old) + new
    return name


def with_current_names(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of a table or of metrics with current names, in the same order."""
    return {current_figure_name(name): value for name, value in row.items()}


def with_nested_current_names(value: Any) -> Any:
    """Return a JSON value whose objects, at any depth, have current names."""
    if isinstance(value, dict):
        return {
            current_figure_name(name): with_nested_current_names(item)
            for name, item in value.items()
        }
    if isinstance(value, list):
        return [with_nested_current_names(item) for item in value]
    return value
