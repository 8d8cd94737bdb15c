"""Samples by Tinker's protocol: requests that wait for one set of weights are answered together.

Shape suffixes: `B` row, `T` token.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nip_astra.language_models.base import Generation, SamplingOptions
from nip_astra.language_models.huggingface import HuggingFaceLanguageModel
from nip_astra.serve.api_errors import wrong
from nip_astra.serve.training.bases import Base, Bases
from nip_astra.serve.training.tinker.bodies import SampleBody, TensorBody
from nip_astra.serve.training.tinker.messages import Likeliest, SampleAnswer, SampledAnswer
from nip_astra.serve.training.tinker.models import ROLE, lora_of
from nip_astra.serve.training.tinker.scores import hidden_states, likeliest, logprobs_after
from nip_astra.serve.training.tinker.store import Checkpoint, LoraShape
from nip_astra.utils.seeding import derive_seed, uniform_rows

MAX_SAMPLERS = 4
"""Sets of weights that are held to sample from; others are read from their folders again."""


@dataclass(frozen=True)
class SamplerSource:
    """What is sampled from.

    Attributes
    ----------
    checkpoint : Checkpoint or None
        None for the base itself.
    """

    base: Base
    lora: LoraShape | None = None
    checkpoint: Checkpoint | None = None

    @property
    def key(self) -> str:
        """Tells sources apart."""
        if self.checkpoint is None:
            return self.base.name
        return f"{self.checkpoint.path} {self.checkpoint.created}"


@dataclass(frozen=True)
class SampleRequest:
    """A request, with what was worked out of it.

    Attributes
    ----------
    options : SamplingOptions
        How its tokens are drawn.
    stops : tuple of str
        Texts that end an answer; they are part of it.
    """

    source: SamplerSource
    ids: tuple[int, ...]
    body: SampleBody
    options: SamplingOptions
    stops: tuple[str, ...]
    seed: int

    @property
    def group(self) -> tuple[object, ...]:
        """Requests of one group are answered by one pass."""
        return self.source.key, self.options, self.body.num_samples


def plan(source: SamplerSource, body: SampleBody, *, seed: int) -> SampleRequest:
    """Check a request, and work out how its tokens are drawn.

    Parameters
    ----------
    seed : int
        For a request that brings none.

    Raises
    ------
    ApiError
        Where it cannot be answered as it stands.
    """
    base, ids = source.base, body.prompt.ids()
    if body.record_stability_info:
        raise wrong(
            "samples were asked for with record_stability_info, but this service trains no "
            "stable_reinforce. Leave it out.",
            "record_stability_info",
        )
    if not ids or min(ids) < 0 or max(ids) >= base.vocab_size:
        raise wrong(
            f"a prompt was given that is empty or holds other tokens than those of the model "
            f"{base.name!r}, 0 to {base.vocab_size - 1}. Encode it by the model's tokenizer.",
            "prompt",
        )
    last = body.prompt_logprobs_last_n
    if last is not None and (not body.prompt_logprobs or last >= len(ids)):
        raise wrong(
            f"the last {last} of {len(ids)} tokens of a prompt were to be scored, but that takes "
            "prompt_logprobs and at least one token before them.",
            "prompt_logprobs_last_n",
        )
    params = body.sampling_params
    room = base.context_window - len(ids)
    most = params.max_tokens or room
    if most > room or room < 1:
        raise wrong(
            f"{most} tokens were to be sampled after a prompt of {len(ids)}, but the window of the "
            f"model {base.name!r} is {base.context_window}. Lower max_tokens, or shorten the "
            "prompt.",
            "max_tokens",
        )
    end_ids, stops = _ends(base, params.stop)
    options = SamplingOptions(
        max_new_tokens=most,
        temperature=params.temperature,
        top_k=params.top_k if params.top_k > 0 else None,
        top_p=params.top_p,
        end_ids=end_ids,
    )
    own = seed if params.seed is None else params.seed
    return SampleRequest(source, tuple(ids), body, options, stops, own)


def _ends(
    base: Base, stop: str | Sequence[str] | Sequence[int] | None
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    if stop is None:
        return base.end_ids, ()
    if isinstance(stop, str):
        return (), (stop,)
    ids = tuple(one for one in stop if isinstance(one, int))
    return ids, tuple(one for one in stop if isinstance(one, str))


class Samplers:
    """Weights to sample from, the newest used ones in memory; for one thread."""

    def __init__(self, bases: Bases) -> None:
        self.bases = bases
        self._held: OrderedDict[str, HuggingFaceLanguageModel] = OrderedDict()

    def answer(self, requests: Sequence[SampleRequest]) -> list[bytes]:
        """Answer requests of one group."""
        first = requests[0]
        policy = self._policy(first.source)
        count = first.body.num_samples
        uniforms_BT = uniform_rows(
            [(one.seed, "sample", index) for one in requests for index in range(count)],
            first.options.max_new_tokens,
        )
        found = policy.generate([one.ids for one in requests], count, uniforms_BT, first.options)
        return [
            self._one(policy, request, _part(found, place * count, count)).encoded()
            for place, request in enumerate(requests)
        ]

    def _policy(self, source: SamplerSource) -> HuggingFaceLanguageModel:
        found = self._held.get(source.key)
        if found is None:
            lora = None if source.lora is None else lora_of(source.base, source.lora)
            found = self.bases.policy(source.base, lora, trainable=False, is_unbridled=True)
            if source.checkpoint is not None:
                found.restore(source.checkpoint.folder / ROLE)
            self._held[source.key] = found
        self._held.move_to_end(source.key)
        while len(self._held) > MAX_SAMPLERS:
            self._held.popitem(last=False)
        return found

    def _one(
        self, policy: HuggingFaceLanguageModel, request: SampleRequest, said: Generation
    ) -> SampleAnswer:
        answers = [
            _cut(policy, request, ids[:length], logprobs[:length])
            for ids, logprobs, length in zip(
                said.ids_BT.tolist(),
                said.logprobs_BT.tolist(),
                said.mask_BT.sum(dim=1).tolist(),
                strict=True,
            )
        ]
        body = request.body
        if body.topk_sample_logprobs:
            answers = [
                SampledAnswer(
                    one.ids,
                    one.logprobs,
                    one.has_stopped,
                    _likeliest_of(policy, request.ids, one.ids, body.topk_sample_logprobs),
                )
                for one in answers
            ]
        return _with_prompt(policy, request, answers)


def _part(found: Generation, start: int, count: int) -> Generation:
    rows = slice(start, start + count)
    return Generation(found.ids_BT[rows], found.mask_BT[rows], found.logprobs_BT[rows])


def _cut(
    policy: HuggingFaceLanguageModel,
    request: SampleRequest,
    ids: list[int],
    logprobs: list[float],
) -> SampledAnswer:
    """An answer up to the token with which a stop text is complete."""
    has_stopped = bool(ids) and ids[-1] in request.options.end_ids
    if request.stops:
        length = _first_stop(policy, ids, request.stops)
        if length is not None:
            return SampledAnswer(ids[:length], logprobs[:length], has_stopped=True)
    return SampledAnswer(ids, logprobs, has_stopped)


def _first_stop(
    policy: HuggingFaceLanguageModel, ids: list[int], stops: Sequence[str]
) -> int | None:
    """How many tokens it takes until their text holds a stop text; None where it never does."""

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
def _with_prompt(
    policy: HuggingFaceLanguageModel, request: SampleRequest, answers: list[SampledAnswer]
) -> SampleAnswer:
    """The answer with what was asked about the prompt."""
    body, ids = request.body, request.ids
    needs_any = (
        body.prompt_logprobs
        or body.topk_prompt_logprobs
        or body.target_prompt_logprobs is not None
        or body.prompt_alt_tokens_k
    )
    if not needs_any:
        return SampleAnswer(answers)
    if len(ids) == 1:
        return SampleAnswer(answers, torch.full((1,), torch.nan) if body.prompt_logprobs else None)
    (hidden_TX,) = hidden_states(policy, [ids])
    # What is scored at a place is predicted by the one before; nothing predicts the first.
    parts = logprobs_after(policy, hidden_TX[:-1])
    next_ids = torch.tensor(ids[1:])
    logprobs_T = _chosen(parts, next_ids[:, None])[:, 0]
    first = len(ids) - (body.prompt_logprobs_last_n or len(ids) - 1)
    prompt_logprobs = top = targets = alternatives = None
    if body.prompt_logprobs:
        unknown = torch.full((first,), torch.nan)
        prompt_logprobs = torch.cat([unknown, logprobs_T[first - 1 :]])
    if body.topk_prompt_logprobs:
        found = likeliest(parts, body.topk_prompt_logprobs)
        shown = Likeliest(found.ids_TK[first - 1 :], found.logprobs_TK[first - 1 :])
        top = shown.after(first)
    if body.target_prompt_logprobs is not None:
        targets = _named(parts, body.target_prompt_logprobs, len(ids) - 1)
    if body.prompt_alt_tokens_k:
        alternatives = _drawn(parts, body.prompt_alt_tokens_k, request)
    return SampleAnswer(answers, prompt_logprobs, top, targets, alternatives)


def _chosen(parts: Sequence[Tensor], ids_TK: Tensor) -> Tensor:
    sizes = [len(part) for part in parts]
    return torch.cat(
        [part.gather(1, ids) for part, ids in zip(parts, torch.split(ids_TK, sizes), strict=True)]
    )


def _named(parts: Sequence[Tensor], body: TensorBody, length: int) -> Tensor:
    """Log-probabilities of named tokens, 0 where none is named."""
    if body.sparse_crow_indices is not None or body.shape is None or len(body.shape) != 2:
        raise wrong(
            "log-probabilities of named tokens of a prompt were asked for by a tensor that is "
            "sparse or not of two dimensions. Send a dense one, with -1 where none is named.",
            "target_prompt_logprobs",
        )
    if body.shape[0] != length or len(body.data) != body.shape[0] * body.shape[1]:
        raise wrong(
            f"log-probabilities of named tokens were asked for by a tensor of the shape "
            f"{body.shape}, but the prompt has {length} tokens after its first. Send a row each.",
            "target_prompt_logprobs",
        )
    ids_TK = torch.tensor(body.data).reshape(body.shape)
    if ids_TK.numel() and int(ids_TK.max()) >= parts[0].shape[1]:
        raise wrong(
            "log-probabilities of tokens were asked for that the model has not. Name others.",
            "target_prompt_logprobs",
        )
    return _chosen(parts, ids_TK.clamp(min=0)) * (ids_TK >= 0)


def _drawn(parts: Sequence[Tensor], count: int, request: SampleRequest) -> Likeliest:
    """Tokens drawn at each place of a prompt, at the request's temperature."""
    generator = torch.Generator().manual_seed(derive_seed(request.seed, "alternatives"))
    temperature = request.options.temperature
    ids = []
    for part in parts:
        if temperature == 0:
            ids.append(part.argmax(dim=1, keepdim=True).expand(-1, count))
            continue
        weights = (part / temperature).softmax(dim=1)
        ids.append(weights.multinomial(count, replacement=True, generator=generator))
    ids_TK = torch.cat(ids)
    return Likeliest(ids_TK, _chosen(parts, ids_TK))
