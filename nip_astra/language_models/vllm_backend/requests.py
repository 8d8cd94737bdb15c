"""What vLLM is asked for, in its words, and what it answers.

Shape suffix: `T` token of a turn.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nip_astra.errors import ConfigurationError, ModelLoadError
from nip_astra.language_models.base import Generation, SamplingOptions, pad_right

MAX_BANNED = 1024
"""Most tokens for which vLLM takes a bias."""
TEMPERATURES = (0.01, 2.0)
"""Temperatures that vLLM draws at; it raises lower ones without a fault and refuses higher ones."""


class Request(NamedTuple):
    """One turn to be sampled.

    Attributes
    ----------
    seed : int
        The only randomness of the turn.
    scores_context : bool
        Whether to give log p of the context's tokens too.
    forced : int or None
        A token that is said first, whatever its probability.
    """

    context: Sequence[int]
    seed: int
    scores_context: bool = False
    forced: int | None = None


class Reply(NamedTuple):
    """What came of a request.

    Attributes
    ----------
    logprobs : list[float]
        log p of each token of `ids` at temperature 1 with nothing cut off; nats.
    context_logprobs : list[float] or None
        The same for each token of the context, 0 for the first.
    num_forwarded : int
        Tokens that the engine read, without those that its prefix cache had.
    """

    ids: list[int]
    logprobs: list[float]
    context_logprobs: list[float] | None
    num_forwarded: int


def sampling_arguments(
    options: SamplingOptions, *, end_ids: Sequence[int], banned_ids: Sequence[int]
) -> dict[str, Any]:
    """The arguments of `SamplingParams` that draw as `options` say.

    The order is the same in both: banned tokens, temperature, `top_k`, then `top_p` over what is
    left, the token that crosses p included.

    Raises
    ------
    ConfigurationError
        When vLLM cannot draw so.
    """
    low, high = TEMPERATURES
    if options.temperature != 0.0 and not low <= options.temperature <= high:
        raise ConfigurationError(
            f"the temperature {options.temperature:g} was asked for, but vLLM draws at 0 or "
            f"between {low:g} and {high:g}. Set temperature to one of these, or _type to "
            "huggingface."
        )
    if len(banned_ids) > MAX_BANNED:
        raise ConfigurationError(
            f"{len(banned_ids)} special tokens are never to be said, but vLLM keeps at most "
            f"{MAX_BANNED} from being drawn. Set _type to huggingface for this model."
        )
    return {
        "max_tokens": options.max_new_tokens,
        "min_tokens": options.min_new_tokens,
        "temperature": options.temperature,
        "top_k": 0 if options.top_k is None else options.top_k,
        "top_p": options.top_p,
        # All ends are named, so that vLLM adds none of its own.
        "stop_token_ids": sorted({*end_ids, *options.end_ids}),
        "ignore_eos": True,
        "logit_bias": dict.fromkeys(banned_ids, float("-inf")) or None,
        # Of the token that was drawn alone.
        "logprobs": 0,
        "detokenize": False,
    }


def scoring_request(text: Sequence[int], window: int) -> Request:
    """Ask for log p of a text's tokens: those of the context, then those of the turn."""
    if len(text) < window:
        return Request(text, seed=0, scores_context=True)
    # There is no room for the token that vLLM samples after a text: the last one is made that.
    return Request(text[:-1], seed=0, scores_context=True, forced=text[-1])


def forcing(request: Request) -> dict[str, Any]:
    """The arguments of `SamplingParams` that force a request's token, where it has one."""
    if request.forced is None:
        return {}
    return {"allowed_token_ids": [request.forced], "logit_bias": None}


def read_reply(request: Request, output: Any) -> Reply:
    """Take what is needed from a `RequestOutput` of vLLM."""
    said = output.outputs[0]
    if said.finish_reason not in ("stop", "length"):
        raise ModelLoadError(
            f"vLLM was to sample a turn, but gave it up ({said.finish_reason}). Its log says why."
        )
    ids = list(said.token_ids)
    chosen = [found[token].logprob for found, token in zip(said.logprobs, ids, strict=True)]
    context_logprobs = None
    if request.scores_context:
        read = zip(output.prompt_logprobs, request.context, strict=True)
        # Nothing predicts the first token.
        context_logprobs = [0.0 if found is None else found[token].logprob for found, token in read]
    num_read = len(request.context) - (output.num_cached_tokens or 0)
    return Reply(ids, chosen, context_logprobs, num_read + max(len(ids) - 1, 0))


def seed_of(uniforms_T: Tensor) -> int:
    """The seed of a row, which its uniform numbers alone decide."""
    digest = hashlib.sha256(uniforms_T.cpu().contiguous().numpy().tobytes()).digest()
    return int.from_bytes(digest[:8], "big") >> 2


def padded_turns(replies: Sequence[Reply], width: int) -> Generation:
    """Replies as turns, padded to a width."""
    ids, mask = pad_right([reply.ids for reply in replies], torch.device("cpu"))
    padding = (0, width - ids.shape[1])
    logprobs = padded_rows([reply.logprobs for reply in replies])
    found = (torch.nn.functional.pad(x, padding) for x in (ids, mask, logprobs))
    return Generation(*found)


def padded_rows(rows: Sequence[Sequence[float]]) -> Tensor:
    """Numbers of several lengths as one tensor, 0 on padding."""
    if not rows:
        return torch.zeros(0, 0)
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
