"""Thirty slow or wrong environments, reward functions and tools: which end a run, and how."""

from __future__ import annotations

import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from nip_astra.deadlines import using_deadline
from nip_astra.errors import CallDeadlineError, NipAstraError, TaskError
from nip_astra.rollouts.messages import ToolCall, Turn
from nip_astra.scenario_base.tasks import rewards
from nip_astra.scenario_base.tasks.base import Episode, Reaction, TrainingProgress, reaction_of
from nip_astra.scenario_base.tasks.library import ArithmeticEnvironment
from nip_astra.scenario_base.tasks.rewards import RewardParameters, WeightedRewards
from nip_astra.scenario_base.tasks.tools import Toolbox, tool_of

HOUR = 3600.0


@pytest.fixture(autouse=True)
def _short_deadline() -> Iterator[None]:
    with using_deadline(0.05):
        yield


def spin() -> None:
    until = time.monotonic() + HOUR
    while time.monotonic() < until:
        pass


def catch_everything() -> None:
    try:
        time.sleep(HOUR)
    except BaseException:
        return


def recurse() -> None:
    recurse()


def fail(error: BaseException) -> None:
    raise error


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


SLOW: dict[str, Callable[[], object]] = {
    "sleeps": partial(time.sleep, HOUR),
    "loops": spin,
    "backtracks": partial(re.match, "(a+)+$", "a" * 60 + "b"),
    "catches everything": catch_everything,
    "waits for a thread": lambda: threading.Event().wait(),
    "waits for a program": partial(subprocess.run, ["sleep", "1000"]),
}
WRONG: dict[str, Callable[[], object]] = {
    "raises": partial(fail, ValueError("of the call")),
    "raises without a text": partial(fail, Unprintable()),
    "recurses": recurse,
    "returns another type": lambda: object(),
}
CASES = [*SLOW, *WRONG]


def refusal_of(name: str) -> type[NipAstraError]:
    return CallDeadlineError if name in SLOW else TaskError


def behave(name: str) -> object:
    return (SLOW | WRONG)[name]()


@pytest.mark.parametrize("name", CASES)
def test_an_environment_ends_the_run_with_its_name(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ArithmeticEnvironment, "step", lambda *_: behave(name))
    environment = ArithmeticEnvironment.__new__(ArithmeticEnvironment)
    with pytest.raises(refusal_of(name), match="ArithmeticEnvironment"):
        reaction_of(environment, "2")


@pytest.mark.parametrize("name", CASES)
def test_a_reward_function_ends_the_run_with_its_name(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def length(completions: Any, **_: Any) -> Any:
        return behave(name)

    monkeypatch.setattr(rewards.REWARDS, "get", lambda _: length)
    weighted = WeightedRewards(
        {"length": RewardParameters(function="exact")},
        (),
        device=torch.device("cpu"),
        scenario_dir=None,
    )
    environment = ArithmeticEnvironment.__new__(ArithmeticEnvironment)
    environment.columns = ()
    episode = Episode(environment, [Turn("user", "1+1="), Turn("assistant", "2")])
    with pytest.raises(refusal_of(name), match="'length'"):
        weighted.rate([episode], TrainingProgress(0, 1))


@pytest.mark.parametrize("name", CASES)
def test_a_slow_tool_ends_the_run_and_the_policy_reads_the_error_of_a_wrong_one(name: str) -> None:
    def look(text: str) -> Any:
        """Look."""
        return behave(name)

    toolbox = Toolbox.of([tool_of(look)])
    if name in SLOW:
        with pytest.raises(CallDeadlineError, match="the tool 'look'"):
            toolbox.execute(ToolCall("look", {"text": "a"}))
    else:
        assert toolbox.execute(ToolCall("look", {"text": "a"})).error == "failed"


def test_a_pattern_of_a_schema_is_interrupted_and_named() -> None:
    def look(text: str) -> str:
        return text

    tool = tool_of(look)
    schema = {
        "type": "object",
        "properties": {"text": {"type": "string", "pattern": "^(a+)+$"}},
    }
    object.__setattr__(tool, "parameters", schema)
    with pytest.raises(CallDeadlineError, match="'look'"):
        Toolbox.of([tool]).execute(ToolCall("look", {"text": "a" * 60 + "b"}))


def test_calls_that_return_in_time_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    reaction = Reaction([], 1.0, is_over=True)
    monkeypatch.setattr(ArithmeticEnvironment, "step", lambda *_: reaction)
    environment = ArithmeticEnvironment.__new__(ArithmeticEnvironment)
    with using_deadline(HOUR):
        assert reaction_of(environment, "2") == reaction
