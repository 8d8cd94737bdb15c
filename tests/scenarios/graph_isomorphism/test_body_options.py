"""Options of bodies beyond reading graphs: duplication, rounding, normalisation, noise, gaps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from nip_astra.errors import ParameterError
from nip_astra.scenarios.graphs import native_layers as native
from nip_astra.scenarios.graphs.agents import (
    GRAPHS,
    NODES,
    AttentionLayer,
    GraphBody,
    GraphIsomorphismAgentParameters,
    SumsNorm,
)
from nip_astra.scenarios.graphs.compiled import SWITCH, NativeCode
from nip_astra.scenarios.graphs.formulas import Pairs
from tests.kit.recording import record_calls
from tests.scenarios.graph_isomorphism.frames import (
    graph_body,
    graph_frames,
    graph_shape,
    in_nodes_order,
    in_symbols_order,
)
from tests.scenarios.graph_isomorphism.test_bodies import SIZES, close, random_order
from tests.scenarios.networks import Frames

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
IS_RANDOM = ("noise", "dropout")


def body_and_frames(*, num_linear: int = 0, **options: Any) -> tuple[GraphBody, Frames]:
    shape = graph_shape(7, num_linear=num_linear)
    return graph_body(shape, **options), graph_frames(7, SIZES, shape)


@pytest.mark.parametrize("option", OPTIONS)
def test_the_order_of_nodes_orders_their_representations_and_nothing_else(option: str) -> None:
    body, frames = body_and_frames(**OPTIONS[option])
    body.eval()
    order = random_order(frames)
    given, other = body(frames), body(in_nodes_order(frames, order))
    symbols = (order + torch.tensor([[0], [7]])).flatten(1)
    close(other[GRAPHS], given[GRAPHS])
    close(other[NODES].transpose(1, 2), in_symbols_order(given[NODES].transpose(1, 2), symbols))


@pytest.mark.parametrize("option", OPTIONS)
def test_only_random_options_differ_between_calls(option: str) -> None:
    body, frames = body_and_frames(**OPTIONS[option])
    is_random = option in (*IS_RANDOM, "all")
    first, second = body(frames)[GRAPHS], body(frames)[GRAPHS]
    assert torch.equal(first, second) != is_random
    assert body.has_hidden_state == (is_random or option == "norm")
    body.eval()
    assert torch.equal(body(frames)[GRAPHS], body(frames)[GRAPHS])


@pytest.mark.parametrize("option", OPTIONS)
def test_every_weight_learns_and_can_be_learnt_twice(option: str) -> None:
    body, frames = body_and_frames(num_linear=2, **OPTIONS[option])
    representation = body(frames)
    loss = representation[GRAPHS].square().sum() + representation[NODES].square().sum()
    weights = list(body.parameters())
    gradients = torch.autograd.grad(loss, weights, create_graph=True)
    assert all(bool(gradient.any()) for gradient in gradients)
    squares = torch.stack([gradient.square().sum() for gradient in gradients]).sum()
    seconds = torch.autograd.grad(squares, weights, allow_unused=True)
    present = [second for second in seconds if second is not None]
    assert len(present) > len(weights) / 2
    assert all(bool(second.isfinite().all()) for second in present)


def test_the_weights_of_the_graph_network_are_known() -> None:
    body, _ = body_and_frames()
    known = {id(parameter) for parameter in body.gnn_parameters()}
    names = {name.split(".")[0] for name, p in body.named_parameters() if id(p) in known}
    assert names == {"node_input", "gnn_layers"}
    assert len(known) == 1 + 4 * len(body.gnn_layers)


@pytest.mark.parametrize("option", OPTIONS)
def test_with_c_and_without_the_same_is_given(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"d_gnn": 16, "d_transformer": 16, **OPTIONS[option]}
    body, frames = body_and_frames(**options)
    results: list[list[Tensor]] = []
    for switch in ("1", "0"):
        monkeypatch.setenv(SWITCH, switch)
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
