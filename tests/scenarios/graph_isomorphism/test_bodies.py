"""A body's inputs from graphs, and the changes to which it is invariant."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from nip_astra.scenarios.graphs.agents import (
    GRAPHS,
    NODES,
    AttentionLayer,
    GinLayer,
    GraphIsomorphismAgentParameters,
)
from nip_astra.scenarios.graphs.generation import GraphPairParameters, GraphPairs, generate_pairs
from nip_astra.scenarios.graphs.pair_files import as_dataset
from nip_astra.scenarios.heads import SummarySoloHead
from tests.scenarios.graph_isomorphism.frames import graph_body, graph_frames, graph_shape
from tests.scenarios.networks import Frames, check_second_derivatives

SIZES = [(7, 7), (5, 6), (4, 4), (7, 3)]


def random_order(frames: Frames) -> Tensor:
    """A permutation of each graph's nodes with padding still last."""
    torch.manual_seed(1)
    keys = torch.rand(frames["node_mask"].shape) + 2 * ~frames["node_mask"]
    return keys.argsort(-1)


def close(item: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(item, other, atol=2e-5, rtol=1e-4)


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


@pytest.mark.parametrize("is_pair_invariant", [True, False])
def test_the_order_of_graphs_is_unseen_with_pair_invariant_pooling_alone(
    is_pair_invariant: bool,
) -> None:
    shape = graph_shape(7)
    body = graph_body(shape, use_pair_invariant_pooling=is_pair_invariant)
    frames = graph_frames(7, SIZES, shape)
    swapped = frames | {name: frames[name].flip(1) for name in ("adjacency", "node_mask")}
    for name in ("message", "message_history"):
        swapped[name] = frames[name].roll(7, -1)
    given, other = body(frames), body(swapped)
    if is_pair_invariant:
        close(other[GRAPHS], given[GRAPHS])
        close(other[NODES], given[NODES].roll(7, 1))
    else:
        assert not torch.allclose(other[GRAPHS], given[GRAPHS], atol=1e-2)


def test_padding_makes_no_difference() -> None:
    shape, padded_shape = graph_shape(7), graph_shape(9)
    body, padded_body = graph_body(shape), graph_body(padded_shape)
    frames = graph_frames(7, SIZES, shape)
    padded = frames | {
        "adjacency": nn.functional.pad(frames["adjacency"], (0, 2, 0, 2)),
        "node_mask": nn.functional.pad(frames["node_mask"], (0, 2)),
    }
    for name in ("message", "message_history"):
        halves = frames[name].unflatten(-1, (2, 7))
        padded[name] = nn.functional.pad(halves, (0, 2)).flatten(-2)
    given, other = body(frames), padded_body(padded)
    close(other[GRAPHS], given[GRAPHS])
    close(other[NODES].unflatten(1, (2, 9))[:, :, :7], given[NODES].unflatten(1, (2, 7)))


def as_torch_layer(layer: AttentionLayer) -> nn.TransformerEncoderLayer:
    """Torch's own layer with the same weights."""
    d, options = layer.query.in_features, {"activation": layer.activation, "batch_first": True}
    theirs = nn.TransformerEncoderLayer(
        d, layer.num_heads, layer.inner.out_features, 0.0, **options
    )
    attention = theirs.self_attn
    with torch.no_grad():
        weights = [layer.query.weight, layer.key.weight, layer.value.weight]
        attention.in_proj_weight.copy_(torch.cat(weights))
        attention.in_proj_bias.zero_()[:d].copy_(layer.query.bias)
    mine = (layer.output, layer.inner, layer.outer, layer.attention_norm, layer.norm)
    others = (attention.out_proj, theirs.linear1, theirs.linear2, theirs.norm1, theirs.norm2)
    for one, other in zip(mine, others, strict=True):
        other.load_state_dict(one.state_dict())
    return theirs


def test_attention_is_torchs_with_nodes_of_one_graph_hidden_from_one_another() -> None:
    shape = graph_shape(7)
    body = graph_body(shape, activation_function="gelu", num_transformer_layers=2)
    frames = graph_frames(7, SIZES, shape)
    graphs, nodes = body._tokens(frames)
    kinds = torch.tensor([2, 3] + [0] * 7 + [1] * 7)
    is_hidden = (kinds[:, None] == kinds) & (kinds < 2)
    is_padding = nn.functional.pad(~frames["node_mask"].flatten(1), (2, 0))
    tokens = torch.cat([graphs, nodes], dim=1)
    for layer in body.attention_layers:
        torch_layer = as_torch_layer(layer)
        tokens = torch_layer(tokens, src_mask=is_hidden, src_key_padding_mask=is_padding)
    expected, given = body.output(tokens), body(frames)
    close(given[GRAPHS], expected[:, :2])
    is_real = frames["node_mask"].flatten(1)
    close(given[NODES][is_real], expected[:, 2:][is_real])


def test_nodes_are_computed_once_and_only_when_they_are_read() -> None:
    shape = graph_shape(7)
    representation = graph_body(shape)(graph_frames(7, SIZES, shape))
    assert list(representation) == [GRAPHS]
    assert representation[NODES] is representation[NODES]
    assert representation[NODES].shape == (4, 14, 16)
    with pytest.raises(KeyError):
        representation["edges"]


def test_an_invisible_channel_and_the_label_are_not_seen() -> None:
    shape = graph_shape(7, visible=[1])
    body, frames = graph_body(shape), graph_frames(7, SIZES, shape)
    given = body(frames)
    for channel in (0, 1):
        history = frames["message_history"].clone()
        history[:, :, channel] += 1
        changed = frames | {"message_history": history, "y": torch.ones(4, 1)}
        assert torch.equal(body(changed)[GRAPHS], given[GRAPHS]) is (channel == 0)


def test_statistics_of_histories_do_not_reveal_the_number_of_a_node() -> None:
    shape = graph_shape(7, visible=[1])
    body = graph_body(shape)
    sample = graph_frames(7, [(7, 5)] * 60, shape)["message_history"]
    body.set_statistics(sample)
    assert body.history_mean.shape == (3, 1, 2, 14)
    assert (body.history_mean == body.history_mean[..., :1]).all()
    history = body.history({"message_history": sample})
    torch.testing.assert_close(history.mean((0, -1)), torch.zeros(3, 1, 2), atol=1e-5, rtol=0)
    torch.testing.assert_close(
        history.movedim(-1, 1).flatten(0, 1).std(0)[:2], torch.ones(2, 1, 2), atol=1e-2, rtol=0
    )


@pytest.mark.parametrize("activation", ["tanh", "gelu"])
def test_a_body_can_be_derived_twice(activation: str) -> None:
    shape = graph_shape(4)
    body = graph_body(shape, num_gnn_layers=2, activation_function=activation)
    frames = graph_frames(4, [(4, 4), (3, 4)], shape)
    check_second_derivatives(body, frames, GRAPHS, NODES)


@pytest.fixture(scope="module")
def hard_pairs() -> GraphPairs:
    """Pairs that only the third round distinguishes."""
    changes = {"isomorphic_share": 0.0, "score_1_share": 0.0, "score_2_share": 0.0}
    pairs = generate_pairs(GraphPairParameters(num_train=40, **changes), "train")
    return pairs.take(np.flatnonzero(pairs.wl_score == 3))


@pytest.mark.parametrize(("num_gnn_layers", "is_different"), [(1, False), (2, False), (5, True)])
def test_a_body_distinguishes_the_same_pairs_as_equally_many_rounds_of_refinement(
    hard_pairs: GraphPairs, num_gnn_layers: int, is_different: bool
) -> None:
    shape = graph_shape(11)
    # Random weights hardly distinguish such pairs: small values count, unlike exact zeros.
    body = graph_body(shape, num_gnn_layers=num_gnn_layers).double()
    head = SummarySoloHead(GraphIsomorphismAgentParameters(), GRAPHS, 32).double()

    @torch.no_grad()
    def logits(pairs: GraphPairs) -> Tensor:
        dataset = as_dataset(pairs)
        frames = graph_frames(11, [(11, 11)] * pairs.num_pairs, shape)
        silent = {name: torch.zeros_like(value).double() for name, value in frames.items()}
        silent |= {"adjacency": dataset["adjacency"].double(), "node_mask": dataset["node_mask"]}
        result: Tensor = head(body(silent), frames)
        return result

    first_twice = hard_pairs._replace(adjacency=hard_pairs.adjacency[:, [0, 0]])
    distances = (logits(hard_pairs) - logits(first_twice)).abs().amax(-1)
    if is_different:
        assert (distances > 1e-9).all()
    else:
        assert distances.max() < 1e-12


@torch.no_grad()
def test_at_first_isomorphic_graphs_look_the_same_where_nodes_that_correspond_were_named() -> None:
    shape = graph_shape(7, visible=(0,), message_size=1)
    body = graph_body(shape)
    body.after_initialisation()
    frames = graph_frames(7, [(7, 7)], shape)
    order = torch.randperm(7, generator=torch.Generator().manual_seed(0))
    frames["adjacency"][:, 1] = frames["adjacency"][:, 0][:, order][:, :, order]
    question = torch.zeros_like(frames["message_history"])
    # Round 0 requests node 2 of the first graph; each node of the second graph is an answer.
    question[:, 0, 0, 0, 2] = 1

    sums: list[Tensor] = []
    body.gnn_layers.register_forward_hook(lambda *given: sums.append(given[-1][1]))

    def difference(answer: int) -> float:
        history = question.clone()
        history[:, 1, 0, 0, 7 + answer] = 1
        body(frames | {"message_history": history})
        first, second = sums.pop().unbind(1)
        return float((first - second).abs().max())

    differences = [difference(answer) for answer in range(7)]
    assert differences[int((order == 2).nonzero())] < 1e-4
    assert max(differences) > 1e-2
