"""Datapoints of text rollouts, their files, and sample conversations for reports."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nip_astra.protocols.protocol_base import ACCEPT, CONTINUE, REJECT, ProtocolHandler
from nip_astra.samplers.text_rollouts import AnswerJournal, active_turns, transcripts
from nip_astra.scenario_base.text.game import TextEpisode, TextGame, read_row
from nip_astra.scenarios.pure_text_base import PureTextScenarioInstance
from nip_astra.tracking.run_directory import RunDirectory
from nip_astra.utils.intervals import rate_estimate
from nip_astra.utils.nested_array_dict import NestedArrayDict
from nip_astra.utils.seeding import derive_seed

CLASSES = {REJECT: "negatives", ACCEPT: "positives"}
"""Names of a label's datapoints in metrics."""


def episode_returns(rollouts: NestedArrayDict) -> npt.NDArray[np.float64]:
    """Return each agent's return in each rollout, `[N, A]`."""
    returns_NA: npt.NDArray[np.float64] = rollouts["agents", "reward"].sum(axis=1)
    return returns_NA


def rollout_statistics(
    rollouts: NestedArrayDict, agent_names: Sequence[str], groupings: Sequence[str] = ()
) -> dict[str, float]:
    """Return metrics of all rollouts, and of each agent as `<agent>/<figure>`.

    A rollout without a decision counts as wrong. Figures without any data are left out. `groupings`
    are columns of the data, by each value of which the accuracy is added.
    """
    y_N, decision_N, datapoint_N = (rollouts[key] for key in ("y", "decision", "datapoint_id"))
    is_correct_N = decision_N == y_N
    _, row_N, count_D = np.unique(datapoint_N, return_inverse=True, return_counts=True)
    found = {
        "mean_accuracy": float(is_correct_N.mean()),
        "share_undecided": float((decision_N == CONTINUE).mean()),
        "mean_episode_length": float(rollouts["num_rounds"].mean()),
        "worst_datapoint_accuracy": float((np.bincount(row_N, is_correct_N) / count_D).min()),
    }
    for label, name in CLASSES.items():
        if (y_N == label).any():
            found[f"accuracy_of_{name}"] = float(is_correct_N[y_N == label].mean())
    if (decision_N != CONTINUE).any():
        found["mean_decision"] = float(decision_N[decision_N != CONTINUE].mean())
    if (decision_N == ACCEPT).any():
        found["accuracy_of_accepting"] = float(is_correct_N[decision_N == ACCEPT].mean())
    for column in groupings:
        values_N = rollouts["datapoint", column]
        for value in sorted(set(values_N.tolist())):
            found[f"accuracy_where_{column}_{value}"] = float(
                is_correct_N[values_N == value].mean()
            )
    returns_NA = episode_returns(rollouts)
    for number, name in enumerate(agent_names):
        found |= {
            f"{name}/{figure}": value
            for figure, value in _of_agent(rollouts, number, returns_NA[:, number]).items()
        }
    return found


def statistics_with_interval(
    rollouts: NestedArrayDict, agent_names: Sequence[str], groupings: Sequence[str] = ()
) -> dict[str, Any]:
    """Return statistics, the number of episodes, and a 95 % interval of accuracy, by datapoint."""
    found: dict[str, Any] = dict(rollout_statistics(rollouts, agent_names, groupings))
    is_correct_N = rollouts["decision"] == rollouts["y"]
    estimate = rate_estimate(is_correct_N.tolist(), rollouts["datapoint_id"].tolist())
    found["mean_accuracy_interval"] = [estimate.low, estimate.high]
    found["num_episodes"] = float(len(rollouts))
    return found


def _of_agent(
    rollouts: NestedArrayDict, number: int, returns_N: npt.NDArray[np.float64]
) -> dict[str, float]:
    found = {
        "mean_episode_reward": float(returns_N.mean()),
        "std_episode_reward": float(returns_N.std()),
    }
    had_turn_NR = rollouts["agents", "is_active"][:, :, number]
    messages = rollouts["agents", "message"][:, :, number][had_turn_NR]
    lengths = [len(text.split()) for text in messages.ravel() if text is not None]
    if lengths:
        found["mean_message_words"] = sum(lengths) / len(lengths)
    if had_turn_NR.any():
        retries_NR = rollouts["agents", "num_retries"][:, :, number]
        found["share_retried"] = float((retries_NR[had_turn_NR] > 0).mean())
        for figure, key in (("share_cut", "is_cut"), ("share_silent", "is_filled")):
            found[figure] = float(rollouts["agents", key][:, :, number][had_turn_NR].mean())
    return found


NUM_SEEDS = 2**16
"""Number of possible seeds of an episode."""
ROLLOUTS, ANSWERS, TRANSCRIPTS = "rollouts.json", "answers.jsonl", "transcripts.json"


# ---- datapoints


def train_episodes(
    instance: PureTextScenarioInstance, *, seed: int, iteration: int, count: int
) -> Iterator[TextEpisode]:
    """Yield the episodes of an iteration; the order is shuffled for each pass over the data."""
    data = instance.train_data
    for number in range(iteration * count, (iteration + 1) * count):
        epoch, place = divmod(number, len(data))
        row = shuffled(len(data), seed, "train data", epoch)[place]
        episode_seed = derive_seed(seed, "train episode", number) % NUM_SEEDS
        yield instance.game.start(row, read_row(data, row), episode_seed)


def held_out_episodes(
    instance: PureTextScenarioInstance, *, seed: int, count: int | None
) -> Iterator[TextEpisode]:
    """Yield the episodes of a test, equal in each test; all of the data if `count` is None."""
    data = instance.test_data
    rows = range(len(data)) if count is None else shuffled(len(data), seed, "test data")[:count]
    for row in rows:
        episode_seed = derive_seed(seed, "test episode", row) % NUM_SEEDS
        yield instance.game.start(row, read_row(data, row), episode_seed)


@lru_cache(maxsize=8)
def shuffled(count: int, *key: str | int) -> tuple[int, ...]:
    """Return the numbers below `count` in an order that depends only on the key."""
    return tuple(np.random.default_rng(derive_seed(*key)).permutation(count).tolist())


# ---- files


class RolloutFiles:
    """The rollouts of one run, a folder per sampling; in memory without a run directory.

    A folder `rollouts/<split>_<iteration>` has `answers.jsonl`, the answers in the order of their
    arrival; `rollouts.json`, a `NestedArrayDict` with prompts and raw answers; and
    `transcripts.json`.
    """

    def __init__(self, run_directory: RunDirectory | None, protocol: ProtocolHandler) -> None:
        self.run_directory, self.protocol = run_directory, protocol
        self._in_memory: dict[tuple[str, int], NestedArrayDict] = {}

    def folder(self, split: str, iteration: int) -> Path | None:
        """Return the folder of a sampling; None without a run directory."""
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
        """Return the answers of a sampling so far; see `AnswerJournal` for the options."""
        folder = self.folder(split, iteration)
        path = None if folder is None else folder / ANSWERS
        return AnswerJournal(path, run_key, is_replayed)

    def keep(self, rollouts: NestedArrayDict, split: str, iteration: int) -> None:
        """Store the rollouts of a sampling."""
        folder = self.folder(split, iteration)
        if folder is None or self.run_directory is None:
            self._in_memory[split, iteration] = rollouts
            return
        folder.mkdir(parents=True, exist_ok=True)
        name = folder.relative_to(self.run_directory.path) / TRANSCRIPTS
        protocol = self.protocol
        texts = transcripts(rollouts, protocol.agent_names, protocol.message_channel_names)
        self.run_directory.write_json(str(name), texts)
        rollouts.save(folder / ROLLOUTS)

    def load(self, split: str, iteration: int) -> NestedArrayDict:
        """Load the rollouts of an earlier sampling."""
        folder = self.folder(split, iteration)
        if folder is None:
            return self._in_memory[split, iteration]
        return NestedArrayDict.load(folder / ROLLOUTS)


# ---- sample conversations


def episode_rows(
    rollouts: NestedArrayDict, game: TextGame, *, num_episodes: int, step: int, seed: int
) -> list[tuple[Any, ...]]:
    """Return rows of sampled rollouts, half of them correct if there are enough.

    Their columns are those of tensor games (`protocol.statistics.COLUMNS`); a message is a text.
    """
    names = game.protocol.agent_names
    are_right = (rollouts["decision"] == rollouts["y"]).tolist()
    generator = np.random.default_rng(derive_seed(seed, "episode rows", step))
    order = generator.permutation(len(are_right)).tolist()
    right = [place for place in order if are_right[place]]
    other = [place for place in order if not are_right[place]]
    num_correct = min(len(right), max(num_episodes - num_episodes // 2, num_episodes - len(other)))
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
        for place in sorted(right[:num_correct] + other[: num_episodes - num_correct])
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
        reasonings = rollouts["agents"].get("reasoning")
        if reasonings is not None and reasonings[at] is not None:
            rounds[number]["moves"][-1]["reasoning"] = reasonings[at]
    return rounds
