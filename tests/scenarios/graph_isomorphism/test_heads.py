"""Messages that agents may send, and outputs of heads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nip_astra.scenario_base.protocol.tensordict_agents import MASKED, AgentShape
from nip_astra.scenarios.graphs.agents import (
    GRAPHS,
    GraphIsomorphismAgentParameters,
    GraphPolicyHead,
    impossible_symbols,
)
from nip_astra.scenarios.heads import SummarySoloHead, SummaryValueHead
from tests.scenarios.graph_isomorphism.frames import agent_shape, graph_body, graph_frames

SIZES = [(3, 3), (2, 3), (3, 1)]
PARAMETERS = GraphIsomorphismAgentParameters()


def value_head(parameters: GraphIsomorphismAgentParameters, shape: AgentShape) -> SummaryValueHead:
    return SummaryValueHead(parameters, shape, GRAPHS, 2 * shape.d_representation)


def solo_head(parameters: GraphIsomorphismAgentParameters, shape: AgentShape) -> SummarySoloHead:
    return SummarySoloHead(parameters, GRAPHS, 2 * shape.d_representation)


def possible(frames: dict[str, Tensor], **shape: object) -> Tensor:
    """Mask of the symbols allowed at each position, [B, V, P, S]."""
    of_agent = agent_shape(3, **shape)  # type: ignore[arg-type]
    places = (len(frames["round"]), of_agent.num_visible, 2, 6)
    return ~impossible_symbols(frames, of_agent).expand(places)


@pytest.fixture
def frames() -> dict[str, Tensor]:
    return without_messages(graph_frames(3, SIZES, agent_shape(3)))


def without_messages(frames: dict[str, Tensor]) -> dict[str, Tensor]:
    silent = {name: torch.zeros_like(frames[name]) for name in ("message", "message_history")}
    return frames | silent


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


def test_a_prover_answers_a_question_before_the_last_message(
    frames: dict[str, Tensor],
) -> None:
    frames["question_round"][2, 1] = 0
    ask(frames, 2, 1, 0, 1)
    frames["message_history"][2, 1, 1, 0, 4] = 1
    frames["message"][2, 1, 0, 4] = 1
    sent = possible(frames, is_verifier=False).int()
    assert sent[2, 1, 0].tolist() == [0, 0, 0, 1, 0, 0]


def test_a_prover_answers_in_the_channels_that_it_sees(frames: dict[str, Tensor]) -> None:
    ask(frames, 0, 0, 0, 1)
    ask(frames, 0, 0, 1, 1)
    sent = possible(frames, is_verifier=False, visible=[1]).int()
    assert sent.shape == (3, 1, 2, 6)
    assert sent[0].tolist() == [[[1, 1, 1, 0, 0, 0]] * 2]


@pytest.mark.parametrize("is_verifier", [True, False])
@pytest.mark.parametrize("num_linear", [0, 4])
def test_a_policy_head_gives_logits_of_all_moves(is_verifier: bool, num_linear: int) -> None:
    shape = agent_shape(3, is_verifier=is_verifier, num_linear=num_linear, visible=[1])
    frames = graph_frames(3, SIZES, shape)
    head = GraphPolicyHead(PARAMETERS, shape)
    output = head(graph_body(shape)(frames), frames)
    assert output.message_logits_BVPS.shape == (3, 1, 2, 6)
    is_masked = output.message_logits_BVPS == MASKED
    assert torch.equal(is_masked, impossible_symbols(frames, shape).expand_as(is_masked))
    assert (output.decision_logits_B3 is not None) is is_verifier
    if output.decision_logits_B3 is not None:
        assert output.decision_logits_B3.shape == (3, 3)
    assert (output.linear_logits_BVPL is not None) is bool(num_linear)
    if output.linear_logits_BVPL is not None:
        assert output.linear_logits_BVPL.shape == (3, 1, 2, num_linear)


def test_positions_and_channels_have_logits_of_their_own() -> None:
    shape = agent_shape(3)
    frames = graph_frames(3, SIZES, shape)
    logits = GraphPolicyHead(PARAMETERS, shape, None)(graph_body(shape)(frames), frames)[0]
    places = logits.flatten(1, 2)
    for one, other in ((0, 1), (0, 2), (1, 3)):
        assert not torch.allclose(places[:, one], places[:, other])


def test_symbols_are_in_the_order_of_nodes() -> None:
    shape = agent_shape(3)
    frames = graph_frames(3, SIZES, shape)
    representation, head = graph_body(shape)(frames), GraphPolicyHead(PARAMETERS, shape, None)
    logits = head(representation, frames).message_logits_BVPS
    alone = head.node_selector(representation["nodes"][1, 4])
    torch.testing.assert_close(logits[1, :, :, 4].flatten(), alone)


def test_a_value_or_a_label_needs_no_nodes() -> None:
    shape = agent_shape(3)
    frames = graph_frames(3, SIZES, shape)
    representation = graph_body(shape)(frames)
    value_head(PARAMETERS, shape)(representation, frames)
    assert solo_head(PARAMETERS, shape)(representation, frames).shape == (3, 2)
    assert list(representation) == ["graphs"]
