"""The datapoints of rollouts in words, their files, and sample conversations for reports."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from nip_astra.samplers.answer_journal import AnswerJournal
from nip_astra.samplers.text_rollouts import active_turns, transcripts
from nip_astra.scenario_base.text.game import TextEpisode, TextGame
from nip_astra.scenarios.pure_text_base import PureTextScenarioInstance, row_of
from nip_astra.tracking.run_directory import RunDirectory
from nip_astra.trainers.text.statistics import episode_returns
from nip_astra.utils.nested_array_dict import NestedArrayDict
from nip_astra.utils.seeding import derive_seed

NUM_SEEDS = 2**16
"""Seeds that an episode may have."""
ROLLOUTS, ANSWERS, TRANSCRIPTS = "rollouts.json", "answers.jsonl", "transcripts.json"
COLUMNS = ("episode", "label", "decision", "is_right", "rewards", "datapoint", "rounds")
"""Columns of sample rollouts, as of tensor games; a message is a text here."""


# ---- datapoints


def train_episodes(
    instance: PureTextScenarioInstance, *, seed: int, iteration: int, count: int
) -> Iterator[TextEpisode]:
    """An iteration's episodes; each pass over the data has its own order."""
    data = instance.train_data
    for number in range(iteration * count, (iteration + 1) * count):
        epoch, place = divmod(number, len(data))
        row = shuffled(len(data), seed, "train data", epoch)[place]
        episode_seed = derive_seed(seed, "train episode", number) % NUM_SEEDS
        yield instance.game.start(row, row_of(data, row), episode_seed)


def held_out_episodes(
    instance: PureTextScenarioInstance, *, seed: int, count: int | None
) -> Iterator[TextEpisode]:
    """A test's episodes, the same in each test; on all of the data where `count` is None."""
    data = instance.test_data
    rows = range(len(data)) if count is None else shuffled(len(data), seed, "test data")[:count]
    for row in rows:
        episode_seed = derive_seed(seed, "test episode", row) % NUM_SEEDS
        yield instance.game.start(row, row_of(data, row), episode_seed)


@lru_cache(maxsize=8)
def shuffled(count: int, *key: str | int) -> tuple[int, ...]:
    """The numbers below `count` in an order that depends on the key alone."""
    return tuple(np.random.default_rng(derive_seed(*key)).permutation(count).tolist())


# ---- files


class RolloutFiles:
    """The rollouts of one run, a folder for each sampling; in memory without a run directory.

    A folder `rollouts/<split>_<iteration>` has `answers.jsonl`, the answers in the order of their
    arrival; `rollouts.json`, a `NestedArrayDict` with prompts and raw answers; and
    `transcripts.json`.
    """

    def __init__(self, run_directory: RunDirectory | None) -> None:
        self.run_directory = run_directory
        self._in_memory: dict[tuple[str, int], NestedArrayDict] = {}

    def folder(self, split: str, iteration: int) -> Path | None:
        """The folder of a sampling; None without a run directory."""
        if self.run_directory is None:
            return None
        return self.run_directory.rollouts_dir / f"{split}_{iteration:04d}"

    def journal(
        self,
        split: str,
        iteration: int,
        run_key: str | None = None,
        *,
        is_replayed: bool = False,
    ) -> AnswerJournal:
        """The answers of a sampling so far; see `AnswerJournal` for the options."""
        folder = self.folder(split, iteration)
        path = None if folder is None else folder / ANSWERS
        return AnswerJournal(path, run_key, is_replayed)

    def keep(
        self,
        rollouts: NestedArrayDict,
        split: str,
        iteration: int,
        *,
        agent_names: Sequence[str],
        channel_names: Sequence[str],
    ) -> None:
        """Keep the rollouts of a sampling."""
        folder = self.folder(split, iteration)
        if folder is None or self.run_directory is None:
            self._in_memory[split, iteration] = rollouts
            return
        folder.mkdir(parents=True, exist_ok=True)
        name = folder.relative_to(self.run_directory.path) / TRANSCRIPTS
        texts = transcripts(rollouts, agent_names, channel_names)
        self.run_directory.write_json(str(name), texts)
        rollouts.save(folder / ROLLOUTS)

    def load(self, split: str, iteration: int) -> NestedArrayDict:
        """The rollouts of an earlier sampling."""
        folder = self.folder(split, iteration)
        if folder is None:
            return self._in_memory[split, iteration]
        return NestedArrayDict.load(folder / ROLLOUTS)


# ---- sample conversations


def episode_rows(
    rollouts: NestedArrayDict, game: TextGame, *, num_episodes: int, step: int, seed: int
) -> list[tuple[Any, ...]]:
    """Rows of a sample of rollouts, half of them with the right decision where there are enough."""
    names = game.protocol.agent_names
    are_right = (rollouts["decision"] == rollouts["y"]).tolist()
    generator = np.random.default_rng(derive_seed(seed, "episode rows", step))
    order = generator.permutation(len(are_right)).tolist()
    right = [place for place in order if are_right[place]]
    other = [place for place in order if not are_right[place]]
    num_right = min(len(right), max(num_episodes - num_episodes // 2, num_episodes - len(other)))
    returns_NA = episode_returns(rollouts)
    columns = rollouts.get("datapoint", {})
    return [
        (
            place,
            int(rollouts["y"][place]),
            int(rollouts["decision"][place]),
            are_right[place],
            dict(zip(names, returns_NA[place].tolist(), strict=True)),
            {
                "kind": "text",
                "id": int(rollouts["datapoint_id"][place]),
                "texts": {name: str(values[place]) for name, values in columns.items()},
            },
            _rounds(rollouts, place, game),
        )
        for place in sorted(right[:num_right] + other[: num_episodes - num_right])
    ]


def _rounds(rollouts: NestedArrayDict, place: int, game: TextGame) -> list[dict[str, Any]]:
    names, channels = game.protocol.agent_names, game.protocol.message_channel_names
    rewards_RA = rollouts["agents", "reward"][place].tolist()
    rounds: list[dict[str, Any]] = [
        {"round": r, "moves": [], "rewards": dict(zip(names, rewards_RA[r], strict=True))}
        for r in range(int(rollouts["num_rounds"][place]))
    ]
    for _, number, agent in active_turns(rollouts[place : place + 1]):
        at = (place, number, agent)
        messages = zip(channels, rollouts["agents", "message"][at], strict=True)
        is_verifier = names[agent] in game.protocol.verifier_names
        rounds[number]["moves"].append(
            {
                "agent": names[agent],
                "decision": int(rollouts["agents", "decision"][at]) if is_verifier else None,
                "messages": {channel: text for channel, text in messages if text is not None},
            }
        )
    return rounds
