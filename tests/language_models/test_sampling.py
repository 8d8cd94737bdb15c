"""Sampling draws exactly from the set and the distribution that the options define."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import (
    PreTrainedTokenizerFast,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from nip_astra.errors import ModelLoadError
from nip_astra.language_models import scoring
from nip_astra.language_models.base import (
    LanguageModel,
    SamplingOptions,
    TokenScores,
    pad_left,
    pad_right,
)
from nip_astra.language_models.huggingface import HuggingFaceLanguageModel
from nip_astra.language_models.sampling import SamplingDistribution as Distribution
from nip_astra.language_models.sampling import (
    SupportMask,
    find_banned_ids,
    keep_likely,
    sample_tokens,
)
from tests.kit.tiny import CPU, load_backend


def _frequencies(logits: torch.Tensor, **options: float) -> torch.Tensor:
    # A fine grid of uniform numbers reproduces the distribution without chance.
    uniforms = (torch.arange(20_000) + 0.5) / 20_000
    drawn = sample_tokens(logits.expand(len(uniforms), -1), uniforms, **options)
    return torch.bincount(drawn, minlength=logits.shape[-1]) / len(uniforms)


@pytest.mark.parametrize("top_k", [None, 1, 5])
@pytest.mark.parametrize("top_p", [1.0, 0.7])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_draws_follow_the_distribution_of_the_hugging_face_warpers(
    top_k: int | None, top_p: float, temperature: float
) -> None:
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(0))
    expected = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k is not None:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1.0:
        expected = TopPLogitsWarper(top_p)(None, expected)
    result = _frequencies(logits, top_k=top_k, top_p=top_p, temperature=temperature)
    assert torch.allclose(result, expected.softmax(-1)[0], atol=2e-4)
    assert torch.equal(result > 0, expected[0] > float("-inf"))


def test_forbidden_tokens_are_never_drawn_and_temperature_zero_is_greedy() -> None:
    logits = torch.tensor([[1.0, 0.0, float("-inf")]])
    largest = torch.tensor([1.0 - 2.0**-24])
    assert sample_tokens(logits, largest).tolist() == [1]
    assert sample_tokens(logits, torch.tensor([0.0])).tolist() == [0]
    assert sample_tokens(logits, largest, temperature=0.0).tolist() == [0]
    assert keep_likely(logits, top_k=None, top_p=1.0).tolist() == [[True, True, False]]


CONTEXTS = [[2, 7], [2, 9, 8], [2, 5, 7, 9]]
PROBES = [[10, 3], [11, 12, 13], [9]]
ROWS = (*pad_left(CONTEXTS, CPU), *pad_right(PROBES, CPU))
OPTIONS = {
    "tempered": SamplingOptions(max_new_tokens=3, temperature=0.5),
    "hot": SamplingOptions(max_new_tokens=3, temperature=1.7, min_new_tokens=1),
    "nucleus": SamplingOptions(max_new_tokens=3, temperature=0.8, top_p=0.7),
    "few": SamplingOptions(max_new_tokens=3, top_k=4, min_new_tokens=1),
    "both": SamplingOptions(max_new_tokens=3, temperature=1.3, top_k=6, top_p=0.8),
}


def scored(
    model: HuggingFaceLanguageModel, rows: tuple[Tensor, ...], options: SamplingOptions, **how: Any
) -> tuple[TokenScores, SupportMask | None]:
    """Scores under the distribution that options define, and the tokens that it keeps."""
    kept = model.support_mask(*rows, options) if options.cuts else None
    return model.token_scores(*rows, distribution=Distribution(options, kept), **how), kept


each_way = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
each_path = pytest.mark.parametrize("is_plain", [False, True], ids=["decoder", "plain"])


@each_path
@each_way
def test_a_token_is_as_likely_as_it_is_often_drawn(
    tiny_model: HuggingFaceLanguageModel, options: SamplingOptions, is_plain: bool
) -> None:
    if is_plain:
        tiny_model._decoder = None
    options = replace(options, max_new_tokens=1)
    # Evenly spaced uniform numbers draw each token as often as its probability says.
    count = 2000
    uniforms = (torch.arange(count) + 0.5).unsqueeze(1) / count
    drawn = tiny_model.generate([CONTEXTS[1]], count, uniforms, options).ids_BT.flatten()
    shares = drawn.bincount(minlength=tiny_model.module.config.vocab_size) / count
    tokens = [[int(token)] for token in shares.nonzero()]
    rows = *pad_left([CONTEXTS[1]] * len(tokens), CPU), *pad_right(tokens, CPU)
    scores, kept = scored(tiny_model, rows, options)
    likely = scores.logprobs_BT.exp()
    torch.testing.assert_close(likely, shares[shares > 0].unsqueeze(1), atol=1.5 / count, rtol=0)
    if kept is not None:
        assert {int(i) for i in kept.at([0]).ids_K} == {token for (token,) in tokens}


@each_way
def test_both_paths_give_the_same_scores_entropies_and_gradients(
    tiny_model_dir: Path, options: SamplingOptions
) -> None:
    result = []
    for is_plain in (False, True):
        model = load_backend(tiny_model_dir)
        if is_plain:
            model._decoder = None
        scores, _ = scored(model, ROWS, options, needs_entropy=True)
        (scores.logprobs_BT.sum() + 0.3 * scores.entropy_BT.sum()).backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        assert gradient.isfinite().all()
        result.append((scores.logprobs_BT.detach(), scores.entropy_BT.detach(), gradient))
    torch.testing.assert_close(*result, atol=2e-4, rtol=1e-3)


def test_small_chunks_of_positions_change_nothing(
    tiny_model: HuggingFaceLanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, kept = scored(tiny_model, ROWS, OPTIONS["both"])
    monkeypatch.setattr(scoring, "MAX_LOGITS", 50)
    parts, again = scored(tiny_model, ROWS, OPTIONS["both"])
    assert torch.equal(again.ids_K, kept.ids_K)
    assert torch.equal(again.counts_S, kept.counts_S)
    torch.testing.assert_close(parts.logprobs_BT, whole.logprobs_BT, atol=1e-5, rtol=0)


def test_a_drawn_token_is_kept_where_rounding_would_cut_it(
    tiny_model: HuggingFaceLanguageModel,
) -> None:
    options = SamplingOptions(max_new_tokens=1, top_k=1)
    rows = *pad_left([CONTEXTS[0]] * 3, CPU), *pad_right([[9], [10], [11]], CPU)
    scores, _ = scored(tiny_model, rows, options)
    assert scores.logprobs_BT.isfinite().all()


def test_kept_tokens_have_the_order_of_the_given_positions() -> None:
    kept = SupportMask(torch.tensor([5, 6, 7, 8, 9, 4]), torch.tensor([2, 1, 3]))
    result = kept.at([2, 0])
    assert result.ids_K.tolist() == [8, 9, 4, 5, 6]
    assert result.counts_S.tolist() == [3, 2]


def test_rows_of_the_vocabulary_without_a_token_are_never_drawn_wherever_they_are() -> None:
    raw = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "b": 7, "<end>": 8}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>", eos_token="<end>")
    assert find_banned_ids(tokenizer, [8], 10) == [0, 2, 3, 4, 5, 6, 9]


def test_a_backend_without_distributions_is_a_typed_error(
    tiny_model: HuggingFaceLanguageModel,
) -> None:
    options = OPTIONS["both"]
    with pytest.raises(ModelLoadError, match=r"behaviour\.logprobs"):
        LanguageModel.token_scores(tiny_model, *ROWS, distribution=Distribution(options))
    with pytest.raises(ModelLoadError, match=r"behaviour\.logprobs"):
        LanguageModel.support_mask(tiny_model, *ROWS, options)
