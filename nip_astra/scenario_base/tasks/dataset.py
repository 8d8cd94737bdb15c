"""Problems from a file or dataset."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from nip_astra.errors import ContextLengthError, DataError
from nip_astra.parameters.conditions import where
from nip_astra.parameters.parameters_base import PlainText, polymorphic
from nip_astra.parameters.types import TaskType
from nip_astra.rollouts.prompts import Prompt, columns_of
from nip_astra.scenario_base.agents import ConversationAgent
from nip_astra.scenario_base.conversation.prompts import DEFAULT_COLUMN, read_prompts
from nip_astra.scenario_base.conversation.tokens import Turn
from nip_astra.scenario_base.tasks.base import (
    Environment,
    Episode,
    Reaction,
    Split,
    Task,
    TaskParameters,
    register_task,
)
from nip_astra.scorers.base import SCORERS, Exchange, Message, Scorer, build_scorer

_MAX_SHOWN = 40
ScorerParameters = polymorphic(SCORERS.get, Scorer.Parameters)


class RowEnvironment(Environment):
    """One row, answered in one message."""

    def __init__(self, prompt: str, answer: str | None, match: str | None) -> None:
        self.prompt, self.solution, self.match = prompt, answer, match
        self.columns = columns_of(prompt)

    def reset(self) -> Sequence[Message]:
        return [Message("user", str(self.prompt))]

    def step(self, message: str) -> Reaction:
        if self.match is None or self.solution is None:
            return Reaction(reward=None)
        text, answer = " ".join(message.split()), " ".join(self.solution.split())
        is_right = answer in text if self.match == "contains" else answer == text
        return Reaction(reward=float(is_right))


@register_task(TaskType.DATASET)
class DatasetTask(Task):
    """One prompt per row, rewarded by its answer column or by a scorer that reads all columns."""

    class Parameters(TaskParameters):
        """Files and reward."""

        train: str
        """Training problems: a `.jsonl`, `.csv` or text file, `scenario://file`, or a dataset as
        `owner/name:split`."""
        test: str
        """Held-out problems, disjoint from the training problems."""
        dev: str | None = None
        """Problems for selecting the best checkpoint; null for the held-out ones."""
        column: PlainText = DEFAULT_COLUMN
        """Column of the prompts."""
        reward: Literal["exact", "contains", "scorer"] = "exact"
        """exact: 1 if the message equals the answer up to whitespace; contains: if it contains the
        answer; scorer: the score of a scorer."""
        answer_column: PlainText = "answer"
        """Column of the answers."""
        scorer: Annotated[ScorerParameters | None, where("reward", "scorer")] = Field(  # type: ignore[valid-type]
            default=None
        )
        """Scorer of messages, 0 to 1; the reward is the score. For a custom function:
        `{_type: python, function: path/to/file.py:name}`."""

    def __init__(
        self, parameters: Any, *, seed: int, device: torch.device, scenario_dir: Path | None
    ) -> None:
        super().__init__(parameters, seed=seed, device=device, scenario_dir=scenario_dir)
        self.scorer: Scorer | None = None
        if parameters.reward == "scorer":
            if parameters.scorer is None:
                raise DataError(
                    "task.reward is scorer, but task.scorer is missing. Set it, or set task.reward "
                    "to exact or contains."
                )
            self.scorer = build_scorer(parameters.scorer, device=device, scenario_dir=scenario_dir)
            self.scorers = (self.scorer,)
        names = {"train": parameters.train, "test": parameters.test}
        names["dev"] = parameters.dev or parameters.test
        self._rows = {
            split: read_prompts(name, scenario_dir, parameters.column)
            for split, name in names.items()
        }
        shared = set(self._rows["train"]) & {*self._rows["test"], *self._rows["dev"]}
        if shared:
            raise DataError(
                f"{len(shared)} held-out problems are training problems too, for instance "
                f"{_short(min(shared))}. Remove them from one file."
            )
        if self.scorer is None:
            for rows in self._rows.values():
                for row in rows:
                    self._answer(row)

    def num_problems(self, split: Split) -> int:
        return len(self._rows[split])

    def environment(self, split: Split, index: int) -> RowEnvironment:
        rows = self._rows[split]
        row = rows[index % len(rows)]
        if self.scorer is not None:
            return RowEnvironment(row, None, None)
        return RowEnvironment(row, self._answer(row), self.parameters.reward)

    def _answer(self, row: Prompt) -> str:
        name = self.parameters.answer_column
        answer = dict(row.columns).get(name)
        if answer is None:
            raise DataError(
                f"the problem {_short(row)} has no column {name!r}. Its columns: "
                f"{', '.join(dict(row.columns)) or 'none'}. Set task.answer_column or a scorer."
            )
        if self.parameters.reward == "contains" and not str(answer).split():
            raise DataError(
                f"the answer of the problem {_short(row)} is empty, so every message contains it. "
                "Add an answer, or set task.reward to exact."
            )
        return str(answer)

    def check_lengths(self, policy: ConversationAgent) -> None:
        """Refuse prompts that exceed the policy's context window."""
        room = policy.language_model.context_window - policy.sampling.max_new_tokens
        encode = policy.conversation_format.encode
        for split, rows in self._rows.items():
            for row in rows:
                # A token has at least one byte, except for those of a chat template.
                if len(str(row).encode(errors="replace")) <= room // 2:
                    continue
                turn = Turn(is_own=False, ids=tuple(encode(str(row))))
                try:
                    policy.conversation_format.fit([turn], num_tokens=room)
                except ContextLengthError as error:
                    raise DataError(
                        f"the problem {_short(row)} of {getattr(self.parameters, split) or 'dev'} "
                        f"is too long: {error}"
                    ) from error

    def rate(self, episodes: Sequence[Episode]) -> None:
        if self.scorer is None:
            super().rate(episodes)
            return
        exchanges = [
            Exchange(
                text=episode.messages[-1].text,
                history=tuple(episode.messages[:-1]),
                role="assistant",
                columns=episode.environment.columns,
            )
            for episode in episodes
        ]
        for episode, score in zip(episodes, self.scorer.rate(exchanges).scores_N, strict=True):
            episode.reward = None if score.isnan() else float(score)


def _short(prompt: str) -> str:
    """A prompt for a message, truncated."""
    text = str(prompt)
    return repr(text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}...")
