"""A body's inputs from graphs, the changes to which it is invariant, its options, and heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from nip_astra.errors import ParameterError
from nip_astra.scenario_base.protocol.tensordict_agents import (
    MASKED,
    AgentShape,
    initialise_orthogonally,
)
from nip_astra.scenarios.graphs import compiled
from nip_astra.scenarios.graphs import native_layers as native
from nip_astra.scenarios.graphs.agents import (
    GRAPHS,
    NODES,
    AttentionLayer,
    GinLayer,
    GraphBody,
    GraphIsomorphismAgentParameters,
    GraphPolicyHead,
    SumsNorm,
    impossible_symbols,
)
from nip_astra.scenarios.graphs.compiled import NativeCode
from nip_astra.scenarios.graphs.formulas import Pairs
from nip_astra.scenarios.graphs.generation import GraphPairParameters, GraphPairs, generate_pairs
from nip_astra.scenarios.graphs.pair_files import as_dataset
from nip_astra.scenarios.heads import SummarySoloHead, SummaryValueHead
from tests.kit.recording import record_calls
from tests.scenarios.networks import Frames, agent_shape, check_second_derivatives


def graph_shape(n: int, **changes: Any) -> AgentShape:
    """A network's view of a game about graphs of `n` nodes."""
    return agent_shape(2 * n, **{"message_size": 2} | changes)


def graph_frames(
    n: int, sizes: Sequence[Sequence[int]], shape: AgentShape, seed: int = 0
) -> Frames:
    """Frames about pairs of random graphs in which real nodes were sent at all positions."""
    generator = torch.Generator().manual_seed(seed)
    num_frames, space = len(sizes), shape.message_space
    node_mask = torch.arange(n) < torch.tensor(sizes)[..., None]
    above = (torch.rand(num_frames, 2, n, n, generator=generator) < 0.5).triu(1)
    above &= node_mask[..., None] & node_mask[..., None, :]
    rounds = torch.arange(num_frames) % shape.num_rounds
    places = torch.Size((num_frames, shape.num_rounds, shape.num_channels, space.message_size))
    chances = node_mask.flatten(1).float()
    sent = torch.multinomial(chances, places[1:].numel(), replacement=True, generator=generator)
    history = nn.functional.one_hot(sent.view(places), 2 * n).float()
    is_past = torch.arange(shape.num_rounds) < rounds[:, None]
    history *= is_past[:, :, None, None, None]
    last_round = (rounds - 1).clamp(min=0)
    last = history[torch.arange(num_frames), last_round]
    frames = {
        "adjacency": (above | above.transpose(-1, -2)).float(),
        "node_mask": node_mask,
        "round": rounds,
        "message_history": history,
        "message": last,
        "question_round": last_round[:, None].expand(-1, shape.num_channels).clone(),
    }
    if space.num_linear_symbols:
        linear = torch.rand(*places, space.num_linear_symbols, generator=generator)
        frames["linear_message_history"] = linear * is_past[:, :, None, None, None]
    return frames


def graph_body(shape: AgentShape, **parameters: object) -> GraphBody:
    """A body with fixed random nonzero weights."""
    torch.manual_seed(0)
    body = GraphBody(GraphIsomorphismAgentParameters(**parameters), shape)
    initialise_orthogonally(body, 1.0)
    for parameter in body.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter.data, std=0.1)
    return body


SIZES = [(7, 7), (5, 6), (4, 4), (7, 3)]


def body_and_frames(
    n: int = 7, sizes: Any = SIZES, *, shape: dict[str, Any] = {}, **options: object
) -> tuple[GraphBody, Frames]:
    body = graph_body(graph_shape(n, **shape), **options)
    return body, graph_frames(n, sizes, body.shape)


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
    body, frames = body_and_frames(use_pair_invariant_pooling=is_pair_invariant)
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
    (body, frames), (padded_body, _) = body_and_frames(), body_and_frames(9)
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
    for part, other in zip(mine, others, strict=True):
        other.load_state_dict(part.state_dict())
    return theirs


def test_attention_is_torchs_with_nodes_of_one_graph_hidden_from_one_another() -> None:
    body, frames = body_and_frames(activation_function="gelu", num_transformer_layers=2)
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
    body, frames = body_and_frames()
    representation = body(frames)
    assert list(representation) == [GRAPHS]
    assert representation[NODES] is representation[NODES]
    assert representation[NODES].shape == (4, 14, 16)
    with pytest.raises(KeyError):
        representation["edges"]


def test_an_invisible_channel_and_the_label_are_not_seen() -> None:
    body, frames = body_and_frames(shape={"visible": [1]})
    given = body(frames)
    for channel in (0, 1):
        history = frames["message_history"].clone()
        history[:, :, channel] += 1
        changed = frames | {"message_history": history, "y": torch.ones(4, 1)}
        assert torch.equal(body(changed)[GRAPHS], given[GRAPHS]) is (channel == 0)


def test_statistics_of_histories_do_not_reveal_the_number_of_a_node() -> None:
    body, frames = body_and_frames(7, [(7, 5)] * 60, shape={"visible": [1]})
    sample = frames["message_history"]
    body.set_statistics(sample)
    assert body.history_mean.shape == (3, 1, 2, 14)
    assert (body.history_mean == body.history_mean[..., :1]).all()
    history = body.history({"message_history": sample})
    torch.testing.assert_close(history.mean((0, -1)), torch.zeros(3, 1, 2), atol=1e-5, rtol=0)
    std = history.movedim(-1, 1).flatten(0, 1).std(0)
    torch.testing.assert_close(std[:2], torch.ones(2, 1, 2), atol=1e-2, rtol=0)


@pytest.mark.parametrize("activation", ["tanh", "gelu"])
def test_a_body_can_be_derived_twice(activation: str) -> None:
    options = {"num_gnn_layers": 2, "activation_function": activation}
    body, frames = body_and_frames(4, [(4, 4), (3, 4)], **options)
    check_second_derivatives(body, frames, GRAPHS, NODES)


@pytest.mark.parametrize(("num_gnn_layers", "is_different"), [(1, False), (2, False), (5, True)])
def test_a_body_distinguishes_the_same_pairs_as_equally_many_rounds_of_refinement(
    num_gnn_layers: int, is_different: bool
) -> None:
    changes = {"isomorphic_share": 0.0, "score_1_share": 0.0, "score_2_share": 0.0}
    pairs = generate_pairs(GraphPairParameters(num_train=40, **changes), "train")
    hard_pairs = pairs.take(np.flatnonzero(pairs.wl_score == 3))
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
        return head(body(silent), frames)

    first_twice = hard_pairs._replace(adjacency=hard_pairs.adjacency[:, [0, 0]])
    distances = (logits(hard_pairs) - logits(first_twice)).abs().amax(-1)
    if is_different:
        assert (distances > 1e-9).all()
    else:
        assert distances.max() < 1e-12


@torch.no_grad()
def test_at_first_isomorphic_graphs_look_the_same_where_nodes_that_correspond_were_named() -> None:
    body, frames = body_and_frames(7, [(7, 7)], shape={"visible": [0], "message_size": 1})
    body.after_initialisation()
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


OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "layers": {"num_transformer_layers": 2},
    "dual": {"use_dual_gnn": True},
    "digits": {"gnn_output_digits": 2},
    "norm": {"use_batch_norm": True},
    "noise": {"noise_sigma": 0.5},
    "dropout": {"transformer_dropout": 0.5},
    "sigmoid": {"activation_function": "sigmoid"},
}
OPTIONS["all"] = {name: value for option in OPTIONS.values() for name, value in option.items()}


def in_order(values: Tensor, order_BS: Tensor, dim: int = -1) -> Tensor:
    """Values with a dimension permuted, each frame's in its own way."""
    return torch.stack([x.index_select(dim, order) for x, order in zip(values, order_BS)])  # noqa: B905


@pytest.mark.parametrize("option", OPTIONS)
def test_the_order_of_nodes_orders_their_representations_and_nothing_else(option: str) -> None:
    body, frames = body_and_frames(**OPTIONS[option])
    body.eval()
    # Padding is still last.
    torch.manual_seed(1)
    keys = torch.rand(frames["node_mask"].shape) + 2 * ~frames["node_mask"]
    order_B2n = keys.argsort(-1)
    symbols = (order_B2n + torch.tensor([[0], [7]])).flatten(1)
    graphs = frames["adjacency"].flatten(0, 1), order_B2n.flatten(0, 1)
    adjacency = in_order(in_order(*graphs, 0), graphs[1], 1)
    ordered = frames | {"adjacency": adjacency.unflatten(0, (-1, 2))}
    for name in ("message_history", "message"):
        ordered[name] = in_order(frames[name], symbols)
    given, other = body(frames), body(ordered)
    close(other[GRAPHS], given[GRAPHS])
    close(other[NODES], in_order(given[NODES], symbols, 0))


@pytest.mark.parametrize("option", OPTIONS)
def test_only_random_options_differ_between_calls(option: str) -> None:
    body, frames = body_and_frames(**OPTIONS[option])
    is_random = option in ("noise", "dropout", "all")
    first, second = body(frames)[GRAPHS], body(frames)[GRAPHS]
    assert torch.equal(first, second) != is_random
    assert body.has_hidden_state == (is_random or option == "norm")
    body.eval()
    assert torch.equal(body(frames)[GRAPHS], body(frames)[GRAPHS])


@pytest.mark.parametrize("option", OPTIONS)
def test_every_weight_learns_and_can_be_learnt_twice(option: str) -> None:
    body, frames = body_and_frames(shape={"num_linear": 2}, **OPTIONS[option])
    representation = body(frames)
    loss = representation[GRAPHS].square().sum() + representation[NODES].square().sum()
    weights = list(body.parameters())
    gradients = torch.autograd.grad(loss, weights, create_graph=True)
    assert all(gradient.any() for gradient in gradients)
    squares = torch.stack([gradient.square().sum() for gradient in gradients]).sum()
    seconds = torch.autograd.grad(squares, weights, allow_unused=True)
    present = [second for second in seconds if second is not None]
    assert len(present) > len(weights) / 2
    assert all(second.isfinite().all() for second in present)


def test_the_weights_of_the_graph_network_are_known() -> None:
    body, _ = body_and_frames()
    known = {id(parameter) for parameter in body.gnn_parameters()}
    names = {name.split(".")[0] for name, p in body.named_parameters() if id(p) in known}
    assert names == {"node_input", "gnn_layers"}
    assert len(known) == 1 + 4 * len(body.gnn_layers)


@pytest.mark.parametrize("option", OPTIONS)
def test_with_c_and_without_the_same_is_given(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    body, frames = body_and_frames(**{"d_gnn": 16, "d_transformer": 16} | OPTIONS[option])
    results: list[list[Tensor]] = []
    for is_off in (False, True):
        monkeypatch.setattr(compiled, "is_switched_off", lambda is_off=is_off: is_off)
        torch.manual_seed(3)
        state = {name: value.clone() for name, value in body.state_dict().items()}
        given = body(frames)
        loss = given[GRAPHS].square().sum() + given[NODES][frames["node_mask"].flatten(1)].sum()
        results.append([loss, *torch.autograd.grad(loss, list(body.parameters()))])
        body.load_state_dict(state)
    for part, other in zip(*results, strict=True):
        torch.testing.assert_close(part, other, atol=2e-4, rtol=2e-3)


@pytest.mark.skipif(native.why_absent() is not None, reason="there is no C compiler")
@pytest.mark.parametrize(
    ("option", "in_play", "while_learning"),
    [
        ("dual", "network network transformer", "network network transformer"),
        ("digits", "transformer", "transformer"),
        ("norm", "network transformer", "network transformer"),
        ("noise", "network transformer", "network transformer"),
        ("dropout", "network transformer", "network"),
        ("sigmoid", "", ""),
    ],
)
def test_options_without_c_code_use_torch(
    option: str, in_play: str, while_learning: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    body, frames = body_and_frames(**OPTIONS[option])
    calls = record_calls(monkeypatch, NativeCode, "call")
    for is_learning, expected in ((False, in_play), (True, while_learning)):
        body.train(is_learning)
        calls.clear()
        body(frames)
        assert [call.arguments[0].source.stem for call in calls] == expected.split()


def test_a_dual_network_also_reads_graphs_without_messages() -> None:
    body, frames = body_and_frames(use_dual_gnn=True, use_pair_invariant_pooling=False)
    seen: list[Tensor] = []
    body.pooling.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    body(frames)
    body(frames | {"message_history": torch.zeros_like(frames["message_history"])})
    (with_messages, plain), (without, other) = (sums.chunk(2, dim=2) for sums in seen)
    close(plain, other)
    close(without, other)
    assert not torch.allclose(with_messages, plain, atol=1e-2)


def test_sums_are_normalised_over_frames_and_graphs_while_learning() -> None:
    norm = SumsNorm(3).eval()
    sums = 4 * torch.randn(50, 2, 3) + 7
    # Before anything was learnt, by those at hand.
    close(norm(sums).mean((0, 1)), torch.zeros(3))
    assert int(norm.num_batches_tracked) == 0
    normed = norm.train()(sums)
    close(normed.mean((0, 1)), torch.zeros(3))
    close(normed.var((0, 1), unbiased=False), torch.ones(3))
    # A single minibatch was seen: in play, the running statistics are used.
    norm.eval()
    torch.testing.assert_close(norm(sums), normed, rtol=0.02, atol=0.02)
    torch.testing.assert_close(norm(sums[:1]), norm(sums)[:1])
    before = {name: value.clone() for name, value in norm.state_dict().items()}
    norm(sums + 100)
    assert all(torch.equal(before[name], value) for name, value in norm.state_dict().items())


def test_running_means_are_plain_at_first_and_forget_later() -> None:
    norm = SumsNorm(1)
    for number in range(1, 11):
        norm(number + torch.tensor([-1.0, 1.0]).view(1, 2, 1))
    assert norm.running_mean.item() == pytest.approx(5.5)
    norm(105.5 + torch.tensor([-1.0, 1.0]).view(1, 2, 1))
    assert norm.running_mean.item() == pytest.approx(15.5)


def test_noise_is_a_share_of_each_sum_and_the_same_for_both_graphs() -> None:
    body, _ = body_and_frames(noise_sigma=0.1, use_pair_invariant_pooling=False)
    sums = torch.rand(20_000, 1, 16).expand(-1, 2, -1) * 10 + 1
    torch.manual_seed(0)
    disturbed = body.pooling(sums)
    assert torch.equal(disturbed[:, 0], disturbed[:, 1])
    share = (disturbed / sums - 1)[:, 0]
    assert share.std().item() == pytest.approx(0.1, rel=0.02)
    assert share.mean().item() == pytest.approx(0, abs=0.002)
    assert torch.equal(body.eval().pooling(sums), sums)


def test_dropout_leaves_out_its_share_and_keeps_the_mean() -> None:
    layer = AttentionLayer(16, 4, 64, "tanh", dropout=0.25)
    with torch.no_grad():
        layer.norm.weight.fill_(1)
    generator = torch.Generator().manual_seed(0)
    graphs, nodes = (torch.randn(1, n, 16, generator=generator) for n in (2, 10))
    pairs = Pairs(graphs, nodes, torch.ones(1, 2, 5, dtype=torch.bool))
    shares: list[float] = []
    layer.drop_out.register_forward_hook(
        lambda _, given, result: shares.append((result[given[0] != 0] == 0).float().mean().item())
    )
    torch.manual_seed(0)
    drawn = torch.stack([layer(pairs).graphs() for _ in range(300)])
    # Dropout of attention weights, of residual updates, and of the perceptron's two layers.
    assert len(shares) == 4 * 300
    for place in range(4):
        assert sum(shares[place::4]) / 300 == pytest.approx(0.25, abs=0.02)
    assert drawn.std(0).mean() > 0.05
    layer.eval()
    given = layer(pairs).graphs()
    assert (drawn.mean(0) - given).abs().mean() < drawn.std(0).mean()


@pytest.mark.parametrize(
    "wrong", [{"transformer_dropout": 1.0}, {"noise_sigma": -1.0}, {"gnn_output_digits": -1}]
)
def test_impossible_options_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ParameterError, match=next(iter(wrong))):
        GraphIsomorphismAgentParameters.from_dict(wrong)


SMALL = [(3, 3), (2, 3), (3, 1)]
PARAMETERS = GraphIsomorphismAgentParameters()


def possible(frames: Frames, **shape: object) -> Tensor:
    """Mask of the symbols allowed at each position, [B, V, P, S]."""
    of_agent = graph_shape(3, **shape)
    places = (len(frames["round"]), of_agent.num_visible, 2, 6)
    return ~impossible_symbols(frames, of_agent).expand(places)


@pytest.fixture
def frames() -> Frames:
    frames = graph_frames(3, SMALL, graph_shape(3))
    return frames | {n: torch.zeros_like(frames[n]) for n in ("message", "message_history")}


def ask(frames: Frames, frame: int, channel: int, position: int, symbol: int | list[int]) -> None:
    """Have a symbol sent in the round to be answered."""
    sent_in = int(frames["question_round"][frame, channel])
    frames["message_history"][frame, sent_in, channel, position, symbol] = 1


def test_a_verifier_may_send_each_real_node(frames: Frames) -> None:
    for frame in range(3):
        ask(frames, frame, 0, 0, 0)
    sent = possible(frames)
    expected = [[1, 1, 1, 1, 1, 1], [1, 1, 0, 1, 1, 1], [1, 1, 1, 1, 0, 0]]
    for channel in range(2):
        for position in range(2):
            assert sent[:, channel, position].int().tolist() == expected


def test_a_prover_answers_from_the_other_graph(frames: Frames) -> None:
    ask(frames, 0, 0, 0, 1)  # of the first graph
    ask(frames, 0, 0, 1, 4)  # of the second
    ask(frames, 0, 1, 1, [0, 5])  # one from each graph, by two senders
    ask(frames, 2, 1, 0, 2)
    sent = possible(frames, is_verifier=False).int()
    assert sent[0].tolist() == [
        [[0, 0, 0, 1, 1, 1], [1, 1, 1, 0, 0, 0]],
        [[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1]],
    ]
    assert sent[1, 0, 0].tolist() == [1, 1, 0, 0, 0, 0], "nothing was sent"
    assert sent[2, 1, 0].tolist() == [0, 0, 0, 1, 0, 0], "padding stays out"


def test_a_prover_answers_in_the_channels_that_it_sees_a_question_before_the_last_message(
    frames: Frames,
) -> None:
    frames["question_round"][2, 1] = 0
    ask(frames, 2, 1, 0, 1)
    frames["message_history"][2, 1, 1, 0, 4] = 1
    frames["message"][2, 1, 0, 4] = 1
    ask(frames, 0, 0, 0, 1)
    sent = possible(frames, is_verifier=False, visible=[1]).int()
    assert sent.shape == (3, 1, 2, 6)
    assert sent[2, 0, 0].tolist() == [0, 0, 0, 1, 0, 0]
    assert sent[0].tolist() == [[[1, 1, 1, 0, 0, 0]] * 2]


@pytest.mark.parametrize("is_verifier", [True, False])
@pytest.mark.parametrize("num_linear", [0, 4])
def test_a_policy_head_gives_logits_of_all_moves(is_verifier: bool, num_linear: int) -> None:
    changes = {"is_verifier": is_verifier, "num_linear": num_linear, "visible": [1]}
    body, frames = body_and_frames(3, SMALL, shape=changes)
    output = GraphPolicyHead(PARAMETERS, body.shape)(body(frames), frames)
    decisions, linear = [(3, 3)] * is_verifier, [(3, 1, 2, num_linear)] * bool(num_linear)
    shapes = [tuple(logits.shape) for logits in output if logits is not None]
    assert shapes == [(3, 1, 2, 6), *decisions, *linear]
    is_masked = output.message_logits_BVPS == MASKED
    assert torch.equal(is_masked, impossible_symbols(frames, body.shape).expand_as(is_masked))


def test_each_place_has_its_logits_in_the_order_of_nodes() -> None:
    body, frames = body_and_frames(3, SMALL)
    representation, head = body(frames), GraphPolicyHead(PARAMETERS, body.shape, None)
    places = head(representation, frames).message_logits_BVPS.flatten(1, 2)
    for item, other in ((0, 1), (0, 2), (1, 3)):
        assert not torch.allclose(places[:, item], places[:, other])
    alone = head.node_selector(representation["nodes"][1, 4])
    torch.testing.assert_close(places[1, :, 4], alone)


def test_a_value_or_a_label_needs_no_nodes() -> None:
    body, frames = body_and_frames(3, SMALL)
    representation = body(frames)
    SummaryValueHead(PARAMETERS, body.shape, GRAPHS, 32)(representation, frames)
    assert SummarySoloHead(PARAMETERS, GRAPHS, 32)(representation, frames).shape == (3, 2)
    assert list(representation) == ["graphs"]
