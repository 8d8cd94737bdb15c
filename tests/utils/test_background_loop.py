"""An event loop in a thread serves synchronous code."""

from __future__ import annotations

import asyncio
import threading

import pytest

from nip_astra.utils.background_loop import BackgroundLoop


async def where() -> tuple[str, asyncio.AbstractEventLoop]:
    return threading.current_thread().name, asyncio.get_running_loop()


def test_calls_share_a_loop_until_it_is_closed_and_work_within_another() -> None:
    loop = BackgroundLoop()
    first, second = loop.run(where()), loop.run(where())
    assert first == second
    assert first[0] != threading.current_thread().name

    async def as_in_a_notebook() -> tuple[str, asyncio.AbstractEventLoop]:
        return loop.run(where())

    assert asyncio.run(as_in_a_notebook()) == first
    loop.close()
    assert first[1].is_closed()
    assert loop.run(where())[1] is not first[1]
    loop.close()
    loop.close()


def test_errors_are_raised_where_a_result_is_waited_for() -> None:
    async def fails() -> None:
        raise KeyError("x")

    loop = BackgroundLoop()
    with pytest.raises(KeyError):
        loop.run(fails())
    loop.close()
