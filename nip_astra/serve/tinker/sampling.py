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
from nip_astra.serve.tinker.messages import Likeliest, packed, schema, tensor_message
from nip_astra.serve.tinker.models import (
    ROLE,
    hidden_states,
    likeliest,
    logprobs_after,
    lora_of,
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
    base, ids = source.base, body.prompt.ids()
    if not ids or min(ids) < 0 or max(ids) >= base.vocab_size:
        raise bad_request(
            f"the prompt is empty or holds tokens outside 0 to {base.vocab_size - 1}. Encode it "
            f"with the tokenizer of {base.name!r}.",
            "prompt",
        )
    last = body.prompt_logprobs_last_n
    if last is not None and (not body.prompt_logprobs or last >= len(ids)):
        raise bad_request(
            f"prompt_logprobs_last_n is {last} for a prompt of {len(ids)} tokens; it needs "
            "prompt_logprobs and must be less than the length of the prompt.",
            "prompt_logprobs_last_n",
        )
    params = body.sampling_params
    room = base.context_window - len(ids)
    most = params.max_tokens or room
    if most > room or room < 1:
        raise bad_request(
            f"max_tokens {most} and a prompt of {len(ids)} tokens exceed the window of "
            f"{base.name!r} ({base.context_window}). Lower max_tokens, or shorten the prompt.",
            "max_tokens",
        )
    given = [params.stop] if isinstance(params.stop, str) else params.stop or []
    end_ids = tuple(one for one in given if isinstance(one, int))
    generation = GenerationRequest(
        prompt=tuple(ids),
        max_tokens=most,
        seed=seed if params.seed is None else params.seed,
        num_samples=body.num_samples,
        temperature=params.temperature,
        top_k=params.top_k if params.top_k > 0 else None,
        top_p=params.top_p,
        end_ids=base.end_ids if params.stop is None else end_ids,
        num_top=0,
        returns_token_ids=True,
    )
    _ = generation.options  # validates them
    stops = tuple(one for one in given if isinstance(one, str))
    return SampleRequest(source, body, generation, stops)


class Samplers:
    """Models for sampling, the most recently used ones in memory; not thread-safe."""

    def __init__(self, bases: Bases) -> None:
        self.bases = bases
        self._held: OrderedDict[str, HuggingFaceLanguageModel] = OrderedDict()

    def answer(self, requests: Sequence[SampleRequest]) -> list[bytes]:
        policy = self._policy(requests[0].source)
        progress = policy.complete([one.generation for one in requests], max_rows=MAX_ROWS)
        return [
            _response(policy, request, answers)
            for request, answers in zip(requests, progress, strict=True)
        ]

    def _policy(self, source: SamplerSource) -> HuggingFaceLanguageModel:
        policy = self._held.get(source.key)
        if policy is None:
            lora = None if source.lora is None else lora_of(source.base, source.lora)
            policy = self.bases.policy(source.base, lora, trainable=False)
            if source.checkpoint is not None:
                policy.restore(source.checkpoint.folder / ROLE)
            self._held[source.key] = policy
        self._held.move_to_end(source.key)
        while len(self._held) > MAX_SAMPLERS:
            self._held.popitem(last=False)
        return policy


def _response(
    policy: HuggingFaceLanguageModel, request: SampleRequest, progress: Sequence[Progress]
) -> bytes:
    pb = schema()
    message = pb.SampleResponse()
    for one in progress:
        ids = [record.token for record in one.tokens]
        # An answer ends after the token that completes a stop text.
        length = _first_stop(policy, ids, request.stops) if request.stops else None
        has_stopped = length is not None or one.finish_reason == "stop"
        ids = ids[:length]
        added = message.sequences.add(
            stop_reason=pb.STOP_REASON_STOP if has_stopped else pb.STOP_REASON_LENGTH,
            tokens=packed(torch.tensor(ids, dtype=torch.int32)),
            logprobs=packed(torch.tensor([record.logprob for record in one.tokens[:length]])),
        )
        if count := request.body.topk_sample_logprobs:
            found = _likeliest_of(policy, request.generation.prompt, ids, count)
            added.topk_sampled_logprobs.CopyFrom(found.encoded())
    _add_prompt(message, policy, request)
    encoded: bytes = message.SerializeToString()
    return encoded


def _first_stop(
    policy: HuggingFaceLanguageModel, ids: list[int], stops: Sequence[str]
) -> int | None:
    """Return the minimum number of tokens whose text holds a stop text, if any."""

    def holds(length: int) -> bool:
        text = policy.tokenizer.decode(ids[:length], skip_special_tokens=False)
        return any(stop in text for stop in stops)

    if not holds(len(ids)):
        return None
    low, high = 1, len(ids)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low


@torch.no_grad()
def _likeliest_of(
    policy: HuggingFaceLanguageModel, prompt: Sequence[int], ids: Sequence[int], count: int
) -> Likeliest:
    (hidden_TX,) = hidden_states(policy, [[*prompt, *ids]])
    places = hidden_TX[len(prompt) - 1 : len(prompt) + len(ids) - 1]
    return likeliest(logprobs_after(policy, places), count)


@torch.no_grad()
def _add_prompt(message: Any, policy: HuggingFaceLanguageModel, request: SampleRequest) -> None:
    """Add the requested log-probabilities of the prompt; NaN for the first token."""
    body, ids = request.body, request.generation.prompt
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
            message.prompt_logprobs = packed(torch.full((1,), torch.nan))
        return
    (hidden_TX,) = hidden_states(policy, [ids])
    # Each token is predicted by the position before it; nothing predicts the first.
    parts = logprobs_after(policy, hidden_TX[:-1])
    first = len(ids) - (body.prompt_logprobs_last_n or len(ids) - 1)
    if body.prompt_logprobs:
        logprobs_T = _chosen(parts, torch.tensor(ids[1:])[:, None])[:, 0]
        unknown = torch.full((first,), torch.nan)
        message.prompt_logprobs = packed(torch.cat([unknown, logprobs_T[first - 1 :]]))
    if body.topk_prompt_logprobs:
        found = likeliest(parts, body.topk_prompt_logprobs)
        shown = Likeliest(found.ids_TK[first - 1 :], found.logprobs_TK[first - 1 :])
        message.topk_prompt_logprobs.CopyFrom(shown.after(first).encoded())
    if body.target_prompt_logprobs is not None:
        targets = _named(parts, body.target_prompt_logprobs, len(ids) - 1)
        message.target_prompt_logprobs.CopyFrom(tensor_message(targets))
    if body.prompt_alt_tokens_k:
        drawn = _drawn(parts, body.prompt_alt_tokens_k, request)
        message.prompt_alt_tokens.tokens.CopyFrom(tensor_message(drawn.ids_TK))
        message.prompt_alt_tokens.logprobs.CopyFrom(tensor_message(drawn.logprobs_TK))


def _chosen(parts: Sequence[Tensor], ids_TK: Tensor) -> Tensor:
    sizes = [len(part) for part in parts]
    return torch.cat(
        [part.gather(1, ids) for part, ids in zip(parts, torch.split(ids_TK, sizes), strict=True)]
    )


def _named(parts: Sequence[Tensor], body: TensorBody, length: int) -> Tensor:
    """Return log-probabilities of the given tokens, 0 for a negative id."""
    if body.sparse_crow_indices is not None or body.shape is None or len(body.shape) != 2:
        raise bad_request(
            "target_prompt_logprobs must be a dense 2-dimensional tensor, with -1 for no token.",
            "target_prompt_logprobs",
        )
    if body.shape[0] != length or len(body.data) != body.shape[0] * body.shape[1]:
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
    return _chosen(parts, ids_TK.clamp(min=0)) * (ids_TK >= 0)


def _drawn(parts: Sequence[Tensor], count: int, request: SampleRequest) -> Likeliest:
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
    return Likeliest(ids_TK, _chosen(parts, ids_TK))
