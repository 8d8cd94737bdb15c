"""A chat model in this process."""

from __future__ import annotations

import asyncio
import copy
import json
import secrets
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import Field

from nip_astra.errors import (
    ConfigurationError,
    MissingDependencyError,
    ModelAbilityError,
    ModelLoadError,
)
from nip_astra.language_models.base import (
    LANGUAGE_MODELS,
    TokenCount,
    TokenModel,
    TokenSampler,
    as_sampler,
)
from nip_astra.language_models.message_format import MessageFormat, format_with_markers
from nip_astra.language_models.sequences import GenerationRequest, Progress
from nip_astra.language_models.services.chat import (
    CPU,
    NUM_SEEDS,
    ChatAnswer,
    ChatFailure,
    ChatModel,
    ChatOutcome,
    ChatRequest,
    ChatUsage,
    FailureReason,
    FinishReason,
    LimitParameters,
    register_chat_model,
    render_chat,
)
from nip_astra.language_models.structured import answer_schema, json_rule
from nip_astra.parameters.parameters_base import polymorphic
from nip_astra.parameters.types import ChatModelType
from nip_astra.utils.actors import are_actors_used, get_actors
from nip_astra.utils.devices import threads_for
from nip_astra.utils.processor import split_evenly

DEFAULT_MAX_TOKENS = 1024
TURNS_TO_GATHER = 3
"""Event-loop iterations for which a batch waits for further requests."""
MAX_KEPT_PROMPTS = 256
"""Prompts whose tokens are kept, since many requests have the same."""


class _Pending(NamedTuple):
    """A waiting request."""

    request: GenerationRequest
    answers: asyncio.Future[list[Progress]]


class LocalLimitParameters(LimitParameters):
    """Limits of a model in this process."""

    concurrency: int = Field(default=1024, ge=1)
    """Maximum concurrent requests."""
    attempt_timeout: float = Field(default=86400.0, gt=0)
    """Seconds after which an attempt fails."""


@register_chat_model(ChatModelType.LOCAL)
class LocalChatModel(ChatModel):
    """A language model in this process; requests that wait at the same time are answered together.

    Models of the Llama family answer as `nip-astra serve` does: equal seeds give equal texts. An
    answer depends only on the request's seed and the sample's number. A `response_format` needs
    llguidance and such a model. If the run has Ray actors, they share the batches. For the
    arguments see `Parameters`.
    """

    # Its weights may change under the same name.
    can_be_remembered = False

    class Parameters(ChatModel.Parameters):
        """The model and its batches."""

        language_model: polymorphic(LANGUAGE_MODELS.get, TokenModel.Parameters)  # type: ignore[valid-type]
        """The backend and its weights; its tokenizer needs a chat template."""
        max_batch_size: int = Field(default=64, ge=1)
        """Requests in a batch, and samples generated at once. Larger is faster and takes more
        memory."""
        num_batches: int = Field(default=1, ge=1)
        """Minimum number of equal batches into which waiting requests are split, so that as many
        actors (settings.num_actors) work in parallel; 1 fills one batch after the other. In one
        process larger is slower. The last digits of log-probabilities depend on this number, but
        not on the number of actors."""
        limits: LocalLimitParameters = LocalLimitParameters()
        """Limits of waiting requests."""

    def __init__(
        self,
        model: TokenSampler,
        *,
        name: str,
        max_batch_size: int = 64,
        num_batches: int = 1,
        reasoning_markers: Sequence[str] | None = None,
    ) -> None:
        if not getattr(model.tokenizer, "chat_template", None):
            raise ModelLoadError(
                f"the tokenizer of {name!r} has no chat template. Use an instruction-tuned model."
            )
        self.name = name
        self.place = name
        self.language_model = model
        self.max_batch_size = max_batch_size
        self.num_batches = num_batches
        # A tokenizer may be used by one thread at a time, and the model decodes in another one.
        self.message_format = format_with_markers(model.tokenizer, reasoning_markers)
        encode = partial(_encode_chat, copy.deepcopy(model.tokenizer), self.message_format)
        self._encode_chat = lru_cache(MAX_KEPT_PROMPTS)(encode)
        self._waiting: list[_Pending] = []
        self._worker: asyncio.Task[None] | None = None
        # Requests may come from event loops of several threads.
        self._queue_lock = threading.Lock()
        # The model answers the requests of one event loop at a time.
        self._model_lock = threading.Lock()

    @classmethod
    def load(
        cls, parameters: Any, *, scenario_dir: Path | None, device: torch.device = CPU
    ) -> LocalChatModel:
        backend = LANGUAGE_MODELS.get(parameters.language_model.type_name)
        model = backend.load(
            parameters.language_model, device=device, scenario_dir=scenario_dir, trainable=False
        )
        name = str(getattr(parameters.language_model, "model", backend.__name__))
        sampler = as_sampler(model, role=f"chat model {name!r}")
        return cls(
            sampler,
            name=name,
            max_batch_size=parameters.max_batch_size,
            num_batches=parameters.num_batches,
            reasoning_markers=parameters.reasoning_markers,
        )

    async def answer(self, request: ChatRequest) -> ChatOutcome:
        prompt, begins_in_thought = self._encode_chat(json.dumps(request.messages))
        window = self.language_model.context_window
        room = window - len(prompt)
        max_tokens = min(request.max_tokens or DEFAULT_MAX_TOKENS, max(room, 1))
        failure: ChatFailure | None = None
        grammar: str | None = None
        try:
            grammar = self._grammar(request, begins_in_thought=begins_in_thought)
        except (ConfigurationError, MissingDependencyError, ModelAbilityError) as error:
            failure = ChatFailure(FailureReason.UNKNOWN_FORM, str(error))
        if failure is None and room < (request.max_tokens or 1):
            failure = ChatFailure(
                FailureReason.CONTEXT_LENGTH,
                f"the messages have {len(prompt)} tokens and the answer may have {max_tokens}, "
                f"which the window of {window} does not hold",
            )
        if failure is not None:
            return ChatOutcome((failure,) * request.num_samples)
        seeds = []
        for number in request.sample_numbers:
            seed = request.seed_from(number)
            seeds.append(secrets.randbelow(NUM_SEEDS) if seed is None else seed)
        generation = GenerationRequest(
            prompt=prompt,
            max_tokens=max_tokens,
            sample_seeds=tuple(seeds),
            num_samples=request.num_samples,
            temperature=1.0 if request.temperature is None else request.temperature,
            top_p=request.top_p,
            stop=request.stop,
            num_top=0 if request.needs_logprobs else None,
            grammar=grammar,
            shown_ids=self.message_format.shown_ids(with_calls=False),
        )
        # Reading the property validates the options before the request waits with others.
        _ = generation.options
        loop = asyncio.get_running_loop()
        pending = _Pending(generation, loop.create_future())
        with self._queue_lock:
            self._waiting.append(pending)
        if self._worker is None or self._worker.done() or self._worker.get_loop() is not loop:
            self._worker = loop.create_task(self._work())
        answers = await pending.answers
        samples = tuple(
            self._read(answer, request, begins_in_thought=begins_in_thought) for answer in answers
        )
        num_tokens = sum(answer.num_tokens for answer in answers)
        return ChatOutcome(samples, ChatUsage(len(prompt), num_tokens))

    def _read(
        self, progress: Progress, request: ChatRequest, *, begins_in_thought: bool
    ) -> ChatAnswer | ChatFailure:
        """Return a sample, with its reasoning apart from its text."""
        if progress.error is not None:
            return ChatFailure(FailureReason.REFUSED, progress.error)
        is_complete = progress.finish_reason == "stop"
        logprobs: tuple[float, ...] | None = None
        if request.needs_logprobs:
            logprobs = tuple(record.logprob for record in progress.tokens)
        sample = ChatAnswer(
            progress.text,
            FinishReason.STOP if is_complete else FinishReason.LENGTH,
            token_logprobs=logprobs,
        )
        if not self.message_format.has_marks:
            return sample
        parsed = self.message_format.parse(sample.text, begins_in_thought=begins_in_thought)
        return replace(
            sample,
            text=parsed.text,
            reasoning=parsed.reasoning,
            is_unfinished=parsed.is_unfinished,
        )

    def _grammar(self, request: ChatRequest, *, begins_in_thought: bool) -> str | None:
        """Return the grammar of the answer; raise the reason if it cannot be enforced."""
        if request.response_format is None:
            return None
        schema = answer_schema(request.response_format)
        if schema is None:
            return None
        grammar = f"start: {json_rule(schema)}"
        if begins_in_thought:
            # The constraint applies to what follows the thought.
            thought_rule = self.message_format.thought_rule()
            grammar = f"start: thought answer\nanswer: {json_rule(schema)}\n{thought_rule}"
        # Compiled here, so that one that cannot be enforced fails this request only.
        self.language_model.grammars.matcher(grammar)
        return grammar

    async def _work(self) -> None:
        """Answer all waiting requests, round by round."""
        # Batches must not depend on speed: requests that arrive meanwhile wait for the next round.
        loop = asyncio.get_running_loop()
        while True:
            for _ in range(TURNS_TO_GATHER):
                await asyncio.sleep(0)
            batches = self._take_batches(loop)
            if not batches:
                return
            if self._uses_actors:
                # Actors work at the same time.
                await self._answer_batches(batches)
                continue
            # Each batch returns when it is complete.
            for batch in batches:
                await self._answer_batches([batch])

    async def _answer_batches(self, batches: Sequence[Sequence[_Pending]]) -> None:
        waiting = [pending for batch in batches for pending in batch]
        try:
            # In a thread, so that the event loop serves other requests meanwhile.
            answers = await asyncio.to_thread(self._complete, batches)
        except Exception as error:
            for pending in waiting:
                if not pending.answers.done():
                    pending.answers.set_exception(error)
            return
        for pending, request_answers in zip(waiting, answers, strict=True):
            # One whose time is over was cancelled.
            if not pending.answers.done():
                pending.answers.set_result(request_answers)

    @property
    def _uses_actors(self) -> bool:
        return are_actors_used() and self.language_model.can_be_copied

    def _take_batches(self, loop: asyncio.AbstractEventLoop) -> list[list[_Pending]]:
        """Return all waiting requests of an event loop, in batches."""
        requests: list[_Pending] = []
        remaining: list[_Pending] = []
        with self._queue_lock:
            for pending in self._waiting:
                if pending.answers.get_loop() is loop:
                    requests.append(pending)
                else:
                    remaining.append(pending)
            self._waiting = remaining
        size = self.max_batch_size
        count = len(requests)
        if self.num_batches == 1 or count == 0:
            return [requests[start : start + size] for start in range(0, count, size)]
        num_batches = max(ceil(count / size), min(self.num_batches, count))
        parts = split_evenly(range(count), num_batches)
        return [requests[part.start : part.stop] for part in parts]

    def _complete(self, batches: Sequence[Sequence[_Pending]]) -> list[list[Progress]]:
        """Return the answers of each request; actors, if there are any, share the batches."""
        model = self.language_model
        calls = []
        for batch in batches:
            requests = [pending.request for pending in batch]
            calls.append(partial(_complete_batch, model, requests, self.max_batch_size))
        with self._model_lock:
            if self._uses_actors:
                actors = get_actors()
                assert actors is not None
                completed = actors.call(calls, [*model.shared_parts(), model])
                # In this process the model counts its tokens itself.
                for _, spent_tokens in completed:
                    model.token_count.add(spent_tokens)
            else:
                with threads_for(model.num_parameters(), self.num_threads):
                    completed = [call() for call in calls]
        answers: list[list[Progress]] = []
        for batch_answers, _ in completed:
            answers += batch_answers
        return answers


class _Prompt(NamedTuple):
    """The tokens of a conversation, and whether the answer begins within its reasoning."""

    ids: tuple[int, ...]
    begins_in_thought: bool


def _encode_chat(tokenizer: Any, message_format: MessageFormat, conversation: str) -> _Prompt:
    """Return the prompt of a conversation in JSON, one hashable value for the cache."""
    text = render_chat(tokenizer, json.loads(conversation), opens_answer=True)
    # The template writes the special tokens itself.
    ids = tuple(tokenizer.encode(text, add_special_tokens=False))
    return _Prompt(ids, message_format.begins_in_thought(text))


def _complete_batch(
    model: TokenSampler, requests: Sequence[GenerationRequest], max_rows: int
) -> tuple[list[list[Progress]], TokenCount]:
    with model.counting() as spent:
        return model.complete(requests, max_rows=max_rows), spent
