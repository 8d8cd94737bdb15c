"""The routes that answer: chat completions, completions, tokens, and the list of models."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from nip_astra.errors import ModelLoadError
from nip_astra.language_models.sequences import GenerationRequest, Progress
from nip_astra.language_models.services.chat import render_chat
from nip_astra.serve.api_errors import ApiError, error_body, wrong
from nip_astra.serve.bodies import read_body
from nip_astra.serve.completions import CompletionStore
from nip_astra.serve.engine_client import Answer, EngineClient
from nip_astra.serve.generation_bodies import (
    ChatBody,
    CompletionBody,
    GenerateBody,
    SamplingBody,
)
from nip_astra.serve.replies import Reply, tokens_reply, usage_of
from nip_astra.serve.served_models import ServedModel, ServedModels
from nip_astra.serve.settings import ServiceSettings

LONG_TEXT = 20_000
"""Characters from which turning a text into tokens is left to a thread."""
_CLIENT_LEFT = 499
Chunk = Callable[[int, Progress], list[dict[str, Any]]]


def text_routes(
    models: ServedModels, settings: ServiceSettings, completions: CompletionStore
) -> APIRouter:
    """The routes of text generation."""
    routes = _TextRoutes(models, settings, completions)
    router = APIRouter()
    router.add_api_route("/v1/models", routes.models, methods=["GET"])
    router.add_api_route("/v1/models/{name}", routes.model, methods=["GET"])
    router.add_api_route("/v1/chat/completions", routes.chat, methods=["POST"])
    router.add_api_route("/v1/completions", routes.completions, methods=["POST"])
    router.add_api_route("/inference/v1/generate", routes.generate, methods=["POST"])
    return router


class _TextRoutes:
    def __init__(
        self, models: ServedModels, settings: ServiceSettings, completions: CompletionStore
    ) -> None:
        self._models, self._store = models, completions
        self.engine_client = EngineClient(settings)

    async def models(self) -> Response:
        cards = [served.card for served in self._models.all()]
        return JSONResponse({"object": "list", "data": cards})

    async def model(self, name: str) -> Response:
        return JSONResponse(self._models.get(name).card)

    async def chat(self, request: Request) -> Response:
        body = await read_body(request, ChatBody)
        served = self._models.get(body.model)
        messages = [message.plain() for message in body.messages]
        size = sum(len(message["content"]) for message in messages)
        prompt = await _maybe_in_thread(
            size, lambda: chat_prompt(served.engine.tokenizer, messages)
        )
        requests = self.engine_client.plan(
            served,
            [prompt],
            body,
            num_top=body.num_top,
            max_tokens=body.max_completion_tokens or body.max_tokens,
        )
        reply = Reply("chatcmpl", body.model, served.engine.tokenizer)
        if not body.stream:
            return await self._store.once(
                request, body.model, lambda: self._whole(request, served, requests, reply.chat)
            )

        def chunks(place: int, progress: Progress) -> list[dict[str, Any]]:
            delta = {"content": progress.text} if progress.text or progress.tokens else {}
            return [reply.chat_chunk(place, delta, progress)]

        first = [
            reply.chat_chunk(place, {"role": "assistant", "content": "", "refusal": None})
            for place in range(body.n)
        ]
        return await self._stream(served, requests, body, reply, (first, chunks))

    async def completions(self, request: Request) -> Response:
        body = await read_body(request, CompletionBody)
        served = self._models.get(body.model)
        size = len(str(body.prompt))
        prompts = await _maybe_in_thread(
            size,
            lambda: completion_prompts(
                served.engine.tokenizer, body.prompt, served.engine.vocab_size
            ),
        )
        requests = self.engine_client.plan(
            served, prompts, body, num_top=body.logprobs, max_tokens=body.max_tokens
        )
        reply = Reply("cmpl", body.model, served.engine.tokenizer)
        if not body.stream:
            return await self._store.once(
                request,
                body.model,
                lambda: self._whole(request, served, requests, reply.completion),
            )
        offsets: dict[int, int] = {}

        def chunks(place: int, progress: Progress) -> list[dict[str, Any]]:
            offset = offsets.get(place, 0)
            offsets[place] = offset + len(progress.text)
            return [reply.completion_chunk(place, progress, offset)]

        return await self._stream(served, requests, body, reply, ([], chunks))

    async def generate(self, request: Request) -> Response:
        """Tokens for tokens: what is learnt from must not go through text."""
        body = await read_body(request, GenerateBody)
        sampling = body.sampling()
        served = self._models.get(body.model)
        prompts = completion_prompts(
            served.engine.tokenizer, body.token_ids, served.engine.vocab_size
        )
        requests = self.engine_client.plan(
            served,
            prompts,
            SamplingBody(
                model=body.model,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                n=sampling.n,
                seed=sampling.seed,
            ),
            num_top=sampling.logprobs,
            max_tokens=sampling.max_tokens,
            end_ids=sampling.stop_token_ids,
        )
        return await self._store.once(
            request, body.model, lambda: self._whole(request, served, requests, tokens_reply)
        )

    async def _whole(
        self,
        request: Request,
        served: ServedModel,
        requests: Sequence[GenerationRequest],
        to_reply: Callable[[Sequence[Answer], dict[str, Any]], dict[str, Any]],
    ) -> Response:
        """Answer at once, or free the places where the client does not wait any more."""
        answering = asyncio.ensure_future(self.engine_client.answer(served.engine, requests))
        leaving = asyncio.ensure_future(_until_left(request))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                return Response(status_code=_CLIENT_LEFT)
            answers = await answering
        finally:
            leaving.cancel()
            answering.cancel()
        said = sum(answer.progress.num_tokens for answer in answers)
        usage = usage_of(sum(len(one.prompt) for one in requests), said)
        return JSONResponse(to_reply(answers, usage))

    async def _stream(
        self,
        served: ServedModel,
        requests: Sequence[GenerationRequest],
        body: SamplingBody,
        reply: Reply,
        parts: tuple[list[dict[str, Any]], Chunk],
    ) -> Response:
        first, chunks = parts
        progress = self.engine_client.stream(served.engine, requests)
        # What refuses the stream does so before its status is sent.
        begin = await anext(progress)
        fields = {"usage": None} if body.includes_usage else {}
        kind = first[0]["object"] if first else "text_completion"

        async def events() -> AsyncIterator[bytes]:
            said: dict[int, int] = {}
            try:
                for chunk in first:
                    yield _event({**chunk, **fields})
                one: tuple[int, Progress] | None = begin
                while one is not None:
                    place, told = one
                    if told.finish_reason == "error":
                        text = f"the answer could not be given: {told.error}"
                        yield _event(error_body(text, "server_error"))
                        return
                    said[place] = told.num_tokens
                    for chunk in chunks(place, told):
                        yield _event({**chunk, **fields})
                    one = await anext(progress, None)
                if body.includes_usage:
                    tokens = sum(len(request.prompt) for request in requests)
                    usage = usage_of(tokens, sum(said.values()))
                    yield _event({**reply.head(kind), "choices": [], "usage": usage})
                yield b"data: [DONE]\n\n"
            finally:
                await progress.aclose()

        headers = {"Cache-Control": "no-cache"}
        return StreamingResponse(events(), media_type="text/event-stream", headers=headers)


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False).encode() + b"\n\n"


async def _until_left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _maybe_in_thread(size: int, work: Callable[[], Any]) -> Any:
    return await asyncio.to_thread(work) if size > LONG_TEXT else work()


def to_response(error: ApiError) -> JSONResponse:
    """A refusal as it is sent."""
    return JSONResponse(error.body, error.status, headers=error.headers)


def chat_prompt(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """The tokens before the next message of the assistant, by the tokenizer's template.

    Raises
    ------
    ApiError
        When there is no template, or it refuses the messages.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise wrong(
            "this model's tokenizer has no chat template. Use /v1/completions, or serve a chat "
            "model.",
            "messages",
            "no_chat_template",
        )
    try:
        text = render_chat(tokenizer, messages, opens_answer=True)
    except ModelLoadError as error:
        raise wrong(str(error), "messages", "refused_by_template") from error
    return list(tokenizer.encode(text, add_special_tokens=False))


def completion_prompts(
    tokenizer: Any, prompt: str | Sequence[Any], vocab_size: int
) -> list[list[int]]:
    """The tokens of each prompt of /v1/completions.

    Raises
    ------
    ApiError
        When a token is none of the model's.
    """
    given: Sequence[Any] = [prompt] if isinstance(prompt, str) else prompt
    if isinstance(given[0], int):
        given = [given]
    found = [list(tokenizer.encode(one)) if isinstance(one, str) else list(one) for one in given]
    worst = max((max(ids, default=0) for ids in found), default=0)
    if worst >= vocab_size:
        raise wrong(
            f"the prompt holds the token {worst}, but the model has {vocab_size}. Give tokens of "
            "this model, or text.",
            "prompt",
            "invalid_value",
        )
    return found
