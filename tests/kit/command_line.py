"""Run commands in a test, in this process, without leaving anything behind."""

from __future__ import annotations

import logging
import os
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import typer.main

import nip_astra as na
from nip_astra import plugins
from nip_astra.cli.app import main
from nip_astra.registry import ALL_REGISTRIES

LOGGER = logging.getLogger("nip_astra")
ONCE = cache(typer.main.get_command)
"""Reading the types of all options takes longer than most commands."""
KINDS = ("trainer", "scenario", "scorer", "language_model", "rollout_analyser", "task")
"""Registries whose built-ins commands import."""


class CommandResult(NamedTuple):
    """Output of a command."""

    code: int
    out: str
    err: str


class CommandLine:
    """Runs commands in an empty folder."""

    def __init__(self, folder: Path, scenario: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.scenario = scenario
        self.capsys = capsys

    def __call__(self, *arguments: str) -> CommandResult:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "environ", os.environ.copy())
            patch.setattr(sys, "argv", ["nip-astra", *arguments])
            patch.setattr(typer.main, "get_command", ONCE)
            # A server command adds a handler that writes to this test's standard error.
            patch.setattr(LOGGER, "handlers", list(LOGGER.handlers))
            with pytest.raises(SystemExit) as caught:
                main()
        captured = self.capsys.readouterr()
        return CommandResult(int(caught.value.code or 0), captured.out, captured.err)

    def ok(self, *arguments: str) -> CommandResult:
        """Run a command that succeeds."""
        result = self(*arguments)
        assert result.code == 0, result.err
        return result

    def run(self, *arguments: str, overrides: tuple[str, ...] = ()) -> CommandResult:
        """Run the tiny scenario as the run `one`, with changes; the last `--trainer` wins."""
        small = ("ast_chat.evaluation.use_random_search=false", "training.num_iterations=2")
        sets = [part for item in (*small, *overrides) for part in ("--set", item)]
        return self(
            *("--trainer", "ast_dpo", "--scenario", str(self.scenario), "--run-id", "one"),
            *sets,
            *arguments,
        )

    def write(self, name: str, text: str) -> str:
        """Write a file into the folder and return its path."""
        (self.folder / name).write_text(textwrap.dedent(text))
        return str(self.folder / name)


def refused(result: CommandResult) -> str:
    """Check the form common to all messages, and return the message on a single line."""
    assert result.code == 2, result
    assert result.err.count("error: ") == 1, result.err
    assert "Traceback" not in result.err
    message = result.err.partition("error: ")[2]
    return " ".join(message.split())


@contextmanager
def plugins_forgotten_after() -> Iterator[None]:
    """Forget plug-ins loaded within the block, with their registrations."""
    for kind in KINDS:
        getattr(na, f"register_{kind}")  # imports the registry
        for name in ALL_REGISTRIES[kind]._built_ins:
            # Later imports would be lost: Python imports a module only once.
            ALL_REGISTRIES[kind].get(name)
    snapshots = [(registry, registry.snapshot()) for registry in ALL_REGISTRIES.values()]
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(plugins, "_LOADED", dict(plugins._LOADED))
            yield
    finally:
        for registry, snapshot in snapshots:
            registry.restore(snapshot)
