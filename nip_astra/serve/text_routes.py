"""The routes that generate text: chat completions, completions, tokens, and the list of models."""

from __future__ import annotations

import asyncio
import json
import math
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from functools import partial
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
    bad_request,
    check_body,
    internal_error,
    make_refusal,
    overloaded,
    parse_json,
    read_body,
)
from nip_astra.serve.served_models import Engine, ServedModel, ServedModels, encode_chat
from nip_astra.serve.settings import ServiceSettings

LONG_TEXT = 20_000
"""Number of characters from which a text is tokenised in a thread."""
# OpenAI's limits, so that a request that works here works there.
MAX_STOPS = 4
MAX_TOOLS = 128
_CLIENT_LEFT = 499
"""nginx's status of a request whose client disconnected; nobody reads it but the log."""
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
    def _drop_nulls(cls, message: Any) -> Any:
        # Clients send back messages of answers with all their fields.
        if not isinstance(message, dict):
            return message
        fields = {name: content for name, content in message.items() if content not in (None, [])}
        if "reasoning" in fields and "reasoning_content" not in fields:
            # OpenRouter and recent vLLM name it so, and their clients send it back.
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
        tool_fields = self.model_dump(include=names, exclude_none=True)
        return {**plain_message(self.role, self.content), **tool_fields}


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
            chosen_name = self.tool_choice.function.name
            return [function for function in functions if function.name == chosen_name]
        return functions if self.tool_choice != "none" else []

    def grammar(self, message_format: MessageFormat, *, begins_in_thought: bool) -> str | None:
        """Return the grammar of the answer; None for any text.

        Raises
        ------
        ModelAbilityError
            If the model's calls cannot be constrained.
        """
        alternatives: list[str] = []
        rules: list[str] = []
        # Tools alone leave the model free to answer with text, which needs no grammar.
        if self.called_tools and (self.must_call or self.response_format):
            functions = [function.model_dump(exclude_none=True) for function in self.called_tools]
            # A tool chosen by name is called once, as by OpenAI.
            allows_several = self.parallel_tool_calls and not isinstance(
                self.tool_choice, ChosenTool
            )
            rules = message_format.call_rules(functions, allows_several=allows_several)
            alternatives.append("calls")
        if self.response_format is not None and not self.must_call:
            schema = answer_schema(self.response_format.model_dump(by_alias=True)) or {}
            rules.append(f"answer: {json_rule(schema)}")
            alternatives.append("answer")
        if not alternatives:
            return None
        start = " | ".join(alternatives)
        if begins_in_thought:
            # The constraint applies to what follows the thought.
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
    """The response to a request for chat completions (`kind` chatcmpl) or completions (cmpl).

    Parameters
    ----------
    returns_token_ids : bool
        Whether to add the tokens of prompts and answers, vLLM's extension of OpenAI's protocol.
    num_calls_allowed : int
        Maximum tool calls of an answer; further ones are dropped.
    make_parser : Callable, optional
        Creates the parser of an answer with thoughts or tool calls; without it, text is content.
    """

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
        """Return the response with all complete answers."""
        choices = [self.choice(index, answer) for index, answer in enumerate(answers)]
        if self.is_chat:
            fields = {"usage": usage, **self.prompt_ids(0, 1)}
            return self.chunk(*choices, object="chat.completion", **fields)
        # Several prompts have one response; each choice then tells its own.
        for index, choice in enumerate(choices):
            choice |= self.prompt_ids(index, len(answers))
        return self.chunk(*choices, usage=usage)

    def chunk(self, *choices: Reply, **fields: Any) -> Reply:
        """Return an event of a stream; of completions, a whole response has the same form."""
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        return {**self._head, "object": kind, "choices": list(choices), **fields}

    def prompt_ids(self, index: int, num_answers: int) -> Reply:
        """Return the prompt's tokens of a choice among `num_answers`, if they are requested."""
        if self._prompts is None:
            return {}
        num_answers_per_prompt = num_answers // len(self._prompts)
        return {"prompt_token_ids": self._prompts[index // num_answers_per_prompt]}

    def choice(self, index: int, progress: Progress, offset: int = 0) -> Reply:
        """Return an answer, or the part that a step adds to one of `offset` characters."""
        choice: Reply = {"index": index, "finish_reason": progress.finish_reason, "logprobs": None}
        if self.is_chat:
            message = self._message_part(index, progress)
            # Clients run the calls of an answer by this reason.
            if progress.finish_reason == "stop" and self._calls.get(index):
                choice["finish_reason"] = "tool_calls"
            if progress.request.is_streamed:
                choice["delta"] = message
            else:
                empty_message = {"role": "assistant", "content": None, "refusal": None}
                choice["message"] = {**empty_message, **message}
        else:
            choice["text"] = progress.text
        if progress.request.num_top is not None:
            if self.is_chat:
                choice["logprobs"] = self._chat_logprobs(progress)
            else:
                choice["logprobs"] = self._completion_logprobs(progress, offset)
        if self._prompts is not None:
            choice["token_ids"] = [record.token for record in progress.tokens]
        return choice

    def _message_part(self, index: int, progress: Progress) -> Reply:
        """Return the reasoning, content and calls that a step adds to an answer."""
        is_streamed = progress.request.is_streamed
        if self._make_parser is None:
            return {"content": progress.text} if progress.text or not is_streamed else {}
        if index not in self._parsers:
            self._parsers[index] = self._make_parser()
        parser = self._parsers[index]
        parts = parser.push(progress.text)
        if progress.finish_reason is not None:
            parts += parser.finish()
        calls = self._calls.setdefault(index, [])
        num_calls_before = len(calls)
        for part in parts:
            if isinstance(part, ToolCall) and len(calls) < self._num_calls_allowed:
                # Mistral's chat templates accept ids of 9 letters and digits only.
                call = part.as_message_part(secrets.token_hex(5)[:9])
                # Only streams number their calls: clients join the parts of one by its index.
                calls.append({"index": len(calls), **call} if is_streamed else call)
        reasoning = "".join(part.text for part in parts if isinstance(part, ReasoningPart))
        content = "".join(part for part in parts if isinstance(part, str))
        new_calls = calls[num_calls_before:]
        message: Reply = {}
        if reasoning:
            message["reasoning_content"] = reasoning
        if content:
            message["content"] = content
        if new_calls:
            message["tool_calls"] = new_calls
        if not message and not is_streamed:
            # Null content means that there are calls; an empty answer is a text.
            message["content"] = ""
        return message

    def _chat_logprobs(self, progress: Progress) -> Reply:
        content = []
        alternatives = self._decode_alternatives(progress)
        for record, top in zip(progress.tokens, alternatives, strict=True):
            top_logprobs = [_text_logprob(text, logprob) for text, logprob in top]
            token_logprob = _text_logprob(record.text, record.logprob)
            content.append({**token_logprob, "top_logprobs": top_logprobs})
        return {"content": content, "refusal": None}

    def _decode_alternatives(self, progress: Progress) -> list[list[tuple[str, float]]]:
        """Return the most likely alternatives of each token, as texts with log-probabilities."""
        records = progress.tokens
        if not records:
            # transformers 5.0 decodes an empty batch to one empty text.
            return []
        # A token's text depends on the tokens before it (a leading space, a part of a character):
        # decode both with and without it, all positions in one call of the tokenizer.
        prefixes = self.tokenizer.batch_decode([list(record.before) for record in records])
        sequences = []
        for record in records:
            for token, _ in record.top:
                sequences.append([*record.before, token])
        texts = iter(self.tokenizer.batch_decode(sequences))
        alternatives = []
        for record, prefix in zip(records, prefixes, strict=True):
            # A character may be complete only with the token.
            start = len(prefix.rstrip("\ufffd"))
            alternatives.append([(next(texts)[start:], logprob) for _, logprob in record.top])
        return alternatives

    def _completion_logprobs(self, progress: Progress, offset: int) -> Reply:
        tokens: list[str] = []
        token_logprobs: list[float | None] = []
        top_logprobs: list[dict[str, float] | None] = []
        text_offsets: list[int] = []
        alternatives = self._decode_alternatives(progress)
        for record, top in zip(progress.tokens, alternatives, strict=True):
            # Nothing predicts the first token of an echoed prompt. JSON has no NaN.
            is_predicted = not math.isnan(record.logprob)
            tokens.append(record.text)
            token_logprobs.append(record.logprob if is_predicted else None)
            top_logprobs.append(_top_by_text(record, top) if is_predicted else None)
            text_offsets.append(offset)
            offset += len(record.text)
        return {
            "tokens": tokens,
            "token_logprobs": token_logprobs,
            "top_logprobs": top_logprobs,
            "text_offset": text_offsets,
        }


def _text_logprob(text: str, logprob: float) -> Reply:
    # Text of an incomplete character has no bytes of its own.
    utf8 = None if "\ufffd" in text else list(text.encode())
    return {"token": text, "logprob": logprob, "bytes": utf8}


def _top_by_text(record: TokenRecord, top: Sequence[tuple[str, float]]) -> dict[str, float]:
    """Return the most likely token per text, with the sampled token, as in OpenAI's protocol."""
    logprobs: dict[str, float] = {}
    # In descending order: of several tokens with one text the most likely stays.
    for text, logprob in top:
        logprobs.setdefault(text, logprob)
    logprobs.setdefault(record.text, record.logprob)
    return logprobs


def _tokens_reply(answers: Sequence[Progress], usage: Reply) -> Reply:
    """Return a response of /inference/v1/generate, in vLLM's format."""
    choices = []
    for index, answer in enumerate(answers):
        logprobs: Reply | None = None
        if answer.request.num_top is not None:
            content = []
            for record in answer.tokens:
                top_logprobs = [_id_logprob(token, logprob) for token, logprob in record.top]
                token_logprob = _id_logprob(record.token, record.logprob)
                content.append({**token_logprob, "top_logprobs": top_logprobs})
            logprobs = {"content": content}
        choice = {
            "index": index,
            "token_ids": [record.token for record in answer.tokens],
            "logprobs": logprobs,
            "finish_reason": answer.finish_reason,
        }
        choices.append(choice)
    return {
        "request_id": f"generate-{secrets.token_hex(12)}",
        "choices": choices,
        "usage": usage,
    }


def _id_logprob(token: int, logprob: float) -> Reply:
    # A token is named by its number: not every token is a text.
    return {"token": f"token_id:{token}", "logprob": logprob, "bytes": None}


def _count_usage(requests: Sequence[GenerationRequest], completion_tokens: int) -> Reply:
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

    def _listen(self, steps: Sequence[Progress]) -> None:
        """Hand progress from an engine's thread to the event loop."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._dispatch, steps)

    def _dispatch(self, steps: Sequence[Progress]) -> None:
        for progress in steps:
            # A request that ended meanwhile has none.
            receive = self._receivers.get(progress.request.number)
            if receive is not None:
                receive(progress)

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
        num_answers = len(prompts) * body.n
        if num_answers > self.settings.max_answers:
            raise bad_request(
                f"{len(prompts)} prompts with n={body.n} are {num_answers} answers; this service "
                f"allows {self.settings.max_answers} per request.",
                "n",
                "invalid_value",
            )
        seed = secrets.randbits(62) if body.seed is None else body.seed
        # Logits divided by a smaller one overflow; the answer is greedy anyway.
        temperature = body.temperature if body.temperature >= 1e-6 else 0.0
        # A nucleus holds at least one token.
        top_p = max(body.top_p, 1e-9)
        requests = []
        for index, prompt in enumerate(prompts):
            request = GenerationRequest(
                prompt=tuple(prompt),
                max_tokens=self._limit_tokens(served.engine, len(prompt), max_tokens),
                top_k=body.top_k,
                # Prompts of one request have independent draws.
                seed=seed + index,
                listener=self._listen,
                num_samples=body.n,
                temperature=temperature,
                top_p=top_p,
                num_top=num_top,
                adapter=served.adapter,
                **options,
            )
            requests.append(request)
        return requests

    def _limit_tokens(self, engine: Engine, num_tokens: int, max_tokens: int | None) -> int:
        """Return the maximum tokens of an answer to a prompt of `num_tokens`."""
        window = engine.context_window
        max_answer_tokens = self.settings.max_answer_tokens
        if max_tokens is not None and max_tokens > max_answer_tokens:
            raise bad_request(
                f"max_tokens is {max_tokens}, but this service allows {max_answer_tokens}. Lower "
                "it, or start the service with --settings max_answer_tokens=N.",
                "max_tokens",
                "invalid_value",
            )
        if num_tokens == 0:
            raise bad_request("the prompt has no tokens.", "prompt", "invalid_value")
        if num_tokens + (max_tokens != 0) > window:
            raise bad_request(
                f"the prompt has {num_tokens} tokens, but prompt and answer share a window of "
                f"{window}. Shorten the prompt.",
                "messages",
                "context_length_exceeded",
            )
        if max_tokens is None:
            max_tokens = max_answer_tokens
        # An answer that fills the window ends there, with finish reason "length".
        return min(max_tokens, window - num_tokens)

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
        # Choices are numbered over all prompts: n for the first, then n for the second.
        first_index = {
            request.number: position * request.num_samples
            for position, request in enumerate(requests)
        }
        num_unfinished = requests[0].num_samples * len(requests)
        # None ends the wait of a client that disconnects.
        inbox: asyncio.Queue[Progress | None] = asyncio.Queue()
        if leaving is not None:
            leaving.add_done_callback(lambda _: inbox.put_nowait(None))
        self._loop = asyncio.get_running_loop()
        # Before the requests are submitted: an engine may report at once.
        self._receivers.update(dict.fromkeys(first_index, inbox.put_nowait))
        try:
            for request in requests:
                engine.submit(request)
            while num_unfinished > 0:
                progress = await inbox.get()
                if progress is None:
                    return
                if progress.finish_reason is not None:
                    num_unfinished -= 1
                yield first_index[progress.request.number] + progress.index, progress
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
            async with aclosing(self.progress(engine, requests)) as steps:
                async for index, progress in steps:
                    yield index, progress
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
        message = f"{path} is not served: {reason}"
        make_error = partial(ApiError, 404, message, code="unsupported_route")
        router.add_api_route(path, make_refusal(make_error), methods=["POST"])
    direct = [
        Route("/v1/chat/completions", routes.chat, methods=["POST"]),
        Route("/v1/completions", routes.completions, methods=["POST"]),
        Route("/inference/v1/generate", routes.generate, methods=["POST"]),
    ]
    return router, direct


class _TextRoutes:
    def __init__(
        self, models: ServedModels, settings: ServiceSettings, completions: CompletionStore
    ) -> None:
        self._models = models
        self._store = completions
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
        # With tool_choice "none" the model does not see the tools either.
        tools: list[dict[str, Any]] = []
        if body.called_tools:
            tools = [tool.model_dump(exclude_none=True) for tool in body.tools]
        message_format = engine.message_format
        if tools or any(message.uses_tools for message in body.messages):
            _check_tools(body.model, message_format)
        conversation = json.dumps([messages, tools])
        if len(conversation) > LONG_TEXT:
            prompt = await asyncio.to_thread(encode_chat, engine.tokenizer, conversation)
        else:
            prompt = engine.cached_prompt(conversation)
        begins_in_thought = engine.begins_in_thought(prompt)
        grammar = await _prepare_grammar(engine, body, begins_in_thought=begins_in_thought)
        make_parser = None
        if tools or message_format.has_marks:
            make_parser = partial(
                message_format.parser,
                begins_in_thought=begins_in_thought,
                tools=argument_schemas(tools) if tools else None,
            )
        num_calls_allowed = 0
        if tools:
            num_calls_allowed = MAX_TOOLS if body.parallel_tool_calls else 1
        reply = TextReply(
            "chatcmpl",
            body.model,
            engine.tokenizer,
            [prompt],
            returns_token_ids=body.return_token_ids,
            num_calls_allowed=num_calls_allowed,
            make_parser=make_parser,
        )
        return await self._answer_text(
            request,
            body,
            [prompt],
            reply,
            num_top=(body.top_logprobs or 0) if body.logprobs else None,
            max_tokens=body.max_completion_tokens or body.max_tokens,
            keeps_tokens=body.return_token_ids,
            grammar=grammar,
            shown_ids=message_format.shown_ids(with_calls=bool(tools)),
        )

    async def completions(self, request: Request) -> Response:
        body = await read_body(request, CompletionBody)
        engine = self._models.get(body.model).engine
        if len(str(body.prompt)) > LONG_TEXT:
            prompts = await asyncio.to_thread(completion_prompts, engine, body.prompt)
        else:
            prompts = completion_prompts(engine, body.prompt)
        reply = TextReply(
            "cmpl",
            body.model,
            engine.tokenizer,
            prompts,
            returns_token_ids=body.return_token_ids,
        )
        return await self._answer_text(
            request,
            body,
            prompts,
            reply,
            num_top=body.logprobs,
            max_tokens=body.max_tokens,
            echo=body.echo,
            # Clients count on one log-probability per token, including the end.
            keeps_tokens=body.return_token_ids or body.logprobs is not None,
        )

    async def _answer_text(
        self,
        request: Request,
        body: SamplingBody,
        prompts: Sequence[Sequence[int]],
        reply: TextReply,
        **options: Any,
    ) -> Response:
        """Generate answers to the prompts of a body; `options` are those of `EngineClient.plan`."""
        served = self._models.get(body.model)
        requests = self._client.plan(
            served,
            prompts,
            body,
            stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop),
            is_streamed=body.stream,
            **options,
        )
        if body.stream:
            # A stream is not stored by its key: it cannot be replayed as it was.
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
        leaving = asyncio.ensure_future(_wait_for_disconnect(request))
        try:
            steps = self._client.progress(served.engine, requests, leaving)
            async with aclosing(steps):
                async for index, progress in steps:
                    if progress.finish_reason == "error":
                        raise _as_api_error(progress)
                    answers[index] = progress
        finally:
            leaving.cancel()
        if len(answers) < requests[0].num_samples * len(requests):
            return Response(status_code=_CLIENT_LEFT)
        num_tokens = sum(answer.num_tokens for answer in answers.values())
        # They finish in any order.
        ordered_answers = [answers[index] for index in sorted(answers)]
        return JSONResponse(to_reply(ordered_answers, _count_usage(requests, num_tokens)))

    async def _stream(
        self,
        engine: Engine,
        requests: Sequence[GenerationRequest],
        body: SamplingBody,
        reply: TextReply,
    ) -> Response:
        steps = self._client.stream(engine, requests)
        # A refusal of the stream must come before its status is sent.
        first_step = await anext(steps)
        # With include_usage, OpenAI's protocol has null in all events but the last.
        fields = {"usage": None} if body.includes_usage else {}

        async def events() -> AsyncIterator[bytes]:
            text_lengths: dict[int, int] = {}
            num_tokens: dict[int, int] = {}
            try:
                for index in range(body.n if reply.is_chat else 0):
                    # OpenAI's clients take the role from the first event of a choice.
                    delta = {"role": "assistant", "content": "", "refusal": None}
                    opening: Reply = {"index": index, "delta": delta, "logprobs": None}
                    opening["finish_reason"] = None
                    yield _event(reply.chunk(opening, **fields, **reply.prompt_ids(0, 1)))
                step: tuple[int, Progress] | None = first_step
                while step is not None:
                    index, progress = step
                    if progress.finish_reason == "error":
                        yield _event(_as_api_error(progress).body)
                        return
                    offset = text_lengths.get(index, 0)
                    added = sum(len(record.text) for record in progress.tokens)
                    text_lengths[index] = offset + added
                    choice = reply.choice(index, progress, offset)
                    if index not in num_tokens and not reply.is_chat:
                        choice |= reply.prompt_ids(index, body.n * len(requests))
                    num_tokens[index] = progress.num_tokens
                    # Text that may become a call is held back.
                    if choice.get("delta", True) or progress.tokens or progress.finish_reason:
                        yield _event(reply.chunk(choice, **fields))
                    # Without it, a backlog would be sent in one go: other requests would wait, and
                    # a closed connection would be noticed only after it.
                    await asyncio.sleep(0)
                    step = await anext(steps, None)
                if body.includes_usage:
                    usage = _count_usage(requests, sum(num_tokens.values()))
                    yield _event(reply.chunk(usage=usage))
                yield b"data: [DONE]\n\n"
            finally:
                # Starlette drops the iterator of a client that left; this cancels its requests.
                await steps.aclose()

        headers = {"Cache-Control": "no-cache"}
        return StreamingResponse(events(), media_type="text/event-stream", headers=headers)


def _as_api_error(progress: Progress) -> ApiError:
    message = f"the answer failed: {progress.error}"
    if progress.is_request_fault:
        return bad_request(message, code="form_not_reached")
    return internal_error(message)


def _event(content: Reply) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False).encode() + b"\n\n"


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _check_tools(name: str, message_format: MessageFormat) -> None:
    """Raise `ApiError` if a model cannot use tools."""
    reason = message_format.fault
    if not message_format.shows_tools:
        reason = "its chat template does not show tools to the model"
    if reason:
        raise bad_request(
            f"the model {name!r} cannot use tools: {reason}. Leave out tools and their messages, "
            "or serve a model whose calls are read.",
            "tools",
            "unsupported_parameter",
        )


async def _prepare_grammar(
    engine: Engine, body: ChatBody, *, begins_in_thought: bool
) -> str | None:
    """Compile the grammar of the answer, and return it; raise `ApiError` if it is unenforceable."""
    option = "response_format" if body.response_format is not None else "tool_choice"
    try:
        grammar = body.grammar(engine.message_format, begins_in_thought=begins_in_thought)
        if grammar is not None:
            # In a thread, as a large schema takes seconds. The engine finds it in its cache.
            # `grammars` too is made on first use, from the whole vocabulary.
            await asyncio.to_thread(lambda: engine.grammars.matcher(grammar))
    except (MissingDependencyError, ModelAbilityError) as error:
        message = f"{option} is not supported by the model {body.model!r}: {error}"
        raise bad_request(message, option, "unsupported_parameter") from error
    except ConfigurationError as error:
        message = f"the JSON schema cannot be enforced: {error}. Give a simpler one."
        raise bad_request(message, option, "invalid_value") from error
    return grammar


def completion_prompts(engine: Engine, prompt: str | Sequence[Any]) -> list[list[int]]:
    """Return the tokens of each prompt: texts, or tokens of the model."""
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        # One prompt, as a text or as tokens.
        prompt = [prompt]
    prompts = []
    for text_or_ids in prompt:
        if isinstance(text_or_ids, str):
            prompts.append(list(engine.tokenizer.encode(text_or_ids)))
        else:
            prompts.append(list(text_or_ids))
    max_id = max(max(ids, default=0) for ids in prompts)
    if max_id >= engine.vocab_size:
        raise bad_request(
            f"the prompt holds the token {max_id}, but the model has {engine.vocab_size}. Give "
            "tokens of this model, or text.",
            "prompt",
            "invalid_value",
        )
    return prompts
