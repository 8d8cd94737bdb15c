"""What an AST run has done so far; everything that a checkpoint must hold beside the models."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any

from nip_astra.rollouts.samples import Sample


@dataclass
class AstState:
    """Counters and half-used experience of an AST run.

    Attributes
    ----------
    iteration : int
        Iterations completed.
    num_optimizer_steps : int
        Optimizer steps taken.
    samples : list[Sample] or None
        Training samples of the iteration in progress; None between iterations.
    num_steps_done : int
        Optimizer steps already taken on `samples`.
    iteration_metrics : dict[str, float]
        Metrics of the rollout in progress.
    step_sums : dict[str, float]
        Sums of the metrics of the steps taken on `samples`.
    best_dev_value : float or None
        Best value of the dev metric so far.
    num_evals_since_best : int
        Dev evaluations since then that were no better.
    before : dict or None
        Held-out figures of the untrained attacker.
    num_queries : int
        Target queries spent in training.
    first_query : dict
        Target queries until each planted failure was found.
    memory : dict
        What the trainer and its reward terms remembered when this was saved.
    """

    iteration: int = 0
    num_optimizer_steps: int = 0
    samples: list[Sample] | None = None
    num_steps_done: int = 0
    iteration_metrics: dict[str, float] = field(default_factory=dict)
    step_sums: dict[str, float] = field(default_factory=dict)
    best_dev_value: float | None = None
    num_evals_since_best: int = 0
    before: dict[str, Any] | None = None
    num_queries: int = 0
    first_query: dict[str, int | None] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)

    @property
    def update_count(self) -> int:
        """A number that grows with every step and every iteration; names checkpoints."""
        return self.num_optimizer_steps + self.iteration

    def to_dict(self) -> dict[str, Any]:
        """Plain values and tensors."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> AstState:
        """Take what `to_dict` gave."""
        return cls(**plain)

    def begin(self, samples: list[Sample], metrics: dict[str, float]) -> None:
        """Start to use the experience of an iteration."""
        self.samples, self.num_steps_done = samples, 0
        self.iteration_metrics, self.step_sums = metrics, {}

    def count_step(self, metrics: dict[str, float]) -> None:
        """Count one optimizer step and add up its metrics."""
        self.num_steps_done += 1
        self.num_optimizer_steps += 1
        for name, value in metrics.items():
            self.step_sums[name] = self.step_sums.get(name, 0.0) + value

    def count_evaluation(self, value: float) -> bool:
        """Count a dev evaluation and say whether it is the best so far; NaN never is."""
        is_best = not math.isnan(value) and (
            self.best_dev_value is None or value > self.best_dev_value
        )
        if is_best:
            self.best_dev_value = value
        self.num_evals_since_best = 0 if is_best else self.num_evals_since_best + 1
        return is_best

    def end(self) -> dict[str, float]:
        """Finish the iteration and give its metrics, the steps' as means."""
        count = max(self.num_steps_done, 1)
        means = {name: value / count for name, value in self.step_sums.items()}
        metrics = self.iteration_metrics | means | {"num_steps": float(self.num_steps_done)}
        self.samples, self.num_steps_done = None, 0
        self.iteration_metrics, self.step_sums = {}, {}
        self.iteration += 1
        return metrics
