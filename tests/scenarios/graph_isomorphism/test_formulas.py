"""Layers of graph networks compute what they should."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from nip_astra.scenarios.graphs.agents import AttentionLayer, GinLayer
from nip_astra.scenarios.graphs.formulas import MASKED_KEY, Pairs, gin_formula
from tests.scenarios.graph_isomorphism.frames import as_torch_layer


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
    if name == "tanh":
        torch.testing.assert_close(gin_formula(nodes, closed, *layer.parameters())[0], expected)


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
