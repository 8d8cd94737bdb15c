"""Problems of a file or data set."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from nip_astra.errors import DataError
from nip_astra.parameters.conditions import where
from nip_astra.parameters.parameters_base import polymorphic
from nip_astra.parameters.types import TaskType
from nip_astra.rollouts.prompts import Prompt, columns_of
from nip_astra.scenario_base.conversation.prompts import DEFAULT_COLUMN, read_prompts
from nip_astra.scenario_base.tasks.base import (
    Environment,
    Episode,
    Reaction,
    Split,
    Task,
    TaskParameters,
)
from nip_astra.scenario_base.tasks.registry import register_task
from nip_astra.scorers.base import Exchange, Message, Scorer
from nip_astra.scorers.registry import SCORERS, build_scorer

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
        said, right = " ".join(message.split()), " ".join(self.solution.split())
        return Reaction(reward=float(right in said if self.match == "contains" else right == said))


@register_task(TaskType.DATASET)
class DatasetTask(Task):
    """A prompt a row, and a reward by its answer, or by a scorer that reads all of its columns."""

    class Parameters(TaskParameters):
        """Which files, and what an answer is worth."""

        train: str
        """Problems learnt from: a `.jsonl`, `.csv` or text file, `scenario://file`, or a data set
        as `owner/name:split`."""
        test: str
        """Held-out problems, which must not be among the others."""
        dev: str | None = None
        """Problems that choose the best checkpoint; null for the held-out ones."""
        column: str = DEFAULT_COLUMN
        """Column of the prompts."""
        reward: Literal["exact", "contains", "scorer"] = "exact"
        """exact: 1 where the message is the answer, spaces apart; contains: where it holds it;
        scorer: what a scorer says."""
        answer_column: Annotated[str, where("reward", "exact", "contains")] = "answer"
        """Column of the answers."""
        scorer: Annotated[ScorerParameters | None, where("reward", "scorer")] = Field(  # type: ignore[valid-type]
            default=None
        )
        """What rates messages from 0 to 1; the reward is its score. A function of one's own is
        `{_type: python, function: path/to/file.py:name}`."""

    def __init__(
        self, parameters: Any, *, seed: int, device: torch.device, scenario_dir: Path | None
    ) -> None:
        super().__init__(parameters, seed=seed, device=device, scenario_dir=scenario_dir)
        self.scorer: Scorer | None = None
        if parameters.reward == "scorer":
            if parameters.scorer is None:
                raise DataError(
                    "the messages of a data set were to be rated by a scorer, but none is given. "
                    "Set task.scorer, or task.reward to exact or contains."
                )
            self.scorer = build_scorer(parameters.scorer, device=device, scenario_dir=scenario_dir)
        names = {"train": parameters.train, "test": parameters.test}
        names["dev"] = parameters.dev or parameters.test
        self._rows = {
            split: read_prompts(name, scenario_dir, parameters.column)
            for split, name in names.items()
        }
        shared = set(self._rows["train"]) & {*self._rows["test"], *self._rows["dev"]}
        if shared:
            raise DataError(
                f"the held-out problems were to be unseen, but {len(shared)} are among those for "
                f"training, for instance {sorted(shared)[0]!r}. Remove them from one."
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
                f"the problem {str(row)[:40]!r} was to be rated by its answer, but has no column "
                f"{name!r}; it has {', '.join(dict(row.columns)) or 'none'}. Add it, name another "
                "with task.answer_column, or rate by a scorer."
            )
        return str(answer)

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
