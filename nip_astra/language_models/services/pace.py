"""Limits by requests and tokens a minute, and pauses that a service asks for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from nip_astra.language_models.services.limits import LimitParameters


class Pace:
    """Says when the next attempt may begin; attempts are spread evenly.

    Parameters
    ----------
    clock, pause : Callable
        Tell the time and wait, in seconds.
    """

    def __init__(
        self,
        limits: LimitParameters,
        *,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self.clock = clock
        self.pause = pause
        self._seconds_a_request = 60.0 / (limits.requests_per_minute or float("inf"))
        self._seconds_a_token = 60.0 / (limits.tokens_per_minute or float("inf"))
        self._next_by_requests = self._next_by_tokens = self._not_before = float("-inf")

    async def take_turn(self, num_tokens: int) -> None:
        """Wait until an attempt of about so many tokens may begin."""
        now = self.clock()
        start = max(now, self._next_by_requests, self._next_by_tokens, self._not_before)
        self._next_by_requests = start + self._seconds_a_request
        self._next_by_tokens = start + num_tokens * self._seconds_a_token
        while start > now:
            await self.pause(start - now)
            # Somebody else may have been asked to wait meanwhile.
            now, start = max(start, self.clock()), max(start, self._not_before)

    def correct(self, planned: int, taken: int) -> None:
        """Count an attempt as the tokens that it took, in place of those that it might have."""
        self._next_by_tokens += (taken - planned) * self._seconds_a_token

    def hold(self, seconds: float) -> None:
        """Begin no attempt for some time, since the service asks for a pause."""
        self._not_before = max(self._not_before, self.clock() + seconds)
