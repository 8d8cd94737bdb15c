"""Calls that do not return are reported and interrupted."""

from __future__ import annotations

import ctypes
import json
import logging
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nip_astra import deadlines
from nip_astra.checkpoints.tensors import load_state
from nip_astra.deadlines import (
    TimeLimitExceeded,
    call_in_threads,
    result_within_deadlines,
    time_limit,
    using_deadline,
    waiting_on,
    within_deadline,
)
from nip_astra.errors import CallDeadlineError
from nip_astra.protocols.protocol_base import (
    DeterministicSingleVerifierProtocolHandler,
    RoundResult,
)
from nip_astra.resume_check import read_run_contents
from nip_astra.run import resume_experiment
from nip_astra.scenario_base.tasks.base import Reaction
from nip_astra.scenario_base.tasks.library import ArithmeticEnvironment
from nip_astra.scenario_base.text.game import TextGame
from nip_astra.trainers.ast.dpo import AstDpoTrainer
from nip_astra.trainers.registry import TRAINERS
from tests.kit.experiments import run_in
from tests.kit.resuming import short_experiment

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


def raise_another() -> None:
    try:
        time.sleep(HOUR)
    except BaseException as error:
        raise ValueError("of the call") from error


def wait_for_a_thread() -> None:
    threading.Event().wait()


CALLS = {
    "sleep": partial(time.sleep, HOUR),
    "loop": spin,
    # It holds the interpreter's lock, so that no thread can interrupt it.
    "pattern": partial(re.match, "(a+)+$", "a" * 60 + "b"),
    "native code": partial(ctypes.CDLL(None).sleep, int(HOUR)),
    "wait for a thread": wait_for_a_thread,
    "process": partial(subprocess.run, ["sleep", "1000"]),
    "catches everything": catch_everything,
    "raises another error": raise_another,
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_of_the_main_thread_ends_at_its_deadline(name: str) -> None:
    call = CALLS[name]
    with (
        pytest.raises(CallDeadlineError, match="the reward 'slow'"),
        within_deadline("the reward 'slow'"),
    ):
        call()


def test_calls_that_return_in_time_leave_nothing_behind() -> None:
    with using_deadline(HOUR), within_deadline("a"), within_deadline("b"):
        pass
    with pytest.raises(ValueError, match="own"), within_deadline("c", seconds=HOUR):
        raise ValueError("own")
    time.sleep(0.1)
    assert deadlines._calls == []


def test_the_shorter_limit_of_nested_ones_counts() -> None:
    with using_deadline(HOUR):
        with within_deadline("outer"), pytest.raises(TimeLimitExceeded), time_limit(0.05):
            spin()
        with (
            pytest.raises(CallDeadlineError, match="outer"),
            within_deadline("outer", seconds=0.05),
            time_limit(HOUR),
        ):
            spin()


@pytest.mark.parametrize("call", [spin, partial(time.sleep, HOUR)])
def test_a_call_in_a_thread_ends_the_wait_for_it(call: Callable[[], None]) -> None:
    def work() -> None:
        with within_deadline("the tool 'slow'"):
            call()

    with pytest.raises(CallDeadlineError, match="the tool 'slow'"):
        call_in_threads([work, lambda: None], 2)
    with pytest.raises(CallDeadlineError, match="the tool 'slow'"):
        result_within_deadlines(deadlines.DaemonThread("test").submit(work))


def test_results_of_threads_keep_their_order_and_the_first_error_is_raised() -> None:
    assert call_in_threads([partial(int, text) for text in "123"], 2) == [1, 2, 3]
    with pytest.raises(ValueError, match="'a'"):
        call_in_threads([partial(int, text) for text in "1ab"], 3)


def test_a_long_wait_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(deadlines, "SECONDS_UNTIL_NOTICE", 0.02)
    reported = threading.Event()

    class Waiting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "a worker" in record.getMessage():
                reported.set()

    handler = Waiting()
    deadlines.logger.addHandler(handler)
    try:
        with waiting_on("a worker"):
            assert reported.wait(30)
    finally:
        deadlines.logger.removeHandler(handler)


def test_a_run_saves_at_a_deadline_and_goes_on_as_if_uninterrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolved = short_experiment(
        "self_hosted_grpo", tmp_path / "x", "training.eval_period=4", num_iterations=4
    )
    num_calls = 0
    step = ArithmeticEnvironment.step

    def counting(environment: ArithmeticEnvironment, message: str) -> Reaction:
        nonlocal num_calls
        num_calls += 1
        return step(environment, message)

    monkeypatch.setattr(ArithmeticEnvironment, "step", counting)
    whole = run_in(tmp_path, resolved, "whole", num_threads=1)
    # In the last but one iteration, before which nothing was saved.
    slow_call = num_calls * 2 // 3
    num_calls = 0

    def sleeping(environment: ArithmeticEnvironment, message: str) -> Reaction:
        if num_calls == slow_call:
            time.sleep(HOUR)
        return counting(environment, message)

    monkeypatch.setattr(ArithmeticEnvironment, "step", sleeping)
    with pytest.raises(CallDeadlineError, match="step of ArithmeticEnvironment"):
        run_in(tmp_path, resolved, "slow", num_threads=1, call_deadline=0.3)
    slow = tmp_path / "slow"
    failed = json.loads((slow / "results.json").read_text())
    assert failed["error"]["type"] == "CallDeadlineError"
    (checkpoint,) = slow.glob("checkpoints/step_*")
    assert 0 < load_state(checkpoint / "state")["run"]["iteration"] < 4
    monkeypatch.setattr(ArithmeticEnvironment, "step", step)
    resume_experiment(slow, progress=False, call_deadline=HOUR)
    assert read_run_contents(slow) == read_run_contents(whole)


@pytest.mark.parametrize("hook", ["flatten", "loss"])
def test_a_hook_of_a_users_trainer_ends_the_run_which_goes_on_as_if_uninterrupted(
    hook: str, tmp_path: Path
) -> None:
    calls = {"until slow": 10**6}

    class Slow(AstDpoTrainer):
        def flatten(self, tree: Any) -> Any:
            return self._after("flatten", super().flatten(tree))

        def loss(self, batch: Any) -> Any:
            return self._after("loss", super().loss(batch))

        def _after(self, name: str, result: Any) -> Any:
            if name == hook:
                calls["until slow"] -= 1
                if calls["until slow"] == 0:
                    time.sleep(HOUR)
            return result

    with pytest.MonkeyPatch.context() as patch:
        # The trainer of the run is the user's class.
        patch.setitem(TRAINERS._entries, "ast_dpo", Slow)
        resolved = short_experiment("ast_dpo", tmp_path / "x", "training.eval_period=4")
        whole = run_in(tmp_path, resolved, "whole", num_threads=1)
        calls["until slow"] = 3
        with pytest.raises(CallDeadlineError) as caught:
            run_in(tmp_path, resolved, "slow", num_threads=1, call_deadline=0.5)
        assert hook in str(caught.value)
        assert "Slow" in str(caught.value)
        assert (tmp_path / "slow" / "checkpoints" / "latest").is_file()
        calls["until slow"] = 0
        resume_experiment(tmp_path / "slow", progress=False, call_deadline=HOUR)
    assert read_run_contents(tmp_path / "slow") == read_run_contents(whole)


def test_hooks_of_users_protocols_and_games_have_deadlines_and_built_in_ones_none() -> None:
    class Slow(DeterministicSingleVerifierProtocolHandler):
        def reward(self, agent_name: str, result: RoundResult) -> float:
            """Documented."""
            time.sleep(HOUR)
            return 0.0

    class SlowGame(TextGame):
        def role(self, agent: str) -> str:
            return ""

        def read(self, turn: Any, text: str) -> Any:
            time.sleep(HOUR)

    Slow.__abstractmethods__ = frozenset()
    handler, game = object.__new__(Slow), object.__new__(SlowGame)
    with using_deadline(0.05):
        for call in (
            lambda: handler.reward("verifier", RoundResult.PASSED),
            lambda: game.read(None, ""),
        ):
            with pytest.raises(CallDeadlineError):
                call()
    assert Slow.reward.__doc__ == "Documented."
    assert not hasattr(TextGame.read, "__wrapped__")


STUCK = """
import ctypes, signal
from nip_astra import deadlines
from nip_astra.deadlines import using_deadline, within_deadline

deadlines.SECONDS_TO_UNWIND = 0.1
# Native code that no signal interrupts.
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
with using_deadline(0.1, on_stuck=lambda error: print("recorded:", error, flush=True)):
    with within_deadline("the tool 'native'"):
        ctypes.CDLL(None).sleep(3600)
"""


def test_a_call_that_cannot_be_interrupted_is_recorded_and_ends_the_process() -> None:
    done = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "recorded: the tool 'native'" in done.stdout
