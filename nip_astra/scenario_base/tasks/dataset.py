"""Problems from a file or dataset."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from nip_astra.errors import ContextLengthError, DataError, counted
from nip_astra.parameters.conditions import where
from nip_astra.parameters.parameters_base import PlainText
from nip_astra.parameters.types import TaskType
from nip_astra.rollouts.messages import Turn
from nip_astra.rollouts.prompts import Prompt
from nip_astra.scenario_base.agents import ConversationAgent
from nip_astra.scenario_base.conversation.prompts import DEFAULT_COLUMN, read_prompts
from nip_astra.scenario_base.tasks.base import (
    Environment,
    Episode,
    Reaction,
    Split,
    Task,
    TaskParameters,
    register_task,
)
from nip_astra.scenario_base.tasks.rewards import (
    RewardParameters,
    WeightedRewards,
    is_correct,
)
from nip_astra.scorers.base import Scorer, ScorerParameters, build_scorer
from nip_astra.utils.seeding import derived_generator

MIN_HELD_OUT, MAX_HELD_OUT = 8, 512
"""Distinct prompts that are held out of the training data."""
_MAX_SHOWN = 40


class RowEnvironment(Environment):
    """A row, answered in one message."""

    is_stateless = True

    def __init__(self, prompt: Prompt, answer: str | None, match: str | None) -> None:
        self.prompt = prompt
        self.solution = answer
        self.match = match
        self.columns = prompt.columns
        self.row = prompt.row
        self.begins_answer = begins_answer(prompt)

    def reset(self) -> Sequence[Turn]:
        return opening_messages(self.prompt)

    def step(self, message: str) -> Reaction:
        if self.match is None or self.solution is None:
            return Reaction(reward=None)
        contains = self.match == "contains"
        return Reaction(reward=float(is_correct(message, self.solution, contains=contains)))


def opening_messages(prompt: Prompt) -> list[Turn]:
    """Return the messages of a prompt that open the conversation."""
    return list(prompt.messages) or [Turn("user", str(prompt))]


def begins_answer(prompt: Prompt) -> bool:
    """Return whether a prompt ends with the beginning of the answer."""
    return bool(prompt.messages) and prompt.messages[-1].role == "assistant"


@register_task(TaskType.DATASET)
class DatasetTask(Task):
    """One prompt per row, rewarded by its answer column, a scorer, or weighted reward functions."""

    reads_state = False

    class Parameters(TaskParameters):
        """Files and reward."""

        train: str | list[str]
        """Training problems: a `.jsonl`, `.csv`, `.parquet` or text file, `scenario://file`, or a
        dataset as `owner/name:split`; or a list of several."""
        test: str | list[str] | None = None
        """Held-out problems, disjoint from the training problems; null to hold out a part of
        train."""
        test_fraction: Annotated[float, where("test", None)] = Field(default=0.1, gt=0, lt=1)
        """Fraction of the distinct training prompts to hold out, by the seed; at least 8 and at
        most 512. With fewer than 16 distinct prompts, none is held out."""
        dev: str | list[str] | None = None
        """Problems for selecting the best checkpoint; null for the held-out ones."""
        column: PlainText = DEFAULT_COLUMN
        """Column of the prompts."""
        reward: Literal["exact", "contains", "scorer", "functions"] = "exact"
        """exact: 1 if the message equals the answer up to whitespace; contains: if it contains the
        answer; scorer: the score of a scorer; functions: a weighted sum of reward functions."""
        functions: Annotated[dict[PlainText, RewardParameters], where("reward", "functions")] = {}
        """Reward functions, or scorers, by the names under which they are logged; the functions are
        called as `trl.GRPOTrainer` calls its own."""
        answer_column: PlainText = "answer"
        """Column of the answers."""
        scorer: Annotated[ScorerParameters | None, where("reward", "scorer")] = Field(  # type: ignore[valid-type]
            default=None
        )
        """Scorer of messages, 0 to 1; the reward is the score. For a custom function:
        `{_type: python, function: path/to/file.py:name}`."""

    def __init__(self, parameters: Any, **options: Any) -> None:
        super().__init__(parameters, **options)
        self.scorer: Scorer | None = None
        if parameters.reward == "scorer":
            if parameters.scorer is None:
                raise DataError(
                    "task.task.reward is scorer, but task.task.scorer is missing. Set it, or set "
                    "task.task.reward to exact or contains."
                )
            self.scorer = build_scorer(
                parameters.scorer, device=self.device, scenario_dir=self.scenario_dir
            )
            self.scorers = (self.scorer,)
        self._rows = self._read_rows()
        held_out_prompts = {*self._rows["test"], *self._rows["dev"]}
        shared_prompts = set(self._rows["train"]) & held_out_prompts
        if shared_prompts:
            raise DataError(
                f"training and held-out data share {counted(len(shared_prompts), 'problem')}, for "
                f"instance {_shorten(min(shared_prompts))}. Remove shared ones from one file."
            )
        self.rewards = self._build_rewards()
        self._has_answers = self.scorer is None and self.rewards is None
        if self._has_answers:
            # A missing answer is reported now, not in the middle of the run.
            for rows in self._rows.values():
                for row in rows:
                    self._read_answer(row)

    def _read_rows(self) -> dict[str, list[Prompt]]:
        """Read the rows of each split; holds out a part of train if no other rows are given."""
        parameters = self.parameters
        rows: dict[str, list[Prompt]] = {}
        for split in ("train", "test", "dev"):
            references = getattr(parameters, split)
            if references is None:
                continue
            if isinstance(references, str):
                references = [references]
            rows[split] = []
            for reference in references:
                rows[split] += read_prompts(reference, self.scenario_dir, parameters.column)
        if "test" not in rows:
            rows["train"], rows["test"] = hold_out(
                rows["train"], parameters.test_fraction, self.seed
            )
        rows.setdefault("dev", rows["test"])
        return rows

    def _build_rewards(self) -> WeightedRewards | None:
        functions = self.parameters.functions
        if self.parameters.reward != "functions":
            return None
        if not functions:
            raise DataError(
                "task.task.reward is functions, but task.task.functions is empty. Set it, for "
                "instance to {mine: {function: rewards.py:mine}}."
            )
        # A dictionary as a set that keeps its order.
        column_names: dict[str, None] = {}
        for rows in self._rows.values():
            for row in rows:
                column_names |= dict.fromkeys(row.row)
        rewards = WeightedRewards(
            functions, tuple(column_names), device=self.device, scenario_dir=self.scenario_dir
        )
        self.scorers = tuple(rewards.scorers.values())
        return rewards

    def num_problems(self, split: Split) -> int:
        return len(self._rows[split])

    def environment(self, split: Split, index: int) -> RowEnvironment:
        rows = self._rows[split]
        row = rows[index % len(rows)]
        if not self._has_answers:
            return RowEnvironment(row, None, None)
        return RowEnvironment(row, self._read_answer(row), self.parameters.reward)

    def _read_answer(self, row: Prompt) -> str:
        name = self.parameters.answer_column
        columns = dict(row.columns)
        answer = columns.get(name)
        if answer is None:
            raise DataError(
                f"the problem {_shorten(row)} has no value in a column {name!r}. Its columns: "
                f"{', '.join(columns) or 'none'}. Set task.task.answer_column, or "
                "task.task.reward to scorer."
            )
        if self.parameters.reward == "contains" and not str(answer).split():
            raise DataError(
                f"the answer of the problem {_shorten(row)} is empty, so every message contains "
                "it. Add an answer, or set task.task.reward to exact."
            )
        return str(answer)

    def check_lengths(self, policy: ConversationAgent) -> None:
        """Check that no prompt exceeds the policy's context window."""
        room = policy.room
        for split, rows in self._rows.items():
            for row in rows:
                # A token has at least one byte, except for those of a chat template.
                is_certainly_short = len(str(row).encode(errors="replace")) <= room // 2
                # Messages must suit the chat template, too.
                if is_certainly_short and not row.messages:
                    continue
                turns = policy.tokenize(opening_messages(row))
                try:
                    policy.fit(turns, is_begun=begins_answer(row))
                except ContextLengthError as error:
                    source = getattr(self.parameters, split) or "dev"
                    raise DataError(
                        f"the problem {_shorten(row)} of {source} is too long: {error}"
                    ) from error

    def rate(self, episodes: Sequence[Episode]) -> None:
        if self.rewards is not None:
            self.rewards.rate(episodes, self.progress)
            return
        if self.scorer is None:
            super().rate(episodes)
            return
        exchanges = [episode.exchange() for episode in episodes]
        scores_N = self.scorer.rate(exchanges).scores_N
        for episode, score in zip(episodes, scores_N, strict=True):
            episode.reward = None if score.isnan() else float(score)


def hold_out(
    rows: Sequence[Prompt], fraction: float, seed: int
) -> tuple[list[Prompt], list[Prompt]]:
    """Split rows into training and held-out rows; equal prompts are on the same side.

    The fraction is of the distinct prompts, at least `MIN_HELD_OUT` and at most `MAX_HELD_OUT`;
    of fewer than twice the former, none is held out. One prompt at least is left for training.
    """
    prompts = list(dict.fromkeys(map(str, rows)))
    if len(prompts) < 2 * MIN_HELD_OUT:
        return list(rows), []
    count = max(round(fraction * len(prompts)), MIN_HELD_OUT)
    count = min(count, MAX_HELD_OUT, len(prompts) - 1)
    order = torch.randperm(len(prompts), generator=derived_generator(seed, "held out"))
    held_out_prompts = {prompts[index] for index in order[:count].tolist()}
    train = [row for row in rows if row not in held_out_prompts]
    held_out = [row for row in rows if row in held_out_prompts]
    return train, held_out


def _shorten(prompt: str) -> str:
    """Return a prompt for a message, truncated."""
    text = str(prompt)
    return repr(text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}...")
