"""Token sampling: options, allowed tokens, the distribution and the draw.

Two methods share these rules: inverting the cumulative distribution at a uniform number
(`sample_tokens`, for trees of conversations), and Gumbel noise (`sample_with_noise`, for answers to
requests).

Shape suffixes: `B` row, `T` continuation position, `S` scored position, `V` vocabulary, `C` chunk
of the vocabulary, `K` token kept at any position.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nip_astra.errors import ConfigurationError

_NUM_LIKELY = (256, 4096)
"""Nucleus sizes tried before a row is sorted in full."""
_CHUNK = 256


@dataclass(frozen=True)
class SamplingOptions:
    """Options of sampling from the model's distribution."""

    max_new_tokens: int
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    end_ids: tuple[int, ...] = ()
    """Tokens that end a turn, in addition to the model's own."""

    def __post_init__(self) -> None:
        is_valid = {
            "max_new_tokens": self.max_new_tokens >= 1,
            "min_new_tokens": self.min_new_tokens >= 0,
            # Smaller values overflow float32 logits.
            "temperature": self.temperature == 0 or 1e-6 <= self.temperature <= 1e6,
            "top_k": self.top_k is None or self.top_k >= 1,
            "top_p": 0 < self.top_p <= 1,
        }
        for name in (name for name, is_fine in is_valid.items() if not is_fine):
            raise ConfigurationError(
                f"{name} is {getattr(self, name)}. Valid: max_new_tokens and top_k >= 1, "
                "min_new_tokens >= 0, temperature 0 or 1e-6 to 1e6, 0 < top_p <= 1."
            )

    @property
    def cuts(self) -> bool:
        """Whether `top_k` or `top_p` excludes unlikely tokens."""
        return self.top_k is not None or self.top_p < 1.0

    @property
    def modifications(self) -> str:
        """Options that change the model's distribution, in words; empty if none does.

        A minimum of one token counts as none.
        """
        usual = {"temperature": 1.0, "top_k": None, "top_p": 1.0}
        given = {n: getattr(self, n) for n in usual if getattr(self, n) != usual[n]}
        if self.min_new_tokens > 1:
            given["min_new_tokens"] = self.min_new_tokens
        return ", ".join(f"{name} {value:g}" for name, value in given.items())


class SupportMask(NamedTuple):
    """The tokens that `top_k` and `top_p` keep at each position."""

    ids_K: Tensor
    """int32; the tokens kept at the first position, then those at the second, and so on."""
    counts_S: Tensor
    """int64; number of tokens kept at each position, at least 1."""

    def at(self, positions: Sequence[int]) -> SupportMask:
        """Return the mask at some positions, in the given order."""
        parts = torch.split(self.ids_K, self.counts_S.tolist())
        ids = [parts[position] for position in positions]
        index = torch.tensor(positions, dtype=torch.long, device=self.counts_S.device)
        return SupportMask(torch.cat([self.ids_K[:0], *ids]), self.counts_S[index])

    def to(self, device: torch.device) -> SupportMask:
        """Move the mask to a device."""
        return SupportMask(self.ids_K.to(device), self.counts_S.to(device))


@dataclass(frozen=True)
class SamplingDistribution:
    """The distribution that tokens were drawn from, for scoring.

    It is the model's at `temperature`, without special tokens, without an end before
    `min_new_tokens`, and truncated by `top_k` and `top_p`.
    """

    options: SamplingOptions
    """Temperature 0 has no distribution."""
    support: SupportMask | None = None
    """One entry per scored token, required to truncate. See `TokenScorer.support_mask`."""
    has_all_tokens: bool = False
    """Whether tokens that are never drawn have mass too, as in the losses of TRL."""

    @classmethod
    def tempered(cls, temperature: float) -> SamplingDistribution:
        """Return the model's distribution over the whole vocabulary at a temperature above 0."""
        return cls(SamplingOptions(max_new_tokens=1, temperature=temperature), has_all_tokens=True)


@dataclass(frozen=True)
class LogitsTransform:
    """Transforms the model's logits at scored positions into those of the sampling distribution."""

    temperature: float
    """> 0; logits are divided by it."""
    banned_ids: Tensor
    """Tokens that are never drawn."""
    end_ids: Tensor
    """Tokens that are not drawn while a turn may not end yet."""
    is_early_S: Tensor
    """bool; True at those positions."""
    support: SupportMask | None = None
    """None without truncation."""

    def at(self, positions: Sequence[int]) -> LogitsTransform:
        """Return the transform at some positions."""
        index = torch.tensor(positions, dtype=torch.long, device=self.is_early_S.device)
        support = None if self.support is None else self.support.at(positions)
        return replace(self, is_early_S=self.is_early_S[index], support=support)

    def apply(self, logits_SV: Tensor) -> Tensor:
        """Return logits of the sampling distribution; gradients flow.

        The support stays fixed while the logits change, so that the distributions before and after
        a step are over the same tokens.
        """
        if self.support is not None:
            rows_K = torch.arange(len(logits_SV), device=logits_SV.device)
            rows_K = rows_K.repeat_interleave(self.support.counts_S)
            is_out_SV = torch.ones_like(logits_SV, dtype=torch.bool)
            is_out_SV[rows_K, self.support.ids_K.long()] = False
        else:
            is_out_SV = torch.zeros_like(logits_SV, dtype=torch.bool)
            is_out_SV[:, self.banned_ids] = True
            is_out_SV[:, self.end_ids] |= self.is_early_S.unsqueeze(1)
        return (logits_SV / self.temperature).masked_fill(is_out_SV, float("-inf"))


def find_end_ids(generation_config: Any, tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens that end a turn: those of the checkpoint and of the tokenizer."""
    configured = getattr(generation_config, "eos_token_id", None)
    ids = configured if isinstance(configured, list) else [configured]
    return tuple(sorted({i for i in [*ids, tokenizer.eos_token_id] if i is not None}))


def find_banned_ids(tokenizer: Any, kept_ids: Collection[int], vocab_size: int) -> list[int]:
    """Return special tokens except some (a model that generated a role marker could forge a turn),
    and vocabulary rows without a token.

    Kept are ends, and the marks of reasoning and calls (`MessageFormat.shown_ids`).
    """
    special = set(tokenizer.all_special_ids)
    special.update(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)
    special.update({*range(vocab_size)} - {*tokenizer.get_vocab().values()})
    return sorted(i for i in special - set(kept_ids) if i < vocab_size)


Draw = Callable[[Tensor, Tensor, int, SamplingOptions], tuple[Tensor, Tensor]]
"""`(logits_BV, uniforms_B, position, options) -> (tokens_B, logprobs_B)`; may overwrite logits."""


class ConstrainedSampler:
    """Samples tokens of a model, never a banned one, and no end before `min_new_tokens`."""

    def __init__(
        self, banned_ids: Sequence[int], end_ids: tuple[int, ...], device: torch.device
    ) -> None:
        self.banned_ids = torch.tensor(banned_ids, dtype=torch.long, device=device)
        self._own_end_ids = end_ids
        self._device = device
        self._end_ids: dict[tuple[int, ...], Tensor] = {}

    def draw(
        self, logits_BV: Tensor, uniforms_B: Tensor, position: int, options: SamplingOptions
    ) -> tuple[Tensor, Tensor]:
        """Sample a token for each row; overwrites the logits."""
        logprobs_BV = logits_BV.log_softmax(dim=1)
        logits_BV.index_fill_(1, self.banned_ids, float("-inf"))
        if position < options.min_new_tokens:
            logits_BV.index_fill_(1, self._ends(options), float("-inf"))
        token_B = sample_tokens(
            logits_BV,
            uniforms_B,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
        )
        return token_B, logprobs_BV.gather(1, token_B.unsqueeze(1)).squeeze(1)

    def transform(self, distribution: SamplingDistribution, mask_BT: Tensor) -> LogitsTransform:
        """Return the transform from the model's logits to a distribution, at masked tokens."""
        options, support = distribution.options, distribution.support
        is_whole = distribution.has_all_tokens
        return LogitsTransform(
            temperature=options.temperature,
            banned_ids=self.banned_ids[:0] if is_whole else self.banned_ids,
            end_ids=self.banned_ids[:0] if is_whole else self._ends(options),
            is_early_S=(mask_BT.nonzero()[:, 1] < options.min_new_tokens).to(self._device),
            support=None if support is None else support.to(self._device),
        )

    def _ends(self, options: SamplingOptions) -> Tensor:
        """Return the end tokens on the device, cached: a copy at each step would synchronise."""
        ids = (*self._own_end_ids, *options.end_ids)
        if ids not in self._end_ids:
            self._end_ids[ids] = torch.tensor(ids, dtype=torch.long, device=self._device)
        return self._end_ids[ids]


def sample_tokens(
    logits_BV: Tensor,
    uniforms_B: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
) -> Tensor:
    """Draw one token per row by inverting its cumulative distribution at a uniform number.

    `top_k` keeps the k most likely tokens, then `top_p` the smallest set of the most likely whose
    mass reaches p (the token that crosses p included), as in Hugging Face's warpers.
    `temperature=0` is greedy. On a CPU the vocabulary is sorted only for rows with a large nucleus.
    Logits are -inf for a forbidden token; uniform numbers are in [0, 1).
    """
    if temperature == 0.0:
        return logits_BV.argmax(dim=-1)
    if temperature != 1.0:
        logits_BV = logits_BV / temperature
    vocab_size = logits_BV.shape[-1]
    if top_k is not None:
        values, tokens = logits_BV.topk(min(top_k, vocab_size), dim=-1)
        return _draw_likely(values, values.double().logsumexp(dim=-1), tokens, uniforms_B, top_p)
    if top_p >= 1.0:
        return _draw_any(logits_BV, uniforms_B)
    mass_B = logits_BV.logsumexp(dim=-1).double()
    if logits_BV.device.type != "cpu":
        # A sort is cheap on a GPU, and checking whether a row needs one would synchronise.
        values, tokens = logits_BV.sort(dim=-1, descending=True)
        return _draw_likely(values, mass_B, tokens, uniforms_B, top_p)
    drawn_B = torch.zeros(len(logits_BV), dtype=torch.long, device=logits_BV.device)
    open_B = torch.ones(len(logits_BV), dtype=torch.bool, device=logits_BV.device)
    for size in (*(size for size in _NUM_LIKELY if size < vocab_size), vocab_size):
        likely = logits_BV[open_B]
        # For the whole vocabulary a sort is faster than a selection.
        values, tokens = (
            likely.topk(size) if size < vocab_size else likely.sort(dim=-1, descending=True)
        )
        drawn_B[open_B] = _draw_likely(values, mass_B[open_B], tokens, uniforms_B[open_B], top_p)
        covered = (values.double() - mass_B[open_B, None]).exp().sum(dim=-1)
        open_B[open_B.clone()] = covered < top_p
        if not open_B.any():
            break
    return drawn_B


def sample_with_noise(
    logits_BV: Tensor,
    *,
    temperatures: Sequence[float],
    cuts: Sequence[tuple[int | None, float]],
    generators: Callable[[int], torch.Generator],
) -> Tensor:
    """Draw one token per row: the argmax of `logit / temperature + Gumbel noise`.

    The noise is the row's own, so that a draw does not depend on the batch. A sum, by which a
    cumulative distribution is inverted, would: its last digit depends on the batch size. Logits are
    float32, -inf for a forbidden token; temperature 0 is greedy; `cuts` are `top_k` and `top_p`;
    `generators` gives that of a row, for rows that are not greedy.
    """
    tokens_B = logits_BV.argmax(dim=1)
    rows = [row for row, temperature in enumerate(temperatures) if temperature > 0]
    if not rows:
        return tokens_B
    device = logits_BV.device
    index = torch.tensor(rows, device=device)
    temperature_R = torch.tensor([temperatures[row] for row in rows], device=device)
    logits_RV = logits_BV[index] / temperature_R[:, None]
    cuts = [cuts[row] for row in rows]
    for top_k, top_p in {(k, p) for k, p in cuts if k is not None or p < 1.0}:
        same = torch.tensor([i for i, cut in enumerate(cuts) if cut == (top_k, top_p)])
        same = same.to(device)
        kept = keep_likely(logits_RV[same], top_k=top_k, top_p=top_p)
        logits_RV[same] = logits_RV[same].masked_fill(~kept, float("-inf"))
    noise_RV = torch.empty_like(logits_RV)
    for noise_V, row in zip(noise_RV, rows, strict=True):
        noise_V.exponential_(generator=generators(row))
    smallest = torch.finfo(noise_RV.dtype).tiny
    tokens_B[index] = (logits_RV - noise_RV.clamp_(min=smallest).log_()).argmax(dim=1)
    return tokens_B


def _draw_likely(
    values: Tensor, mass_B: Tensor, tokens: Tensor, uniforms_B: Tensor, top_p: float
) -> Tensor:
    """Sample among tokens in descending order, truncated to the share `top_p` of `exp(mass_B)`."""
    probabilities = (values.double() - mass_B[:, None]).exp()
    if top_p < 1.0:
        probabilities = probabilities.masked_fill(_is_beyond(probabilities, top_p), 0.0)
    drawn = _invert(probabilities, uniforms_B.double())
    return tokens.gather(-1, drawn.unsqueeze(-1)).squeeze(-1)


def _is_beyond(probabilities: Tensor, top_p: float) -> Tensor:
    """Return which probabilities, in descending order, lie beyond the nucleus."""
    return probabilities.cumsum(dim=-1) - probabilities >= top_p


def keep_likely(logits_BV: Tensor, *, top_k: int | None, top_p: float) -> Tensor:
    """Return which tokens can be drawn at temperature 1, bool `[B, V]`.

    NaN and infinite logits are kept, so that they are drawn and noticed.
    """
    size = logits_BV.shape[-1] if top_k is None else min(top_k, logits_BV.shape[-1])
    values, tokens = logits_BV.topk(size, dim=-1)
    probabilities = (values.double() - values.double().logsumexp(dim=-1, keepdim=True)).exp()
    is_kept = ~((probabilities <= 0.0) | _is_beyond(probabilities, top_p))
    return torch.zeros_like(logits_BV, dtype=torch.bool).scatter_(-1, tokens, is_kept)


def _draw_any(logits_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """Sample a chunk of the vocabulary, then a token in it."""
    vocab_size = logits_BV.shape[-1]
    highest_B1 = logits_BV.max(dim=-1, keepdim=True).values
    weights_BV = F.pad((logits_BV - highest_B1).exp_(), (0, -vocab_size % _CHUNK))
    chunks_BCT = weights_BV.view(len(weights_BV), -1, _CHUNK)
    # float64: with float32 a cumulative sum over 50,000 tokens misplaces the rare ones.
    sums_BC = chunks_BCT.sum(dim=-1, dtype=torch.float64)
    chunk_B = _invert(sums_BC, uniforms_B.double())
    rows = torch.arange(len(weights_BV), device=logits_BV.device)
    ends_BC = sums_BC.cumsum(dim=-1)
    before_B = ends_BC[rows, chunk_B] - sums_BC[rows, chunk_B]
    within_B = (uniforms_B.double() * ends_BC[:, -1] - before_B) / sums_BC[rows, chunk_B]
    inside = _invert(chunks_BCT[rows, chunk_B].double(), within_B.clamp_(0.0, 1.0 - 2.0**-40))
    # NaN logits give an index past the end; `require_finite` rejects their log-probability.
    return (chunk_B * _CHUNK + inside).clamp_(max=vocab_size - 1)


def _invert(weights: Tensor, uniforms_B: Tensor) -> Tensor:
    cumulative = weights.cumsum(dim=-1)
    # Scaling by the total makes the last positive bin reach the largest uniform number.
    thresholds = uniforms_B.unsqueeze(-1) * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, thresholds, right=True).squeeze(-1)
    return drawn.clamp_(max=weights.shape[-1] - 1)
