"""Episodes of interaction protocols, of chat models and of networks: rows, metrics and tables.

A row has `datapoint_id`, `y`, `decision` ("accept", "reject" or None), `is_right`, `num_rounds`,
`rewards` by agent, and what the family adds. An episode without a decision is not right: the
verifier had all its rounds, so this is a result and no missing verdict. Its share is shown beside
the accuracy, with the accuracy of the episodes that were decided.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from nip_astra.evaluation.comparison import Contender, Metric, metric_of
from nip_astra.evaluation.families.base import OF_ATTACKERS, Evaluation, EvaluationFamily
from nip_astra.evaluation.storage import Row
from nip_astra.evaluation.tables import bracketed, plain_table
from nip_astra.parameters.files import read_yaml_mapping
from nip_astra.tracking.run_directory import HYPER_PARAMETERS
from nip_astra.utils.formatting import decimal, is_share, percent

DECISIONS = {0: "reject", 1: "accept"}
"""Names of a verifier's decisions; None where it has not decided."""


def metrics_of_episodes(agents: Sequence[str]) -> dict[str, Metric]:
    """Accuracy, undecided episodes, length, and the reward of each agent."""
    rewards = {
        f"reward_of_{name}": metric_of(partial(_reward, name), "observed") for name in agents
    }
    return {
        "accuracy": metric_of(lambda row: float(row["is_right"]), is_binary=True),
        "share_undecided": metric_of(lambda row: float(row["decision"] is None)),
        "episode_length": metric_of(lambda row: float(row["num_rounds"]), "observed"),
        **rewards,
    }


def _reward(agent: str, row: Row) -> float | None:
    value = row["rewards"].get(agent)
    return None if value is None else float(value)


def conditions_of_run(run: Path, split: str, seed: int | None) -> dict[str, Any]:
    """What should be equal where runs are compared: split, seed, and models before training."""
    values = read_yaml_mapping(run / HYPER_PARAMETERS)
    sections = [values, *(one for one in values.values() if isinstance(one, Mapping))]
    agents = {
        name: agent["model"]
        for section in sections
        for name, agent in (section.get("agents") or {}).items()
        if isinstance(agent, Mapping) and "model" in agent
    }
    return {"split": split, "seed": values["seed"] if seed is None else seed, "models": agents}


def figures_table(figures: Mapping[str, Any]) -> Table:
    """The figures of an evaluation, of all episodes and by agent."""
    flat, agents = figures["figures"], figures["agents"]
    table = plain_table(f"{figures['run']}: {figures['name']}", "", "all", *agents)
    names = [name for name in flat if not name.endswith("_interval") and "std_" not in name]
    for name in names:
        if "/" not in name:
            table.add_row(Text(_words(name)), _cell(flat, name), *("" for _ in agents))
    for name in dict.fromkeys(one.partition("/")[2] for one in names if "/" in one):
        cells = [_cell(flat, f"{agent}/{name}") for agent in agents]
        table.add_row(Text(_words(name)), "", *cells)
    return table


def _words(name: str) -> str:
    return name.replace("_", " ")


def _cell(flat: Mapping[str, Any], name: str) -> str:
    if name not in flat:
        return ""
    is_count = name.rpartition("/")[2].startswith("num_")
    write = percent if is_share(name) else decimal
    shown = f"{flat[name]:,.0f}" if is_count else write(flat[name])
    return shown + bracketed(flat.get(f"{name}_interval"), write)


def bounds_of_undecided(rows: Sequence[Row]) -> dict[str, float]:
    """How many episodes were not decided, and the accuracy of the others; empty if all were."""
    decided = [row for row in rows if row["decision"] is not None]
    num_undecided = len(rows) - len(decided)
    if not num_undecided:
        return {}
    num_right = sum(row["is_right"] for row in decided)
    found = {
        "num_undecided": float(num_undecided),
        "accuracy_if_undecided_right": (num_right + num_undecided) / len(rows),
    }
    return found | ({"accuracy_of_decided": num_right / len(decided)} if decided else {})


class EpisodeFamily(EvaluationFamily):
    """Base of the families whose rows are episodes of an interaction protocol."""

    splits = ("train", "test")
    unread = OF_ATTACKERS | {"overrides", "batch_size"}

    def pair_key(self, unit: Row) -> Hashable:
        """The number of a row's datapoint, and its content, which may differ between data sets."""
        content = json.dumps(unit.get("datapoint") or {}, sort_keys=True)
        return unit["datapoint_id"], unit["y"], unit.get("datapoint_hash") or content

    def tables(self, figures: Mapping[str, Any]) -> list[RenderableType]:
        return [figures_table(figures)]

    def contender(self, evaluation: Evaluation, label: str) -> Contender:
        figures, rows = evaluation.figures, evaluation.rows
        return Contender(
            label,
            rows,
            [self.pair_key(row) for row in rows],
            metrics_of_episodes(figures["agents"]),
            figures,
            conditions_of_run(evaluation.run, figures["split"], figures.get("seed")),
        )
