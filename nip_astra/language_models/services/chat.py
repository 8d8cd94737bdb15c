"""Asynchronous chat models: messages in, messages out, without a tokenizer."""

from __future__ import annotations

import asyncio
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypedDict, TypeVar, cast

import torch
from pydantic import Field, JsonValue

from nip_astra.errors import ModelLoadError
from nip_astra.language_models.services.reasons import FailureReason as FailureReason
from nip_astra.language_models.services.reasons import FinishReason as FinishReason
from nip_astra.parameters.parameters_base import (
    ComponentRegistry,
    PolymorphicParameters,
    ReasoningMarkers,
    SubParameters,
    polymorphic,
)
from nip_astra.rollouts.messages import ToolCall
from nip_astra.safe_text import valid_text
from nip_astra.utils.background_loop import BackgroundLoop
from nip_astra.utils.seeding import derive_seed


class ChatMessage(TypedDict):
    """One message of a conversation, in the form of OpenAI's protocol and chat templates."""

    role: Literal["system", "user", "assistant"]
    content: str


REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Names of a message's reasoning in chat templates; the first one is OpenAI's protocol's."""


def render_chat(
    tokenizer: Any,
    messages: Sequence[ChatMessage] | Sequence[Mapping[str, Any]],
    *,
    opens_answer: bool,
    tools: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Render a conversation with the tokenizer's chat template.

    With `opens_answer` the text ends where the assistant's next message begins. Messages and
    `tools` have OpenAI's form; templates expect the arguments of calls as objects. A message's
    `reasoning_content` is shown if the template shows it.
    """
    has_reasoning = any(message.get(REASONING_FIELDS[0]) for message in messages)
    # Some templates refuse reasoning beside a text: then it is left out.
    attempts = (True, False) if has_reasoning else (True,)
    for shows_reasoning in attempts:
        template_messages = [_for_template(message, shows_reasoning) for message in messages]
        try:
            text: str = tokenizer.apply_chat_template(
                template_messages,
                # Templates test whether there are tools by `tools is not none`.
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=opens_answer,
            )
            return text
        except Exception as error:
            # Templates raise errors of any type.
            fault = error
    raise ModelLoadError(
        f"the chat template refused the roles {[message['role'] for message in messages]}: "
        f"{str(fault).rstrip('.')}. Begin with a user's message, or remove the system message."
    ) from fault


def _for_template(message: Mapping[str, Any], shows_reasoning: bool) -> dict[str, Any]:
    """Return a message as templates read it: reasoning under each name, arguments as objects."""
    reasoning = message.get(REASONING_FIELDS[0])
    fields = {name: field for name, field in message.items() if name not in REASONING_FIELDS}
    if reasoning and shows_reasoning:
        # A template reads the name that it knows.
        fields |= dict.fromkeys(REASONING_FIELDS, reasoning)
    calls = []
    for call in message.get("tool_calls") or ():
        function = dict(call["function"])
        if isinstance(function["arguments"], str):
            function["arguments"] = json.loads(function["arguments"])
        calls.append({**call, "type": "function", "function": function})
    if calls:
        fields["tool_calls"] = calls
    return fields


@dataclass(frozen=True)
class ChatRequest:
    """A request to a chat model.

    Attributes
    ----------
    messages : tuple of ChatMessage
        The conversation so far; the answer is the next message of the assistant.
    max_tokens : int or None
        Longest answer in tokens; None uses the service's default.
    temperature : float or None
        Sampling temperature, at least 0; 0 is greedy, None uses the service's default (some models
        require that).
    top_p : float
        Nucleus: tokens are drawn from the smallest set of the most likely ones of this mass.
    stop : tuple of str
        Texts that end an answer; they are not part of it.
    seed : int or None
        Equal seeds give equal answers if the service supports seeds; samples are independent.
    num_samples : int
        Answers to draw independently, at least 1.
    first_sample : int
        Number of the first sample among all samples of this request. It is part of the key in the
        cache: other numbers are new samples, equal numbers the same answer.
    needs_logprobs : bool
        Whether answers hold the log-probabilities of their tokens.
    response_format : Mapping or None
        Format of the answer as in OpenAI's protocol; a backend or service without support fails
        with `FailureReason.UNKNOWN_FORM`.
    key : str or None
        Name of the request; services that support it answer a repeated name from their log. It
        does not affect the answer.
    """

    messages: tuple[ChatMessage, ...]
    max_tokens: int | None = 256
    temperature: float | None = 1.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int | None = None
    num_samples: int = 1
    first_sample: int = 0
    needs_logprobs: bool = False
    response_format: Mapping[str, JsonValue] | None = None
    key: str | None = None

    @property
    def sample_numbers(self) -> range:
        """Return the number of each sample."""
        return range(self.first_sample, self.first_sample + self.num_samples)

    @property
    def longest_text(self) -> int:
        """Return the length in UTF-8 bytes above which an answer is not what was requested."""
        if self.max_tokens is None:
            return LONGEST_DEFAULT_TEXT
        return BYTES_OF_LONG_WORD + MAX_BYTES_PER_TOKEN * self.max_tokens

    @property
    def longest_response(self) -> int:
        """Return the limit in bytes of a service's response with all samples.

        It leaves room for escaped text, reasoning and log-probabilities.
        """
        return BYTES_AROUND_ANSWERS + BYTES_PER_TEXT_BYTE * self.longest_text * self.num_samples

    def seed_from(self, sample: int) -> int | None:
        """Return the seed of a request that starts at a sample, for every kind of model."""
        if self.seed is None:
            return None
        # The first sample has the request's own seed, as at a service that knows no samples.
        seed = derive_seed(self.seed, "sample", sample) if sample > 0 else self.seed
        return seed % NUM_SEEDS

    def parts(self, size: int | None) -> list[ChatRequest]:
        """Split the request into parts of at most `size` samples each; None for no limit."""
        if size is None or self.num_samples <= size:
            return [self]
        end = self.first_sample + self.num_samples
        return [
            replace(self, first_sample=first, num_samples=min(size, end - first))
            for first in range(self.first_sample, end, size)
        ]


class ChatUsage(NamedTuple):
    """Tokens of a request and its answers, counted by the service."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


MAX_BYTES_PER_TOKEN = 32
"""Bytes per requested token of the longest answer that is accepted. Texts have about 4, words of
other scripts up to 20."""
BYTES_OF_LONG_WORD = 256
"""Allowance for an answer of few, long tokens."""
LONGEST_DEFAULT_TEXT = 2**20
"""Longest accepted answer in bytes if the service chooses its length."""
BYTES_PER_TEXT_BYTE = 16
"""Bytes of a response per byte of text: escapes, reasoning, and an object per token for
log-probabilities."""
BYTES_AROUND_ANSWERS = 2**18
NUM_SEEDS = 2**31
"""Number of seeds that every service accepts; larger ones are taken modulo this."""
NOTHING_USED = ChatUsage()
CPU = torch.device("cpu")


@dataclass(frozen=True)
class ChatAnswer:
    """One message of a model.

    Attributes
    ----------
    text : str
        Its text; empty if it refused in a separate field.
    finish_reason : FinishReason
        The reason why it ended.
    refusal : str or None
        The service's text if it marks the answer as a refusal.
    token_logprobs : tuple of float or None
        Log-probability of each token of the text, nats; None if not requested or not given.
    reasoning : str or None
        What the service gives separately as the model's reasoning; None without it.
    calls : tuple of ToolCall
        Its calls of tools.
    is_unfinished : bool
        Whether it ended within its reasoning.
    """

    text: str
    finish_reason: FinishReason = FinishReason.STOP
    refusal: str | None = None
    token_logprobs: tuple[float, ...] | None = None
    reasoning: str | None = None
    calls: tuple[ToolCall, ...] = ()
    is_unfinished: bool = False

    def __post_init__(self) -> None:
        # A service may send text that cannot be encoded.
        for name in ("text", "refusal", "reasoning"):
            text = getattr(self, name)
            if text is not None:
                object.__setattr__(self, name, valid_text(text))

    @property
    def is_missing(self) -> bool:
        """Whether it ended before its first word: no reply, and so no evidence of anything."""
        is_empty = not self.text.strip() and not self.calls and self.refusal is None
        is_cut = self.is_unfinished or self.finish_reason is FinishReason.LENGTH
        return is_empty and is_cut

    @property
    def is_refused(self) -> bool:
        """Whether the service marks it as a refusal, or withholds its content."""
        return self.refusal is not None or self.finish_reason is FinishReason.CONTENT_FILTER


@dataclass(frozen=True)
class ChatFailure:
    """A failed sample: part of the experiment's data, not an error of the run.

    Attributes
    ----------
    message : str
        Description, from the service if present; never contains the key.
    retry_after : float
        Seconds to wait before another attempt, as the service requests; 0 without a request.
    """

    reason: FailureReason
    message: str
    retry_after: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", valid_text(self.message))


@dataclass(frozen=True)
class ChatOutcome:
    """The result of a request.

    Attributes
    ----------
    samples : tuple of ChatAnswer or ChatFailure
        One per requested sample, in order.
    usage : ChatUsage
        Tokens of all samples together, including failed attempts that were paid for.
    is_cached : bool
        Whether all samples came from the cache, at no cost.
    is_usage_estimated : bool
        Whether tokens are estimated from the length of the texts, because the service did not
        report them.
    usage_before : ChatUsage
        Tokens that this run paid for cached samples when it first requested them.
    """

    samples: tuple[ChatAnswer | ChatFailure, ...]
    usage: ChatUsage = NOTHING_USED
    is_cached: bool = False
    is_usage_estimated: bool = False
    usage_before: ChatUsage = NOTHING_USED


def join_outcomes(outcomes: Sequence[ChatOutcome]) -> ChatOutcome:
    """Join the outcomes of a request's parts."""
    return ChatOutcome(
        tuple(sample for outcome in outcomes for sample in outcome.samples),
        sum_usage(outcome.usage for outcome in outcomes),
        is_cached=all(outcome.is_cached for outcome in outcomes),
        is_usage_estimated=any(outcome.is_usage_estimated for outcome in outcomes),
        usage_before=sum_usage(outcome.usage_before for outcome in outcomes),
    )


def sum_usage(usages: Iterable[ChatUsage]) -> ChatUsage:
    """Sum the tokens of several requests."""
    return ChatUsage(*map(sum, zip(*usages, strict=True)))


TOKENS_PRICED = 1_000_000
LONGEST_BACKOFF = 60.0


class LimitParameters(SubParameters):
    """Rate limits, timeouts and retries of a chat model."""

    concurrency: int = Field(default=16, ge=1)
    """Maximum concurrent requests. Larger is faster if the service allows it."""
    requests_per_minute: float | None = Field(default=None, gt=0)
    """Attempts per minute, evenly spaced; null for no limit."""
    tokens_per_minute: float | None = Field(default=None, gt=0)
    """Tokens per minute, evenly spaced; until its answer a request counts as its messages and
    `max_tokens`. null for no limit."""
    num_retries: int = Field(default=5, ge=0)
    """Maximum retries if a service is busy, late, unavailable, or violates its protocol."""
    backoff: float = Field(default=1.0, ge=0)
    """Seconds before the first retry, doubled for each next one, at most 60, minus a random share
    of up to half; a longer Retry-After of the service wins."""
    max_retry_after: float = Field(default=300.0, ge=0)
    """Maximum Retry-After in seconds; a request with a longer one fails at once."""
    attempt_timeout: float = Field(default=600.0, gt=0)
    """Seconds after which an attempt is aborted, even if data still arrives."""
    request_timeout: float | None = Field(default=None, gt=0)
    """Seconds for all attempts of a request including pauses. null for twice `attempt_timeout`."""

    def pause_before(
        self,
        attempt: int,
        *,
        retry_after: float,
        spent: float,
        jitter: Callable[[], float] = lambda: 0.0,
    ) -> float | None:
        """Return the seconds to wait before a retry; None for no retry.

        Parameters
        ----------
        attempt : int
            Number of the further attempt, from 1.
        retry_after, spent : float
            Seconds that the service requests, and that the request took so far.
        jitter : callable
            Random share of half the pause to leave out, in [0, 1).
        """
        if attempt > self.num_retries or retry_after > self.max_retry_after:
            return None
        longest = min(self.backoff * 2 ** (attempt - 1), LONGEST_BACKOFF)
        # Random, so that requests that failed together do not come back together.
        pause = max(longest * (1.0 - 0.5 * jitter()), retry_after)
        has_time = spent + pause < self.seconds_per_request
        return pause if has_time else None

    @property
    def seconds_per_request(self) -> float:
        """Time limit of a request with all its attempts."""
        if self.request_timeout is None:
            return 2 * self.attempt_timeout
        return self.request_timeout


class PriceParameters(SubParameters):
    """Prices of a service, in any currency, the same for all models of a run."""

    prompt: float = Field(ge=0)
    """Price of a million prompt tokens."""
    completion: float = Field(ge=0)
    """Price of a million completion tokens."""

    def cost(self, usage: ChatUsage) -> float:
        prompt, completion = usage
        return (prompt * self.prompt + completion * self.completion) / TOKENS_PRICED


class ChatModel(ABC):
    """A model that answers messages.

    A backend makes one attempt and returns its result; `open_chat_model` adds retries, rate
    limits, a budget and a cache.

    Attributes
    ----------
    name : str
        Name of the model at its service; part of the key of stored answers.
    place : str
        Location of the model, for instance the address of its service; part of the key too.
    samples_at_once : int or None
        Most samples in one request to the service; None for no limit.
    can_be_remembered : bool
        Whether answers may be stored: name and place determine the model.
    num_threads : int or None
        CPU threads of a model in this process; None chooses by its size.
    reasoning_markers : sequence of str or None
        Those of its parameters.
    """

    class Parameters(PolymorphicParameters):
        """Parameters of the backend; a subclass adds its own."""

        type_name: ClassVar[str] = ""

        limits: LimitParameters = LimitParameters()
        """Rate limits, timeouts and retries."""
        prices: PriceParameters | None = None
        """Prices of the model; null if unknown or zero."""
        reasoning_markers: ReasoningMarkers = None
        """Texts that begin and end the reasoning in an answer; null for those of the model's chat
        template, or <think> and </think> if it is unknown; an empty list for none: then all is
        text. What a service gives separately as reasoning is never text."""

    name: str
    place: str = ""
    samples_at_once: int | None = None
    can_be_remembered: bool = True
    num_threads: int | None = None
    reasoning_markers: Sequence[str] | None = None

    @classmethod
    @abstractmethod
    def load(
        cls, parameters: Any, *, scenario_dir: Path | None, device: torch.device = CPU
    ) -> ChatModel:
        """Build the model that the parameters describe.

        Parameters
        ----------
        device : torch.device
            Device of a model in this process.

        Raises
        ------
        ConfigurationError
            If a parameter is invalid.
        """

    @abstractmethod
    async def answer(self, request: ChatRequest) -> ChatOutcome:
        """Answer a request of up to `samples_at_once` samples. Concurrent calls are allowed.

        Raises
        ------
        ConfigurationError
            When every request would fail: a wrong key, address or model.
        BudgetExhaustedError
            When the budget does not allow another request.
        """

    async def close(self) -> None:  # noqa: B027 - a model without connections has nothing to free
        """Close connections; the model may be used again later."""


CHAT_MODELS: ComponentRegistry[type[ChatModel]] = ComponentRegistry("chat_model")
ChatModelParameters = polymorphic(CHAT_MODELS.get, ChatModel.Parameters)


def register_chat_model(name: str) -> Callable[[type[ChatModel]], type[ChatModel]]:
    """Register a `ChatModel` subclass under its `_type` in parameter files; a decorator."""
    return CHAT_MODELS.register(name)


BYTES_PER_TOKEN = 4.0
"""Rough estimate with common vocabularies: in UTF-8, since other scripts than Latin have about as
many tokens as characters."""
TOKENS_PER_MESSAGE = 4
"""Rough number of tokens that a chat template adds to a message."""


def cut_at_stop(text: str, stop: Sequence[str]) -> str | None:
    """Return the text before the first stop text; None without one."""
    positions = [text.index(stop_text) for stop_text in stop if stop_text in text]
    return text[: min(positions)] if positions else None


def reject_long_answer(
    sample: ChatAnswer | ChatFailure, request: ChatRequest
) -> ChatAnswer | ChatFailure:
    """Return a sample, or the failure of an answer that is far longer than requested."""
    if isinstance(sample, ChatFailure):
        return sample
    max_bytes = request.longest_text
    # A character has at least a byte: a text of gigabytes is not encoded only to be measured.
    if len(sample.text) <= max_bytes and len(sample.text.encode()) <= max_bytes:
        return sample
    limit = "by default" if request.max_tokens is None else f"for {request.max_tokens} tokens"
    return ChatFailure(
        FailureReason.TOO_LONG,
        f"the answer has more than {max_bytes:,} bytes, the most {limit}",
    )


def estimate_tokens(text: str) -> int:
    """Estimate the number of tokens of a text."""
    return math.ceil(len(text.encode(errors="surrogatepass")) / BYTES_PER_TOKEN)


def estimate_usage(messages: Iterable[ChatMessage], answers: Iterable[str]) -> ChatUsage:
    """Estimate the tokens of a request and its answers."""
    prompt_tokens = sum(
        TOKENS_PER_MESSAGE + estimate_tokens(message["content"]) for message in messages
    )
    completion_tokens = sum(estimate_tokens(answer) for answer in answers)
    return ChatUsage(prompt_tokens, completion_tokens)


T = TypeVar("T")


_LOOP = BackgroundLoop()


class PerLoop(Generic[T]):
    """A resource of the running event loop, created again in another one.

    Connections and semaphores belong to the loop in which they were first used; a forked process
    and a second call of `asyncio.run` have another one.

    Parameters
    ----------
    create : Callable
        Creates the resource.
    """

    def __init__(self, create: Callable[[], T]) -> None:
        self._create = create
        self._resource: T | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def get(self) -> T:
        """Return the resource of the running event loop."""
        loop = asyncio.get_running_loop()
        if self._resource is None or self._loop is not loop:
            self._resource = self._create()
            self._loop = loop
        return self._resource

    def remove(self) -> T | None:
        """Forget the resource; return it to be closed if it belongs to the running event loop."""
        is_usable = self._loop is asyncio.get_running_loop()
        resource = self._resource if is_usable else None
        self._resource = None
        self._loop = None
        return resource


def complete_all(model: ChatModel, requests: Sequence[ChatRequest]) -> list[ChatOutcome]:
    """Send all requests concurrently and wait for all outcomes; raises as `ChatModel.answer`."""
    return run_sync(gather_all([model.answer(request) for request in requests]))


def close_all(models: Iterable[ChatModel]) -> None:
    """Close the connections of models, and stop the services started by them."""
    endings = [model.close() for model in models]
    if endings:
        run_sync(gather_all(endings))


def run_sync(task: Coroutine[Any, Any, T]) -> T:
    """Return the result of an asynchronous task; a signal that ends the wait cancels the task."""
    return _LOOP.run(task)


async def gather_all(tasks: Iterable[Awaitable[T]]) -> list[T]:
    """Return the results of all tasks; raise the error of a failed one after the others end."""
    # Without `return_exceptions`, the others would go on, and spend money, unobserved.
    results_or_errors = await asyncio.gather(*tasks, return_exceptions=True)
    for result_or_error in results_or_errors:
        if isinstance(result_or_error, BaseException):
            raise result_or_error
    return cast("list[T]", results_or_errors)
