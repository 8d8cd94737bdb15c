"""Snapshots of weights."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Iterator
from itertools import accumulate, chain, count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from nip_astra.language_models.base import SamplingOptions, pad_left
from nip_astra.language_models.huggingface import HuggingFaceLanguageModel
from nip_astra.language_models.sources import load_causal_lm
from nip_astra.language_models.tree_engine import weights
from nip_astra.language_models.tree_engine.weights import (
    Adapter,
    DenseLinear,
    Matrix,
    OneDnnLinear,
    Weights,
    adapted_linear,
    frozen_weights,
    has_onednn,
    packed_linear,
    uses_onednn,
)
from tests.kit.tiny import CPU, load_backend
from tests.language_models.tree_engine.test_decode_graphs import fix

needs_onednn = pytest.mark.skipif(
    not has_onednn(CPU, torch.float32), reason="this build of torch has no oneDNN"
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_overwritten_snapshot_equals_a_new_snapshot_in_the_same_memory(
    tiny_model_dir: Path, dtype: torch.dtype
) -> None:
    module = load_causal_lm(str(tiny_model_dir), None)
    old = frozen_weights(module, dtype, use_adapter=False)
    places = [old.embedding_VX.data_ptr(), old.layers[0].input_norm.data_ptr()]
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape))
    new = frozen_weights(module, dtype, use_adapter=False)
    assert frozen_weights(module, dtype, use_adapter=False, into=old) is old
    assert places == [old.embedding_VX.data_ptr(), old.layers[0].input_norm.data_ptr()]
    x = torch.randn(3, old.embedding_VX.shape[1]).to(dtype)

    def values(held: Weights) -> list[Tensor]:
        of_layers = [
            (layer.input_norm, layer.mlp_norm, layer.qkv(x), layer.gate_up(x))
            for layer in held.layers
        ]
        return [held.embedding_VX, held.final_norm, held.head(x), *chain(*of_layers)]

    assert all(map(torch.equal, values(old), values(new)))


def _matrix(num_outputs: int) -> Matrix:
    weight, bias = torch.randn(num_outputs, 12), torch.randn(num_outputs)
    return Matrix((weight,), bias, lambda x, bias, weight: F.linear(x, weight, bias))


def _adapter(num_outputs: int, rank: int, scaling: float) -> Adapter:
    down, up = torch.randn(rank, 12), torch.randn(num_outputs, rank)
    return Adapter(down.requires_grad_(), up.requires_grad_(), scaling)


def _one_by_one(x: Tensor, matrices: list[Matrix], adapters: list[list[Adapter]]) -> Tensor:
    parts = []
    for ((weight,), bias, _), of_matrix in zip(matrices, adapters, strict=True):
        part = F.linear(x, weight, bias)
        for down, up, scaling in of_matrix:
            part = part + F.linear(F.linear(x, down), up) * scaling
        parts.append(part)
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("is_joined", [False, pytest.param(True, marks=needs_onednn)])
def test_one_product_is_all_products_with_their_adapters(is_joined: bool) -> None:
    torch.manual_seed(0)
    separate = matrices = [_matrix(size) for size in (7, 5, 3)]
    if is_joined:
        bias = torch.cat([matrix.bias for matrix in separate])
        matrices = [Matrix(tuple(m.weights[0] for m in separate), bias, OneDnnLinear.apply)]
    # A single adapter, none, and two of different rank.
    adapters = [[_adapter(7, 4, 2.0)], [], [_adapter(3, 2, 0.5), _adapter(3, 3, 1.5)]]
    x = torch.randn(6, 12, requires_grad=True)
    learnt = [w for of_matrix in adapters for a in of_matrix for w in (a.down, a.up)]
    result = adapted_linear(matrices, adapters)(x)
    expected = _one_by_one(x, separate, adapters)
    upstream = torch.randn_like(result)
    ours, theirs = (
        [of, *torch.autograd.grad(of, [x, *learnt], upstream)] for of in (result, expected)
    )
    torch.testing.assert_close(ours, theirs)


def test_adapters_learn_where_the_input_does_not() -> None:
    adapter, shapes = _adapter(5, 2, 1.0), list[tuple[int, ...]]()

    def multiply(x: Tensor, bias: Tensor | None, weight: Tensor) -> Tensor:
        shapes.append(tuple(weight.shape))
        return F.linear(x, weight, bias)

    matrix = Matrix((torch.randn(5, 12),), None, multiply)
    adapted_linear([matrix], [[adapter]])(torch.randn(4, 12)).sum().backward()
    assert adapter.down.grad is not None
    assert adapter.up.grad is not None
    # Forward only: no gradient is computed for the matrix.
    assert shapes == [(5, 12)]


def test_an_adapter_that_adds_nothing_changes_no_bit() -> None:
    torch.manual_seed(0)
    matrix, adapter = _matrix(5), Adapter(torch.randn(2, 12), torch.zeros(5, 2), 2.0)
    x = torch.randn(4, 12)
    expected = F.linear(x, matrix.weights[0], matrix.bias)
    assert torch.equal(adapted_linear([matrix], [[adapter]])(x), expected)


CONTEXTS = [[2, 4, 6, 7, 3, 5], [2, 4, 8, 3, 5]]
# Log-probabilities are the model's own at any temperature; TRL and verl divide logits by it.
OPTIONS = SamplingOptions(max_new_tokens=4, temperature=0.3)


def gap(model: HuggingFaceLanguageModel) -> float:
    """Distance between log-probabilities of sampling and of scoring."""
    drawn = model.generate(CONTEXTS, 1, torch.rand(2, 4), OPTIONS)
    with torch.no_grad():
        scored = model.logprobs(*pad_left(CONTEXTS, CPU), drawn.ids_BT, drawn.mask_BT)
    return float((scored - drawn.logprobs_BT).abs().max())


@pytest.mark.parametrize("has_fixed_shapes", [False, True])
@pytest.mark.parametrize("is_fused", [False, True])
def test_a_step_of_any_optimizer_is_sampled_from(
    tiny_model: HuggingFaceLanguageModel, has_fixed_shapes: bool, is_fused: bool
) -> None:
    if has_fixed_shapes:
        fix(tiny_model, None)
    # A fused step does not increase the tensors' version counters.
    optimizer = torch.optim.AdamW(tiny_model.parameters(), lr=0.3, fused=is_fused)
    assert gap(tiny_model) < 1e-4
    ids_BT = torch.tensor([[6, 7], [8, 9]])
    logprobs = tiny_model.logprobs(*pad_left(CONTEXTS, CPU), ids_BT, ids_BT > 0)
    logprobs.sum().backward()
    optimizer.step()
    assert gap(tiny_model) < 1e-4


def test_unchanged_weights_are_not_copied_again(tiny_model: HuggingFaceLanguageModel) -> None:
    gap(tiny_model)
    first = tiny_model._snapshot.update(tiny_model.parameters())
    gap(tiny_model)
    assert tiny_model._snapshot.update(tiny_model.parameters()) is first


def test_a_snapshot_of_inference_mode_is_overwritten_outside_of_it(tiny_model_dir: Path) -> None:
    model = load_backend(tiny_model_dir, lora={"rank": 2})
    fix(model, None)
    with torch.inference_mode():
        model.generate(CONTEXTS, 1, torch.rand(2, 4), OPTIONS)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
    assert gap(model) < 1e-4


@needs_onednn
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("num_rows", [1, 2, 17, 300])
def test_packed_products_and_gradients_equal_torch(num_rows: int, has_bias: bool) -> None:
    torch.manual_seed(0)
    leaves = [torch.randn(shape, requires_grad=True) for shape in ((num_rows, 40), (48, 40), (48,))]
    inputs = leaves if has_bias else [*leaves[:2], None]
    x, weight, bias = inputs
    expected = F.linear(x, weight, bias)
    for dense in (packed_linear(weight, bias)(x), DenseLinear(weight, bias)(x)):
        assert torch.allclose(dense, expected, atol=1e-4)
    learned = leaves if has_bias else leaves[:2]
    # One matrix, or several side by side.
    parts = weight.split([30, 18]) if num_rows == 17 else [weight]
    ours = torch.autograd.grad(OneDnnLinear.apply(x, bias, *parts).square().sum(), learned)
    theirs = torch.autograd.grad(expected.square().sum(), learned)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)
    # Without gradients of a frozen matrix.
    (gradient,) = torch.autograd.grad(OneDnnLinear.apply(x, None, weight.detach()).sum(), x)
    assert torch.allclose(gradient, weight.sum(dim=0).expand(num_rows, -1), atol=1e-3)


SQUARE = torch.Size([512, 512])


@needs_onednn
@pytest.mark.parametrize(
    ("shape", "vectors", "expected"),
    [
        (SQUARE, "AVX512", True),
        (SQUARE, "AVX2", True),
        (SQUARE, "DEFAULT", False),
        (torch.Size([64, 64]), "AVX512", False),
    ],
)
def test_a_large_matrix_is_multiplied_by_onednn_where_that_was_faster(
    monkeypatch: pytest.MonkeyPatch, shape: torch.Size, vectors: str, expected: bool
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: vectors)
    assert uses_onednn(shape, CPU, torch.float32) is expected


def _large_llama() -> LlamaForCausalLM:
    """A model of one layer whose matrices are large enough for oneDNN."""
    sizes = {"vocab_size": 8, "hidden_size": 512, "intermediate_size": 512}
    torch.manual_seed(0)
    module = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=8))
    assert module.model.layers[0].mlp.down_proj.weight.numel() >= weights.SMALLEST_FOR_ONEDNN
    return module


def _fresh_weights_module() -> Any:
    """Load the module again, as another process does."""
    spec = importlib.util.spec_from_file_location("fresh_weights", weights.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Its dataclasses look their module up.
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[spec.name]
    return module


def _slowing_clock() -> Iterator[float]:
    return accumulate(float(number) for number in count())


def _quickening_clock() -> Iterator[float]:
    return accumulate(1 / (number + 1) for number in count())


@needs_onednn
def test_no_clock_changes_the_kernel_of_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two processes one is interrupted early, and the other late."""
    llama, x = _large_llama(), torch.randn(4, 512)
    products = []
    for make_clock in (_slowing_clock, _quickening_clock):
        fresh = _fresh_weights_module()
        for name in ("perf_counter", "monotonic", "process_time", "thread_time", "time"):
            monkeypatch.setattr(time, name, make_clock().__next__)
        held = fresh.frozen_weights(llama, torch.float32, use_adapter=False)
        monkeypatch.undo()
        products.append(held.layers[0].down(x))
    assert torch.equal(*products)


@needs_onednn
def test_where_bfloat16_cannot_be_packed_torch_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on processors without AVX-512, where packing raises."""
    names = vars(torch.ops.mkldnn)
    monkeypatch.setitem(names, "_is_mkldnn_bf16_supported", lambda: False)
    monkeypatch.setattr(weights, "packed_linear", lambda *_: pytest.fail("was packed"))
    frozen = weights.frozen_weights(_large_llama(), torch.bfloat16, use_adapter=False)
    assert frozen.layers[0].down(torch.ones(2, 512, dtype=torch.bfloat16)).shape == (2, 512)
    assert has_onednn(CPU, torch.float32)
