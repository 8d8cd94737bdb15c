"""Chat models: messages in, messages out, asynchronously; no tokenizer and no weights needed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, Literal, TypedDict

import torch
from pydantic import JsonValue

from nip_astra.language_models.services.limits import LimitParameters, PriceParameters
from nip_astra.language_models.services.usage import ChatUsage as ChatUsage
from nip_astra.parameters.parameters_base import ComponentRegistry, PolymorphicParameters
from nip_astra.parameters.types import ChatModelType
from nip_astra.safe_text import valid_text


class ChatMessage(TypedDict):
    """One message of a conversation, as OpenAI's protocol and chat templates spell it."""

    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True)
class ChatRequest:
    """What a chat model is asked.

    Attributes
    ----------
    messages : tuple of ChatMessage
        The conversation so far; the answer is the next message of the assistant.
    max_tokens : int or None
        Most tokens of an answer; None leaves it to the service.
    temperature : float or None
        Of sampling, at least 0; 0 takes the likeliest token, and None leaves it to the service, as
        some models demand.
    top_p : float
        Least probability that the likeliest tokens must have together to be all that is drawn.
    stop : tuple of str
        Texts before which an answer ends; they are no part of it.
    seed : int or None
        With equal seeds a service that can will answer alike; sample i of n has a draw of its own.
    num_samples : int
        Answers to draw independently, at least 1.
    first_sample : int
        Number of the first sample among all that are ever drawn for this request. An answer is
        remembered by it, so that further samples are new ones, and the same number is the same
        answer.
    needs_logprobs : bool
        Whether answers shall hold the log-probabilities of their tokens.
    response_format : Mapping or None
        The form in which the answer is asked for, in the words of OpenAI's protocol; a backend or
        service that knows it not fails with `FailureReason.UNKNOWN_FORM`.
    key : str or None
        Name of the request, for services that give who asks again under it the answer that they
        gave before. It says nothing of the answer.
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
        """The number of each sample that is asked for."""
        return range(self.first_sample, self.first_sample + self.num_samples)

    def parts(self, size: int | None) -> list[ChatRequest]:
        """Requests of at most `size` samples each that together ask for the same; None for one."""
        if size is None or self.num_samples <= size:
            return [self]
        end = self.first_sample + self.num_samples
        return [
            replace(self, first_sample=first, num_samples=min(size, end - first))
            for first in range(self.first_sample, end, size)
        ]


NOTHING_USED = ChatUsage()
CPU = torch.device("cpu")


class FinishReason(StrEnum):
    """Why an answer ended."""

    STOP = "stop"
    """The model ended its turn, or said a stop text."""
    LENGTH = "length"
    """`max_tokens` were said."""
    CONTENT_FILTER = "content_filter"
    """The service withheld the rest."""


class FailureReason(StrEnum):
    """Why there is no answer, though the request was a right one."""

    TIMEOUT = "timeout"
    UNAVAILABLE = "unavailable"
    """No connection, a broken one, or an error of the server, after all attempts."""
    RATE_LIMITED = "rate_limited"
    """The service still refused for its limits after all attempts."""
    REFUSED = "refused"
    """The service refused this very request, for instance for its length or its content."""
    MALFORMED = "malformed"
    """What the service sent is not of the protocol."""
    UNKNOWN_FORM = "unknown_form"
    """The service does not know the form (`response_format`) that was asked for."""

    @property
    def may_pass(self) -> bool:
        """Whether another attempt may know better."""
        return self not in (FailureReason.REFUSED, FailureReason.UNKNOWN_FORM)


@dataclass(frozen=True)
class ChatAnswer:
    """One message of a model.

    Attributes
    ----------
    text : str
        What it said; empty where it refused in a field of its own.
    finish_reason : FinishReason
        Why it ended.
    refusal : str or None
        The service's own words where it marks an answer as a refusal.
    token_logprobs : tuple of float or None
        Log-probability of each token of the text, nats; None where none were asked for or given.
    """

    text: str
    finish_reason: FinishReason = FinishReason.STOP
    refusal: str | None = None
    token_logprobs: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        # What a service sent, or was remembered of it, may be no text that can be kept or read.
        object.__setattr__(self, "text", valid_text(self.text))
        if self.refusal is not None:
            object.__setattr__(self, "refusal", valid_text(self.refusal))

    @property
    def is_refused(self) -> bool:
        """Whether the service marks it as a refusal, or withholds it for its content."""
        return self.refusal is not None or self.finish_reason is FinishReason.CONTENT_FILTER


@dataclass(frozen=True)
class ChatFailure:
    """A sample that did not come about; data of the experiment, not the end of the run.

    Attributes
    ----------
    message : str
        What happened, in the service's words where it had some; holds no key.
    retry_after : float
        Seconds that the service asks to wait before another attempt; 0 where it does not say.
    """

    reason: FailureReason
    message: str
    retry_after: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", valid_text(self.message))


@dataclass(frozen=True)
class ChatOutcome:
    """What became of a request.

    Attributes
    ----------
    samples : tuple of ChatAnswer or ChatFailure
        One a sample asked for, in order.
    usage : ChatUsage
        Tokens of all samples together, of attempts that were paid for.
    is_cached : bool
        Whether the samples were remembered, so that nothing was paid for them.
    is_usage_estimated : bool
        Whether the service did not say how many tokens it took, so that they are guessed from the
        length of the texts.
    usage_before : ChatUsage
        Tokens that this run paid for remembered samples when they were given.
    """

    samples: tuple[ChatAnswer | ChatFailure, ...]
    usage: ChatUsage = NOTHING_USED
    is_cached: bool = False
    is_usage_estimated: bool = False
    usage_before: ChatUsage = NOTHING_USED


class ChatModel(ABC):
    """A model that answers messages.

    A backend makes one attempt and tells what became of it; patience, limits, a budget and a memory
    are put around it by `open_chat_model`.

    Attributes
    ----------
    name : str
        Of the model at its service; part of what an answer is remembered by.
    place : str
        Where the model is, for instance the address of its service; part of it too.
    samples_at_once : int or None
        Most samples that one request to the service may ask for; None for no bound.
    can_be_remembered : bool
        Whether name and place say all that an answer depends on.
    num_threads : int or None
        CPU threads of a model in this process; None for as many as its size needs.
    """

    class Parameters(PolymorphicParameters):
        """Parameters of the backend; a subclass adds its own."""

        type_name: ClassVar[str] = ""

        limits: LimitParameters = LimitParameters()
        """How fast and how patiently it is asked."""
        prices: PriceParameters | None = None
        """What it costs; null where that is not known or nothing."""

    name: str
    place: str = ""
    samples_at_once: int | None = None
    can_be_remembered: bool = True
    num_threads: int | None = None

    @classmethod
    @abstractmethod
    def load(
        cls, parameters: Any, *, scenario_dir: Path | None, device: torch.device = CPU
    ) -> ChatModel:
        """Build the model that parameters describe.

        Parameters
        ----------
        device : torch.device
            For a model in this process.

        Raises
        ------
        ConfigurationError
            When the parameters cannot be meant.
        """

    @abstractmethod
    async def answer(self, request: ChatRequest) -> ChatOutcome:
        """Answer a request. May be called many times at once.

        Raises
        ------
        ConfigurationError
            When no request would fare better: a wrong key, address or model.
        BudgetExhaustedError
            When the budget does not allow another request.
        """

    async def close(self) -> None:  # noqa: B027 - a model without connections has nothing to free
        """End what is open. The model may be asked again later."""


CHAT_MODELS: ComponentRegistry[type[ChatModel]] = ComponentRegistry(
    "chat_model", package="nip_astra.language_models.services.chat_models", members=ChatModelType
)


def register_chat_model(name: str) -> Callable[[type[ChatModel]], type[ChatModel]]:
    """Register a `ChatModel` subclass under the `_type` by which parameter files name it."""
    return CHAT_MODELS.register(name)
