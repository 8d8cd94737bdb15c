"""Our forward pass equals that of transformers, for every supported architecture."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    MistralForCausalLM,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

from nip_astra.errors import ConfigurationError, ModelLoadError
from nip_astra.language_models import huggingface
from nip_astra.language_models.base import SamplingOptions, pad_left, pad_right
from nip_astra.language_models.huggingface import HuggingFaceLanguageModel
from nip_astra.language_models.sources import round_weights
from nip_astra.language_models.tree_engine import decoder as decoder_module
from nip_astra.language_models.tree_engine.attention import TrieAttention
from nip_astra.language_models.tree_engine.decoder import (
    build_decoder,
    rms_norm,
    silu_gated,
    unsaved,
    why_unsupported,
)
from nip_astra.language_models.tree_engine.token_trie import build_trie
from nip_astra.language_models.tree_engine.weights import frozen_weights, live_weights
from tests.kit.tiny import CPU, load_backend, make_gpt2, make_language_model, uniforms_of

SIZES: dict[str, Any] = {
    "vocab_size": 23,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.4,
    "eos_token_id": 3,
    "pad_token_id": 0,
    "bos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, {"attention_bias": True}),
    "llama3 rope": (
        LlamaForCausalLM,
        {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True},
    ),
    "mistral": (MistralForCausalLM, {"sliding_window": None, "head_dim": 16}),
    "qwen2": (Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3ForCausalLM, {"head_dim": 16}),
}


def build(name: str = "llama", **more: Any) -> Any:
    torch.manual_seed(0)
    kind, options = KINDS[name]
    module = kind(kind.config_class(**{**SIZES, **options, **more})).eval()
    # Random norms and biases, so that a missing parameter is noticed.
    with torch.no_grad():
        for parameter_name, parameter in module.named_parameters():
            if "norm" in parameter_name or parameter_name.endswith("bias"):
                parameter.uniform_(0.5, 1.5)
    return module


@pytest.mark.parametrize("name", KINDS)
def test_logits_and_gradients_equal_those_of_transformers(name: str) -> None:
    module = build(name)
    decoder = build_decoder(module)
    sequences = [[2, 4, 6, 7, 8], [2, 4, 6, 9], [2, 5, 6, 7, 8, 9, 10]]
    trie = build_trie(sequences)
    where = trie.ids_N, trie.positions_N, TrieAttention(trie, torch.float32)
    for read in (frozen_weights, live_weights):
        weights = read(module, torch.float32, use_adapter=True)
        hidden = decoder.hidden(weights, *where)
        logits = weights.head(hidden)
        for row, sequence in enumerate(sequences):
            expected = module(torch.tensor([sequence])).logits[0]
            result = logits[trie.nodes_SD[row, : len(sequence)]]
            assert torch.allclose(result, expected, atol=2e-4)
    ours, theirs = (
        torch.autograd.grad(logits.log_softmax(-1)[:, 7].sum(), list(module.parameters()))
        for logits in (result, expected)
    )
    torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)


def test_other_models_use_their_own_forward_pass(caplog: pytest.LogCaptureFixture) -> None:
    assert "sliding window" in str(why_unsupported(build("mistral", sliding_window=8)))
    dynamic = {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0}
    assert "dynamic" in str(why_unsupported(build(rope_parameters=dynamic)))
    other = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2))
    inexact = build()
    inexact.model.norm.forward = lambda x: x * 2.0
    for module, fact in ((other, "GPT2LMHeadModel"), (inexact, "outputs differ")):
        with caplog.at_level(logging.INFO, logger=decoder_module.__name__):
            assert build_decoder(module) is None
        assert fact in caplog.messages[-1]


@pytest.fixture
def gpt2(tmp_path: Path) -> HuggingFaceLanguageModel:
    """A backend over an architecture with learned positions, which goes through `generate`."""
    model = load_backend(make_gpt2(tmp_path / "gpt2"))
    # A checkpoint's own generation settings must not change the distribution.
    model.module.generation_config.repetition_penalty = 5.0
    assert model._decoder is None
    return model


def test_other_architectures_sample_through_generate(gpt2: HuggingFaceLanguageModel) -> None:
    contexts = [[2, 4, 6, 7], [2, 4, 8], [2, 9, 9, 9, 9, 9, 10]]
    uniforms = uniforms_of(12, 6)
    options = SamplingOptions(max_new_tokens=6, min_new_tokens=1)
    with gpt2.counting() as spent:
        drawn = gpt2.generate(contexts, 4, uniforms, options)
    assert spent.generated == int(drawn.mask_BT.sum())
    assert spent.forwarded > spent.generated
    rows = [context for context in contexts for _ in range(4)]
    turns = [ids[mask].tolist() for ids, mask in zip(drawn.ids_BT, drawn.mask_BT, strict=True)]
    assert set(drawn.ids_BT[drawn.mask_BT].tolist()).isdisjoint({0, 1, 2, 4, 5})
    assert all(turn.index(3) == len(turn) - 1 for turn in turns if 3 in turn)
    scored = gpt2.logprobs(*pad_left(rows, CPU), *pad_right(turns, CPU))
    width = scored.shape[1]
    assert torch.allclose(scored, drawn.logprobs_BT[:, :width], atol=1e-4)
    gpt2.max_batch_tokens = 20
    parts = gpt2.generate(contexts, 4, uniforms, options)
    assert torch.equal(parts.ids_BT, drawn.ids_BT)


def test_other_architectures_play_trees(gpt2: HuggingFaceLanguageModel) -> None:
    session = gpt2.open_session()
    contexts = [[2, 4, 6, 7], [2, 4, 8, 9]]
    uniforms = torch.rand(4, 3)
    options = SamplingOptions(max_new_tokens=3)
    turns = session.generate(contexts, 2, uniforms, options, spans=[(2, 4), (3, 4)])
    expected = gpt2.module(torch.tensor([contexts[1]])).logits[0, 2].log_softmax(-1)[9]
    assert torch.allclose(turns.span_logprobs_CT[1, 0], expected, atol=1e-4)
    assert float(turns.span_logprobs_CT[1, 1].detach()) == 0.0


def test_a_large_frozen_model_is_held_once_and_cannot_be_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_language_model(tmp_path / "model")
    whole = load_backend(path, trainable=False)
    monkeypatch.setattr(huggingface, "SMALLEST_RELEASED", 0)
    held_once = load_backend(path, trainable=False)
    assert held_once.module.model.layers[0].mlp.up_proj.weight.device.type == "meta"
    assert held_once.num_parameters() == whole.num_parameters()
    models, uniforms, options = (whole, held_once), torch.rand(4, 6), SamplingOptions(6)
    drawn, other = (model.generate([[2, 4, 6]], 4, uniforms, options) for model in models)
    assert torch.equal(drawn.ids_BT, other.ids_BT)
    rows = (*pad_left([[2, 4, 6]] * 4, CPU), drawn.ids_BT, drawn.mask_BT)
    assert torch.allclose(*(model.logprobs(*rows) for model in models), atol=1e-5)
    with pytest.raises(ModelLoadError, match="frozen"):
        held_once.save_pretrained(tmp_path / "copy")


@pytest.mark.parametrize("name", ["tiny_model", "gpt2"])
def test_entropies_and_hidden_states_come_from_the_same_pass(
    name: str, request: pytest.FixtureRequest
) -> None:
    model: HuggingFaceLanguageModel = request.getfixturevalue(name)
    ids = torch.tensor([[7, 8, 3], [9, 3, 0]])
    mask = ids > 0
    rows = (*pad_left([[2, 4, 6, 7], [2, 4]], CPU), ids, mask)
    with model.counting() as spent, torch.no_grad():
        result = model.token_scores(*rows, needs_entropy=True, needs_hidden=True)
    assert spent.head_rows == 5
    assert result.hidden_BTX.shape == (2, 3, model.hidden_size)
    assert torch.equal(result.logprobs_BT, model.logprobs(*rows))
    for row, context in enumerate([[2, 4, 6, 7], [2, 4]]):
        length = int(mask[row].sum())
        whole = torch.tensor([context + ids[row, :length].tolist()])
        output = model.module(whole, output_hidden_states=True)
        before = slice(len(context) - 1, -1)
        expected = torch.distributions.Categorical(logits=output.logits[0, before]).entropy()
        assert torch.allclose(result.entropy_BT[row, :length], expected, atol=1e-5)
        hidden = output.hidden_states[-1][0, before]
        assert torch.allclose(result.hidden_BTX[row, :length], hidden, atol=1e-5)
    assert (result.entropy_BT[~mask] == 0).all()
    assert (result.hidden_BTX[~mask] == 0).all()


def test_buffers_are_rounded_with_the_weights_but_not_those_of_rotary_positions() -> None:
    module = torch.nn.Linear(2, 2)
    for name in ("scale", "inv_freq", "original_inv_freq"):
        module.register_buffer(name, torch.ones(2))
    module.register_buffer("count", torch.ones(2, dtype=torch.long))
    round_weights(module, torch.bfloat16)
    assert {name: buffer.dtype for name, buffer in module.named_buffers()} == {
        "scale": torch.bfloat16,
        "inv_freq": torch.float32,
        "original_inv_freq": torch.float32,
        "count": torch.long,
    }


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"lora_bias": True}, "its adapters have biases"),
        ({"use_dora": True}, "a magnitude vector"),
        ({"bias": "lora_only"}, "it learns weights under its adapters"),
        ({"target_modules": ["embed_tokens"]}, "other than LoRA on linear layers"),
        ({"modules_to_save": ["lm_head"]}, "other than LoRA on linear layers"),
        ({}, ""),
    ],
)
def test_adapters_that_are_more_than_two_matrices_go_through_the_module(
    more: dict[str, Any], reason: str
) -> None:
    config = LoraConfig(**{"r": 2, "target_modules": ["q_proj", "down_proj"], **more})
    module = get_peft_model(build(), config).get_base_model()
    result = why_unsupported(module) or ""
    assert reason in result
    assert bool(reason) == bool(result)


def test_a_target_on_the_attackers_weights_keeps_its_own_options(tiny_model_dir: Path) -> None:
    def parameters(**given: Any) -> Any:
        return HuggingFaceLanguageModel.Parameters(model=str(tiny_model_dir), **given)

    attacker = load_backend(tiny_model_dir, lora={"rank": 2})
    target = attacker.base_for(parameters(max_batch_tokens=256, decode_graphs="never"))
    assert target.module is attacker.module
    assert (target.max_batch_tokens, attacker.max_batch_tokens) == (256, 8192)
    assert (target._decode_graphs, attacker._decode_graphs) == ("never", "auto")
    with pytest.raises(ConfigurationError, match="decode_graphs"):
        attacker.base_for(parameters(decode_graphs="always"))


@pytest.fixture(params=["small", "large"])
def _size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "large":
        monkeypatch.setattr(decoder_module, "SMALLEST_UNSAVED", 0)


def _agree(one: Callable[..., Tensor], other: Callable[..., Tensor], *inputs: Tensor) -> None:
    leaves = [x.requires_grad_() for x in inputs]
    results = one(*leaves), other(*leaves)
    upstream = torch.randn_like(results[0])
    ours, theirs = ([of, *torch.autograd.grad(of, leaves, upstream)] for of in results)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.usefixtures("_size")
def test_norms_gates_and_recomputed_functions_are_those_of_torch() -> None:
    torch.manual_seed(0)
    for shape in ((6, 8), (6, 3, 8)):
        _agree(
            lambda x, weight: rms_norm(x, weight, 1e-5),
            lambda x, weight: F.rms_norm(x, (8,), weight, 1e-5),
            torch.randn(shape),
            torch.rand(8),
        )
    _agree(silu_gated, lambda x: F.silu(x[:, :4]) * x[:, 4:], torch.randn(6, 8))
    _agree(lambda x: unsaved(torch.tanh, x), torch.tanh, torch.randn(6, 8))


def test_a_norm_in_bfloat16_is_computed_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(decoder_module, "SMALLEST_UNSAVED", 0)
    x, weight, upstream = torch.randn(64, 96), torch.rand(96), torch.randn(64, 96)

    def gradient(dtype: torch.dtype) -> Tensor:
        leaf = x.bfloat16().to(dtype).requires_grad_()
        normed = rms_norm(leaf, weight.bfloat16().to(dtype), 1e-5)
        return torch.autograd.grad(normed, leaf, upstream.bfloat16().to(dtype))[0].float()

    exact = gradient(torch.float32)
    # A single rounding, of the result only.
    assert (gradient(torch.bfloat16) - exact).norm() < 2**-8 * exact.norm()


def test_nothing_of_a_large_functions_inside_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_module, "SMALLEST_UNSAVED", 0)
    x, weight = torch.randn(6, 8, requires_grad=True), torch.rand(8)
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        rms_norm(x, weight, 1e-5)
        silu_gated(x)
    assert {tensor.data_ptr() for tensor in kept} == {x.data_ptr(), weight.data_ptr()}
