"""Warnings reach the user, once each."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from nip_astra.cli.app import NoteHandler
from tests.kit.command_line import CommandLine

TRAINER = """
    from nip_astra import RemoteApiTrainer


    class NothingGained(RemoteApiTrainer):
        def __init__(self, config):
            super().__init__(config)

        def _prepare_trajectories(self, trajectories, metrics):
            for one in trajectories:
                one.advantage = 0.0
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
    said = cli.ok("--parameters", cli.write("task.yaml", TASK))
    assert said.err.count("world_size left out") == 1
    told = " ".join((said.out + said.err).split())
    assert told.count("warning: nothing was learned: all advantages were 0") == 1


def test_each_warning_is_shown_once_and_few_of_a_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    said = io.StringIO()
    monkeypatch.setattr(sys, "stderr", said)
    logger = logging.Logger("nip_astra.of_a_test")
    logger.addHandler(NoteHandler())
    for number in (1, 1, 2, 3, 4, 5):
        logger.warning("prompt %d is empty", number)
    logger.warning("kept for the end", extra={"is_repeated_at_end": True})
    logger.error("told by whom it ends")
    logger.info("for the log")
    assert said.getvalue().splitlines() == [f"warning: prompt {n} is empty" for n in (1, 2, 3)]


class Broken(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


@pytest.mark.parametrize("kind", ["pipe", "file", "none"])
def test_a_warning_that_cannot_be_written_ends_nothing(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", {"pipe": Broken(), "file": closed, "none": None}[kind])
    logger = logging.Logger("nip_astra.of_a_test")
    logger.addHandler(NoteHandler())
    logger.warning("prompt is empty")
