"""Building and playing protocols without agents."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from nip_astra.parameters.hyper_parameters import HyperParameters
from nip_astra.protocols.protocol_base import (
    ACCEPT,
    CONTINUE,
    REJECT,
    Moves,
    ProtocolHandler,
    ProtocolStep,
)
from nip_astra.protocols.registry import PROTOCOL_HANDLERS, build_protocol_handler

LETTERS = {"r": REJECT, "a": ACCEPT, "c": CONTINUE}
REWARDS = {
    "prover_reward": 2.0,
    "verifier_reward": 3.0,
    "verifier_incorrect_penalty": -5.0,
    "verifier_terminated_penalty": -7.0,
    "verifier_no_guess_reward": 0.5,
}
"""Rewards of which no two are alike, nor a sum of others."""
PLAY_ALONE = ("adp", "merlin_arthur", "solo_verifier")
"""Protocols whose length is fixed."""


def build(
    name: str,
    section: Mapping[str, Any] = {},
    *,
    zk: Mapping[str, float] | None = None,
    **common: Any,
) -> ProtocolHandler:
    """Build a protocol with its own parameters, and zero knowledge if `zk` is given."""
    cls = HyperParameters.with_sections({name: PROTOCOL_HANDLERS.get(name).Parameters})
    values = {
        "trainer": "none",
        "scenario": "none",
        "interaction_protocol": name,
        name: dict(section),
        "protocol_common": {**REWARDS, "zero_knowledge": zk is not None, **common},
        "zk_protocol": dict(zk or {}),
    }
    return build_protocol_handler(cls.from_dict(values))


def play(
    handler: ProtocolHandler,
    moves_of: Callable[[int], Moves],
    y_E: Tensor,
    seed_E: Tensor,
    *,
    num_rounds: int | None = None,
) -> list[ProtocolStep]:
    """Play rounds of episodes that begin together and are also stepped after their ends."""
    agent_decided_EA = torch.zeros(len(y_E), handler.num_agents, dtype=torch.bool)
    steps = []
    for r in range(num_rounds or handler.max_message_rounds):
        round_E = torch.full_like(seed_E, r)
        steps.append(handler.step(round_E, seed_E, y_E, agent_decided_EA, moves_of(r)))
        agent_decided_EA = steps[-1].agent_decided_EA
    return steps


def random_moves(handler: ProtocolHandler, count: int, generator: torch.Generator) -> Moves:
    """Moves of all agents, active or not; most decisions are to continue."""
    shape = (count, handler.num_agents)
    weights = torch.tensor([1.0, 1.0, 3.0]).expand(count * handler.num_agents, 3)
    decisions = torch.multinomial(weights, 1, generator=generator).reshape(shape)
    space = (handler.num_channels, 2, 3)
    return Moves(
        decision_EA=decisions,
        message_logits_EACPS=torch.randn(*shape, *space, generator=generator),
        decision_logits_EA3=torch.randn(*shape, 3, generator=generator),
    )
