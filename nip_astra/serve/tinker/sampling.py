"""Sampling with Tinker's protocol; requests for one set of weights are answered together.

Shape suffixes: `B` row, `T` token.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nip_astra.language_models.huggingface import HuggingFaceLanguageModel
from nip_astra.language_models.sequences import GenerationRequest, Progress
from nip_astra.serve.requests import bad_request
from nip_astra.serve.tinker.bodies import SampleBody, TensorBody
from nip_astra.serve.tinker.messages import TopTokens, pack, schema, tensor_message
from nip_astra.serve.tinker.models import (
    ROLE,
    find_lora,
    hidden_states,
    logprobs_after,
    top_tokens,
)
from nip_astra.serve.tinker.store import Checkpoint, LoraShape
from nip_astra.serve.training import Base, Bases
from nip_astra.utils.seeding import derive_seed

MAX_SAMPLERS = 4
"""Maximum sets of weights kept in memory for sampling; others are reloaded when needed."""
MAX_ROWS = 256
"""Maximum answers generated at once."""


@dataclass(frozen=True)
class SamplerSource:
    """Weights to sample from: a base, or an adapter on it."""

    base: Base
    lora: LoraShape | None = None
    checkpoint: Checkpoint | None = None

    @property
    def key(self) -> str:
        if self.checkpoint is None:
            return self.base.name
        return f"{self.checkpoint.path} {self.checkpoint.created}"


@dataclass(frozen=True)
class SampleRequest:
    """A validated request; an answer includes the text of `stops` that ends it."""

    source: SamplerSource
    body: SampleBody
    generation: GenerationRequest
    stops: tuple[str, ...]


def plan(source: SamplerSource, body: SampleBody, *, seed: int) -> SampleRequest:
    """Validate a request; `seed` is the default seed."""
    base = source.base
    ids = body.prompt.ids()
    if not ids or min(ids) < 0 or max(ids) >= base.vocab_size:
        raise bad_request(
            f"the prompt is empty or holds tokens outside 0 to {base.vocab_size - 1}. Encode it "
            f"with the tokenizer of {base.name!r}.",
            "prompt",
        )
    num_last = body.prompt_logprobs_last_n
    if num_last is not None and (not body.prompt_logprobs or num_last >= len(ids)):
        raise bad_request(
            f"prompt_logprobs_last_n is {num_last} for a prompt of {len(ids)} tokens; it needs "
            "prompt_logprobs and must be less than the length of the prompt.",
            "prompt_logprobs_last_n",
        )
    params = body.sampling_params
    room = base.context_window - len(ids)
    max_tokens = params.max_tokens or room
    if max_tokens > room or room < 1:
        raise bad_request(
            f"max_tokens {max_tokens} and a prompt of {len(ids)} tokens exceed the window of "
            f"{base.name!r} ({base.context_window}). Lower max_tokens, or shorten the prompt.",
            "max_tokens",
        )
    stops: list[str] = []
    end_ids: tuple[int, ...] = ()
    if params.stop is None:
        # In Tinker's protocol, stops replace the model's own ends.
        end_ids = base.end_ids
    elif isinstance(params.stop, str):
        stops = [params.stop]
    else:
        stops = [stop for stop in params.stop if isinstance(stop, str)]
        end_ids = tuple(stop for stop in params.stop if isinstance(stop, int))
    generation = GenerationRequest(
        prompt=tuple(ids),
        max_tokens=max_tokens,
        seed=seed if params.seed is None else params.seed,
        num_samples=body.num_samples,
        temperature=params.temperature,
        # The SDK sends -1 for no limit.
        top_k=params.top_k if params.top_k > 0 else None,
        top_p=params.top_p,
        end_ids=end_ids,
        num_top=0,
        returns_token_ids=True,
    )
    # Reading the property validates the options before the request is queued.
    _ = generation.options
    return SampleRequest(source, body, generation, tuple(stops))


class Samplers:
    """Models for sampling, the most recently used ones in memory; not thread-safe."""

    def __init__(self, bases: Bases) -> None:
        self.bases = bases
        # The one used last at the end.
        self._loaded: OrderedDict[str, HuggingFaceLanguageModel] = OrderedDict()

    def answer(self, requests: Sequence[SampleRequest]) -> list[bytes]:
        """Answer requests for the same weights in one batch."""
        policy = self._load(requests[0].source)
        generations = [request.generation for request in requests]
        answers = policy.complete(generations, max_rows=MAX_ROWS)
        return [
            _encode_response(policy, request, request_answers)
            for request, request_answers in zip(requests, answers, strict=True)
        ]

    def _load(self, source: SamplerSource) -> HuggingFaceLanguageModel:
        policy = self._loaded.get(source.key)
        if policy is None:
            lora = None if source.lora is None else find_lora(source.base, source.lora)
            policy = self.bases.policy(source.base, lora, trainable=False)
            if source.checkpoint is not None:
                policy.restore(source.checkpoint.folder / ROLE)
            self._loaded[source.key] = policy
        self._loaded.move_to_end(source.key)
        while len(self._loaded) > MAX_SAMPLERS:
            self._loaded.popitem(last=False)
        return policy


def _encode_response(
    policy: HuggingFaceLanguageModel, request: SampleRequest, answers: Sequence[Progress]
) -> bytes:
    pb = schema()
    message = pb.SampleResponse()
    for answer in answers:
        records = answer.tokens
        has_stopped = answer.finish_reason == "stop"
        if request.stops:
            # An answer ends after the token that completes a stop text.
            ids = [record.token for record in records]
            length = _find_first_stop(policy, ids, request.stops)
            if length is not None:
                records = records[:length]
                has_stopped = True
        ids = [record.token for record in records]
        sequence = message.sequences.add(
            stop_reason=pb.STOP_REASON_STOP if has_stopped else pb.STOP_REASON_LENGTH,
            tokens=pack(torch.tensor(ids, dtype=torch.int32)),
            logprobs=pack(torch.tensor([record.logprob for record in records])),
        )
        num_top = request.body.topk_sample_logprobs
        if num_top:
            tops = _score_answer(policy, request.generation.prompt, ids, num_top)
            sequence.topk_sampled_logprobs.CopyFrom(tops.encode())
    _add_prompt_scores(message, policy, request)
    encoded: bytes = message.SerializeToString()
    return encoded


def _find_first_stop(
    policy: HuggingFaceLanguageModel, ids: list[int], stops: Sequence[str]
) -> int | None:
    """Return the minimum number of tokens whose text contains a stop text, if any."""

    def contains_stop(length: int) -> bool:
        text = policy.tokenizer.decode(ids[:length], skip_special_tokens=False)
        return any(stop in text for stop in stops)

    if not contains_stop(len(ids)):
        return None
    # By bisection: a prefix that contains a stop text stays so when it grows.
    low, high = 1, len(ids)
    while low < high:
        middle = (low + high) // 2
        if contains_stop(middle):
            high = middle
        else:
            low = middle + 1
    return low


@torch.no_grad()
def _score_answer(
    policy: HuggingFaceLanguageModel, prompt: Sequence[int], ids: Sequence[int], count: int
) -> TopTokens:
    """Return the most likely tokens at each position of an answer."""
    (hidden_TX,) = hidden_states(policy, [[*prompt, *ids]])
    # Each token is predicted at the position before it.
    start = len(prompt) - 1
    predicting_TX = hidden_TX[start : start + len(ids)]
    return top_tokens(logprobs_after(policy, predicting_TX), count)


@torch.no_grad()
def _add_prompt_scores(
    message: Any, policy: HuggingFaceLanguageModel, request: SampleRequest
) -> None:
    """Add the requested log-probabilities of the prompt; NaN for the first token."""
    body = request.body
    ids = request.generation.prompt
    needs_any = (
        body.prompt_logprobs
        or body.topk_prompt_logprobs
        or body.target_prompt_logprobs is not None
        or body.prompt_alt_tokens_k
    )
    if not needs_any:
        return
    if len(ids) == 1:
        if body.prompt_logprobs:
            message.prompt_logprobs = pack(torch.full((1,), torch.nan))
        return
    (hidden_TX,) = hidden_states(policy, [ids])
    # Each token is predicted by the position before it; nothing predicts the first.
    parts = logprobs_after(policy, hidden_TX[:-1])
    # Position of the first token that is reported; its score is in row `first - 1`.
    first = len(ids) - (body.prompt_logprobs_last_n or len(ids) - 1)
    if body.prompt_logprobs:
        logprobs_T = _gather(parts, torch.tensor(ids[1:])[:, None])[:, 0]
        unreported = torch.full((first,), torch.nan)
        message.prompt_logprobs = pack(torch.cat([unreported, logprobs_T[first - 1 :]]))
    if body.topk_prompt_logprobs:
        tops = top_tokens(parts, body.topk_prompt_logprobs)
        reported = TopTokens(tops.ids_TK[first - 1 :], tops.logprobs_TK[first - 1 :])
        message.topk_prompt_logprobs.CopyFrom(reported.pad_front(first).encode())
    if body.target_prompt_logprobs is not None:
        targets = _score_targets(parts, body.target_prompt_logprobs, len(ids) - 1)
        message.target_prompt_logprobs.CopyFrom(tensor_message(targets))
    if body.prompt_alt_tokens_k:
        alternatives = _sample_alternatives(parts, body.prompt_alt_tokens_k, request)
        message.prompt_alt_tokens.tokens.CopyFrom(tensor_message(alternatives.ids_TK))
        message.prompt_alt_tokens.logprobs.CopyFrom(tensor_message(alternatives.logprobs_TK))


def _gather(parts: Sequence[Tensor], ids_TK: Tensor) -> Tensor:
    """Return the log-probabilities of tokens, from chunks of `logprobs_after`."""
    sizes = [len(part) for part in parts]
    ids_by_part = torch.split(ids_TK, sizes)
    return torch.cat([part.gather(1, ids) for part, ids in zip(parts, ids_by_part, strict=True)])


def _score_targets(parts: Sequence[Tensor], body: TensorBody, length: int) -> Tensor:
    """Return log-probabilities of the tokens that a request names, 0 for a negative id."""
    if body.sparse_crow_indices is not None or body.shape is None or len(body.shape) != 2:
        raise bad_request(
            "target_prompt_logprobs must be a dense 2-dimensional tensor, with -1 for no token.",
            "target_prompt_logprobs",
        )
    num_rows, num_columns = body.shape
    if num_rows != length or len(body.data) != num_rows * num_columns:
        raise bad_request(
            f"target_prompt_logprobs has the shape {body.shape}, but needs one row for each of the "
            f"{length} tokens after the first.",
            "target_prompt_logprobs",
        )
    ids_TK = torch.tensor(body.data).reshape(body.shape)
    if ids_TK.numel() and int(ids_TK.max()) >= parts[0].shape[1]:
        raise bad_request(
            f"target_prompt_logprobs holds ids above {parts[0].shape[1] - 1}, the model's largest.",
            "target_prompt_logprobs",
        )
    return _gather(parts, ids_TK.clamp(min=0)) * (ids_TK >= 0)


def _sample_alternatives(parts: Sequence[Tensor], count: int, request: SampleRequest) -> TopTokens:
    """Return alternatives sampled at each position of a prompt, at the request's temperature."""
    generator = torch.Generator().manual_seed(derive_seed(request.generation.seed, "alternatives"))
    temperature = request.generation.temperature
    ids = []
    for part in parts:
        if temperature == 0:
            ids.append(part.argmax(dim=1, keepdim=True).expand(-1, count))
            continue
        weights = (part / temperature).softmax(dim=1)
        ids.append(weights.multinomial(count, replacement=True, generator=generator))
    ids_TK = torch.cat(ids)
    return TopTokens(ids_TK, _gather(parts, ids_TK))
