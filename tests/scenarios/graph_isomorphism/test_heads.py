"""Messages that agents may send, and outputs of heads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nip_astra.scenario_base.protocol.tensordict_agents import MASKED
from nip_astra.scenarios.graphs.agents import (
    GRAPHS,
    GraphIsomorphismAgentParameters,
    GraphPolicyHead,
    impossible_symbols,
)
from nip_astra.scenarios.heads import SummarySoloHead, SummaryValueHead
from tests.scenarios.graph_isomorphism.frames import graph_body, graph_frames, graph_shape

SIZES = [(3, 3), (2, 3), (3, 1)]
PARAMETERS = GraphIsomorphismAgentParameters()


def possible(frames: dict[str, Tensor], **shape: object) -> Tensor:
    """Mask of the symbols allowed at each position, [B, V, P, S]."""
    of_agent = graph_shape(3, **shape)
    places = (len(frames["round"]), of_agent.num_visible, 2, 6)
    return ~impossible_symbols(frames, of_agent).expand(places)


@pytest.fixture
def frames() -> dict[str, Tensor]:
    frames = graph_frames(3, SIZES, graph_shape(3))
    return frames | {n: torch.zeros_like(frames[n]) for n in ("message", "message_history")}


def ask(
    frames: dict[str, Tensor], frame: int, channel: int, position: int, symbol: int | list[int]
) -> None:
    """Have a symbol sent in the round to be answered."""
    said_in = int(frames["question_round"][frame, channel])
    frames["message_history"][frame, said_in, channel, position, symbol] = 1


def test_a_verifier_may_send_each_real_node(frames: dict[str, Tensor]) -> None:
    for frame in range(3):
        ask(frames, frame, 0, 0, 0)
    sent = possible(frames)
    expected = [[1, 1, 1, 1, 1, 1], [1, 1, 0, 1, 1, 1], [1, 1, 1, 1, 0, 0]]
    for channel in range(2):
        for position in range(2):
            assert sent[:, channel, position].int().tolist() == expected


def test_a_prover_answers_from_the_other_graph(frames: dict[str, Tensor]) -> None:
    ask(frames, 0, 0, 0, 1)  # of the first graph
    ask(frames, 0, 0, 1, 4)  # of the second
    ask(frames, 0, 1, 1, [0, 5])  # one from each graph, by two senders
    ask(frames, 2, 1, 0, 2)
    sent = possible(frames, is_verifier=False).int()
    assert sent[0].tolist() == [
        [[0, 0, 0, 1, 1, 1], [1, 1, 1, 0, 0, 0]],
        [[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1]],
    ]
    assert sent[1, 0, 0].tolist() == [1, 1, 0, 0, 0, 0], "nothing was said"
    assert sent[2, 1, 0].tolist() == [0, 0, 0, 1, 0, 0], "padding stays out"


def test_a_prover_answers_in_the_channels_that_it_sees_a_question_before_the_last_message(
    frames: dict[str, Tensor],
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
    shape = graph_shape(3, is_verifier=is_verifier, num_linear=num_linear, visible=[1])
    frames = graph_frames(3, SIZES, shape)
    head = GraphPolicyHead(PARAMETERS, shape)
    output = head(graph_body(shape)(frames), frames)
    decisions, linear = [(3, 3)] * is_verifier, [(3, 1, 2, num_linear)] * bool(num_linear)
    shapes = [tuple(logits.shape) for logits in output if logits is not None]
    assert shapes == [(3, 1, 2, 6), *decisions, *linear]
    is_masked = output.message_logits_BVPS == MASKED
    assert torch.equal(is_masked, impossible_symbols(frames, shape).expand_as(is_masked))


def test_positions_and_channels_have_logits_of_their_own() -> None:
    shape = graph_shape(3)
    frames = graph_frames(3, SIZES, shape)
    logits = GraphPolicyHead(PARAMETERS, shape, None)(graph_body(shape)(frames), frames)[0]
    places = logits.flatten(1, 2)
    for item, other in ((0, 1), (0, 2), (1, 3)):
        assert not torch.allclose(places[:, item], places[:, other])


def test_symbols_are_in_the_order_of_nodes() -> None:
    shape = graph_shape(3)
    frames = graph_frames(3, SIZES, shape)
    representation, head = graph_body(shape)(frames), GraphPolicyHead(PARAMETERS, shape, None)
    logits = head(representation, frames).message_logits_BVPS
    alone = head.node_selector(representation["nodes"][1, 4])
    torch.testing.assert_close(logits[1, :, :, 4].flatten(), alone)


def test_a_value_or_a_label_needs_no_nodes() -> None:
    shape = graph_shape(3)
    frames = graph_frames(3, SIZES, shape)
    representation, width = graph_body(shape)(frames), 2 * shape.d_representation
    SummaryValueHead(PARAMETERS, shape, GRAPHS, width)(representation, frames)
    assert SummarySoloHead(PARAMETERS, GRAPHS, width)(representation, frames).shape == (3, 2)
    assert list(representation) == ["graphs"]
