"""Evaluation of a sampler over many episodes."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from tqdm import tqdm

from nip_astra.astra.core.aliases import only_one
from nip_astra.astra.core.common import ActionT, StateT
from nip_astra.astra.core.counts import check_count
from nip_astra.astra.core.sampler import Graph, Sampler
from nip_astra.errors import ConfigurationError

SeedT = TypeVar("SeedT")
JSONLike = dict[str, Any]
"""A JSON object."""


@dataclass
class GraphMetrics:
    """Metrics of one episode.

    Attributes
    ----------
    overall : dict
        Metrics of the whole episode.
    per_turn : list of dict
        Metrics of each turn, in order.
    """

    overall: dict[str, Any]
    per_turn: list[dict[str, Any]]


class Evaluator(ABC, Generic[StateT, ActionT, SeedT]):
    """Samples evaluation episodes; subclasses implement `compute_metrics` and `aggregate_metrics`.

    Attributes
    ----------
    env : Sampler
        The sampler; also called `sampler` and `environment`.
    seeds : list or None
        Starts of episodes, usually prompts; None for the numbers from 0.
    """

    def __init__(
        self,
        env: Sampler[StateT, ActionT] | None = None,
        seeds: Sequence[SeedT] | None = None,
        *,
        sampler: Sampler[StateT, ActionT] | None = None,
        environment: Sampler[StateT, ActionT] | None = None,
    ) -> None:
        found = only_one("what plays", env=env, sampler=sampler, environment=environment)
        if not isinstance(found, Sampler):
            raise ConfigurationError(
                f"{type(self).__name__} needs a sampler, got "
                f"{'none' if found is None else f'a {type(found).__name__}'}. Give one first, for "
                "instance ASTSampler(problem, prompts)."
            )
        self.env: Sampler[StateT, ActionT] = found
        self.seeds = None if seeds is None else list(seeds)

    @property
    def sampler(self) -> Sampler[StateT, ActionT]:
        """Another name of `env`."""
        return self.env

    environment = sampler

    def evaluate(self, n_rollouts: int | None = None, progress: bool = True) -> JSONLike:
        """Sample the episodes and return the aggregated metrics.

        Parameters
        ----------
        n_rollouts : int, optional
            Number of seeds to use, the first ones; all by default.
        progress : bool
            Whether a progress bar is shown.
        """
        graphs = self.play(self._chosen_seeds(n_rollouts))
        bar = tqdm(graphs, disable=not progress, desc="Evaluating")
        return self.aggregate_metrics([self.compute_metrics(graph) for graph in bar])

    def play(self, seeds: Sequence[Any]) -> list[Graph[StateT, ActionT]]:
        """Sample one episode per seed, in one batch if the sampler can."""
        together = getattr(self.env, "eval_rollouts", None)
        if together is not None:
            graphs: list[Graph[StateT, ActionT]] = together(seeds)
            return graphs
        return [self.env.eval_rollout(seed) for seed in seeds]

    def _chosen_seeds(self, count: int | None) -> list[Any]:
        if count is not None:
            check_count("n_rollouts", count, what="episodes")
        if self.seeds is None and count is not None:
            return list(range(count))
        if self.seeds is None or (count is not None and count > len(self.seeds)):
            have = "no seeds" if self.seeds is None else f"{len(self.seeds)} seeds"
            raise ConfigurationError(
                f"cannot evaluate {count or 'all'} episodes: the evaluator has {have}. Give "
                "n_rollouts, at most the number of seeds, or more seeds."
            )
        return list(self.seeds[:count])

    @abstractmethod
    def compute_metrics(self, g: Graph[StateT, ActionT]) -> GraphMetrics:
        """Return the metrics of one episode."""

    @abstractmethod
    def aggregate_metrics(self, all_metrics: list[GraphMetrics]) -> JSONLike:
        """Aggregate the metrics of all episodes."""

    @staticmethod
    def write_json(data: JSONLike, path: str | Path) -> None:
        """Write metrics to a file."""
        Path(path).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
