"""NexRL's evaluators, which are reward functions here."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from nip_astra.errors import DataError


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


# ---- rewards of NexRL's rollout workers


def tagged_answer(
    completions: Sequence[Any],
    ground_truth: Sequence[Any] | None = None,
    reward_model: Sequence[Any] | None = None,
    **_: Any,
) -> list[float]:
    """Return 1 where the text within `<answer>` equals the right answer, as the simple worker."""
    answers = right_answers(len(completions), ground_truth, reward_model)
    rewards = []
    for completion, answer in zip(completions, answers, strict=True):
        match = re.search(r"<answer>(.*?)</answer>", _text(completion), re.DOTALL)
        is_correct = match is not None and match[1].strip() == answer
        rewards.append(float(is_correct))
    return rewards


def boxed_answer(
    completions: Sequence[Any],
    ground_truth: Sequence[Any] | None = None,
    reward_model: Sequence[Any] | None = None,
    **_: Any,
) -> list[float]:
    r"""Return 1 where the last `\boxed{...}` equals the right answer as text or as a number.

    Unlike NexRL's agent for mathematics it compares no formulas; for these, give a verifier of
    mathematics as the reward function.
    """
    answers = right_answers(len(completions), ground_truth, reward_model)
    return [
        float(_is_same_answer(_last_boxed(_text(completion)), _last_boxed(answer) or answer))
        for completion, answer in zip(completions, answers, strict=True)
    ]


def right_answers(
    count: int, ground_truth: Sequence[Any] | None, reward_model: Sequence[Any] | None
) -> list[str]:
    """Return the right answers from either column of NexRL's data.

    Raises
    ------
    DataError
        If the data have neither `ground_truth` nor `reward_model.ground_truth`.
    """
    column = list(ground_truth or [None] * count)
    nested_column = list(reward_model or [None] * count)
    answers = []
    for answer, nested in zip(column, nested_column, strict=True):
        if answer is None and isinstance(nested, Mapping):
            answer = nested.get("ground_truth")
        answers.append(answer)
    if None in answers:
        raise DataError(
            "the data have no right answer. Give a column ground_truth, or reward_model with "
            "ground_truth."
        )
    return list(map(str, answers))


def _last_boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{...}`, whose braces match."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    begin = start + len("\\boxed{")
    depth = 1
    for index in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return text[begin:index]
    return None


def _is_same_answer(answer: str | None, right: str) -> bool:
    if answer is None:
        return False
    first, second = _normalised(answer), _normalised(right)
    if first == second:
        return True
    numbers = _number(first), _number(second)
    return None not in numbers and numbers[0] == numbers[1]


def _normalised(text: str) -> str:
    text = re.sub(r"\\(?:text|mathrm)\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\\(?:left|right|,|!|;| )", "", text).replace("dfrac", "frac")
    return re.sub(r"[\s$]|,(?=\d{3}\b)", "", text).rstrip(".")


def _number(text: str) -> Fraction | None:
    fraction = re.fullmatch(r"(-?)\\frac\{(\d+)\}\{(\d+)\}", text)
    if fraction is not None:
        text = f"{fraction[1]}{fraction[2]}/{fraction[3]}"
    try:
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        return None


def _text(completion: Any) -> str:
    return str(_messages(completion, "assistant")[-1]["content"])


def _messages(content: Any, role: str) -> list[dict[str, Any]]:
    """Return a prompt or completion as messages."""
    return [{"role": role, "content": content}] if isinstance(content, str) else list(content)
