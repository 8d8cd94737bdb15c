"""Requests to engines from an event loop; a client that leaves cancels its requests."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from nip_astra.language_models.sequences import GenerationRequest, Progress
from nip_astra.serve.api_errors import failed, overloaded, wrong
from nip_astra.serve.engine import Engine
from nip_astra.serve.generation_bodies import SamplingBody
from nip_astra.serve.served_models import ServedModel
from nip_astra.serve.settings import ServiceSettings


@dataclass
class Answer:
    """One whole answer."""

    text: str
    progress: Progress


class EngineClient:
    """Submits requests to engines, and returns their progress to the event loop."""

    def __init__(self, settings: ServiceSettings) -> None:
        self.settings = settings
        self.num_streams = 0
        self._inboxes: dict[int, asyncio.Queue[Progress]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def _listen(self, progress: Sequence[Progress]) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._dispatch, progress)

    def _dispatch(self, items: Sequence[Progress]) -> None:
        for progress in items:
            inbox = self._inboxes.get(progress.request.number)
            if inbox is not None:
                inbox.put_nowait(progress)

    def plan(
        self,
        served: ServedModel,
        prompts: Sequence[Sequence[int]],
        body: SamplingBody,
        *,
        num_top: int | None,
        max_tokens: int | None,
        end_ids: Sequence[int] | None = None,
    ) -> list[GenerationRequest]:
        """The requests of a body, one per prompt.

        Parameters
        ----------
        end_ids : Sequence[int], optional
            If given, answers are tokens instead of text, and these end an answer too.

        Raises
        ------
        ApiError
            If they exceed a limit of the service.
        """
        if len(prompts) * body.n > self.settings.max_answers:
            raise wrong(
                f"{len(prompts)} prompts with n={body.n} are {len(prompts) * body.n} answers; this "
                f"service allows {self.settings.max_answers} per request.",
                "n",
                "invalid_value",
            )
        seed = secrets.randbits(62) if body.seed is None else body.seed
        common: dict[str, Any] = {
            "listener": self._listen,
            "num_samples": body.n,
            "temperature": body.temperature,
            # A nucleus holds at least one token.
            "top_p": max(body.top_p, 1e-9),
            "stop": body.stops,
            "num_top": num_top,
            "is_streamed": body.stream,
            "end_ids": tuple(end_ids or ()),
            "returns_token_ids": end_ids is not None,
            "adapter": served.adapter,
        }
        return [
            GenerationRequest(
                prompt=tuple(prompt),
                max_tokens=self._room(served.engine, len(prompt), max_tokens),
                # Prompts of one request have independent draws.
                seed=seed + place,
                **common,
            )
            for place, prompt in enumerate(prompts)
        ]

    def _room(self, engine: Engine, num_tokens: int, max_tokens: int | None) -> int:
        window, most = engine.context_window, self.settings.max_answer_tokens
        if max_tokens is not None and max_tokens > most:
            raise wrong(
                f"max_tokens is {max_tokens}, but this service allows {most}. Lower it, or start "
                "the service with a higher --max-answer-tokens.",
                "max_tokens",
                "invalid_value",
            )
        if num_tokens == 0:
            raise wrong("the prompt has no tokens.", "prompt", "invalid_value")
        if num_tokens >= window:
            raise wrong(
                f"the prompt has {num_tokens} tokens, but prompt and answer share a window of "
                f"{window}. Shorten the prompt.",
                "messages",
                "context_length_exceeded",
            )
        # An answer that fills the window ends there, with finish reason "length".
        return min(max_tokens or most, window - num_tokens)

    @contextmanager
    def _submitted(
        self, engine: Engine, requests: Sequence[GenerationRequest]
    ) -> Iterator[asyncio.Queue[Progress]]:
        """A queue with the progress of requests, which end with the block."""
        if engine.num_waiting + len(requests) > self.settings.max_waiting:
            raise overloaded(
                f"{engine.num_waiting} requests are waiting, and this service allows "
                f"{self.settings.max_waiting}. Retry later.",
                "queue_full",
            )
        self._loop = asyncio.get_running_loop()
        inbox: asyncio.Queue[Progress] = asyncio.Queue()
        self._inboxes.update({request.number: inbox for request in requests})
        try:
            for request in requests:
                engine.submit(request)
            yield inbox
        finally:
            for request in requests:
                engine.cancel(request)
                del self._inboxes[request.number]

    async def answer(self, engine: Engine, requests: Sequence[GenerationRequest]) -> list[Answer]:
        """All answers, ordered by request and sample."""
        places = {request.number: place for place, request in enumerate(requests)}
        count = requests[0].num_samples
        answers: dict[int, Answer] = {}
        with self._submitted(engine, requests) as inbox:
            while len(answers) < count * len(requests):
                one = await inbox.get()
                if one.finish_reason == "error":
                    raise failed(f"the answer failed: {one.error}")
                if one.finish_reason is not None:
                    answers[places[one.request.number] * count + one.index] = Answer(one.text, one)
        return [answers[place] for place in sorted(answers)]

    async def stream(
        self, engine: Engine, requests: Sequence[GenerationRequest]
    ) -> AsyncGenerator[tuple[int, Progress], None]:
        """Progress as it arrives, each with the index of its answer among all."""
        if self.num_streams >= self.settings.max_streams:
            raise overloaded(
                f"{self.num_streams} streams are open, the limit of this service. Retry later.",
                "too_many_streams",
            )
        places = {request.number: place for place, request in enumerate(requests)}
        count = requests[0].num_samples
        num_open = count * len(requests)
        self.num_streams += 1
        try:
            with self._submitted(engine, requests) as inbox:
                while num_open:
                    one = await inbox.get()
                    num_open -= one.finish_reason is not None
                    yield places[one.request.number] * count + one.index, one
        finally:
            self.num_streams -= 1
