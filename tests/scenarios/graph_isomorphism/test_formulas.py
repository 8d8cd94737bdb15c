"""Layers with written derivatives equal their plain formulas, and so do both derivatives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck

from nip_astra.scenarios.graphs.agents import AttentionLayer, GinLayer
from nip_astra.scenarios.graphs.formulas import (
    MASKED_KEY,
    Attention,
    Pairs,
    TanhGin,
    TanhResidual,
    attention_formula,
    gin_formula,
    residual_formula,
)
from tests.scenarios.graph_isomorphism.frames import as_torch_layer

Layer = Callable[..., Tensor]
WIDTH, HIDDEN, HEADS = 3, 4, 2
PERCEPTRON = ((HIDDEN, WIDTH), (HIDDEN,), (WIDTH, HIDDEN), (WIDTH,))
NORM = ((WIDTH,), (WIDTH,))
JOINT = HEADS * WIDTH


def numbers(*shapes: tuple[int, ...]) -> list[Tensor]:
    torch.manual_seed(0)
    return [(0.7 * torch.randn(*shape, dtype=torch.float64)).requires_grad_() for shape in shapes]


def gin() -> tuple[Layer, Layer, list[Tensor]]:
    # Not symmetric, so that a transposed sum shows.
    closed = torch.tensor([[[1.0, 1], [0, 1]], [[1, 0], [0, 0]]]).double()

    def with_graph(layer: Layer) -> Layer:
        return lambda nodes, *weights: layer(nodes, closed, *weights)

    inputs = numbers((2, 2, WIDTH), *PERCEPTRON)
    return with_graph(TanhGin.apply), with_graph(gin_formula), inputs


def residual() -> tuple[Layer, Layer, list[Tensor]]:
    return TanhResidual.apply, residual_formula, numbers((4, WIDTH), *PERCEPTRON, *NORM)


def attention(num_tokens: int, num_keys: int) -> tuple[Layer, Layer, list[Tensor]]:
    mask = torch.zeros(2, num_keys, 1, dtype=torch.float64)
    mask[0, 1] = MASKED_KEY

    def among_tokens(layer: Layer) -> Layer:
        # Keys hold what is asked from, too, as a graph reads itself.
        def run(tokens: Tensor, others: Tensor, *weights: Tensor) -> Tensor:
            return layer(tokens, torch.cat([others, tokens[:, :1]], dim=1), mask, *weights)

        return run

    weights = ((JOINT, WIDTH), (JOINT,), (JOINT, WIDTH), (WIDTH,), *NORM)
    inputs = numbers((2, num_tokens, WIDTH), (2, num_keys - 1, WIDTH), *weights)
    return among_tokens(Attention.apply), among_tokens(attention_formula), inputs


CASES = {
    "gin": gin,
    "residual": residual,
    "more keys than queries": lambda: attention(1, 3),
    "more queries than keys": lambda: attention(2, 3),
}


@pytest.mark.parametrize("case", CASES)
def test_a_layer_gives_what_its_formula_gives(case: str) -> None:
    layer, formula, inputs = CASES[case]()
    torch.testing.assert_close(layer(*inputs), formula(*inputs))
    given = torch.autograd.grad(layer(*inputs).square().sum(), inputs)
    expected = torch.autograd.grad(formula(*inputs).square().sum(), inputs)
    torch.testing.assert_close(given, expected)


@pytest.mark.parametrize("case", CASES)
def test_a_layer_can_be_derived_twice(case: str) -> None:
    layer, _, inputs = CASES[case]()
    assert gradcheck(layer, inputs, fast_mode=True)
    assert gradgradcheck(layer, inputs, fast_mode=True)


def test_a_second_derivative_is_that_of_the_formula() -> None:
    layer, formula, inputs = attention(2, 3)
    twice = []
    for function in (layer, formula):
        first = torch.autograd.grad(function(*inputs).square().sum(), inputs, create_graph=True)
        norm = torch.stack([gradient.square().sum() for gradient in first]).sum()
        twice.append(torch.autograd.grad(norm, inputs))
    torch.testing.assert_close(*twice)


def test_weights_that_do_not_learn_get_no_second_derivative() -> None:
    layer, _, (nodes, *weights) = gin()
    weights[0].requires_grad_(False)
    (first,) = torch.autograd.grad(layer(nodes, *weights).sum(), nodes, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), nodes)
    assert second.isfinite().all()


@pytest.mark.parametrize("name", ["tanh", "relu", "gelu"])
def test_a_gin_layer_sums_over_a_node_and_its_neighbours(name: str) -> None:
    activation = {"tanh": torch.tanh, "relu": torch.relu, "gelu": nn.functional.gelu}[name]
    torch.manual_seed(0)
    layer, nodes = GinLayer(3, 5, name), torch.randn(1, 3, 3)
    closed = torch.tensor([[[1.0, 1, 0], [1, 1, 1], [0, 1, 1]]])
    first, second, third = activation(nodes[0])
    sums = torch.stack([first + second, first + second + third, second + third])
    expected = layer.outer(activation(layer.inner(sums)))
    torch.testing.assert_close(layer(nodes, closed)[0], expected)


@pytest.mark.parametrize("num_heads", [1, 2, 4])
def test_an_attention_layer_is_torchs(num_heads: int) -> None:
    torch.manual_seed(num_heads)
    layer = AttentionLayer(8, num_heads, 12, "gelu")
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    tokens = torch.randn(3, 6, 8)
    is_padding = torch.tensor([[False] * 6, [False] * 4 + [True] * 2, [True] + [False] * 5])
    mask = torch.where(is_padding, MASKED_KEY, 0.0)[..., None]
    nobody = Pairs(torch.ones(0, 2, 8), torch.ones(0, 2, 8), torch.ones(0, 2, 1).bool())
    given: Tensor = layer(nobody).attend(tokens, tokens, mask)
    expected = as_torch_layer(layer)(tokens, src_key_padding_mask=is_padding)
    torch.testing.assert_close(given, expected, atol=1e-5, rtol=1e-4)
