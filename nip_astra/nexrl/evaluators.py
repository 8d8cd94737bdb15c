"""NexRL's evaluators, which are reward functions here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class BaseEvaluationTarget:
    """What is evaluated: the policy's answer."""

    final_answer: str


@dataclass
class NexAUEvaluationTarget(BaseEvaluationTarget):
    """An answer with the messages before it, and whether it was cut."""

    observation: list[dict[str, Any]]
    is_truncated: bool = False


@dataclass
class EvaluationRunResult:
    """The reward of an answer, the right answer, and numbers to log."""

    reward: float = 0.0
    ground_truth: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    extra_info: dict[str, Any] = field(default_factory=dict)


class Evaluator(ABC):
    """Base of evaluators; subclasses implement `evaluate`.

    An instance is a reward function: `task.task.functions.NAME.function: evaluator.py:MyEvaluator`.
    """

    @abstractmethod
    def evaluate(
        self, data: Mapping[str, Any], evaluation_target: BaseEvaluationTarget
    ) -> EvaluationRunResult:
        """Hook: rate an answer to a row of the dataset.

        Parameters
        ----------
        data : Mapping
            The columns of the row, and `prompt`.
        evaluation_target : BaseEvaluationTarget
            The answer, with the messages of prompt and answer as `observation`.
        """

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float]:
        """Return the rewards of completions, and log the means of their metrics."""
        results = []
        for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            messages = _messages(prompt, "user") + _messages(completion, "assistant")
            target = NexAUEvaluationTarget(messages[-1]["content"], messages)
            rows = {
                name: values[row]
                for name, values in columns.items()
                if isinstance(values, list) and len(values) == len(prompts)
            }
            results.append(self.evaluate({**rows, "prompt": prompt}, target))
        names = dict.fromkeys(name for result in results for name in result.metrics)
        for name in names if log_metric is not None else ():
            values = [result.metrics[name] for result in results if name in result.metrics]
            log_metric(name, sum(values) / len(values))  # type: ignore[misc]  # not None here
        return [float(result.reward) for result in results]


def _messages(content: Any, role: str) -> list[dict[str, Any]]:
    """Return a prompt or completion as messages."""
    return [{"role": role, "content": content}] if isinstance(content, str) else list(content)
