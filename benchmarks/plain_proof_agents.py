"""Baseline agents of graph isomorphism for TorchRL: one actor and one critic over all agents.

A straightforward implementation: message passing is a product over all pairs of nodes, and a
transformer reads all tokens with a mask per frame. All networks run on every frame; the moves of
inactive agents are then made deterministic.

Shapes: B frames, A agents, n nodes of a graph, S = 2 n symbols, K = 2 + S tokens, D width,
F message features.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from tensordict.nn import CompositeDistribution, InteractionType, TensorDictModule
from torch import Tensor, nn
from torch.distributions import Categorical, Independent
from torchrl.modules import ProbabilisticActor

from nip_astra.scenario_base.protocol.tensordict_agents import MASKED, Agent, AgentBody
from nip_astra.scenarios.graphs.agents import GRAPHS, NODES, AttentionLayer, GinLayer, GraphBody

FRAME_KEYS = (
    *("round", "message_history", "message", "adjacency", "node_mask"),
    *("active_mask", "can_decide", "question_round"),
)
"""Keys of a frame that agents read."""


class PlainBody(nn.Module):
    """Equivalent of a `GraphBody` by a product over pairs of nodes and a masked transformer."""

    def __init__(self, body: GraphBody) -> None:
        super().__init__()
        layers = [layer for layer in body.attention_layers if isinstance(layer, AttentionLayer)]
        d_token, num_heads = layers[0].query.in_features, layers[0].num_heads
        self.num_heads = num_heads
        self.is_pair_invariant = body.pooling.is_pair_invariant
        self.visible = list(body.shape.visible_channels)
        self.node_input = copy.deepcopy(body.node_input)
        self.gnn_layers = nn.ModuleList(
            nn.Sequential(copy.deepcopy(layer.inner), nn.Tanh(), copy.deepcopy(layer.outer))
            for layer in body.gnn_layers
            if isinstance(layer, GinLayer)
        )
        self.token_input = copy.deepcopy(body.token_input)
        layer = nn.TransformerEncoderLayer(
            d_token,
            num_heads,
            layers[0].inner.out_features,
            dropout=0.0,
            activation=torch.tanh,
            batch_first=True,
        )
        self.encoder = nn.TransformerEncoder(layer, len(layers), enable_nested_tensor=False)
        for target, source in zip(self.encoder.layers, layers, strict=True):
            _copy_attention(target, source)
        self.output = copy.deepcopy(body.output)

    def forward(self, frame: Mapping[str, Tensor]) -> dict[str, Tensor]:
        history_BPS = frame["message_history"][:, :, self.visible].flatten(1, 3)
        num_frames, _, num_symbols = history_BPS.shape
        ones_BS1 = history_BPS.new_ones(num_frames, num_symbols, 1)
        nodes = self.node_input(torch.cat([history_BPS.transpose(1, 2), ones_BS1], dim=-1))
        nodes_B2nD = nodes.unflatten(1, (2, -1))
        adjacency_B2nn1 = frame["adjacency"].unsqueeze(-1)
        for layer in self.gnn_layers:
            nodes_B2nD = torch.tanh(nodes_B2nD)
            sums_B2nD = (adjacency_B2nn1 * nodes_B2nD.unsqueeze(-3)).sum(dim=-2)
            nodes_B2nD = layer(nodes_B2nD + sums_B2nD)
        sums_B2D = (nodes_B2nD * frame["node_mask"].unsqueeze(-1)).sum(dim=-2)
        if self.is_pair_invariant:
            first, second = sums_B2D.unbind(1)
            sums_B2D = torch.stack([(first + second) / 2, (first - second).abs()], dim=1)
        tokens_BKD = self._tokens(torch.cat([sums_B2D, nodes_B2nD.flatten(1, 2)], dim=1), frame)
        mask_BKK = _attention_mask(frame["node_mask"])
        encoded_BKD = self.encoder(
            tokens_BKD, mask=mask_BKK.repeat_interleave(self.num_heads, dim=0)
        )
        output_BKD = self.output(encoded_BKD)
        return {GRAPHS: output_BKD[:, :2], NODES: output_BKD[:, 2:]}

    def _tokens(self, gnn_BKD: Tensor, frame: Mapping[str, Tensor]) -> Tensor:
        num_frames, num_tokens, _ = gnn_BKD.shape
        flags_K2 = torch.eye(num_tokens, 2)
        message_BSF = frame["message"][:, self.visible].flatten(1, 2).transpose(1, 2)
        message_BKF = torch.cat([torch.zeros_like(message_BSF[:, :2]), message_BSF], dim=1)
        flags_BK2 = flags_K2.expand(num_frames, -1, -1)
        tokens: Tensor = self.token_input(torch.cat([gnn_BKD, flags_BK2, message_BKF], dim=-1))
        return tokens


def _copy_attention(target: nn.TransformerEncoderLayer, source: AttentionLayer) -> None:
    attention = target.self_attn
    with torch.no_grad():
        attention.in_proj_weight.copy_(
            torch.cat([source.query.weight, source.key.weight, source.value.weight])
        )
        zeros = torch.zeros_like(source.query.bias)
        attention.in_proj_bias.copy_(torch.cat([source.query.bias, zeros, zeros]))
    pairs = (
        (attention.out_proj, source.output),
        (target.norm1, source.attention_norm),
        (target.linear1, source.inner),
        (target.linear2, source.outer),
        (target.norm2, source.norm),
    )
    for copied, original in pairs:
        copied.load_state_dict(original.state_dict())


def _attention_mask(node_mask_B2n: Tensor) -> Tensor:
    """True where attention is forbidden, [B, K, K]: padding, and nodes of the same graph."""
    num_frames, _, n = node_mask_B2n.shape
    graph_K = torch.cat([torch.tensor([-1, -2]), torch.arange(2).repeat_interleave(n)])
    is_same_KK = (graph_K[:, None] == graph_K) & (graph_K >= 0)
    is_real_BK = torch.cat(
        [torch.ones(num_frames, 2, dtype=torch.bool), node_mask_B2n.flatten(1)], dim=1
    )
    return is_same_KK | ~is_real_BK[:, None]


# ---- all agents as one actor and one critic


class PlainNetworks(nn.Module):
    """A body and a head for each agent."""

    def __init__(self, agents: Sequence[Agent], kind: str) -> None:
        super().__init__()
        self.bodies = nn.ModuleList(_plain_body(getattr(agent, f"{kind}_body")) for agent in agents)
        self.heads = nn.ModuleList(
            copy.deepcopy(getattr(agent, f"{kind}_head")) for agent in agents
        )


class PlainPolicies(PlainNetworks):
    """Logits of all agents in every frame."""

    def forward(self, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        frame, batch_shape = _frame_of(tensors)
        messages, decisions = [], []
        for body, head in zip(self.bodies, self.heads, strict=True):
            output = head(body(frame), frame)
            logits = output.message_logits_BVPS
            messages.append(logits)
            decision = output.decision_logits_B3
            decisions.append(logits.new_zeros(len(logits), 3) if decision is None else decision)
        message_BACPS, decision_BA3 = torch.stack(messages, dim=1), torch.stack(decisions, dim=1)
        # An inactive agent's move is deterministic: its log-probability and entropy are 0.
        silence_S = _deterministic_logits(message_BACPS.shape[-1], 0)
        is_active = frame["active_mask"][..., None, None]
        message_BACPS = torch.where(is_active, message_BACPS, silence_S)
        decision_BA3 = torch.where(
            frame["can_decide"][..., None], decision_BA3, _deterministic_logits(3, 2)
        )
        return _unflattened(message_BACPS, batch_shape), _unflattened(decision_BA3, batch_shape)


class PlainValues(PlainNetworks):
    """Values of all agents in every frame, [B, A, 1]."""

    def forward(self, *tensors: Tensor) -> Tensor:
        frame, batch_shape = _frame_of(tensors)
        parts = zip(self.bodies, self.heads, strict=True)
        values_BA = torch.stack([head(body(frame), frame) for body, head in parts], dim=1)
        return _unflattened(values_BA.unsqueeze(-1), batch_shape)


def _plain_body(body: AgentBody | None) -> PlainBody:
    assert isinstance(body, GraphBody)
    return PlainBody(body)


def _frame_of(tensors: Sequence[Tensor]) -> tuple[dict[str, Tensor], torch.Size]:
    """The frames with flattened batch dimensions, and their original batch shape."""
    batch_shape = tensors[0].shape
    last = len(batch_shape) - 1
    frame = {key: tensor.flatten(0, last) for key, tensor in zip(FRAME_KEYS, tensors, strict=True)}
    return frame, batch_shape


def _unflattened(tensor: Tensor, batch_shape: torch.Size) -> Tensor:
    return tensor.view(*batch_shape, *tensor.shape[1:])


def _deterministic_logits(num_symbols: int, symbol: int) -> Tensor:
    logits = torch.full((num_symbols,), MASKED)
    logits[symbol] = 0.0
    return logits


def _messages(logits: Tensor) -> Independent[Categorical]:
    """Joint distribution of the symbols of all channels and positions."""
    return Independent(Categorical(logits=logits), 2)


def build_actor(agents: Sequence[Agent]) -> ProbabilisticActor:
    """One actor for all agents."""
    parameters = [("agents", "params", name, "logits") for name in ("message", "decision")]
    network = TensorDictModule(
        PlainPolicies(agents, "policy"), in_keys=[*FRAME_KEYS], out_keys=parameters
    )
    moves = {name: ("agents", name) for name in ("message", "decision")}
    return ProbabilisticActor(
        network,
        in_keys={"params": ("agents", "params")},
        out_keys=list(moves.values()),
        distribution_class=CompositeDistribution,
        distribution_kwargs={
            "distribution_map": {"message": _messages, "decision": Categorical},
            "name_map": moves,
        },
        return_log_prob=True,
        default_interaction_type=InteractionType.RANDOM,
    )


def build_critic(agents: Sequence[Agent]) -> TensorDictModule:
    """One critic for all agents."""
    return TensorDictModule(
        PlainValues(agents, "value"), in_keys=[*FRAME_KEYS], out_keys=[("agents", "value")]
    )
