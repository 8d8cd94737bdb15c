"""Ask engines from an event loop: answers come through queues, and who leaves is cancelled."""

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
from nip_astra.serve.settings import ServiceSettings
from nip_astra.serve.shelf import ServedModel


@dataclass
class Answer:
    """One whole answer."""

    text: str
    progress: Progress


class Asker:
    """Hands requests to engines and their progress back to whoever waits in the event loop."""

    def __init__(self, settings: ServiceSettings) -> None:
        self.settings = settings
        self.num_streams = 0
        self._inboxes: dict[int, asyncio.Queue[Progress]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def _listen(self, told: Sequence[Progress]) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._dispatch, told)

    def _dispatch(self, told: Sequence[Progress]) -> None:
        for progress in told:
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
        """The requests of a body, one a prompt.

        Parameters
        ----------
        end_ids : Sequence[int], optional
            Where given, tokens are told in place of text, and these end an answer too.

        Raises
        ------
        ApiError
            When they are more, or longer, than can be answered.
        """
        if len(prompts) * body.n > self.settings.max_answers:
            raise wrong(
                f"{len(prompts)} prompts with n = {body.n} ask for {len(prompts) * body.n} "
                f"answers, and this service gives {self.settings.max_answers} a request. Ask for "
                "fewer at once.",
                "n",
                "invalid_value",
            )
        seed = secrets.randbits(62) if body.seed is None else body.seed
        common: dict[str, Any] = {
            "listener": self._listen,
            "num_samples": body.n,
            "temperature": body.temperature,
            # No nucleus is smaller than its first token.
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
                # Prompts of one request have draws of their own.
                seed=seed + place,
                **common,
            )
            for place, prompt in enumerate(prompts)
        ]

    def _room(self, engine: Engine, num_tokens: int, asked: int | None) -> int:
        window, most = engine.context_window, self.settings.max_answer_tokens
        if asked is not None and asked > most:
            raise wrong(
                f"an answer of up to {asked} tokens was asked for, and this service gives {most}. "
                "Lower max_tokens, or start the service with a higher --max-answer-tokens.",
                "max_tokens",
                "invalid_value",
            )
        if num_tokens == 0:
            raise wrong("the prompt has no tokens. Give one that has.", "prompt", "invalid_value")
        if num_tokens >= window:
            raise wrong(
                f"the prompt has {num_tokens} tokens, but the model's window holds {window}, the "
                "answer included. Shorten the prompt.",
                "messages",
                "context_length_exceeded",
            )
        # max_tokens is a bound: an answer that fills the window ends there, for its length.
        return min(asked or most, window - num_tokens)

    @contextmanager
    def _asked(
        self, engine: Engine, requests: Sequence[GenerationRequest]
    ) -> Iterator[asyncio.Queue[Progress]]:
        """A queue of the progress of requests, which end with the block."""
        if engine.num_waiting + len(requests) > self.settings.max_waiting:
            raise overloaded(
                f"{engine.num_waiting} requests wait already, and this service lets "
                f"{self.settings.max_waiting} wait. Come again later.",
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
        found: dict[int, Answer] = {}
        with self._asked(engine, requests) as inbox:
            while len(found) < count * len(requests):
                one = await inbox.get()
                if one.finish_reason == "error":
                    raise failed(f"the answer could not be given: {one.error}")
                if one.finish_reason is not None:
                    found[places[one.request.number] * count + one.index] = Answer(one.text, one)
        return [found[place] for place in sorted(found)]

    async def stream(
        self, engine: Engine, requests: Sequence[GenerationRequest]
    ) -> AsyncGenerator[tuple[int, Progress], None]:
        """Progress as it comes, each with the place of its answer among all."""
        if self.num_streams >= self.settings.max_streams:
            raise overloaded(
                f"{self.num_streams} streams are open, the most that this service has. Come again "
                "later.",
                "too_many_streams",
            )
        places = {request.number: place for place, request in enumerate(requests)}
        count = requests[0].num_samples
        num_open = count * len(requests)
        self.num_streams += 1
        try:
            with self._asked(engine, requests) as inbox:
                while num_open:
                    one = await inbox.get()
                    num_open -= one.finish_reason is not None
                    yield places[one.request.number] * count + one.index, one
        finally:
            self.num_streams -= 1
