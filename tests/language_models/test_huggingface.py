"""The Hugging Face backend samples and scores as the model itself says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nip_astra.errors import CheckpointError, ModelLoadError
from nip_astra.language_models.base import SamplingOptions, pad_left
from nip_astra.language_models.huggingface import HuggingFaceLanguageModel
from nip_astra.language_models.sources import load_causal_lm, resolve_model
from tests.kit.tiny import make_language_model

CONTEXTS = [[2, 4, 6, 7, 3, 5], [2, 4, 8, 3, 5], [2, 4, 9, 10, 11, 12, 3, 5]]
OPTIONS = SamplingOptions(max_new_tokens=8)


def _uniforms(rows: int, width: int = 8, seed: int = 0) -> torch.Tensor:
    return torch.rand(rows, width, generator=torch.Generator().manual_seed(seed))


def test_greedy_text_equals_generate(tiny_model: HuggingFaceLanguageModel) -> None:
    options = SamplingOptions(max_new_tokens=8, temperature=0.0)
    found = tiny_model.generate(CONTEXTS, 1, _uniforms(3), options)
    banned = tiny_model.token_sampler.banned_ids
    for row, context in enumerate(CONTEXTS):
        expected = tiny_model.module.generate(
            torch.tensor([context]),
            attention_mask=torch.ones(1, len(context), dtype=torch.long),
            max_new_tokens=8,
            do_sample=False,
            suppress_tokens=banned,
        )[0, len(context) :]
        assert found.ids_BT[row][found.mask_BT[row]].tolist() == expected.tolist()


def test_logprobs_of_sampling_equal_those_of_scoring(tiny_model: HuggingFaceLanguageModel) -> None:
    found = tiny_model.generate(CONTEXTS, 4, _uniforms(12), OPTIONS)
    contexts, mask = pad_left([c for c in CONTEXTS for _ in range(4)], torch.device("cpu"))
    scored = tiny_model.logprobs(contexts, mask, found.ids_BT, found.mask_BT)
    assert torch.allclose(scored, found.logprobs_BT, atol=1e-5)
    assert (found.logprobs_BT[~found.mask_BT] == 0).all()


def test_logprobs_equal_the_log_softmax_of_the_whole_model(
    tiny_model: HuggingFaceLanguageModel,
) -> None:
    context, continuation = CONTEXTS[0], [7, 8, 3]
    logits = tiny_model.module(torch.tensor([context + continuation])).logits[0]
    expected = logits.log_softmax(-1)[len(context) - 1 : -1].gather(
        1, torch.tensor(continuation).unsqueeze(1)
    )
    found = tiny_model.logprobs(
        *pad_left([context], torch.device("cpu")),
        torch.tensor([continuation]),
        torch.ones(1, 3, dtype=torch.bool),
    )
    assert torch.allclose(found[0], expected.squeeze(1), atol=1e-6)


def test_scores_and_gradients_do_not_depend_on_padding_or_on_the_split_into_batches(
    tiny_model: HuggingFaceLanguageModel,
) -> None:
    ids = torch.tensor([[7, 8, 3], [9, 3, 0], [10, 11, 12]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 1]], dtype=torch.bool)

    def gradients(parts: list[list[int]], extra: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        tiny_model.module.zero_grad()
        found = torch.zeros(3, 3 + extra)
        for part in parts:
            contexts, context_mask = pad_left(
                [CONTEXTS[i] for i in part] + ([[0] * 30] if extra else []), torch.device("cpu")
            )
            rows = slice(0, len(part))
            logprobs = tiny_model.logprobs(
                contexts[rows],
                context_mask[rows],
                torch.nn.functional.pad(ids[part], (0, extra)),
                torch.nn.functional.pad(mask[part], (0, extra)),
            )
            logprobs.sum().backward()
            found[part] = logprobs.detach()
        return found[:, :3], [p.grad.clone() for p in tiny_model.parameters()]

    whole, whole_grads = gradients([[0, 1, 2]], 0)
    split, split_grads = gradients([[0], [2, 1]], 5)
    assert torch.allclose(whole, split, atol=1e-5)
    for a, b in zip(whole_grads, split_grads, strict=True):
        assert torch.allclose(a, b, atol=1e-4)


def test_a_row_depends_on_its_own_uniform_numbers_only(
    tiny_model: HuggingFaceLanguageModel,
) -> None:
    uniforms = _uniforms(6)
    together = tiny_model.generate(CONTEXTS, 2, uniforms, OPTIONS)
    alone = tiny_model.generate(CONTEXTS[1:2], 2, uniforms[2:4], OPTIONS)
    assert torch.equal(together.ids_BT[2:4], alone.ids_BT)


def test_a_small_token_budget_changes_nothing_but_the_batches(
    tiny_model: HuggingFaceLanguageModel,
) -> None:
    uniforms = _uniforms(6)
    whole = tiny_model.generate(CONTEXTS, 2, uniforms, OPTIONS)
    tiny_model.max_batch_tokens = 30
    parts = tiny_model.generate(CONTEXTS, 2, uniforms, OPTIONS)
    assert torch.equal(whole.ids_BT, parts.ids_BT)
    assert torch.allclose(whole.logprobs_BT, parts.logprobs_BT, atol=1e-5)


def test_role_markers_are_never_sampled_and_the_shortest_turn_is_kept(
    tiny_model: HuggingFaceLanguageModel,
) -> None:
    options = SamplingOptions(max_new_tokens=8, min_new_tokens=3, temperature=3.0)
    found = tiny_model.generate(CONTEXTS, 40, _uniforms(120), options)
    said = set(found.ids_BT[found.mask_BT].tolist())
    assert said.isdisjoint({0, 1, 2, 4, 5})
    assert 3 in said
    assert int(found.mask_BT.sum(dim=1).min()) >= 4


def test_the_reference_of_a_trained_model_stays_and_has_no_gradient(
    tiny_model: HuggingFaceLanguageModel,
) -> None:
    reference = tiny_model.frozen_reference()
    contexts, mask = pad_left(CONTEXTS, torch.device("cpu"))
    ids, ids_mask = torch.full((3, 2), 7), torch.ones(3, 2, dtype=torch.bool)
    before = reference.logprobs(contexts, mask, ids, ids_mask)
    with torch.no_grad():
        for parameter in tiny_model.parameters():
            parameter.add_(0.1)
    assert torch.equal(reference.logprobs(contexts, mask, ids, ids_mask), before)
    assert not before.requires_grad
    assert list(reference.parameters()) == []


def test_saved_weights_are_restored_exactly(
    tiny_model: HuggingFaceLanguageModel, tmp_path: Path
) -> None:
    tiny_model.save(tmp_path)
    kept = [parameter.clone() for parameter in tiny_model.parameters()]
    with torch.no_grad():
        for parameter in tiny_model.parameters():
            parameter.add_(1.0)
    tiny_model.restore(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(kept, tiny_model.parameters(), strict=True))


def test_weights_of_another_model_are_refused(
    tiny_model: HuggingFaceLanguageModel, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=r"cannot be read.*another checkpoint"):
        tiny_model.restore(tmp_path / "nowhere")


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"does not exist|could not be loaded"):
        resolve_model(str(tmp_path / "missing" / "model.gguf"), None)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelLoadError, match=r"no config\.json"):
        resolve_model(str(tmp_path / "empty"), None)


def test_a_lora_model_starts_as_its_base_and_only_its_adapter_learns(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="LoRA attackers need the extra 'lora'")
    path = make_language_model(tmp_path / "base")
    parameters = HuggingFaceLanguageModel.Parameters.from_dict(
        {"model": str(path), "lora": {"rank": 4}}
    )
    model = HuggingFaceLanguageModel.load(
        parameters, device=torch.device("cpu"), scenario_dir=None, trainable=True
    )
    reference = model.frozen_reference()
    assert reference.module is model.module
    assert all("lora" in name for name, p in model.module.named_parameters() if p.requires_grad)
    contexts, mask = pad_left(CONTEXTS, torch.device("cpu"))
    ids, ids_mask = torch.full((3, 2), 7), torch.ones(3, 2, dtype=torch.bool)
    before = reference.logprobs(contexts, mask, ids, ids_mask)
    assert torch.allclose(model.logprobs(contexts, mask, ids, ids_mask), before, atol=1e-6)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3)
    assert torch.equal(reference.logprobs(contexts, mask, ids, ids_mask), before)
    changed = model.logprobs(contexts, mask, ids, ids_mask).detach()
    assert not torch.allclose(changed, before, atol=1e-3)

    model.save(tmp_path / "adapter")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.restore(tmp_path / "adapter")
    assert torch.equal(model.logprobs(contexts, mask, ids, ids_mask).detach(), changed)

    model.save_pretrained(tmp_path / "merged")
    merged = load_causal_lm(str(tmp_path / "merged"), None)
    alone = HuggingFaceLanguageModel(
        merged, model.tokenizer, device=torch.device("cpu"), trainable=False
    )
    assert torch.allclose(alone.logprobs(contexts, mask, ids, ids_mask), changed, atol=1e-4)


def test_a_model_in_bfloat16_turns_positions_as_one_in_float32(tiny_model_dir: Path) -> None:
    cpu = torch.device("cpu")
    tables = []
    for dtype in ("float32", "bfloat16"):
        parameters = HuggingFaceLanguageModel.Parameters(model=str(tiny_model_dir), dtype=dtype)
        model = HuggingFaceLanguageModel.load(
            parameters, device=cpu, scenario_dir=None, trainable=False
        )
        assert next(model.module.parameters()).dtype == getattr(torch, dtype)
        assert model._decoder is not None
        tables.append(model._decoder.rotations(2048, torch.float32, cpu)[0])
    assert torch.equal(*tables)
