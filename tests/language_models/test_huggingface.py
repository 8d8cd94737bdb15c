"""The Hugging Face backend samples and scores as transformers does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, MambaConfig, MambaForCausalLM

from nip_astra.errors import CheckpointError, ConfigurationError, ModelLoadError
from nip_astra.language_models.adapters import LoraParameters, add_adapter
from nip_astra.language_models.base import (
    SamplingDistribution,
    SamplingOptions,
    pad_left,
    pad_right,
)
from nip_astra.language_models.huggingface import HuggingFaceLanguageModel
from nip_astra.language_models.plain_forward import find_layers
from nip_astra.language_models.sources import resolve_model
from nip_astra.run import prepare_experiment
from nip_astra.trainers.language_model_base import distribute
from tests.kit.messages import says
from tests.kit.resuming import short_experiment
from tests.kit.tiny import (
    CPU,
    load_backend,
    make_gpt2,
    make_language_model,
    make_tokenizer,
    uniforms_of,
)

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
    torch.testing.assert_close(whole_grads, split_grads, atol=1e-4, rtol=1e-5)


def test_role_markers_are_never_sampled_and_the_shortest_turn_is_kept(
    tiny_model: HuggingFaceLanguageModel,
) -> None:
    options = SamplingOptions(max_new_tokens=8, min_new_tokens=3, temperature=3.0)
    result = tiny_model.generate(CONTEXTS, 40, uniforms_of(120, 8), options)
    sampled = set(result.ids_BT[result.mask_BT].tolist())
    assert sampled.isdisjoint({0, 1, 2, 4, 5})
    assert 3 in sampled
    assert int(result.mask_BT.sum(dim=1).min()) >= 4


def test_a_model_without_an_end_of_turn_samples_and_scores(tiny_model_dir: Path) -> None:
    inner = load_backend(tiny_model_dir)
    model = HuggingFaceLanguageModel(
        inner.module, inner.tokenizer, device=CPU, trainable=False, allows_any_token=True
    )
    options = SamplingOptions(max_new_tokens=4, min_new_tokens=2)
    drawn = model.generate(CONTEXTS, 1, uniforms_of(3, 4), options)
    assert drawn.mask_BT.all()
    rows = (*pad_left(CONTEXTS, CPU), drawn.ids_BT, drawn.mask_BT)
    scores = model.token_scores(*rows, distribution=SamplingDistribution(options))
    assert torch.allclose(scores.logprobs_BT, drawn.logprobs_BT, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "lora"),
    [
        (make_language_model, None),
        (make_language_model, {"rank": 4}),
        # The head shares its weights with the embeddings.
        (make_gpt2, {"rank": 4, "target_modules": ["c_attn", "lm_head"]}),
    ],
)
def test_the_reference_of_a_trained_model_stays_and_weights_are_restored_exactly(
    tmp_path: Path, make: Callable[[Path], Path], lora: dict[str, Any] | None
) -> None:
    model = load_backend(make(tmp_path / "model"), lora=lora)
    reference = model.frozen_reference()
    assert (reference.module is model.module) == (lora is not None)
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
    if lora is not None:
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


SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2}
IDS = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
LANGUAGE = SHAPE | IDS | {"vocab_size": len(make_tokenizer()), "initializer_range": 0.4}
IMAGES = SHAPE | {"image_size": 28, "patch_size": 14}


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("gemma3", {"text_config": LANGUAGE | {"head_dim": 8}, "vision_config": IMAGES}),
        ("gemma2", {"final_logit_softcapping": 3.0, "head_dim": 8, "sliding_window": 4}),
        ("granite", {"logits_scaling": 4.0}),
        ("cohere", {"logit_scale": 0.25}),
        ("bloom", {"n_layer": 2}),
        # Stored under other names than those of their weights.
        ("gpt_neox", {}),
        ("mixtral", {"num_local_experts": 4}),
    ],
)
def test_other_architectures_score_as_their_own_forward_pass_and_are_restored(
    tmp_path: Path, kind: str, sizes: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(sizes if "text_config" in sizes else LANGUAGE | sizes))
    module = AutoModelForCausalLM.from_config(config)
    module.generation_config.suppress_tokens = [8, 9, 10]  # of a checkpoint
    module.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    model = load_backend(tmp_path)
    drawn = model.generate(CONTEXTS, 1, uniforms_of(3, 8), OPTIONS)
    rows = (*pad_left(CONTEXTS, CPU), drawn.ids_BT, drawn.mask_BT)
    scores = model.token_scores(*rows, needs_hidden=True)
    expected = torch.zeros(3, 8)
    for row, context in enumerate(CONTEXTS):
        answer_T = drawn.ids_BT[row][drawn.mask_BT[row]]
        logits = model.module(torch.tensor([[*context, *answer_T.tolist()]])).logits[0]
        before = logits.log_softmax(dim=1)[len(context) - 1 : -1]
        expected[row, : len(answer_T)] = before.gather(1, answer_T[:, None]).squeeze(1)
    assert torch.allclose(drawn.logprobs_BT, expected, atol=1e-4)
    assert torch.allclose(scores.logprobs_BT, expected, atol=1e-4)
    assert scores.hidden_BTX is not None
    logits_NV = model.compute_logits(scores.hidden_BTX[drawn.mask_BT])
    chosen = logits_NV.log_softmax(dim=1).gather(1, drawn.ids_BT[drawn.mask_BT][:, None])
    assert torch.allclose(chosen.squeeze(1), expected[drawn.mask_BT], atol=1e-4)
    model.save(tmp_path / "weights")
    change(model, torch.zeros_like)
    model.restore(tmp_path / "weights")
    assert torch.equal(model.logprobs(*rows), scores.logprobs_BT)


# ---- memory and precision

PAIRS = (*pad_left([[2, 6, 7], [2, 6]], CPU), *pad_right([[8, 9, 3], [9, 3]], CPU))


@pytest.fixture(params=["decoder", "own forward pass"])
def load(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Any]:
    make = make_language_model if request.param == "decoder" else make_gpt2
    return partial(load_backend, make(tmp_path / "model"))


def gradients_of(model: HuggingFaceLanguageModel) -> tuple[Tensor, list[Tensor]]:
    scores = model.token_scores(*PAIRS, needs_entropy=True)
    (scores.logprobs_BT.exp().sum() + scores.entropy_BT.sum()).backward()
    return scores.logprobs_BT.detach(), [weight.grad for weight in model.parameters()]  # type: ignore[misc]


def test_layers_computed_again_keep_less_and_give_the_same_gradients(
    load: Callable[..., Any],
) -> None:
    kept, result = [], []
    for recomputes in (False, True):
        model = load()
        if recomputes:
            model.recompute_layers()
        sizes: list[int] = []

        def keep(tensor: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model.logprobs(*PAIRS)
        kept.append(sum(sizes))
        result.append(gradients_of(model))
    torch.testing.assert_close(*result, atol=0, rtol=0)
    assert len(result[0][1]) > 20
    assert kept[1] < 0.7 * kept[0]


def test_a_model_learns_in_bfloat16_on_weights_of_float32(load: Callable[..., Any]) -> None:
    exact, rounded = load(), load(dtype="bfloat16")
    assert rounded.dtype == torch.bfloat16
    assert {weight.dtype for weight in rounded.parameters()} == {torch.float32}
    logprobs, gradients = gradients_of(exact)
    nearly, rounded_gradients = gradients_of(rounded)
    assert nearly.dtype == torch.float32
    # Nats, about 5; bfloat16 has 8 bits, so the error is about a percent. How far gradients turn
    # depends on the version of transformers: 2 to 7 degrees.
    assert 0 < (nearly - logprobs).abs().max() < 0.2
    whole, nearly_whole = (
        torch.cat([item.flatten() for item in some]) for some in (gradients, rounded_gradients)
    )
    assert torch.cosine_similarity(whole, nearly_whole, dim=0) > 0.98
    options = SamplingOptions(max_new_tokens=3)
    drawn = rounded.generate([[2, 6, 7]], 2, torch.full((2, 3), 0.4), options)
    with torch.no_grad():
        scored_BT = rounded.logprobs(*pad_left([[2, 6, 7]] * 2, CPU), drawn.ids_BT, drawn.mask_BT)
    assert torch.allclose(scored_BT, drawn.logprobs_BT, atol=0.05)
    hidden = rounded.token_scores(*PAIRS, needs_hidden=True).hidden_BTX
    assert rounded.compute_logits(hidden[0]).dtype == torch.float32


def test_a_model_without_known_layers_is_refused() -> None:
    with pytest.raises(ConfigurationError) as caught:
        find_layers(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    assert says(caught.value, "layers of Sequential", "GradientCheckpointingLayer", "sharding")


@pytest.mark.usefixtures("no_plugins_left")
def test_the_setting_reaches_the_policy(tmp_path: Path) -> None:
    resolved = short_experiment("self_hosted_grpo", tmp_path / "scenario", num_iterations=1)
    how = {"progress": False, "gradient_checkpointing": True}
    trainer: Any = prepare_experiment(resolved, **how).trainer
    assert trainer.policy.recomputes_layers
    with pytest.raises(ConfigurationError) as caught:
        distribute(object(), trainer.policy, [], trainer.team, trainer.settings)  # type: ignore[arg-type]
    assert says(caught.value, "gradient_checkpointing", "object", "to false")
    resolved = short_experiment("vanilla_ppo", tmp_path / "agents")
    with pytest.raises(ConfigurationError) as caught:
        prepare_experiment(resolved, **how)
    assert says(caught.value, "gradient_checkpointing=true", "Leave it out")


def test_layers_that_peft_cannot_adapt_are_named_with_those_to_choose_from() -> None:
    config = MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, state_size=4)
    with pytest.raises(ConfigurationError) as caught:
        add_adapter(MambaForCausalLM(config), LoraParameters(rank=2))
    assert says(caught.value, "lora.target_modules", "'out_proj'", "in_proj")
    chosen = LoraParameters(rank=2, target_modules=["in_proj", "x_proj"])
    assert add_adapter(MambaForCausalLM(config), chosen).peft_config
