"""Warnings reach the user, once each."""

from __future__ import annotations

import io
import logging
import sys
from unittest.mock import Mock

import pytest

from nip_astra.cli.app import NoteHandler
from tests.kit.command_line import CommandLine

TRAINER = """
    from nip_astra import RemoteApiTrainer


    class NothingGained(RemoteApiTrainer):
        def __init__(self, config):
            super().__init__(config)

        def _prepare_trajectories(self, trajectories, metrics):
            for trajectory in trajectories:
                trajectory.advantage = 0.0
            return trajectories
"""
TASK = """
    trainer:
      custom_trainer_module_path: nothing_gained.py
      custom_trainer_class_name: NothingGained
      total_train_steps: 1
      train_service: {backend: self-hosted, world_size: 8}
    training: {num_episodes_per_experience: 2, minibatch_size: 16}
    task: {evaluation: {num_problems: 2}}
"""


def test_unread_parts_of_a_file_and_learning_nothing_are_reported(cli: CommandLine) -> None:
    cli.write("nothing_gained.py", TRAINER)
    cli("list", "trainers")
    result = cli.ok("--parameters", cli.write("task.yaml", TASK))
    assert result.err.count("world_size") == 1
    output = " ".join((result.out + result.err).split())
    assert output.count("warning: nothing was learned:") == 1


@pytest.fixture
def logger() -> logging.Logger:
    logger = logging.Logger("nip_astra.of_a_test")
    logger.addHandler(NoteHandler())
    return logger


def test_each_warning_is_shown_once_and_few_of_a_kind(
    logger: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    for number in (1, 1, 2, 3, 4, 5):
        logger.warning("prompt %d is empty", number)
    logger.warning("kept for the end", extra={"is_repeated_at_end": True})
    logger.error("shown by the caller")
    logger.info("for the log")
    assert stderr.getvalue().splitlines() == [f"warning: prompt {n} is empty" for n in (1, 2, 3)]


def test_a_warning_that_cannot_be_written_ends_nothing(
    logger: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken_pipe = Mock(write=Mock(side_effect=BrokenPipeError(32, "Broken pipe")))
    closed = io.StringIO()
    closed.close()
    for stream in (broken_pipe, closed, None):
        monkeypatch.setattr(sys, "stderr", stream)
        logger.warning("prompt is empty")
