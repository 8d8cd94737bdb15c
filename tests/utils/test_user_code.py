"""The process is as before after a call of a user's function."""

from __future__ import annotations

import signal
import threading

import pytest
import torch

from nip_astra.errors import UserCodeError
from nip_astra.utils.user_code import process_state_kept


def test_the_default_dtype_is_restored_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    with process_state_kept("the function 'mine'"):
        torch.set_default_dtype(torch.float64)
    assert torch.get_default_dtype() is torch.float32
    assert "'mine'" in caplog.text
    assert "float64" in caplog.text


def test_an_alarm_without_a_handler_is_an_error_of_the_function_that_set_it() -> None:
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(UserCodeError, match="'mine'"), process_state_kept("'mine'"):
        signal.raise_signal(signal.SIGALRM)
    assert signal.getsignal(signal.SIGALRM) == before


def test_an_alarm_and_a_handler_left_behind_are_removed() -> None:
    before = signal.getsignal(signal.SIGALRM)
    with process_state_kept("'mine'"):
        signal.signal(signal.SIGALRM, lambda number, frame: None)
        signal.alarm(1000)
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
    assert signal.getsignal(signal.SIGALRM) == before


def test_a_timer_that_already_runs_and_other_threads_are_left_alone() -> None:
    signal.setitimer(signal.ITIMER_REAL, 1000)
    try:
        with process_state_kept("'mine'"):
            pass
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 0

        def call() -> None:
            with process_state_kept("'mine'"):
                pass

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
