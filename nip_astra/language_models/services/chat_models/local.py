"""A language model in this process as a chat model.

Shape suffixes: `B` row, `T` token.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Sequence
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import Field

from nip_astra.errors import ModelLoadError
from nip_astra.language_models.base import (
    LANGUAGE_MODELS,
    SamplingOptions,
    TokenCount,
    TokenModel,
    TokenSampler,
    as_sampler,
)
from nip_astra.language_models.finite import refuse_nan
from nip_astra.language_models.services.chat import (
    CPU,
    ChatAnswer,
    ChatFailure,
    ChatMessage,
    ChatModel,
    ChatOutcome,
    ChatRequest,
    ChatUsage,
    FailureReason,
    FinishReason,
    register_chat_model,
)
from nip_astra.language_models.services.limits import LimitParameters
from nip_astra.language_models.services.texts import cut_at_stop
from nip_astra.parameters.parameters_base import polymorphic
from nip_astra.parameters.types import ChatModelType
from nip_astra.utils.actors import are_actors_used, get_actors
from nip_astra.utils.cutting import cut_evenly
from nip_astra.utils.devices import threads_for
from nip_astra.utils.seeding import SeedPart, uniform_rows

MOST_TOKENS = 1024
"""Of an answer for which no `max_tokens` are given."""
TURNS_TO_GATHER = 3
"""Turns of the event loop for which a batch waits for those who are about to ask."""


Said = tuple[list[int], list[float]]
"""Tokens of a sample, its end token included, and their log-probabilities, nats."""


class _Drawn(NamedTuple):
    """What a batch said, and what that took."""

    said: list[Said]
    spent: TokenCount


class _Row(NamedTuple):
    """One sample that waits."""

    context: list[int]
    options: SamplingOptions
    seed_key: tuple[SeedPart, ...]
    said: asyncio.Future[Said]


@register_chat_model(ChatModelType.LOCAL)
class LocalChatModel(ChatModel):
    """A language model in this process; requests that wait at the same time are answered together.

    A sample's randomness depends on the request's seed and the sample's number alone, whatever
    else is in its batch; without a seed it is drawn anew. Batches are divided among actors of Ray,
    where the run has some.

    Parameters
    ----------
    name : str
        Of the model, by which answers are remembered.
    max_batch_size : int
        Samples drawn at once.
    num_batches : int
        Batches into which samples that wait together are cut at least, where they are as many.
    """

    # Its weights may be others under the same name.
    can_be_remembered = False

    class Parameters(ChatModel.Parameters):
        """Which model, and how many it answers at once."""

        language_model: polymorphic(LANGUAGE_MODELS.get, TokenModel.Parameters)  # type: ignore[valid-type]
        """The backend and its weights; its tokenizer needs a chat template."""
        max_batch_size: int = Field(default=64, ge=1)
        """Samples drawn at once. Larger is faster and takes more memory."""
        num_batches: int = Field(default=1, ge=1)
        """Batches into which samples that wait together, as those of a level of conversations do,
        are cut at least, all of one size, so that as many actors (settings.num_actors) draw at
        once; 1 fills one batch after the other. In one process more are slower. The last digits of
        what the model says depend on this number, and on no number of actors."""
        limits: LimitParameters = LimitParameters(concurrency=1024, attempt_timeout=86400.0)
        """How many requests wait for it at once, and for how long."""

    def __init__(
        self, model: TokenSampler, *, name: str, max_batch_size: int = 64, num_batches: int = 1
    ) -> None:
        if not getattr(model.tokenizer, "chat_template", None):
            raise ModelLoadError(
                f"the language model {name!r} was to answer messages, but its tokenizer has no "
                "chat template. Use an instruction-tuned model."
            )
        self.name = self.place = name
        self.language_model = model
        self.max_batch_size, self.num_batches = max_batch_size, num_batches
        self._waiting: list[_Row] = []
        self._worker: asyncio.Task[None] | None = None
        # Event loops of several threads may ask.
        self._line = threading.Lock()
        # Whoever asks from another event loop waits here: the model samples one batch at a time.
        self._lock = threading.Lock()

    @classmethod
    def load(
        cls, parameters: Any, *, scenario_dir: Path | None, device: torch.device = CPU
    ) -> LocalChatModel:
        backend = LANGUAGE_MODELS.get(parameters.language_model.type_name)
        model = backend.load(
            parameters.language_model, device=device, scenario_dir=scenario_dir, trainable=False
        )
        name = str(getattr(parameters.language_model, "model", backend.__name__))
        speaker = as_sampler(model, role=f"chat model {name!r}")
        sizes = {"max_batch_size": parameters.max_batch_size}
        return cls(speaker, name=name, **sizes, num_batches=parameters.num_batches)

    async def answer(self, request: ChatRequest) -> ChatOutcome:
        if request.response_format is not None:
            form = "a model in this process answers with texts only, and knows no response_format"
            failure = ChatFailure(FailureReason.UNKNOWN_FORM, form)
            return ChatOutcome((failure,) * request.num_samples)
        context = self._encode(request.messages)
        room = self.language_model.context_window - len(context)
        wanted = min(request.max_tokens or MOST_TOKENS, max(room, 1))
        if room < (request.max_tokens or 1):
            failure = ChatFailure(
                FailureReason.REFUSED,
                f"the messages have {len(context)} tokens and the answer may have {wanted}, which "
                f"the window of {self.language_model.context_window} does not hold",
            )
            return ChatOutcome((failure,) * request.num_samples)
        temperature = 1.0 if request.temperature is None else request.temperature
        options = SamplingOptions(wanted, temperature=temperature, top_p=request.top_p)
        seed = secrets.randbits(62) if request.seed is None else request.seed
        loop = asyncio.get_running_loop()
        rows = [
            _Row(context, options, (seed, "sample", number), loop.create_future())
            for number in request.sample_numbers
        ]
        with self._line:
            self._waiting += rows
        if self._worker is None or self._worker.done() or self._worker.get_loop() is not loop:
            self._worker = loop.create_task(self._work())
        said = await asyncio.gather(*(row.said for row in rows))
        answers = tuple(self._answer_of(ids, logprobs, request) for ids, logprobs in said)
        return ChatOutcome(answers, ChatUsage(len(context), sum(len(ids) for ids, _ in said)))

    def _encode(self, messages: Sequence[ChatMessage]) -> list[int]:
        tokenizer = self.language_model.tokenizer
        try:
            text = tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except Exception as error:
            # Templates raise whatever their authors chose.
            raise ModelLoadError(
                f"the chat template of {self.name!r} refused messages of the roles "
                f"{[message['role'] for message in messages]}: {error}. Where it demands that the "
                "user speaks first, begin with a user's message; where it knows no system role, "
                "remove the system message."
            ) from error
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids

    async def _work(self) -> None:
        """Answer what waits, all of it at a time, until nothing does."""
        loop = asyncio.get_running_loop()
        while True:
            for _ in range(TURNS_TO_GATHER):
                await asyncio.sleep(0)
            batches = self._take_batches(loop)
            if not batches:
                return
            # Actors take batches at the same time; else each is told as soon as it is answered.
            rounds = [batches] if self._uses_actors else [[batch] for batch in batches]
            for together in rounds:
                await self._answer_batches(together)

    async def _answer_batches(self, batches: Sequence[Sequence[_Row]]) -> None:
        rows = [row for batch in batches for row in batch]
        try:
            said = await asyncio.to_thread(self._generate, batches)
        except Exception as error:
            for row in rows:
                if not row.said.done():
                    row.said.set_exception(error)
            return
        for row, one in zip(rows, said, strict=True):
            if not row.said.done():
                row.said.set_result(one)

    @property
    def _uses_actors(self) -> bool:
        return are_actors_used() and self.language_model.can_be_copied

    def _take_batches(self, loop: asyncio.AbstractEventLoop) -> list[list[_Row]]:
        """All rows of an event loop that wait, those together that are drawn alike.

        They are answered before others are taken, so that batches do not depend on how fast some of
        them were.
        """
        with self._line:
            mine = [row for row in self._waiting if row.said.get_loop() is loop]
            self._waiting = [row for row in self._waiting if row.said.get_loop() is not loop]
        by_options: dict[SamplingOptions, list[_Row]] = {}
        for row in mine:
            by_options.setdefault(row.options, []).append(row)
        return [
            alike[part.start : part.stop]
            for alike in by_options.values()
            for part in self._cut(len(alike))
        ]

    def _cut(self, num_rows: int) -> list[range]:
        size = self.max_batch_size
        if self.num_batches == 1:
            return [range(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]
        count = max(ceil(num_rows / size), min(self.num_batches, num_rows))
        return cut_evenly(range(num_rows), count)

    def _generate(self, batches: Sequence[Sequence[_Row]]) -> list[Said]:
        """What each row says; batches are divided among actors, where there are some."""
        model = self.language_model
        calls = [
            partial(_draw, model, batch[0].options, [(row.context, row.seed_key) for row in batch])
            for batch in batches
        ]
        with self._lock:
            if not self._uses_actors:
                with threads_for(model.num_parameters(), self.num_threads):
                    drawn = [call() for call in calls]
            else:
                actors = get_actors()
                assert actors is not None
                drawn = actors.call(calls, [*model.shared_parts(), model])
                for one in drawn:
                    model.token_count.add(one.spent)
        return [said for one in drawn for said in one.said]

    def _answer_of(self, ids: list[int], logprobs: list[float], request: ChatRequest) -> ChatAnswer:
        has_ended = bool(ids) and ids[-1] in self.language_model.end_ids
        if has_ended:
            ids, logprobs = ids[:-1], logprobs[:-1]
        text = self._decode(ids)
        cut = cut_at_stop(text, request.stop)
        if cut is not None:
            text, has_ended = cut, True
            logprobs = logprobs[: self._num_tokens_of(cut, ids)]
        return ChatAnswer(
            text,
            FinishReason.STOP if has_ended else FinishReason.LENGTH,
            token_logprobs=tuple(logprobs) if request.needs_logprobs else None,
        )

    def _num_tokens_of(self, beginning: str, ids: Sequence[int]) -> int:
        """Fewest tokens whose text holds a beginning of the text of all."""
        counts = range(len(ids) + 1)
        return next(n for n in counts if len(self._decode(ids[:n])) >= len(beginning))

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self.language_model.tokenizer.decode(list(ids), skip_special_tokens=True)
        return text


def _draw(
    model: TokenSampler,
    options: SamplingOptions,
    asked: Sequence[tuple[list[int], tuple[SeedPart, ...]]],
) -> _Drawn:
    """Answer a batch of contexts, each with the key of its random numbers."""
    # Neighbours that begin alike share what they read.
    order = sorted(range(len(asked)), key=lambda index: asked[index][0])
    uniforms_BT = uniform_rows([asked[i][1] for i in order], options.max_new_tokens)
    with model.counting() as spent:
        drawn = model.generate([asked[i][0] for i in order], 1, uniforms_BT, options)
    refuse_nan(drawn.logprobs_BT, drawn.mask_BT, role="chat", model=model, during="a batch")
    said: list[Said] = [([], [])] * len(asked)
    for row, index in enumerate(order):
        length = int(drawn.mask_BT[row].sum())
        ids, logprobs = drawn.ids_BT[row, :length], drawn.logprobs_BT[row, :length]
        said[index] = (ids.tolist(), logprobs.tolist())
    return _Drawn(said, spent)
