"""Play trained chat models again, apart from their training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nip_astra.errors import ConfigurationError
from nip_astra.samplers.answer_journal import AnswerJournal
from nip_astra.samplers.text_arrays import rollouts_of
from nip_astra.trainers.rl_pure_text_base import PureTextRlTrainer
from nip_astra.trainers.service_use import services_used
from nip_astra.trainers.text.datapoints import held_out_episodes, train_episodes
from nip_astra.trainers.text.episode_rows import COLUMNS, episode_rows
from nip_astra.utils.nested_array_dict import NestedArrayDict

NUM_ROWS = 24
"""Conversations of an evaluation that reports show at most."""


@dataclass(frozen=True)
class TextEvaluation:
    """What is to be played.

    Attributes
    ----------
    split : str
        "test", or "train" for data that was trained on.
    num_episodes : int or None
        Rollouts; None plays about each datapoint once.
    seed : int
        Of the choice of datapoints and of all answers.
    """

    split: Literal["train", "test"]
    num_episodes: int | None
    seed: int


@dataclass(frozen=True)
class PlayedEvaluation:
    """What was played.

    Attributes
    ----------
    figures : dict
        As in a run's results.
    rows : list of dict
        A sample of episodes, for reports.
    """

    rollouts: NestedArrayDict
    figures: dict[str, Any]
    rows: list[dict[str, Any]]
    services: dict[str, Any]


def play_evaluation(
    trainer: PureTextRlTrainer,
    models: Mapping[str, Any],
    evaluation: TextEvaluation,
    journal_path: Path,
) -> PlayedEvaluation:
    """Let the agents of a trainer play, and measure how they did.

    Parameters
    ----------
    models : Mapping
        State of each group; empty for the models that a run begins with.
    journal_path : Path
        Where answers are kept as they come, so that a killed evaluation asks nothing twice.
    """
    instance = trainer.instance
    count = evaluation.num_episodes
    if evaluation.split == "test":
        episodes = list(held_out_episodes(instance, seed=evaluation.seed, count=count))
    else:
        size = len(instance.train_data) if count is None else count
        episodes = list(train_episodes(instance, seed=evaluation.seed, iteration=0, count=size))
    if count is not None and count > len(episodes):
        raise ConfigurationError(
            f"{count} episodes were to be played, but the test data has {len(episodes)} "
            "datapoints, and each is played about once. Ask for fewer, or give a scenario with "
            "more data."
        )
    trainer.take_up_models(models)
    try:
        ends = trainer.sample_text(
            episodes,
            key=(evaluation.seed, "evaluation", evaluation.split),
            journal=AnswerJournal(journal_path),
        )
        services = services_used(trainer.services())
    finally:
        trainer.close()
    rollouts = rollouts_of(trainer.game, ends)
    rows = episode_rows(
        *(rollouts, trainer.game),
        num_episodes=min(NUM_ROWS, len(rollouts)),
        step=trainer.text_rl.num_iterations,
        seed=evaluation.seed,
    )
    step = {"step": trainer.text_rl.num_iterations}
    told = [step | dict(zip(COLUMNS, row, strict=True)) for row in rows]
    return PlayedEvaluation(rollouts, trainer.figures_of(rollouts), told, services)
