"""Token sampling: options, allowed tokens, the distribution and the draw.

Two methods share these rules: inverting the cumulative distribution at a uniform number
(`sample_tokens`, for trees of conversations), and Gumbel noise (`sample_with_noise`, for answers to
requests).

Shape suffixes: `B` row, `R` row that is not greedy, `G` row of a group with equal options,
`T` continuation position, `S` scored position, `V` vocabulary, `C` chunk of the vocabulary,
`K` token of a chunk, or token kept.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nip_astra.errors import ConfigurationError

_NUCLEUS_SIZES = (256, 4096)
"""Numbers of most likely tokens tried before a row is sorted in full."""
_CHUNK = 256
"""Tokens of the vocabulary that are summed together: about the root of its size."""


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
        # Lower temperatures overflow float32 logits.
        has_valid_temperature = self.temperature == 0 or 1e-6 <= self.temperature <= 1e6
        is_valid = {
            "max_new_tokens": self.max_new_tokens >= 1,
            "min_new_tokens": self.min_new_tokens >= 0,
            "temperature": has_valid_temperature,
            "top_k": self.top_k is None or self.top_k >= 1,
            "top_p": 0 < self.top_p <= 1,
        }
        for name, is_option_valid in is_valid.items():
            if not is_option_valid:
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
        neutral = {"temperature": 1.0, "top_k": None, "top_p": 1.0}
        modified: dict[str, float] = {}
        for name, neutral_value in neutral.items():
            option = getattr(self, name)
            if option != neutral_value:
                modified[name] = option
        if self.min_new_tokens > 1:
            modified["min_new_tokens"] = self.min_new_tokens
        return ", ".join(f"{name} {option:g}" for name, option in modified.items())


class SupportMask(NamedTuple):
    """The tokens that `top_k` and `top_p` keep at each position."""

    ids_K: Tensor
    """int32; the tokens kept at the first position, then those at the second, and so on."""
    counts_S: Tensor
    """int64; number of tokens kept at each position, at least 1."""

    def at(self, positions: Sequence[int]) -> SupportMask:
        """Return the mask at some positions, in the given order."""
        ids_by_position = torch.split(self.ids_K, self.counts_S.tolist())
        selected_ids = [ids_by_position[position] for position in positions]
        index = torch.tensor(positions, dtype=torch.long, device=self.counts_S.device)
        # The empty slice gives `cat` a tensor of the right type if there is no position.
        ids_K = torch.cat([self.ids_K[:0], *selected_ids])
        return SupportMask(ids_K, self.counts_S[index])

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
            # The support was found after the bans, so it contains no banned token.
            num_positions = len(logits_SV)
            positions_S = torch.arange(num_positions, device=logits_SV.device)
            rows_K = positions_S.repeat_interleave(self.support.counts_S)
            is_excluded_SV = torch.ones_like(logits_SV, dtype=torch.bool)
            is_excluded_SV[rows_K, self.support.ids_K.long()] = False
        else:
            is_excluded_SV = torch.zeros_like(logits_SV, dtype=torch.bool)
            is_excluded_SV[:, self.banned_ids] = True
            is_excluded_SV[:, self.end_ids] |= self.is_early_S.unsqueeze(1)
        tempered_SV = logits_SV / self.temperature
        return tempered_SV.masked_fill(is_excluded_SV, float("-inf"))


def find_end_ids(generation_config: Any, tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens that end a turn: those of the checkpoint and of the tokenizer."""
    configured = getattr(generation_config, "eos_token_id", None)
    # Chat checkpoints often list several, of which the tokenizer knows only one.
    candidates = list(configured) if isinstance(configured, list) else [configured]
    candidates.append(tokenizer.eos_token_id)
    end_ids = {token_id for token_id in candidates if token_id is not None}
    return tuple(sorted(end_ids))


def find_special_ids(tokenizer: Any) -> frozenset[int]:
    """Return the tokens that a text omits."""
    special_ids = set(tokenizer.all_special_ids)
    # Special tokens without a role, such as marks of turns, are only here.
    for token_id, token in tokenizer.added_tokens_decoder.items():
        if token.special:
            special_ids.add(token_id)
    return frozenset(special_ids)


def find_banned_ids(tokenizer: Any, kept_ids: Collection[int], vocab_size: int) -> list[int]:
    """Return tokens that may not be drawn: special ones, and vocabulary rows without a token.

    A model that generated a role marker could forge a turn. `kept_ids` stay allowed: ends, and the
    marks of reasoning and calls (`MessageFormat.shown_ids`).
    """
    # Embedding matrices are often padded to a multiple of 64 or 128 rows.
    ids_without_token = set(range(vocab_size)) - set(tokenizer.get_vocab().values())
    banned = (find_special_ids(tokenizer) | ids_without_token) - set(kept_ids)
    return sorted(token_id for token_id in banned if token_id < vocab_size)


Draw = Callable[[Tensor, Tensor, int, SamplingOptions], tuple[Tensor, Tensor]]
"""`(logits_BV, uniforms_B, position, options) -> (tokens_B, logprobs_B)`; may overwrite logits."""


class ConstrainedSampler:
    """Samples tokens of a model, never a banned one, and no end before `min_new_tokens`."""

    def __init__(
        self, banned_ids: Sequence[int], end_ids: tuple[int, ...], device: torch.device
    ) -> None:
        self.banned_ids = torch.tensor(banned_ids, dtype=torch.long, device=device)
        self._model_end_ids = end_ids
        self._device = device
        self._end_ids_on_device: dict[tuple[int, ...], Tensor] = {}

    def draw(
        self, logits_BV: Tensor, uniforms_B: Tensor, position: int, options: SamplingOptions
    ) -> tuple[Tensor, Tensor]:
        """Sample a token for each row; overwrites the logits."""
        # Before the bans and the temperature: log-probabilities are the model's own.
        logprobs_BV = logits_BV.log_softmax(dim=1)
        logits_BV.index_fill_(1, self.banned_ids, float("-inf"))
        if position < options.min_new_tokens:
            logits_BV.index_fill_(1, self._find_end_ids(options), float("-inf"))
        token_B = sample_tokens(
            logits_BV,
            uniforms_B,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
        )
        logprob_B = logprobs_BV.gather(1, token_B.unsqueeze(1)).squeeze(1)
        return token_B, logprob_B

    def transform(self, distribution: SamplingDistribution, mask_BT: Tensor) -> LogitsTransform:
        """Return the transform from the model's logits to a distribution, at masked tokens."""
        options = distribution.options
        if distribution.has_all_tokens:
            banned_ids = end_ids = self.banned_ids[:0]
        else:
            banned_ids = self.banned_ids
            end_ids = self._find_end_ids(options)
        # Row by row, as `mask_BT` selects tokens of `[B, T]`.
        position_S = mask_BT.nonzero()[:, 1]
        is_early_S = position_S < options.min_new_tokens
        support = distribution.support
        return LogitsTransform(
            temperature=options.temperature,
            banned_ids=banned_ids,
            end_ids=end_ids,
            is_early_S=is_early_S.to(self._device),
            support=None if support is None else support.to(self._device),
        )

    def _find_end_ids(self, options: SamplingOptions) -> Tensor:
        """Return the end tokens on the device, cached: a copy at each step would synchronise."""
        end_ids = (*self._model_end_ids, *options.end_ids)
        if end_ids not in self._end_ids_on_device:
            on_device = torch.tensor(end_ids, dtype=torch.long, device=self._device)
            self._end_ids_on_device[end_ids] = on_device
        return self._end_ids_on_device[end_ids]


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
        values_BK, tokens_BK = logits_BV.topk(min(top_k, vocab_size), dim=-1)
        # As in Hugging Face, the nucleus is a share of the mass that top_k has left.
        mass_B = values_BK.double().logsumexp(dim=-1)
        return _draw_from_sorted(values_BK, mass_B, tokens_BK, uniforms_B, top_p)
    if top_p >= 1.0:
        return _draw_from_all(logits_BV, uniforms_B)
    mass_B = logits_BV.logsumexp(dim=-1).double()
    if logits_BV.device.type != "cpu":
        # A sort is cheap on a GPU, and checking whether a row needs one would synchronise.
        values_BV, tokens_BV = logits_BV.sort(dim=-1, descending=True)
        return _draw_from_sorted(values_BV, mass_B, tokens_BV, uniforms_B, top_p)
    return _draw_by_growing_nucleus(logits_BV, mass_B, uniforms_B, top_p)


def _draw_by_growing_nucleus(
    logits_BV: Tensor, mass_B: Tensor, uniforms_B: Tensor, top_p: float
) -> Tensor:
    """Sample from nuclei; a row whose nucleus exceeds a size is tried again with a larger one."""
    vocab_size = logits_BV.shape[-1]
    sizes = [size for size in _NUCLEUS_SIZES if size < vocab_size]
    drawn_B = torch.zeros(len(logits_BV), dtype=torch.long, device=logits_BV.device)
    is_open_B = torch.ones(len(logits_BV), dtype=torch.bool, device=logits_BV.device)
    for size in (*sizes, vocab_size):
        open_logits = logits_BV[is_open_B]
        if size < vocab_size:
            values, tokens = open_logits.topk(size)
        else:
            # For the whole vocabulary a sort is faster than a selection.
            values, tokens = open_logits.sort(dim=-1, descending=True)
        open_mass = mass_B[is_open_B]
        drawn_B[is_open_B] = _draw_from_sorted(
            values, open_mass, tokens, uniforms_B[is_open_B], top_p
        )
        # The draw stands only if the selected tokens cover the nucleus.
        covered = (values.double() - open_mass[:, None]).exp().sum(dim=-1)
        is_open_B[is_open_B.clone()] = covered < top_p
        if not is_open_B.any():
            break
    return drawn_B


class Truncation(NamedTuple):
    """Options that exclude unlikely tokens."""

    top_k: int | None
    top_p: float

    @property
    def is_active(self) -> bool:
        """Whether any token may be excluded."""
        return self.top_k is not None or self.top_p < 1.0


def sample_with_noise(
    logits_BV: Tensor,
    *,
    temperatures: Sequence[float],
    truncations: Sequence[Truncation],
    generators: Callable[[int], torch.Generator],
) -> Tensor:
    """Draw one token per row: the argmax of `logit / temperature + Gumbel noise`.

    The noise is the row's own, so that a draw does not depend on the batch. A sum, by which a
    cumulative distribution is inverted, would: its last digit depends on the batch size. Logits are
    float32, -inf for a forbidden token; temperature 0 is greedy; `generators` gives that of a row,
    for rows that are not greedy.
    """
    tokens_B = logits_BV.argmax(dim=1)
    random_rows = [row for row, temperature in enumerate(temperatures) if temperature > 0]
    if not random_rows:
        return tokens_B
    device = logits_BV.device
    rows_R = torch.tensor(random_rows, device=device)
    temperature_R = torch.tensor([temperatures[row] for row in random_rows], device=device)
    logits_RV = logits_BV[rows_R] / temperature_R[:, None]
    # Rows with equal options are truncated together.
    rows_by_truncation: dict[Truncation, list[int]] = {}
    for index, row in enumerate(random_rows):
        if truncations[row].is_active:
            rows_by_truncation.setdefault(truncations[row], []).append(index)
    for truncation, indices in rows_by_truncation.items():
        index_G = torch.tensor(indices, device=device)
        logits_GV = logits_RV[index_G]
        is_kept_GV = keep_likely(logits_GV, top_k=truncation.top_k, top_p=truncation.top_p)
        logits_RV[index_G] = logits_GV.masked_fill(~is_kept_GV, float("-inf"))
    noise_RV = torch.empty_like(logits_RV)
    for noise_V, row in zip(noise_RV, random_rows, strict=True):
        noise_V.exponential_(generator=generators(row))
    # -log of an exponential number is Gumbel noise. Zero is drawn sometimes, and its logarithm
    # would make the token certain.
    smallest = torch.finfo(noise_RV.dtype).tiny
    log_noise_RV = noise_RV.clamp_(min=smallest).log_()
    tokens_B[rows_R] = (logits_RV - log_noise_RV).argmax(dim=1)
    return tokens_B


def _draw_from_sorted(
    values_BK: Tensor, mass_B: Tensor, tokens_BK: Tensor, uniforms_B: Tensor, top_p: float
) -> Tensor:
    """Sample among tokens in descending order, truncated to the share `top_p` of `exp(mass_B)`."""
    probabilities_BK = (values_BK.double() - mass_B[:, None]).exp()
    if top_p < 1.0:
        is_beyond_BK = _is_beyond_nucleus(probabilities_BK, top_p)
        probabilities_BK = probabilities_BK.masked_fill(is_beyond_BK, 0.0)
    index_B = _invert_cumulative(probabilities_BK, uniforms_B.double())
    return tokens_BK.gather(-1, index_B.unsqueeze(-1)).squeeze(-1)


def _is_beyond_nucleus(probabilities_BK: Tensor, top_p: float) -> Tensor:
    """Return which probabilities, in descending order, lie beyond the nucleus."""
    # The mass before a token decides, so that the token that crosses `top_p` is still inside.
    mass_before_BK = probabilities_BK.cumsum(dim=-1) - probabilities_BK
    return mass_before_BK >= top_p


def keep_likely(logits_BV: Tensor, *, top_k: int | None, top_p: float) -> Tensor:
    """Return which tokens can be drawn at temperature 1, bool `[B, V]`.

    NaN and infinite logits are kept, so that they are drawn and noticed.
    """
    vocab_size = logits_BV.shape[-1]
    num_candidates = vocab_size if top_k is None else min(top_k, vocab_size)
    values_BK, tokens_BK = logits_BV.topk(num_candidates, dim=-1)
    values_BK = values_BK.double()
    probabilities_BK = (values_BK - values_BK.logsumexp(dim=-1, keepdim=True)).exp()
    is_beyond_BK = _is_beyond_nucleus(probabilities_BK, top_p)
    # Not `> 0`, which is false for NaN.
    is_kept_BK = ~((probabilities_BK <= 0.0) | is_beyond_BK)
    return torch.zeros_like(logits_BV, dtype=torch.bool).scatter_(-1, tokens_BK, is_kept_BK)


def _draw_from_all(logits_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """Sample a chunk of the vocabulary, then a token in it.

    Two cumulative sums in float64 of about the root of the vocabulary's size replace one over all
    of it.
    """
    vocab_size = logits_BV.shape[-1]
    highest_B1 = logits_BV.max(dim=-1, keepdim=True).values
    weights_BV = (logits_BV - highest_B1).exp_()
    weights_BV = F.pad(weights_BV, (0, -vocab_size % _CHUNK))
    weights_BCK = weights_BV.view(len(weights_BV), -1, _CHUNK)
    # float64: with float32 a cumulative sum over 50,000 tokens misplaces the rare ones.
    uniforms_B = uniforms_B.double()
    sums_BC = weights_BCK.sum(dim=-1, dtype=torch.float64)
    chunk_B = _invert_cumulative(sums_BC, uniforms_B)
    rows_B = torch.arange(len(weights_BV), device=logits_BV.device)
    chunk_sum_B = sums_BC[rows_B, chunk_B]
    ends_BC = sums_BC.cumsum(dim=-1)
    start_B = ends_BC[rows_B, chunk_B] - chunk_sum_B
    # The uniform number's share of the way through the drawn chunk, again in [0, 1).
    share_B = (uniforms_B * ends_BC[:, -1] - start_B) / chunk_sum_B
    share_B = share_B.clamp_(0.0, 1.0 - 2.0**-40)
    index_B = _invert_cumulative(weights_BCK[rows_B, chunk_B].double(), share_B)
    # NaN logits give an index past the end; `require_finite` rejects their log-probability.
    return (chunk_B * _CHUNK + index_B).clamp_(max=vocab_size - 1)


def _invert_cumulative(weights_BK: Tensor, uniforms_B: Tensor) -> Tensor:
    """Return the index at which the cumulative weights reach a uniform share of their sum."""
    cumulative_BK = weights_BK.cumsum(dim=-1)
    # Scaling by the total makes the last positive bin reach the largest uniform number.
    thresholds_B1 = uniforms_B.unsqueeze(-1) * cumulative_BK[:, -1:]
    index_B = torch.searchsorted(cumulative_BK, thresholds_B1, right=True).squeeze(-1)
    return index_B.clamp_(max=weights_BK.shape[-1] - 1)
