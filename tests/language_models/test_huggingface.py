"""The Hugging Face backend samples and scores as transformers does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nip_astra.errors import CheckpointError, ModelLoadError
from nip_astra.language_models.base import SamplingOptions, pad_left
from nip_astra.language_models.huggingface import HuggingFaceLanguageModel
from nip_astra.language_models.sources import resolve_model
from tests.kit.tiny import CPU, load_backend, make_language_model, uniforms_of

CONTEXTS = [[2, 4, 6, 7, 3, 5], [2, 4, 8, 3, 5], [2, 4, 9, 10, 11, 12, 3, 5]]
OPTIONS = SamplingOptions(max_new_tokens=8)
ROWS = (*pad_left(CONTEXTS, CPU), torch.full((3, 2), 7), torch.ones(3, 2, dtype=torch.bool))


@torch.no_grad()
def change(model: HuggingFaceLanguageModel, by: Callable[[Tensor], Tensor]) -> None:
    for parameter in model.parameters():
        parameter.copy_(by(parameter))


def test_greedy_text_equals_generate(tiny_model: HuggingFaceLanguageModel) -> None:
    options = SamplingOptions(max_new_tokens=8, temperature=0.0)
    result = tiny_model.generate(CONTEXTS, 1, uniforms_of(3, 8), options)
    for row, context in enumerate(CONTEXTS):
        expected = tiny_model.module.generate(
            torch.tensor([context]),
            attention_mask=torch.ones(1, len(context), dtype=torch.long),
            max_new_tokens=8,
            do_sample=False,
            suppress_tokens=tiny_model.token_sampler.banned_ids,
        )[0, len(context) :]
        assert result.ids_BT[row][result.mask_BT[row]].tolist() == expected.tolist()


def test_scores_and_gradients_do_not_depend_on_padding_or_on_the_split_into_batches(
    tiny_model: HuggingFaceLanguageModel,
) -> None:
    ids = torch.tensor([[7, 8, 3], [9, 3, 0], [10, 11, 12]])

    def gradients(parts: list[list[int]], extra: int) -> tuple[Tensor, list[Tensor]]:
        tiny_model.module.zero_grad()
        result = torch.zeros(3, 3 + extra)
        for part in parts:
            padding = [[0] * 30] if extra else []
            context, mask = pad_left([CONTEXTS[i] for i in part] + padding, CPU)
            padded = torch.nn.functional.pad(ids[part], (0, extra))
            size = len(part)
            logprobs = tiny_model.logprobs(context[:size], mask[:size], padded, padded > 0)
            logprobs.sum().backward()
            result[part] = logprobs.detach()
        return result[:, :3], [p.grad.clone() for p in tiny_model.parameters()]

    whole, whole_grads = gradients([[0, 1, 2]], 0)
    split, split_grads = gradients([[0], [2, 1]], 5)
    assert torch.allclose(whole, split, atol=1e-5)
    for a, b in zip(whole_grads, split_grads, strict=True):
        assert torch.allclose(a, b, atol=1e-4)


def test_role_markers_are_never_sampled_and_the_shortest_turn_is_kept(
    tiny_model: HuggingFaceLanguageModel,
) -> None:
    options = SamplingOptions(max_new_tokens=8, min_new_tokens=3, temperature=3.0)
    result = tiny_model.generate(CONTEXTS, 40, uniforms_of(120, 8), options)
    sampled = set(result.ids_BT[result.mask_BT].tolist())
    assert sampled.isdisjoint({0, 1, 2, 4, 5})
    assert 3 in sampled
    assert int(result.mask_BT.sum(dim=1).min()) >= 4


@pytest.mark.parametrize("rank", [None, 4])
def test_the_reference_of_a_trained_model_stays_and_weights_are_restored_exactly(
    tiny_model_dir: Path, tmp_path: Path, rank: int | None
) -> None:
    model = load_backend(tiny_model_dir, lora=None if rank is None else {"rank": rank})
    reference = model.frozen_reference()
    assert (reference.module is model.module) == (rank is not None)
    assert list(reference.parameters()) == []
    before = reference.logprobs(*ROWS)
    assert not before.requires_grad
    assert torch.allclose(model.logprobs(*ROWS), before, atol=1e-6)
    change(model, lambda weight: weight + 0.3)
    assert torch.equal(reference.logprobs(*ROWS), before)
    changed = model.logprobs(*ROWS).detach()
    assert not torch.allclose(changed, before, atol=1e-3)
    model.save(tmp_path / "weights")
    change(model, torch.zeros_like)
    model.restore(tmp_path / "weights")
    assert torch.equal(model.logprobs(*ROWS).detach(), changed)
    model.save_pretrained(tmp_path / "whole")
    alone = load_backend(tmp_path / "whole", trainable=False)
    assert torch.allclose(alone.logprobs(*ROWS), changed, atol=1e-4)
    if rank is not None:
        learned = [name for name, weight in model.module.named_parameters() if weight.requires_grad]
        assert all("lora" in name for name in learned)


def test_missing_weights_and_models_are_named(
    tiny_model: HuggingFaceLanguageModel, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        tiny_model.restore(tmp_path / "nowhere")
    with pytest.raises(ModelLoadError, match=r"missing|gguf"):
        resolve_model(str(tmp_path / "missing" / "model.gguf"), None)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        resolve_model(str(tmp_path / "empty"), None)


def test_a_model_in_bfloat16_turns_positions_as_one_in_float32(tmp_path: Path) -> None:
    folder, tables = make_language_model(tmp_path), []
    for dtype in ("float32", "bfloat16"):
        model = load_backend(folder, trainable=False, dtype=dtype)
        assert next(model.module.parameters()).dtype == getattr(torch, dtype)
        tables.append(model._decoder.rotations(2048, torch.float32, CPU)[0])
    assert torch.equal(*tables)
