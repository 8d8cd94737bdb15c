"""oneDNN's products are torch's, with gradients, and the choice between them is stated."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from nip_astra.language_models.tree_engine import weights
from nip_astra.language_models.tree_engine.weights import (
    DenseLinear,
    OneDnnLinear,
    has_onednn,
    is_packing_faster,
    packed_linear,
)

pytestmark = pytest.mark.skipif(
    not has_onednn(torch.device("cpu"), torch.float32), reason="this build of torch has no oneDNN"
)


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("num_rows", [1, 2, 17, 300])
def test_packed_products_equal_torch(num_rows: int, has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 40, generator=generator)
    bias = torch.randn(48, generator=generator) if has_bias else None
    x = torch.randn(num_rows, 40, generator=generator)
    assert torch.allclose(packed_linear(weight, bias)(x), DenseLinear(weight, bias)(x), atol=1e-4)


@pytest.mark.parametrize("has_bias", [True, False])
def test_gradients_equal_those_of_torch(has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(9, 40), (48, 40), *([(48,)] if has_bias else [])]
    inputs = [torch.randn(shape, generator=generator) for shape in shapes]
    gradients = []
    for function in (OneDnnLinear.apply, F.linear):
        leaves = [value.clone().requires_grad_() for value in inputs]
        product = function(*leaves, *([] if has_bias else [None]))
        product.square().sum().backward()
        gradients.append([leaf.grad for leaf in leaves])
    for ours, theirs in zip(*gradients, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-3)


def test_a_frozen_matrix_gets_no_gradient() -> None:
    x = torch.randn(3, 40, requires_grad=True)
    weight = torch.randn(48, 40)
    OneDnnLinear.apply(x, weight, None).sum().backward()
    assert torch.allclose(x.grad, weight.sum(dim=0).expand(3, -1), atol=1e-4)
    assert weight.grad is None


def test_the_faster_kernel_is_measured_and_stated(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for seconds, expected in ((1.0, True), (9.0, False)):
        weights._measure.cache_clear()
        times = iter([seconds, 2.0])
        monkeypatch.setattr(weights, "_fastest", lambda *_, times=times: next(times))
        with caplog.at_level(logging.INFO, logger=weights.__name__):
            assert is_packing_faster(torch.Size([512, 512]), torch.float32) is expected
        assert caplog.messages[-1].endswith("taking oneDNN" if expected else "taking torch")
    weights._measure.cache_clear()


def test_small_matrices_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_fastest", lambda *_: pytest.fail("was measured"))
    assert not is_packing_faster(torch.Size([64, 64]), torch.float32)


def test_where_bfloat16_cannot_be_packed_torch_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on processors without AVX-512, where packing raises."""
    names = vars(torch.ops.mkldnn)
    monkeypatch.setitem(names, "_is_mkldnn_bf16_supported", lambda: False)
    monkeypatch.setattr(weights, "packed_linear", lambda *_: pytest.fail("was packed"))
    config = LlamaConfig(
        vocab_size=8,
        hidden_size=512,
        intermediate_size=512,
        num_hidden_layers=1,
        num_attention_heads=8,
    )
    module = LlamaForCausalLM(config)
    assert module.model.layers[0].mlp.down_proj.weight.numel() >= weights.SMALLEST_MEASURED
    frozen = weights.frozen_weights(module, torch.bfloat16, use_adapter=False)
    assert frozen.layers[0].down(torch.ones(2, 512, dtype=torch.bfloat16)).shape == (2, 512)
    assert has_onednn(torch.device("cpu"), torch.float32)
