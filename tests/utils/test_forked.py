"""Calls by several processes at once: their results, and their faults."""

from __future__ import annotations

import gc
import io
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from nip_astra.errors import ConfigurationError, WorkerProcessError
from nip_astra.utils.forked import (
    blocked_signals,
    call_at_once,
    can_fork,
    fork,
    get_num_processes,
    using_processes,
)
from nip_astra.utils.processor import choose_num_threads

pytestmark = [
    pytest.mark.usefixtures("forked"),
    pytest.mark.skipif(not can_fork(), reason="processes are forked on Linux without a GPU only"),
]


class TwoArguments(Exception):
    """Can be pickled, but not unpickled."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


def failing(error: BaseException) -> Any:
    raise error


def test_each_call_is_made_in_a_process_of_its_own_and_results_keep_their_order() -> None:
    # Longer than a pipe's buffer.
    calls = [partial(lambda n: (os.getpid(), torch.full((300_000,), n)), n) for n in range(3)]
    results = call_at_once(calls)
    assert results[0][0] == os.getpid()
    assert len({process for process, _ in results}) == 3
    assert [int(values.sum()) for _, values in results] == [0, 300_000, 600_000]


def test_a_process_begins_with_everything_that_is_there_and_changes_nothing_here() -> None:
    seen = [1]

    def add() -> int:
        seen.append(2)
        return len(seen)

    assert call_at_once([lambda: len(seen), add]) == [1, 2]
    assert seen == [1]


def test_objects_lost_here_are_not_destroyed_there() -> None:
    destroyed = []

    class Lost:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            destroyed.append(os.getpid())

    def collect() -> list[int]:
        gc.collect()
        return destroyed

    gc.disable()
    try:
        Lost()
        # The destructor of a process group would wait for threads that only this process has.
        assert call_at_once([list, collect]) == [[], []]
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("call", "kind", "fact"),
    [
        (partial(failing, ConfigurationError("no such name")), ConfigurationError, "no such name"),
        (partial(failing, KeyError("name")), KeyError, "name"),
        (partial(failing, TwoArguments("a", "b")), WorkerProcessError, "TwoArguments: a b"),
        (lambda: lambda: 1, WorkerProcessError, "pickle"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), WorkerProcessError, "SIGKILL.*threads 1"),
    ],
)
def test_an_error_keeps_its_type_and_unpicklable_values_are_reported(
    call: Callable[[], Any], kind: type[Exception], fact: str
) -> None:
    with pytest.raises(kind, match=f"(?s){fact}") as raised:
        call_at_once([lambda: 1, call])
    assert kind is WorkerProcessError or "in failing" in raised.value.__notes__[0]


def test_a_killed_process_is_noticed_even_if_a_child_holds_its_connections() -> None:
    reading, writing = os.pipe()

    def leave_a_process() -> None:
        if os.fork() == 0:
            os.read(reading, 1)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(WorkerProcessError, match=r"process 2 of 2 .*SIGKILL"):
        call_at_once([lambda: 1, leave_a_process])
    os.write(writing, b"x")
    os.close(reading)
    os.close(writing)


def test_an_error_here_ends_the_others() -> None:
    with pytest.raises(KeyboardInterrupt):
        call_at_once([partial(failing, KeyboardInterrupt()), signal.pause])


def test_a_process_does_not_hear_the_signal_that_stops_a_run() -> None:
    def interrupt() -> str:
        os.kill(os.getpid(), signal.SIGINT)
        return "went on"

    assert call_at_once([lambda: "", interrupt]) == ["", "went on"]


def test_a_process_prints_past_who_draws_the_terminal_and_logs_nothing(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = io.StringIO()
    monkeypatch.setattr(sys, "stdout", drawn)

    def speak() -> None:
        print("said")
        logging.getLogger("nip_astra").error("logged")

    call_at_once([lambda: None, speak])
    assert capfd.readouterr() == ("said\n", "")
    assert drawn.getvalue() == ""


def test_a_process_that_cannot_be_started_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    fork, calls = os.fork, []

    def failing_fork() -> int:
        calls.append(1)
        if len(calls) == 2:
            raise BlockingIOError("too many processes")
        return fork()

    monkeypatch.setattr(os, "fork", failing_fork)
    with pytest.raises(WorkerProcessError, match=r"too many processes.*--num-threads 1"):
        call_at_once([lambda: 1, signal.pause, signal.pause])


@pytest.mark.parametrize("value", [None, "true"])
def test_tokenizers_use_no_threads_in_a_process(
    monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    name = "TOKENIZERS_PARALLELISM"
    monkeypatch.setenv(name, value or "")
    if value is None:
        monkeypatch.delenv(name)
    result = call_at_once([partial(os.environ.get, name), partial(os.environ.get, name)])
    assert result == [value, "false"]
    assert os.environ.get(name) == value


def test_processes_have_one_thread_each_and_do_not_wait_for_those_of_torch() -> None:
    torch.set_num_threads(2)  # the next test begins with one again, see tests/conftest.py
    assert call_at_once([torch.get_num_threads, torch.get_num_threads]) == [1, 1]
    assert torch.get_num_threads() == 2
    assert call_at_once([list, partial(choose_num_threads, 10**9, 2)]) == [[], 1]
    values = torch.linspace(0, 1, 400_000)
    expected = values.exp().sum()
    with blocked_signals():
        worker = fork("a process that adds up")
        if worker is None:
            signal.alarm(60)
            try:
                assert torch.isclose(values.exp().sum(), expected)
                os._exit(0)
            finally:
                os._exit(1)
    assert worker.wait(60)
    assert worker.code == 0


@pytest.mark.parametrize("stream", [None, io.StringIO()])
def test_closed_streams_end_nothing_and_are_left_closed(
    monkeypatch: pytest.MonkeyPatch, stream: io.StringIO | None
) -> None:
    if stream is not None:
        stream.close()
    monkeypatch.setattr(sys, "stdout", stream)
    assert call_at_once([lambda: 1, lambda: sys.stdout is None]) == [1, stream is None]


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_ends_with_the_first_however_that_ends(sent: signal.Signals) -> None:
    script = (
        "import os, sys, signal, time; from nip_astra.utils.forked import call_at_once;"
        "tell = lambda: (print('begun', flush=True), time.sleep(600));"
        "call_at_once([lambda: time.sleep(600), tell])"
    )
    first = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None
    with first:
        assert first.stdout.readline() == "begun\n"
        first.send_signal(sent)
        # The worker holds the pipe too, which ends when both have ended.
        assert first.communicate(timeout=60)[0] == ""


@pytest.mark.parametrize(
    ("platform", "has_gpu", "num_processes"),
    [("linux", False, 3), ("darwin", False, 1), ("linux", True, 1)],
)
def test_the_number_of_processes_holds_within_its_block_where_they_can_be_forked(
    monkeypatch: pytest.MonkeyPatch, platform: str, has_gpu: bool, num_processes: int
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: has_gpu)
    assert can_fork() is (num_processes > 1)
    assert get_num_processes() == 1
    with using_processes(3):
        assert get_num_processes() == num_processes
        with using_processes(1):
            assert get_num_processes() == 1
        assert get_num_processes() == num_processes
    assert get_num_processes() == 1
