"""The routes that generate text: chat completions, completions, tokens, and the list of models."""

from __future__ import annotations

import asyncio
import json
import math
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from itertools import accumulate
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter
from pydantic import Field, field_validator, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from nip_astra.errors import (
    ConfigurationError,
    MissingDependencyError,
    ModelAbilityError,
    counted,
)
from nip_astra.language_models.message_format import (
    MessageFormat,
    MessageParser,
    ReasoningPart,
    argument_schemas,
)
from nip_astra.language_models.sequences import GenerationRequest, Progress, TokenRecord
from nip_astra.language_models.structured import answer_schema, json_rule
from nip_astra.rollouts.messages import ToolCall
from nip_astra.serve.completions import CompletionStore
from nip_astra.serve.requests import (
    ApiError,
    Body,
    Metadata,
    check_body,
    failed,
    overloaded,
    parse_json,
    read_body,
    wrong,
)
from nip_astra.serve.served_models import Engine, ServedModel, ServedModels, prompt_of
from nip_astra.serve.settings import ServiceSettings

LONG_TEXT = 20_000
"""Number of characters from which a text is tokenised in a thread."""
MAX_STOPS = 4
MAX_TOOLS = 128
_CLIENT_LEFT = 499
NOT_SERVED = {
    "/v1/embeddings": "hidden states of causal models are poor embeddings. Use a model that was "
    "trained for them; generate text with /v1/chat/completions.",
    "/v1/responses": "it needs conversations stored by the service. Send all messages to "
    "/v1/chat/completions.",
}
"""OpenAI's routes that are refused by name."""

# ---- requests

Stop = Annotated[str, Field(min_length=1, max_length=256)]
Name = Annotated[str, Field(min_length=1, max_length=512)]
Label = Annotated[str, Field(max_length=512)]
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
Part = TypeVar("Part")
AtLeastOne = Annotated[list[Part], Field(min_length=1)]
Ids = AtLeastOne[Annotated[int, Field(ge=0)]]


class DrawBody(Body):
    """Sampling options."""

    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_k: Annotated[int, Field(ge=1)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0
    n: Annotated[int, Field(ge=1)] = 1
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class InertBody(Body):
    """Options of OpenAI that do not affect an answer: billing, abuse, storage, caches, latency."""

    metadata: Metadata = {}
    prompt_cache_key: Label | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    safety_identifier: Label | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None
    store: bool = False
    user: Label | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class SamplingBody(DrawBody, InertBody):
    """Options of both text routes."""

    model: Name
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] = []
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False

    @model_validator(mode="after")
    def _check_stream(self) -> SamplingBody:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options need stream: true")
        return self

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class TextPart(Body):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(Body):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | AtLeastOne[TextPart]

    def plain(self) -> dict[str, str]:
        return plain_message(self.role, self.content)


def plain_message(role: str, content: str | Sequence[TextPart]) -> dict[str, str]:
    """Return a message with one text, for a chat template."""
    text = content if isinstance(content, str) else "".join(part.text for part in content)
    return {"role": "system" if role == "developer" else role, "content": text}


class CalledFunction(Body):
    """A function with the arguments of a call, as JSON."""

    name: FunctionName
    arguments: str

    @field_validator("arguments")
    @classmethod
    def _check_arguments(cls, arguments: str) -> str:
        try:
            is_valid = isinstance(parse_json(arguments.encode()), dict)
        except ApiError:
            is_valid = False
        if not is_valid:
            raise ValueError("arguments must be the text of a JSON object")
        return arguments


class CallPart(Body):
    """A call of a tool in a message."""

    id: Label
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatTurn(Body):
    """A message of a conversation with tools."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | AtLeastOne[TextPart] = ""
    name: Label | None = None
    reasoning_content: str | None = None
    tool_calls: AtLeastOne[CallPart] | None = None
    tool_call_id: Label | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, given: Any) -> Any:
        # Clients send back messages of answers with all their fields.
        if not isinstance(given, dict):
            return given
        fields = {key: value for key, value in given.items() if value not in (None, [])}
        if "reasoning" in fields and "reasoning_content" not in fields:
            # Some services and their clients name it so.
            fields["reasoning_content"] = fields.pop("reasoning")
        return fields

    @model_validator(mode="after")
    def _check_parts(self) -> ChatTurn:
        if self.tool_calls is not None and self.role != "assistant":
            raise ValueError("only messages of the role assistant have tool_calls")
        if self.reasoning_content is not None and self.role != "assistant":
            raise ValueError("only messages of the role assistant have reasoning_content")
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise ValueError("messages of the role tool, and only those, need tool_call_id")
        if "content" not in self.model_fields_set and self.tool_calls is None:
            raise ValueError("the message needs content")
        return self

    @property
    def uses_tools(self) -> bool:
        return self.role == "tool" or self.tool_calls is not None

    def plain(self) -> dict[str, Any]:
        """Return the message for a chat template."""
        names = {"name", "reasoning_content", "tool_calls", "tool_call_id"}
        more = self.model_dump(include=names, exclude_none=True)
        return {**plain_message(self.role, self.content), **more}


class Function(Body):
    """A function that a model may call; `parameters` is a JSON schema."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool that a model may call."""

    type: Literal["function"]
    function: Function


class ChosenFunction(Body):
    """The name of a function."""

    name: FunctionName


class ChosenTool(Body):
    """A tool that a model must call."""

    type: Literal["function"]
    function: ChosenFunction


class JsonSchema(Body):
    """A named JSON schema; it is always enforced, as by `strict`."""

    name: FunctionName
    description: str | None = None
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(Body):
    """The format of an answer."""

    type: Literal["json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema belongs to the type json_schema, which needs it")
        return self


class ChatBody(SamplingBody):
    """A request of /v1/chat/completions."""

    messages: AtLeastOne[ChatTurn]
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] = []
    tool_choice: Literal["none", "auto", "required"] | ChosenTool = "auto"
    parallel_tool_calls: bool = True
    response_format: ResponseFormat | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @model_validator(mode="after")
    def _check_pairs(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs need logprobs: true")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("max_tokens and max_completion_tokens are one option; give one")
        if self.must_call and not self.called_tools:
            raise ValueError("tool_choice names no function of tools; give it among tools")
        return self

    @property
    def must_call(self) -> bool:
        return self.tool_choice not in ("none", "auto")

    @property
    def called_tools(self) -> list[Function]:
        """Return the functions that the answer may call."""
        functions = [tool.function for tool in self.tools]
        if isinstance(self.tool_choice, ChosenTool):
            return [one for one in functions if one.name == self.tool_choice.function.name]
        return functions if self.tool_choice != "none" else []

    def grammar(self, message_format: MessageFormat, *, begins_in_thought: bool) -> str | None:
        """Return the grammar of the answer; None for any text.

        Raises
        ------
        ModelAbilityError
            If the model's calls cannot be constrained.
        """
        answers: list[str] = []
        rules: list[str] = []
        if self.called_tools and (self.must_call or self.response_format):
            is_one = isinstance(self.tool_choice, ChosenTool) or not self.parallel_tool_calls
            functions = [one.model_dump(exclude_none=True) for one in self.called_tools]
            rules = message_format.call_rules(functions, allows_several=not is_one)
            answers.append("calls")
        if self.response_format is not None and not self.must_call:
            answers.append("answer")
            schema = answer_schema(self.response_format.model_dump(by_alias=True)) or {}
            rules.append(f"answer: {json_rule(schema)}")
        if not answers:
            return None
        start = " | ".join(answers)
        if begins_in_thought:
            start = f"thought /[ \\n]{{0,4}}/ ({start})"
            rules.append(message_format.thought_rule())
        return "\n".join([f"start: {start}", *rules])


class CompletionBody(SamplingBody):
    """A request of /v1/completions."""

    prompt: str | AtLeastOne[str] | Ids | AtLeastOne[Ids]
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    echo: bool = False

    @model_validator(mode="after")
    def _check_echo(self) -> CompletionBody:
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens: 0 needs echo: true")
        if self.echo and self.return_token_ids:
            raise ValueError("echo and return_token_ids exclude each other; give one")
        return self


class TokenSamplingBody(DrawBody):
    """The `sampling_params` of /inference/v1/generate; the last two have no effect here."""

    stop_token_ids: list[Annotated[int, Field(ge=0)]] = []
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    skip_special_tokens: bool = True
    routed_experts_prompt_start: int | None = None


class GenerateBody(Body):
    """A request of /inference/v1/generate."""

    model: Name
    token_ids: Ids
    sampling_params: dict[str, Any] = {}


# ---- responses

Reply = dict[str, Any]


class TextReply:
    """The response to a request for chat completions (`kind` chatcmpl) or completions (cmpl)."""

    def __init__(
        self,
        kind: str,
        model: str,
        tokenizer: Any,
        prompts: Sequence[Sequence[int]],
        *,
        returns_token_ids: bool,
        num_calls_allowed: int = 0,
        make_parser: Callable[[], MessageParser] | None = None,
    ) -> None:
        self.is_chat = kind == "chatcmpl"
        self.tokenizer = tokenizer
        self._prompts = [list(prompt) for prompt in prompts] if returns_token_ids else None
        self._num_calls_allowed = num_calls_allowed
        self._make_parser = make_parser
        self._parsers: dict[int, MessageParser] = {}
        self._calls: dict[int, list[Reply]] = {}
        self._head = {
            "id": f"{kind}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": None,
        }

    def whole(self, answers: Sequence[Progress], usage: Reply) -> Reply:
        choices = [self.choice(place, one) for place, one in enumerate(answers)]
        if self.is_chat:
            fields = {"usage": usage, **self.prompt_ids(0, 1)}
            return self.chunk(*choices, object="chat.completion", **fields)
        for place, choice in enumerate(choices):
            choice |= self.prompt_ids(place, len(answers))
        return self.chunk(*choices, usage=usage)

    def chunk(self, *choices: Reply, **fields: Any) -> Reply:
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        return {**self._head, "object": kind, "choices": list(choices), **fields}

    def prompt_ids(self, place: int, num_answers: int) -> Reply:
        if self._prompts is None:
            return {}
        return {"prompt_token_ids": self._prompts[place * len(self._prompts) // num_answers]}

    def _token_ids(self, progress: Progress) -> Reply:
        if self._prompts is None:
            return {}
        return {"token_ids": [record.token for record in progress.tokens]}

    def choice(self, place: int, progress: Progress, offset: int = 0) -> Reply:
        """Return an answer, or the part that a step adds to one of `offset` characters."""
        if not self.is_chat:
            return self._completion(place, progress, offset)
        delta = self._delta(place, progress)
        is_part = progress.request.is_streamed
        empty = {} if is_part else {"role": "assistant", "content": None, "refusal": None}
        return {
            "index": place,
            "delta" if is_part else "message": {**empty, **delta},
            "logprobs": self._chat_logprobs(progress),
            "finish_reason": self._finish_reason(place, progress),
            **self._token_ids(progress),
        }

    def _delta(self, place: int, progress: Progress) -> Reply:
        """Return the reasoning, content and calls that a step adds to an answer."""
        is_part = progress.request.is_streamed
        if self._make_parser is None:
            return {"content": progress.text} if progress.text or not is_part else {}
        if place not in self._parsers:
            self._parsers[place] = self._make_parser()
        parser = self._parsers[place]
        parts = parser.push(progress.text)
        if progress.finish_reason is not None:
            parts += parser.finish()
        calls = self._calls.setdefault(place, [])
        num_before = len(calls)
        for part in parts:
            if isinstance(part, ToolCall) and len(calls) < self._num_calls_allowed:
                # Mistral's chat templates accept no other length.
                call = part.as_message_part(secrets.token_hex(5)[:9])
                # Only streams number their calls.
                calls.append({"index": len(calls), **call} if is_part else call)
        reasoning = "".join(part.text for part in parts if isinstance(part, ReasoningPart))
        content = "".join(part for part in parts if isinstance(part, str))
        fields = {
            "reasoning_content": reasoning,
            "content": content,
            "tool_calls": calls[num_before:],
        }
        delta = {name: value for name, value in fields.items() if value}
        # An answer that is empty is a text.
        return delta if delta or is_part else {"content": ""}

    def _finish_reason(self, place: int, progress: Progress) -> str | None:
        is_call = progress.finish_reason == "stop" and self._calls.get(place)
        return "tool_calls" if is_call else progress.finish_reason

    def _chat_logprobs(self, progress: Progress) -> Reply | None:
        if progress.request.num_top is None:
            return None
        content = [
            {
                **_shown(record.text, record.logprob),
                "top_logprobs": [_shown(text, logprob) for text, logprob in top],
            }
            for record, top in zip(progress.tokens, self._tops(progress), strict=True)
        ]
        return {"content": content, "refusal": None}

    def _tops(self, progress: Progress) -> list[list[tuple[str, float]]]:
        """Return the most likely alternatives of each token, as texts with log-probabilities."""
        records, decode = progress.tokens, self.tokenizer.batch_decode
        befores = decode([list(record.before) for record in records])
        # A character may be complete only with the token.
        starts = [len(before.rstrip("\ufffd")) for before in befores]
        afters = iter(decode([[*one.before, token] for one in records for token, _ in one.top]))
        return [
            [(next(afters)[start:], logprob) for _, logprob in record.top]
            for record, start in zip(records, starts, strict=True)
        ]

    def _completion(self, place: int, progress: Progress, offset: int) -> Reply:
        logprobs = None
        if progress.request.num_top is not None:
            records = progress.tokens
            lengths = [len(record.text) for record in records]
            logprobs = {
                "tokens": [record.text for record in records],
                # The first token of a prompt has none.
                "token_logprobs": [
                    None if math.isnan(record.logprob) else record.logprob for record in records
                ],
                "top_logprobs": [
                    None if math.isnan(record.logprob) else _by_text(record, top)
                    for record, top in zip(records, self._tops(progress), strict=True)
                ],
                "text_offset": list(accumulate(lengths[:-1], initial=offset))[: len(records)],
            }
        return {
            "index": place,
            "text": progress.text,
            "logprobs": logprobs,
            "finish_reason": progress.finish_reason,
            **self._token_ids(progress),
        }


def _shown(text: str, logprob: float) -> Reply:
    # Text of an incomplete character has no bytes of its own.
    data = None if "\ufffd" in text else list(text.encode())
    return {"token": text, "logprob": logprob, "bytes": data}


def _by_text(record: TokenRecord, top: Sequence[tuple[str, float]]) -> dict[str, float]:
    """Return the most likely token per text, with the sampled token, as in OpenAI's protocol."""
    found: dict[str, float] = {}
    for text, logprob in (*top, (record.text, record.logprob)):
        found.setdefault(text, logprob)
    return found


def _tokens_reply(answers: Sequence[Progress], usage: Reply) -> Reply:
    """Return a response of /inference/v1/generate, in vLLM's format."""

    def shown(token: int, logprob: float) -> Reply:
        # A token is named by its number: not every token is a text.
        return {"token": f"token_id:{token}", "logprob": logprob, "bytes": None}

    def logprobs_of(record: TokenRecord) -> Reply:
        tops = [shown(token, logprob) for token, logprob in record.top]
        return {**shown(record.token, record.logprob), "top_logprobs": tops}

    choices = [
        {
            "index": place,
            "token_ids": [record.token for record in one.tokens],
            "logprobs": None
            if one.request.num_top is None
            else {"content": [logprobs_of(record) for record in one.tokens]},
            "finish_reason": one.finish_reason,
        }
        for place, one in enumerate(answers)
    ]
    return {
        "request_id": f"generate-{secrets.token_hex(12)}",
        "choices": choices,
        "usage": usage,
    }


def _usage_of(requests: Sequence[GenerationRequest], completion_tokens: int) -> Reply:
    prompt_tokens = sum(len(request.prompt) for request in requests)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


# ---- engines


class EngineClient:
    """Submits requests to engines from an event loop, and cancels those of disconnected clients."""

    def __init__(self, settings: ServiceSettings) -> None:
        self.settings = settings
        self.num_streams = 0
        self._receivers: dict[int, Callable[[Progress], None]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def _listen(self, items: Sequence[Progress]) -> None:
        def dispatch() -> None:
            for progress in items:
                receive = self._receivers.get(progress.request.number)
                if receive is not None:
                    receive(progress)

        assert self._loop is not None
        self._loop.call_soon_threadsafe(dispatch)

    def plan(
        self,
        served: ServedModel,
        prompts: Sequence[Sequence[int]],
        body: DrawBody,
        *,
        num_top: int | None,
        max_tokens: int | None,
        **options: Any,
    ) -> list[GenerationRequest]:
        """Return the requests of a body, one per prompt; raise `ApiError` beyond a limit."""
        if len(prompts) * body.n > self.settings.max_answers:
            raise wrong(
                f"{len(prompts)} prompts with n={body.n} are {len(prompts) * body.n} answers; this "
                f"service allows {self.settings.max_answers} per request.",
                "n",
                "invalid_value",
            )
        seed = secrets.randbits(62) if body.seed is None else body.seed
        return [
            GenerationRequest(
                prompt=tuple(prompt),
                max_tokens=self._room(served.engine, len(prompt), max_tokens),
                top_k=body.top_k,
                # Prompts of one request have independent draws.
                seed=seed + place,
                listener=self._listen,
                num_samples=body.n,
                # Logits divided by a smaller one overflow; the answer is greedy anyway.
                temperature=body.temperature if body.temperature >= 1e-6 else 0.0,
                # A nucleus holds at least one token.
                top_p=max(body.top_p, 1e-9),
                num_top=num_top,
                adapter=served.adapter,
                **options,
            )
            for place, prompt in enumerate(prompts)
        ]

    def _room(self, engine: Engine, num_tokens: int, max_tokens: int | None) -> int:
        window, most = engine.context_window, self.settings.max_answer_tokens
        if max_tokens is not None and max_tokens > most:
            raise wrong(
                f"max_tokens is {max_tokens}, but this service allows {most}. Lower it, or start "
                "the service with --settings max_answer_tokens=N.",
                "max_tokens",
                "invalid_value",
            )
        if num_tokens == 0:
            raise wrong("the prompt has no tokens.", "prompt", "invalid_value")
        if num_tokens + (max_tokens != 0) > window:
            raise wrong(
                f"the prompt has {num_tokens} tokens, but prompt and answer share a window of "
                f"{window}. Shorten the prompt.",
                "messages",
                "context_length_exceeded",
            )
        # An answer that fills the window ends there, with finish reason "length".
        return min(most if max_tokens is None else max_tokens, window - num_tokens)

    async def progress(
        self,
        engine: Engine,
        requests: Sequence[GenerationRequest],
        leaving: asyncio.Future[None] | None = None,
    ) -> AsyncGenerator[tuple[int, Progress], None]:
        """Yield progress as it arrives, with the index of its answer among all.

        Requests end with the generator, which ends early when `leaving` is done.
        """
        if engine.num_waiting + len(requests) > self.settings.max_waiting:
            raise overloaded(
                f"{counted(engine.num_waiting, 'request')} waiting, and this service allows "
                f"{self.settings.max_waiting}. Retry later.",
                "queue_full",
            )
        first = {request.number: i * request.num_samples for i, request in enumerate(requests)}
        num_open = requests[0].num_samples * len(requests)
        inbox: asyncio.Queue[Progress | None] = asyncio.Queue()
        if leaving is not None:
            leaving.add_done_callback(lambda _: inbox.put_nowait(None))
        self._loop = asyncio.get_running_loop()
        self._receivers.update(dict.fromkeys(first, inbox.put_nowait))
        try:
            for request in requests:
                engine.submit(request)
            while num_open and (one := await inbox.get()) is not None:
                num_open -= one.finish_reason is not None
                yield first[one.request.number] + one.index, one
        finally:
            for request in requests:
                engine.cancel(request)
                del self._receivers[request.number]

    async def stream(
        self, engine: Engine, requests: Sequence[GenerationRequest]
    ) -> AsyncGenerator[tuple[int, Progress], None]:
        """Yield `progress`, within the limit of open streams."""
        if self.num_streams >= self.settings.max_streams:
            raise overloaded(
                f"{self.num_streams} streams are open, the limit of this service. Retry later.",
                "too_many_streams",
            )
        self.num_streams += 1
        try:
            async with aclosing(self.progress(engine, requests)) as progress:
                async for one in progress:
                    yield one
        finally:
            self.num_streams -= 1


# ---- routes


def text_routes(
    models: ServedModels, settings: ServiceSettings, completions: CompletionStore
) -> tuple[APIRouter, list[Route]]:
    """Return the routes of text, and those that generate it."""
    routes = _TextRoutes(models, settings, completions)
    router = APIRouter()
    router.add_api_route("/v1/models", routes.models, methods=["GET"])
    router.add_api_route("/v1/models/{name}", routes.model, methods=["GET"])
    for path, reason in NOT_SERVED.items():
        router.add_api_route(path, partial(_refuse, path, reason), methods=["POST"])
    direct = [
        Route("/v1/chat/completions", routes.chat, methods=["POST"]),
        Route("/v1/completions", routes.completions, methods=["POST"]),
        Route("/inference/v1/generate", routes.generate, methods=["POST"]),
    ]
    return router, direct


async def _refuse(path: str, reason: str) -> Response:
    raise ApiError(404, f"{path} is not served: {reason}", code="unsupported_route")


class _TextRoutes:
    def __init__(
        self, models: ServedModels, settings: ServiceSettings, completions: CompletionStore
    ) -> None:
        self._models, self._store = models, completions
        self._client = EngineClient(settings)

    async def models(self) -> Response:
        cards = [served.card for served in self._models.all()]
        return JSONResponse({"object": "list", "data": cards})

    async def model(self, name: str) -> Response:
        return JSONResponse(self._models.get(name).card)

    async def chat(self, request: Request) -> Response:
        body = await read_body(request, ChatBody)
        engine = self._models.get(body.model).engine
        messages = [message.plain() for message in body.messages]
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools if body.called_tools]
        message_format = engine.message_format
        if tools or any(message.uses_tools for message in body.messages):
            _check_tools(body.model, message_format)
        prompt = await self._chat_prompt(engine, messages, tools)
        begins_in_thought = engine.begins_in_thought(prompt)
        grammar = _grammar(body, message_format, begins_in_thought=begins_in_thought)
        if grammar is not None:
            await asyncio.to_thread(_compile, engine, grammar, body)
        num_top = (body.top_logprobs or 0) if body.logprobs else None
        max_tokens = body.max_completion_tokens or body.max_tokens
        make_parser = None
        if tools or message_format.has_marks:
            make_parser = partial(
                message_format.parser,
                begins_in_thought=begins_in_thought,
                tools=argument_schemas(tools) if tools else None,
            )
        return await self._answer_text(
            *("chatcmpl", request, body, [prompt], num_top, max_tokens),
            num_calls_allowed=0 if not tools else MAX_TOOLS if body.parallel_tool_calls else 1,
            make_parser=make_parser,
            keeps_tokens=body.return_token_ids,
            grammar=grammar,
            shown_ids=message_format.shown_ids(with_calls=bool(tools)),
        )

    async def _chat_prompt(
        self, engine: Engine, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]
    ) -> Sequence[int]:
        """Return the tokens of a conversation."""
        conversation = json.dumps([messages, tools])
        if len(conversation) > LONG_TEXT:
            return await asyncio.to_thread(prompt_of, engine.tokenizer, conversation)
        return engine.known_prompt(conversation)

    async def completions(self, request: Request) -> Response:
        body = await read_body(request, CompletionBody)
        engine = self._models.get(body.model).engine
        work = partial(completion_prompts, engine, body.prompt)
        is_long = len(str(body.prompt)) > LONG_TEXT
        prompts = await asyncio.to_thread(work) if is_long else work()
        return await self._answer_text(
            *("cmpl", request, body, prompts, body.logprobs, body.max_tokens),
            echo=body.echo,
            # Clients count on one log-probability per token, including the end.
            keeps_tokens=body.return_token_ids or body.logprobs is not None,
        )

    async def _answer_text(
        self,
        kind: str,
        request: Request,
        body: SamplingBody,
        prompts: Sequence[Sequence[int]],
        num_top: int | None,
        max_tokens: int | None,
        *,
        num_calls_allowed: int = 0,
        make_parser: Callable[[], MessageParser] | None = None,
        **options: Any,
    ) -> Response:
        served = self._models.get(body.model)
        requests = self._client.plan(
            served,
            prompts,
            body,
            num_top=num_top,
            max_tokens=max_tokens,
            stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop),
            is_streamed=body.stream,
            **options,
        )
        reply = TextReply(
            *(kind, body.model, served.engine.tokenizer, prompts),
            returns_token_ids=body.return_token_ids,
            num_calls_allowed=num_calls_allowed,
            make_parser=make_parser,
        )
        if body.stream:
            return await self._stream(served.engine, requests, body, reply)
        return await self._store.once(
            request, body.model, lambda: self._whole(request, served, requests, reply.whole)
        )

    async def generate(self, request: Request) -> Response:
        """Generate tokens from tokens: training data must not be converted to text."""
        body = await read_body(request, GenerateBody)
        sampling = check_body(body.sampling_params, TokenSamplingBody)
        served = self._models.get(body.model)
        requests = self._client.plan(
            served,
            completion_prompts(served.engine, body.token_ids),
            sampling,
            num_top=sampling.logprobs,
            max_tokens=sampling.max_tokens,
            end_ids=tuple(sampling.stop_token_ids),
            returns_token_ids=True,
        )
        return await self._store.once(
            request, body.model, lambda: self._whole(request, served, requests, _tokens_reply)
        )

    async def _whole(
        self,
        request: Request,
        served: ServedModel,
        requests: Sequence[GenerationRequest],
        to_reply: Callable[[Sequence[Progress], Reply], Reply],
    ) -> Response:
        """Return all answers together; none if the client disconnects before."""
        answers: dict[int, Progress] = {}
        leaving = asyncio.ensure_future(_until_left(request))
        try:
            async with aclosing(
                self._client.progress(served.engine, requests, leaving)
            ) as progress:
                async for place, one in progress:
                    if one.finish_reason == "error":
                        raise _error_of(one)
                    answers[place] = one
        finally:
            leaving.cancel()
        if len(answers) < requests[0].num_samples * len(requests):
            return Response(status_code=_CLIENT_LEFT)
        usage = _usage_of(requests, sum(one.num_tokens for one in answers.values()))
        return JSONResponse(to_reply([answers[place] for place in sorted(answers)], usage))

    async def _stream(
        self,
        engine: Engine,
        requests: Sequence[GenerationRequest],
        body: SamplingBody,
        reply: TextReply,
    ) -> Response:
        progress = self._client.stream(engine, requests)
        # A refusal of the stream must come before its status is sent.
        begin = await anext(progress)
        fields = {"usage": None} if body.includes_usage else {}

        async def events() -> AsyncIterator[bytes]:
            lengths: dict[int, int] = {}
            num_tokens: dict[int, int] = {}
            try:
                for place in range(body.n if reply.is_chat else 0):
                    delta = {"role": "assistant", "content": "", "refusal": None}
                    first = {"index": place, "delta": delta, "logprobs": None}
                    first["finish_reason"] = None
                    yield _event(reply.chunk(first, **fields, **reply.prompt_ids(0, 1)))
                one: tuple[int, Progress] | None = begin
                while one is not None:
                    place, step = one
                    if step.finish_reason == "error":
                        yield _event(_error_of(step).body)
                        return
                    offset = lengths.get(place, 0)
                    lengths[place] = offset + sum(len(record.text) for record in step.tokens)
                    choice = reply.choice(place, step, offset)
                    if place not in num_tokens and not reply.is_chat:
                        choice |= reply.prompt_ids(place, body.n * len(requests))
                    num_tokens[place] = step.num_tokens
                    # Text that may become a call is held back.
                    if choice.get("delta", True) or step.tokens or step.finish_reason:
                        yield _event(reply.chunk(choice, **fields))
                    # Neither the backlog of a slow reader nor a closed connection waits.
                    await asyncio.sleep(0)
                    one = await anext(progress, None)
                if body.includes_usage:
                    usage = _usage_of(requests, sum(num_tokens.values()))
                    yield _event(reply.chunk(usage=usage))
                yield b"data: [DONE]\n\n"
            finally:
                await progress.aclose()

        headers = {"Cache-Control": "no-cache"}
        return StreamingResponse(events(), media_type="text/event-stream", headers=headers)


def _error_of(progress: Progress) -> ApiError:
    text = f"the answer failed: {progress.error}"
    return wrong(text, code="form_not_reached") if progress.is_request_fault else failed(text)


def _event(content: Reply) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False).encode() + b"\n\n"


async def _until_left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _check_tools(name: str, message_format: MessageFormat) -> None:
    """Raise `ApiError` if a model cannot use tools."""
    reason = message_format.fault
    if not message_format.shows_tools:
        reason = "its chat template does not show tools to the model"
    if reason:
        raise wrong(
            f"the model {name!r} cannot use tools: {reason}. Leave out tools and their messages, "
            "or serve a model whose calls are read.",
            "tools",
            "unsupported_parameter",
        )


def _grammar(
    body: ChatBody, message_format: MessageFormat, *, begins_in_thought: bool
) -> str | None:
    """Return the grammar of the answer; raise `ApiError` if the model's calls have none."""
    try:
        return body.grammar(message_format, begins_in_thought=begins_in_thought)
    except ModelAbilityError as error:
        raise _unsupported(body, error) from error
    except ConfigurationError as error:
        raise _unenforceable(body, error) from error


def _constraint(body: ChatBody) -> str:
    """Return the parameter that constrains the answer."""
    return "response_format" if body.response_format is not None else "tool_choice"


def _unsupported(body: ChatBody, error: Exception) -> ApiError:
    text = f"{_constraint(body)} is not supported by the model {body.model!r}: {error}"
    return wrong(text, _constraint(body), "unsupported_parameter")


def _compile(engine: Engine, grammar: str, body: ChatBody) -> None:
    """Compile the grammar of an answer; raise `ApiError` if it cannot be enforced."""
    try:
        engine.grammars.matcher(grammar)
    except (MissingDependencyError, ModelAbilityError) as error:
        raise _unsupported(body, error) from error
    except ConfigurationError as error:
        raise _unenforceable(body, error) from error


def _unenforceable(body: ChatBody, error: Exception) -> ApiError:
    text = f"the JSON schema cannot be enforced: {error}. Give a simpler one."
    return wrong(text, _constraint(body), "invalid_value")


def completion_prompts(engine: Engine, prompt: str | Sequence[Any]) -> list[list[int]]:
    """Return the tokens of each prompt: texts, or tokens of the model."""
    given: Sequence[Any] = [prompt] if isinstance(prompt, str) else prompt
    if isinstance(given[0], int):
        given = [given]
    encode = engine.tokenizer.encode
    found = [list(encode(one)) if isinstance(one, str) else list(one) for one in given]
    worst = max((max(ids, default=0) for ids in found), default=0)
    if worst >= engine.vocab_size:
        raise wrong(
            f"the prompt holds the token {worst}, but the model has {engine.vocab_size}. Give "
            "tokens of this model, or text.",
            "prompt",
            "invalid_value",
        )
    return found
