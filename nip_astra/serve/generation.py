"""What the engine is asked for and what it tells while it answers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from nip_astra.serve.routed_weights import Adapter

FinishReason = Literal["stop", "length", "error"]
_NUMBERS = itertools.count()


class TokenRecord(NamedTuple):
    """One token of an answer.

    Attributes
    ----------
    logprob : float
        Under the model's own distribution (temperature 1, nothing cut off), nats.
    top : tuple of (int, float)
        The likeliest tokens and their log-probabilities, the likeliest first; as many as asked for.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Progress:
    """What one step of the engine added to one answer.

    Attributes
    ----------
    index : int
        Which of the request's answers.
    text : str
        What is certain to be part of the answer; may lag behind the tokens.
    tokens : tuple of TokenRecord
        Those whose text begins in `text`, the end of the turn not among them; none unless the
        request asks for log-probabilities. Of one that `tells_ids`, all of them.
    num_tokens : int
        Tokens said so far, the end of the turn among them.
    finish_reason : FinishReason or None
        None while the answer goes on.
    error : str or None
        Why the engine gave up, where the finish reason is "error".
    """

    request: GenerationRequest
    index: int
    text: str
    tokens: tuple[TokenRecord, ...] = ()
    num_tokens: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None


Listener = Callable[[Sequence[Progress]], None]
"""Told after each step, in the engine's thread, what all answers of the listener gained."""


@dataclass(eq=False)
class GenerationRequest:
    """A prompt to go on with.

    Attributes
    ----------
    prompt : tuple of int
        At least one token.
    max_tokens : int
        Most tokens of an answer, at least 1; with the prompt they fit into the model's window.
    seed : int
        With the index of the answer it decides every draw, whatever else the engine does.
    num_samples : int
        Answers, drawn independently.
    num_top : int or None
        Likeliest tokens to tell of each; None where no log-probabilities are asked for.
    is_streamed : bool
        Whether progress is told at every step or at the end alone.
    end_ids : tuple of int
        Tokens that end an answer, besides those of the model.
    tells_ids : bool
        Whether every token is told, the end of the turn and special ones too, and no text.
    adapter : Adapter or None
        What the prompt and the answers go through beside the engine's weights.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    listener: Listener
    seed: int
    num_samples: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    num_top: int | None = None
    is_streamed: bool = False
    end_ids: tuple[int, ...] = ()
    tells_ids: bool = False
    adapter: Adapter | None = None
    is_cancelled: bool = False
    number: int = field(default_factory=lambda: next(_NUMBERS))
