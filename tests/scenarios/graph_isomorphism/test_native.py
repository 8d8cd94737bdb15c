"""Layers in C equal their plain formulas in values and both derivatives."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from nip_astra.scenarios.graph_isomorphism import GraphIsomorphismScenario
from nip_astra.scenarios.graphs import compiled
from nip_astra.scenarios.graphs import native_layers as native
from nip_astra.scenarios.graphs.compiled import SWITCH
from nip_astra.scenarios.graphs.formulas import (
    LayerWeights,
    Network,
    PairReading,
    Pairs,
    gin_formula,
    tanh_reading,
)
from nip_astra.scenarios.graphs.native_layers import NativeNetwork

pytestmark = pytest.mark.skipif(native.why_absent() is not None, reason="there is no C compiler")

Layer = Callable[..., Tensor]
Reading = PairReading | native.NativeReading
WIDTH, HIDDEN, TOKEN = 32, 48, 16
PERCEPTRON = ((HIDDEN, WIDTH), (HIDDEN,), (WIDTH, HIDDEN), (WIDTH,))
NORM = ((WIDTH,), (WIDTH,))


def numbers(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).requires_grad_()
        for shape in shapes
    ]


def network(
    num_frames: int, num_nodes: int, num_layers: int = 2, num_sent: int = 3
) -> tuple[Layer, Layer, list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    # Graphs of all sizes, including a graph without nodes.
    sizes = torch.arange(2 * num_frames).view(-1, 2) % (num_nodes + 1)
    is_node = torch.arange(num_nodes) < sizes[..., None]
    # Not symmetric, so that a transposed sum shows; padding is connected to nothing.
    adjacency = torch.rand(num_frames, 2, num_nodes, num_nodes, generator=generator).round()
    adjacency *= is_node[..., None] * is_node[..., None, :]
    sent = torch.rand(num_frames, num_sent, 2 * num_nodes, generator=generator)
    last = torch.rand(num_frames, num_sent // 2, 2 * num_nodes, generator=generator)
    of_ends = ((WIDTH, num_sent + 1), (TOKEN, WIDTH), (TOKEN,), (TOKEN, num_sent // 2))

    def masked(run: Callable[[Network, Sequence[Tensor]], tuple[Tensor, Tensor]]) -> Layer:
        def layer(*learnt: Tensor) -> Tensor:
            read = [x.to(learnt[0].dtype) for x in (sent, adjacency, last)]
            given = Network(read[0], read[1], is_node, read[2], *learnt[:4])
            tokens, sums = run(given, learnt[4:])
            tokens = tokens.view(num_frames, 2, num_nodes, TOKEN) * is_node[..., None]
            return torch.cat([tokens.flatten(1), sums.flatten(1)], dim=1)

        return layer

    def by_formula(given: Network, weights: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        def passing(nodes: Tensor, closed: Tensor) -> Tensor:
            for i in range(0, len(weights), 4):
                nodes = gin_formula(nodes, closed, *weights[i : i + 4])
            return nodes

        return given.apply(passing)

    learnt = numbers(*of_ends, *num_layers * PERCEPTRON)
    return masked(native.tanh_network), masked(by_formula), learnt


def tokens_of(
    whose: str, num_frames: int, num_nodes: int, heads: int = 2, *, is_full: bool = False
) -> tuple[Layer, Layer, list[Tensor]]:
    # Graphs of all sizes, including a graph without nodes.
    sizes = torch.arange(2 * num_frames).view(-1, 2) % (num_nodes + 1)
    is_node = (torch.arange(num_nodes) < sizes[..., None]) | is_full

    def given_by(read: Callable[[Pairs, LayerWeights], Reading]) -> Layer:
        def layer(graphs: Tensor, nodes: Tensor, *weights: Tensor) -> Tensor:
            reading = read(Pairs(graphs, nodes, is_node), LayerWeights(*weights))
            if whose == "graphs":
                return reading.graphs()
            return reading.nodes() * is_node.flatten(1)[..., None]

        return layer

    attention = ((heads, WIDTH // heads, WIDTH), (WIDTH,), *3 * [(WIDTH, WIDTH)], *3 * [(WIDTH,)])
    inputs = numbers(
        *((num_frames, 2, WIDTH), (num_frames, 2 * num_nodes, WIDTH)),
        *(*attention, *PERCEPTRON, *NORM),
    )
    return given_by(native.read), given_by(tanh_reading), inputs


# Several blocks of 36 rows, partial blocks, graphs larger than a block, rows that fill no tile.
CASES = {
    "graphs of several blocks": lambda: network(num_frames=10, num_nodes=12),
    "graphs of one block": lambda: network(num_frames=3, num_nodes=4),
    "a graph larger than a block": lambda: network(num_frames=22, num_nodes=41, num_layers=1),
    "many layers": lambda: network(num_frames=4, num_nodes=7, num_layers=5),
    "nothing sent": lambda: network(num_frames=4, num_nodes=7, num_sent=0),
    "tokens of graphs": lambda: tokens_of("graphs", num_frames=11, num_nodes=9),
    "tokens of graphs with one head": lambda: tokens_of("graphs", 1, 3, heads=1),
    "tokens of nodes": lambda: tokens_of("nodes", num_frames=7, num_nodes=9),
    "tokens of nodes with four heads": lambda: tokens_of("nodes", 2, 5, heads=4),
    "nodes whose keys fill a tile": lambda: tokens_of("nodes", 2, 14, is_full=True),
    "more nodes than a block": lambda: tokens_of("nodes", num_frames=22, num_nodes=41),
}


@pytest.mark.parametrize("case", CASES)
def test_a_layer_equals_its_formula_also_without_derivatives_and_nan_stays_nan(case: str) -> None:
    layer, formula, inputs = CASES[case]()
    result = layer(*inputs)
    assert is_native(result)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = formula(*exact)
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)
    both = zip(gradients_of(result, inputs), gradients_of(expected, exact), strict=True)
    for name, (gradient, right) in enumerate(both):
        if not right.any():
            assert not gradient.any()
            continue
        error = (gradient.double() - right).abs().max() / right.abs().max()
        # Some sums nearly cancel.
        assert error < 3e-5, f"input {name}"
    with torch.no_grad():
        assert torch.equal(layer(*inputs), result)
        inputs[0][..., -1] = float("nan")
        assert layer(*inputs).isnan().any()


def is_native(result: Tensor) -> bool:
    functions = [result.grad_fn]
    while functions:
        function = functions.pop()
        if re.match("Native(Network|GraphTokens|NodeTokens)", type(function).__name__):
            return True
        functions += [above for above, _ in function.next_functions if above is not None]
    return False


def gradients_of(result: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    weights = torch.linspace(-1, 1, result.numel()).view_as(result)
    total = (result * weights).sum()
    return list(torch.autograd.grad(total, inputs, materialize_grads=True))


@pytest.mark.parametrize(
    "case", ["graphs of one block", "nothing sent", *(case for case in CASES if "tokens" in case)]
)
def test_a_second_derivative_is_that_of_the_formula(case: str) -> None:
    layer, formula, inputs = CASES[case]()
    twice = []
    for result in (layer(*inputs), formula(*inputs)):
        square = result.square().sum()
        first = torch.autograd.grad(square, inputs, create_graph=True, materialize_grads=True)
        norm = torch.stack([gradient.square().sum() for gradient in first]).sum()
        twice.append(torch.autograd.grad(norm, inputs, materialize_grads=True))
    for results, expected in zip(*twice, strict=True):
        scale = float(expected.abs().max()) if expected.numel() else 0.0
        torch.testing.assert_close(results, expected, rtol=1e-3, atol=1e-4 * scale)


def test_large_numbers_do_not_overflow() -> None:
    layer, formula, inputs = CASES["tokens of graphs"]()
    with torch.no_grad():
        inputs[0] *= 1e4
        expected = formula(*inputs)
        torch.testing.assert_close(layer(*inputs), expected, rtol=1e-3, atol=1e-3)
    layer, formula, inputs = CASES["graphs of one block"]()
    with torch.no_grad():
        inputs[0] *= 1e9
        torch.testing.assert_close(layer(*inputs), formula(*inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_reason", ["double", "width", "size", "switch"])
def test_inputs_unsupported_in_c_go_through_torch(
    is_reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, formula, inputs = tokens_of("graphs", num_frames=2, num_nodes=3)
    if is_reason == "double":
        inputs = [x.detach().double().requires_grad_() for x in inputs]
    elif is_reason in ("width", "size"):
        d, f = (8, 16) if is_reason == "width" else (64, 256)
        of_width = {WIDTH: d, HIDDEN: f, WIDTH // 2: d // 2}
        inputs = numbers(*(tuple(of_width.get(size, size) for size in x.shape) for x in inputs))
    else:
        monkeypatch.setattr(compiled, "is_switched_off", lambda: True)
    results = layer(*inputs)
    assert not is_native(results)
    torch.testing.assert_close(results, formula(*inputs), rtol=1e-4, atol=1e-5)


def small_network(**other: Tensor) -> tuple[Network, list[Tensor]]:
    given = Network(
        sent_BPS=torch.ones(2, 3, 10),
        adjacency_B2nn=torch.ones(2, 2, 5, 5),
        is_node_B2n=torch.ones(2, 2, 5, dtype=torch.bool),
        last_BLS=torch.ones(2, 1, 10),
        input_DP=torch.ones(16, 4),
        node_ED=torch.ones(16, 16),
        bias_E=torch.ones(16),
        message_EL=torch.ones(16, 1),
    )
    weights = [torch.ones(32, 16), torch.ones(32), torch.ones(16, 32), torch.ones(16)]
    return given._replace(**other), weights


@pytest.mark.parametrize(
    "other",
    [
        {"adjacency_B2nn": torch.ones(2, 2, 6, 6)},
        {"is_node_B2n": torch.ones(2, 2, 4, dtype=torch.bool)},
        {"sent_BPS": torch.ones(2, 300, 10)},
        {"last_BLS": torch.ones(2, 40, 10)},
        {"bias_E": torch.ones(17)},
        {"bias_E": torch.ones(16).double()},
        {"nodes_BSD": torch.ones(2, 8, WIDTH)},
        {"graphs_B2D": torch.ones(3, 2, WIDTH)},
    ],
    ids=lambda other: next(iter(other)),
)
def test_mismatched_inputs_are_refused_by_torch(other: dict[str, Tensor]) -> None:
    """C could not detect this, and would read out of bounds."""
    is_node = torch.ones(2, 2, 5, dtype=torch.bool)
    pairs = Pairs(torch.ones(2, 2, WIDTH), torch.ones(2, 10, WIDTH), is_node)
    (given, weights), of_layer = small_network(), layer_weights()
    calls: list[Callable[..., object]] = []
    if {*other} <= {*Network._fields}:
        calls.append(lambda **changes: native.tanh_network(given._replace(**changes), weights))
    if {*other} <= {*Pairs._fields}:
        calls.append(lambda **changes: native.read(pairs._replace(**changes), of_layer).graphs())
        calls.append(lambda **changes: native.read(pairs._replace(**changes), of_layer).nodes())
    for call in calls:
        call()
        with pytest.raises((RuntimeError, ValueError, IndexError)):
            call(**other)


def test_nodes_are_rounded_and_learn_as_if_they_were_not() -> None:
    edges = torch.rand(2, 2, 5, 5, generator=torch.Generator().manual_seed(0)).round()
    given, _ = small_network(
        sent_BPS=numbers((2, 3, 10))[0].detach(),
        adjacency_B2nn=((edges + edges.transpose(-1, -2)) > 1).float(),
        input_DP=numbers((16, 4))[0].detach(),
        node_ED=torch.eye(16),
        bias_E=torch.zeros(16),
        message_EL=torch.zeros(16, 1),
    )
    weights = numbers((32, 16), (32,), (16, 32), (16,))
    exact, _ = native.tanh_network(given, weights)
    tokens, sums = native.tanh_network(given, weights, digits=2)
    hundredths = tokens.detach() * 100
    assert torch.allclose(hundredths, hundredths.round(), atol=1e-3)
    assert 0 < (tokens - exact).detach().abs().max().item() <= 0.005 + 1e-6
    torch.testing.assert_close(sums, tokens.unflatten(1, (2, 5)).sum(2))
    torch.testing.assert_close(
        gradients_of(tokens, weights), gradients_of(exact, weights), rtol=1e-4, atol=2e-5
    )


HOLE = torch.tensor([True, False, True, True, False]).expand(2, 2, 5)


def test_padding_between_the_nodes_of_a_graph_is_left_out() -> None:
    """C counts nodes up to the last, so torch handles such graphs."""
    edges = (HOLE[..., None] & HOLE[..., None, :]).float()
    given, weights = small_network(adjacency_B2nn=edges, is_node_B2n=HOLE)
    tokens, sums = native.tanh_network(given, weights)
    order = torch.tensor([0, 2, 3, 1, 4])
    at_end = given._replace(
        adjacency_B2nn=edges[..., order, :][..., order], is_node_B2n=HOLE[..., order]
    )
    expected, sums_at_end = native.tanh_network(at_end, weights)
    assert not NativeNetwork.takes((*given, *weights))
    assert NativeNetwork.takes((*at_end, *weights))
    torch.testing.assert_close(sums, sums_at_end)
    of_nodes = tokens.unflatten(1, (2, 5))[:, :, order[:3]]
    torch.testing.assert_close(of_nodes, expected.unflatten(1, (2, 5))[:, :, :3])


def layer_weights() -> LayerWeights:
    return LayerWeights(*tokens_of("graphs", 1, 1)[2][2:])


def test_tokens_of_padding_are_not_read_and_become_0() -> None:
    # Graphs of 4 and 2 nodes.
    is_node = torch.arange(4) < torch.tensor([[[4], [2]]])
    graphs, nodes = numbers((1, 2, WIDTH), (1, 8, WIDTH))
    nodes = torch.where(is_node.view(1, 8, 1), nodes.detach(), torch.nan).requires_grad_()
    reading = native.read(Pairs(graphs, nodes, is_node), layer_weights())
    tokens = reading.nodes()
    assert is_native(tokens)
    assert tokens.isfinite().all()
    assert not tokens[:, 6:].any()
    (tokens.sum() + reading.graphs().square().sum()).backward()
    assert nodes.grad.isfinite().all()
    assert not nodes.grad[:, 6:].any()


def test_inputs_may_lie_in_any_order_and_weights_need_not_learn() -> None:
    layer, formula, inputs = tokens_of("nodes", num_frames=3, num_nodes=5)
    turned = [
        x.detach().transpose(-2, -1).contiguous().transpose(-2, -1) if x.ndim > 1 else x.detach()
        for x in inputs
    ]
    turned[1].requires_grad_()
    results = layer(*turned)
    assert is_native(results)
    torch.testing.assert_close(results, formula(*inputs), rtol=1e-4, atol=1e-5)
    given = gradients_of(results, turned[1:2])
    torch.testing.assert_close(
        given, gradients_of(formula(*inputs), inputs[1:2]), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("field", ["is_node_B2n", "graphs_B2D"])
def test_tensors_on_other_devices_are_not_given_to_c(field: str) -> None:
    given = Pairs(torch.ones(1, 2, WIDTH), torch.ones(1, 6, WIDTH), torch.ones(1, 2, 3).bool())
    elsewhere = given._replace(**{field: getattr(given, field).to("meta")})
    assert native.NativeGraphTokens.takes((*given, *layer_weights()))
    assert not native.NativeGraphTokens.takes((*elsewhere, *layer_weights()))


def test_no_frames_give_no_tokens() -> None:
    layer, _, inputs = tokens_of("nodes", num_frames=0, num_nodes=3)
    assert layer(*inputs).shape == (0, 6, WIDTH)


def test_a_second_derivative_needs_no_layer_that_learns() -> None:
    given, weights = small_network()
    given.node_ED.requires_grad_()
    tokens, _ = native.tanh_network(given, weights)
    assert is_native(tokens)
    (first,) = torch.autograd.grad(tokens.square().sum(), given.node_ED, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), given.node_ED)
    assert second.isfinite().all()
    assert second.any()


def test_the_implementation_of_layers_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    on = GraphIsomorphismScenario.layers_on
    assert re.fullmatch(
        r"compiled: network\.c [0-9a-f]{12}, transformer\.c [0-9a-f]{12}", on(torch.device("cpu"))
    )
    assert on(torch.device("cuda")) == "torch"
    monkeypatch.setenv(SWITCH, "0")
    compiled.is_switched_off.cache_clear()
    assert on(torch.device("cpu")) == f"torch ({SWITCH} is 0)"
    # Layers ask for it at each call, and the environment is read once.
    monkeypatch.setenv(SWITCH, "1")
    assert on(torch.device("cpu")) == f"torch ({SWITCH} is 0)"
    compiled.is_switched_off.cache_clear()
    assert on(torch.device("cpu")).startswith("compiled")
