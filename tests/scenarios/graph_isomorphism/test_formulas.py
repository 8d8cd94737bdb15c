"""Graph network layers compute the right formulas."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nip_astra.scenarios.graphs.agents import GinLayer
from nip_astra.scenarios.graphs.formulas import gin_formula


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
