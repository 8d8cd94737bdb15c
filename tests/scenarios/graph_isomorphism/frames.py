"""Frames of conversations about random graphs, and agents that read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nip_astra.scenario_base.protocol.tensordict_agents import AgentShape, initialise_orthogonally
from nip_astra.scenarios.graphs.agents import GraphBody, GraphIsomorphismAgentParameters
from tests.scenarios.networks import Frames, agent_shape


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


def in_nodes_order(frames: Frames, order_B2n: Tensor) -> Frames:
    """The frames with the nodes of each graph permuted."""
    n = order_B2n.shape[-1]
    symbols = (order_B2n + torch.tensor([[0], [n]])).flatten(1)
    adjacency = frames["adjacency"].gather(2, order_B2n[..., None].expand(-1, -1, -1, n))
    adjacency = adjacency.gather(3, order_B2n[:, :, None].expand(-1, -1, n, -1))
    return frames | {
        "adjacency": adjacency,
        "node_mask": frames["node_mask"].gather(2, order_B2n),
        "message_history": in_symbols_order(frames["message_history"], symbols),
        "message": in_symbols_order(frames["message"], symbols),
    }


def in_symbols_order(values: Tensor, order_BS: Tensor) -> Tensor:
    """Values [B, ..., S] with their last dimension permuted."""
    between = [1] * (values.dim() - 2)
    return values.gather(-1, order_BS.view(len(order_BS), *between, -1).expand_as(values))


def graph_body(shape: AgentShape, **parameters: object) -> GraphBody:
    """A body with fixed random nonzero weights."""
    torch.manual_seed(0)
    body = GraphBody(GraphIsomorphismAgentParameters(**parameters), shape)
    initialise_orthogonally(body, 1.0)
    for parameter in body.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter.data, std=0.1)
    return body
