"""Results that a time limit cut are kept, and a resumed run equals one that went on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from nip_astra.call_outcomes import (
    FOLDER,
    CallOutcomes,
    call_position,
    kept_outcome,
    using_outcomes,
)
from nip_astra.errors import ScorerError
from nip_astra.language_models.services.chat import (
    ChatAnswer,
    ChatFailure,
    ChatOutcome,
    ChatRequest,
    LimitParameters,
)
from nip_astra.language_models.services.chat_models.scripted import ScriptedChatModel
from nip_astra.language_models.services.reasons import FailureReason
from nip_astra.language_models.services.retrying import ResponseCache, RetryingChatModel
from nip_astra.resume_check import read_run_contents
from nip_astra.rollouts.messages import ToolCall
from nip_astra.run import resume_experiment
from nip_astra.samplers.executor import _adopt_outcomes, _earlier_outcomes, run_apart
from nip_astra.scenario_base.tasks.openenv import Fields, OpenEnvEnvironment, Result
from nip_astra.scenario_base.tasks.tools import TOOLS, Toolbox
from nip_astra.scorers.base import SCORERS, Scorer, Verdict
from nip_astra.trainers.language_model_base import LanguageModelTrainer
from nip_astra.utils.forked import call_at_once
from tests.kit.experiments import run_in
from tests.kit.resuming import Killed, short_experiment


class Machine:
    """A machine that is slow, so that calls are cut, until it is fast."""

    is_slow = True
    num_calls = 0


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> type[Machine]:
    monkeypatch.setattr(Machine, "is_slow", True)
    monkeypatch.setattr(Machine, "num_calls", 0)
    return Machine


def look(text: str) -> str:
    """Look."""
    Machine.num_calls += 1
    # On a slow machine some programs still end in time.
    if Machine.is_slow and len(text) % 3 == 0:
        raise TimeoutError("the program was stopped")
    return text[::-1] if Machine.is_slow else "fast"


look.keeps_outcomes = True  # type: ignore[attr-defined]  # read by tool_of


class SlowScorer(Scorer):
    class Parameters(Scorer.Parameters):
        """None of its own."""

    def _score(self, texts: Sequence[str]) -> Sequence[Verdict]:
        Machine.num_calls += 1
        return [
            ScorerError("exceeded timeout_seconds")
            if Machine.is_slow and len(text) % 3 == 0
            else len(text) % 7 / 7
            for text in texts
        ]


@pytest.fixture(autouse=True, scope="module")
def _registered() -> Iterator[None]:
    """Register the tool and the scorer for these tests alone."""
    name = "of_a_slow_machine"
    TOOLS.register(name)(look)
    SCORERS.register(name)(SlowScorer)
    yield
    TOOLS.forget(name)
    SCORERS.forget(name)


def with_tool(folder: Path, patch: pytest.MonkeyPatch) -> Any:
    """Return a run whose policy calls the tool with each of its first turns."""

    def calls_in(_: Toolbox, turn: Any, __: Any) -> list[ToolCall]:
        return [] if turn.text.endswith("=") else [ToolCall("look", {"text": turn.text})]

    patch.setattr(Toolbox, "calls_in", calls_in)
    offered = "task.tools.offered={look: {function: 'of_a_slow_machine'}}"
    return short_experiment("self_hosted_grpo", folder, offered, "task.max_turns=2")


def with_scorer(folder: Path, _: pytest.MonkeyPatch) -> Any:
    scorer = "ast_chat.scorer={_type: 'of_a_slow_machine', on_failure: skip}"
    return short_experiment("ast_dpo", folder, scorer)


@pytest.mark.parametrize("build", [with_tool, with_scorer])
@pytest.mark.parametrize("checkpoint_period", [0, 1])
def test_a_resumed_run_equals_the_slow_one_also_on_a_fast_machine(
    build: Callable[..., Any],
    checkpoint_period: int,
    machine: type[Machine],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = {"num_threads": 1, "checkpoint_period": checkpoint_period}
    resolved = build(tmp_path / "x", monkeypatch)
    update = LanguageModelTrainer._update

    def watched(trainer: Any, iteration: int) -> None:
        if iteration == 2:
            # From here on a slow and a fast machine would have equal results.
            machine.is_slow = False
            if is_killed:
                raise Killed
        update(trainer, iteration)

    monkeypatch.setattr(LanguageModelTrainer, "_update", watched)
    is_killed = False
    whole = run_in(tmp_path, resolved, "whole", **settings)
    num_calls, machine.num_calls, machine.is_slow = machine.num_calls, 0, True
    is_killed = True
    with pytest.raises(Killed):
        run_in(tmp_path, resolved, "killed", **settings)
    if build is with_tool:
        # Equal calls of episodes that are played at once have places of their own.
        kept = CallOutcomes(tmp_path / "killed" / FOLDER).remaining()
        assert len({outcome.key for outcome in kept}) == len(kept) > 0
    num_before = machine.num_calls
    assert 0 < num_before < num_calls
    is_killed, machine.is_slow = False, False
    resume_experiment(tmp_path / "killed", progress=False)
    assert read_run_contents(tmp_path / "killed") == read_run_contents(whole)
    # No call was made again.
    assert machine.num_calls == num_calls


def keep(folder: Path | None, text: str, result: str, checkpoint: str | None = None) -> str:
    """Make a call in a process of its own that continues from a checkpoint."""
    with using_outcomes(CallOutcomes(folder, checkpoint=checkpoint)):
        return str(kept_outcome("tool", text, lambda: result))


def test_outcomes_are_taken_once_in_their_order_and_only_for_equal_calls(tmp_path: Path) -> None:
    with using_outcomes(CallOutcomes(tmp_path)):
        for result in ("first", "second"):
            # Its own outcomes are not taken: a call may be made twice.
            assert kept_outcome("tool", "a", lambda result=result: result) == result
        with call_position("run", 1):
            assert kept_outcome("tool", "a", lambda: "elsewhere") == "elsewhere"
    with using_outcomes(CallOutcomes(tmp_path)):
        assert kept_outcome("tool", "b", lambda: "new") == "new"
        assert kept_outcome("scorer", "a", lambda: "new") == "new"
        found = [kept_outcome("tool", "a", lambda: "third") for _ in range(3)]
        with call_position("run", 1):
            assert kept_outcome("tool", "a", lambda: "new") == "elsewhere"
    assert found == ["first", "second", "third"]
    assert kept_outcome("tool", "a", lambda: "without a run") == "without a run"


def test_outcomes_follow_the_checkpoint_from_which_a_run_continues(tmp_path: Path) -> None:
    outcomes = CallOutcomes(tmp_path)
    names = ["step_00000001", "step_00000001_r2", "step_00000010"]
    with using_outcomes(outcomes):
        kept_outcome("tool", "a", lambda: "at first")
        for name in names:
            outcomes.begin_after(name)
            kept_outcome("tool", "a", lambda name=name: name)
    # A damaged newest checkpoint leaves the one before.
    assert keep(tmp_path, "a", "new", names[1]) == names[1]
    assert keep(tmp_path, "a", "new", names[2]) == names[2]
    assert keep(tmp_path, "a", "new", "step_00000011") == "new"
    assert {path.stem for path in tmp_path.iterdir()} == {*names[1:], "step_00000011"}


def test_an_unfinished_line_of_a_killed_process_is_left_out(tmp_path: Path) -> None:
    keep(tmp_path, "a", "whole")
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes() + b'["half')
    assert keep(tmp_path, "b", "next") == "next"
    assert keep(tmp_path, "a", "new") == "whole"
    assert keep(tmp_path, "b", "new") == "next"


def test_a_run_that_ends_with_an_error_calls_again(tmp_path: Path) -> None:
    outcomes = CallOutcomes(tmp_path)
    with using_outcomes(outcomes):
        kept_outcome("tool", "a", lambda: "failed")
    outcomes.forget()
    assert keep(tmp_path, "a", "new") == "new"


def test_forked_processes_and_threads_keep_outcomes_too(tmp_path: Path) -> None:
    with using_outcomes(CallOutcomes(tmp_path)):
        call_at_once([lambda: kept_outcome("tool", "a", lambda: "a")] * 2)
        thread = threading.Thread(target=lambda: kept_outcome("tool", "b", lambda: "b"))
        thread.start()
        thread.join()
    kept = CallOutcomes(tmp_path).remaining()
    assert sorted(outcome.value for outcome in kept) == ["a", "a", "b"]


def test_workers_without_the_runs_files_return_outcomes_and_get_earlier_ones(
    tmp_path: Path,
) -> None:
    keep(tmp_path, "a", "earlier")

    def play() -> list[str]:
        return [kept_outcome("tool", text, lambda: "new") for text in ("a", "b")]

    with using_outcomes(CallOutcomes(tmp_path)):
        result = run_apart([play], [], _earlier_outcomes())
        _adopt_outcomes([result])
        assert result.parts == [["earlier", "new"]]
        assert _earlier_outcomes() == []
    assert sorted(outcome.value for outcome in CallOutcomes(tmp_path).remaining()) == [
        "earlier",
        "new",
    ]


def test_a_request_that_exceeded_its_limit_is_not_made_again(tmp_path: Path) -> None:
    class Slow(ScriptedChatModel):
        place = "a service"

        async def answer(self, request: ChatRequest) -> ChatOutcome:
            Machine.num_calls += 1
            if Machine.is_slow:
                await asyncio.sleep(3600)
            return ChatOutcome((ChatAnswer("yes"),) * request.num_samples)

    def ask(folder: Path) -> ChatAnswer | ChatFailure:
        model = RetryingChatModel(
            Slow.__new__(Slow),
            LimitParameters(attempt_timeout=0.01, num_retries=0),
            cache=ResponseCache(tmp_path / "answers.sqlite"),
            is_cache_of_run=True,
        )
        with using_outcomes(CallOutcomes(folder)):
            outcome = asyncio.run(
                model.answer(ChatRequest(({"role": "user", "content": "well?"},)))
            )
        return outcome.samples[0]

    Slow.name = "slow"
    Machine.is_slow, Machine.num_calls = True, 0
    late = ask(tmp_path / "run")
    Machine.is_slow = False
    assert isinstance(late, ChatFailure)
    assert late.reason is FailureReason.TIMEOUT
    assert ask(tmp_path / "run") == late
    assert Machine.num_calls == 1
    assert ask(tmp_path / "other run") == ChatAnswer("yes")


def test_a_step_of_a_server_that_exceeded_its_limit_is_not_made_again(tmp_path: Path) -> None:
    class Session:
        """Answers with the actions so far."""

        def __init__(self) -> None:
            self.actions: list[str] = []

        def reset(self, seed: int) -> Result:
            return Result({"text": "go"}, None, is_over=False)

        def step(self, action: dict[str, str]) -> Result:
            self.actions.append(action["action"])
            return Result({"text": " ".join(self.actions)}, 1.0, is_over=len(self.actions) == 3)

        def close(self) -> None:
            pass

    def open_episode() -> tuple[OpenEnvEnvironment, Session]:
        session = Session()
        environment = OpenEnvEnvironment(lambda: session, Fields("action", "text"), 0, 1)
        environment.reset()
        return environment, session

    with using_outcomes(CallOutcomes(tmp_path)):
        environment, _ = open_episode()
        before = [environment.step(text) for text in "ab"]
    with using_outcomes(CallOutcomes(tmp_path)):
        environment, session = open_episode()
        assert [environment.step(text) for text in "ab"] == before
        assert session.actions == []
        # What follows needs the state of the steps before.
        last = environment.step("c")
        assert session.actions == ["a", "b", "c"]
    assert last.is_over
    assert last.reward == 3.0
