"""What requests for text may say."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, model_validator

from nip_astra.serve.bodies import Body, check_body

MAX_STOPS = 4
Stop = Annotated[str, Field(min_length=1, max_length=256)]


class StreamOptions(Body):
    """How a stream is told."""

    include_usage: bool = False


class SamplingBody(Body):
    """What both routes for text share."""

    model: Annotated[str, Field(min_length=1, max_length=512)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0
    n: Annotated[int, Field(ge=1)] = 1
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] = []
    stream: bool = False
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _check_stream(self) -> SamplingBody:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options are of use with stream: true alone")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop texts."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with what it cost."""
        return self.stream_options is not None and self.stream_options.include_usage


class TextPart(Body):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(Body):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(min_length=1)]

    def plain(self) -> dict[str, str]:
        """The message as chat templates read it."""
        content = self.content
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatBody(SamplingBody):
    """A request of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @model_validator(mode="after")
    def _check_pairs(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs are of use with logprobs: true alone")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("max_tokens and max_completion_tokens are one option; give one")
        return self

    @property
    def num_top(self) -> int | None:
        """Likeliest tokens to tell of each token; None without log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None


Part = TypeVar("Part")
AtLeastOne = Annotated[list[Part], Field(min_length=1)]
Ids = AtLeastOne[Annotated[int, Field(ge=0)]]


class CompletionBody(SamplingBody):
    """A request of /v1/completions."""

    prompt: str | AtLeastOne[str] | Ids | AtLeastOne[Ids]
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None


class TokenSamplingBody(Body):
    """How tokens are drawn by /inference/v1/generate.

    Attributes
    ----------
    logprobs : int or None
        Likeliest tokens to tell of each, besides the one that was drawn.
    skip_special_tokens : bool
        Of the text, of which the answer has none.
    routed_experts_prompt_start : int or None
        Of models with experts, whose routes are told from there; others have none.
    """

    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0
    n: Annotated[int, Field(ge=1)] = 1
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = []
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    skip_special_tokens: bool = True
    routed_experts_prompt_start: int | None = None


class GenerateBody(Body):
    """A request of /inference/v1/generate.

    Attributes
    ----------
    sampling_params : dict
        Those of `TokenSamplingBody`.
    """

    model: Annotated[str, Field(min_length=1, max_length=512)]
    token_ids: Ids
    sampling_params: dict[str, Any] = {}

    def sampling(self) -> TokenSamplingBody:
        """How tokens are drawn.

        Raises
        ------
        ApiError
            With the first fault of `sampling_params`.
        """
        return check_body(self.sampling_params, TokenSamplingBody)
