"""What a run of a language model has done so far."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field

from nip_astra.checkpoints.run_state import RunState
from nip_astra.parameters.training import TrainingConfiguration
from nip_astra.rollouts.samples import Sample
from nip_astra.tracking.tracker import plain_numbers

logger = logging.getLogger(__name__)


@dataclass
class LanguageModelState(RunState):
    """Counters and half-used experience.

    Attributes
    ----------
    samples : list[Sample] or None
        Training samples of the iteration in progress; None between iterations.
    num_steps_done : int
        Optimizer steps already taken on `samples`.
    iteration_metrics : dict[str, float]
        Metrics of the experience in progress.
    step_sums : dict[str, float]
        Sums of the metrics of the steps taken on `samples`.
    best_dev_value : float or None
        Best value of the dev metric so far.
    num_evals_since_best : int
        Dev evaluations since then that were no better.
    """

    samples: list[Sample] | None = None
    num_steps_done: int = 0
    iteration_metrics: dict[str, float] = field(default_factory=dict)
    step_sums: dict[str, float] = field(default_factory=dict)
    best_dev_value: float | None = None
    num_evals_since_best: int = 0

    @property
    def update_count(self) -> int:
        """A number that grows with every step and every iteration."""
        return self.num_optimizer_steps + self.iteration

    def begin(self, samples: list[Sample], metrics: dict[str, float]) -> None:
        """Start to use the experience of an iteration.

        Raises
        ------
        TrackingError
            When a metric is no number.
        """
        # Figures of NumPy and torch would not be held by a checkpoint.
        self.iteration_metrics, self.step_sums = plain_numbers(metrics), {}
        self.samples, self.num_steps_done = samples, 0

    def count_step(self, metrics: dict[str, float]) -> None:
        """Count one optimizer step and add up its metrics."""
        self.num_steps_done += 1
        self.num_optimizer_steps += 1
        for name, value in plain_numbers(metrics).items():
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

    def has_stopped_early(self, training: TrainingConfiguration) -> bool:
        """Say whether the dev evaluations have brought nothing better for too long."""
        patience = training.early_stopping_patience
        if patience is None or self.num_evals_since_best < patience:
            return False
        logger.info(
            "stopped after iteration %d: no better dev/%s in %d evaluations",
            self.iteration,
            training.dev_metric,
            self.num_evals_since_best,
        )
        return True

    def end(self) -> dict[str, float]:
        """Finish the iteration and give its metrics, the steps' as means."""
        count = max(self.num_steps_done, 1)
        means = {name: value / count for name, value in self.step_sums.items()}
        metrics = self.iteration_metrics | means | {"num_steps": float(self.num_steps_done)}
        self.samples, self.num_steps_done = None, 0
        self.iteration_metrics, self.step_sums = {}, {}
        self.iteration += 1
        return metrics
