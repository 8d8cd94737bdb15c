"""How fast and how patiently a service is asked, and what it costs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from pydantic import Field

from nip_astra.language_models.services.usage import ChatUsage
from nip_astra.parameters.parameters_base import SubParameters

TOKENS_PRICED = 1_000_000
LONGEST_BACKOFF = 60.0


class LimitParameters(SubParameters):
    """How fast and how patiently a chat model is asked."""

    concurrency: int = Field(default=16, ge=1)
    """Requests under way at once. Larger is faster, where the service takes it."""
    requests_per_minute: float | None = Field(default=None, gt=0)
    """Attempts begun in a minute, evenly spread; null for no limit."""
    tokens_per_minute: float | None = Field(default=None, gt=0)
    """Tokens read and said in a minute, evenly spread; before its answer a request counts as its
    messages and `max_tokens`. null for no limit."""
    num_retries: int = Field(default=5, ge=0)
    """Further attempts where a service is busy, late, broken, or off its protocol."""
    backoff: float = Field(default=1.0, ge=0)
    """Seconds before the first further attempt, doubled for each next one, at most 60, of which a
    random half may be left out; what the service asks for in Retry-After is waited for where it is
    longer."""
    max_retry_after: float = Field(default=300.0, ge=0)
    """Longest pause in seconds that a service may ask for in Retry-After. If it asks for a longer
    one, the request fails at once."""
    attempt_timeout: float = Field(default=600.0, gt=0)
    """Seconds after which an attempt is given up, though bytes may still come."""
    request_timeout: float | None = Field(default=None, gt=0)
    """Seconds for all attempts of a request and the pauses between them; then the request fails.
    null for twice `attempt_timeout`."""

    def pause_before(
        self,
        attempt: int,
        *,
        retry_after: float,
        spent: float,
        jitter: Callable[[], float] = lambda: 0.0,
    ) -> float | None:
        """Seconds to wait before a further attempt; None if there is to be none.

        Parameters
        ----------
        attempt : int
            The further attempt, from 1.
        retry_after : float
            Seconds that the service asks for.
        spent : float
            Seconds that the request has taken so far.
        jitter : callable
            Draws the part of half the pause that is left out, in [0, 1).
        """
        if attempt > self.num_retries or retry_after > self.max_retry_after:
            return None
        longest = min(self.backoff * 2 ** (attempt - 1), LONGEST_BACKOFF)
        pause = max(longest * (1.0 - 0.5 * jitter()), retry_after)
        return pause if spent + pause < self.seconds_per_request else None

    @property
    def seconds_per_request(self) -> float:
        """Longest that a request may take, all attempts together."""
        given = self.request_timeout
        return 2 * self.attempt_timeout if given is None else given


class PriceParameters(SubParameters):
    """What a service charges; any currency, the same for all models of a run."""

    prompt: float = Field(ge=0)
    """Price of a million tokens that the model reads."""
    completion: float = Field(ge=0)
    """Price of a million tokens that the model says."""

    def cost(self, usage: ChatUsage) -> float:
        """The price of a request."""
        read, said = usage
        return (read * self.prompt + said * self.completion) / TOKENS_PRICED


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
