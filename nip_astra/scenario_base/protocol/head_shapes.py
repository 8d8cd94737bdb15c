"""Check that agents' networks return tensors of the shapes required by a protocol.

Shapes: as in `tensordict_agents`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from nip_astra.errors import AgentShapeError
from nip_astra.scenario_base.protocol.environment import ProtocolEnvironment
from nip_astra.scenario_base.protocol.tensordict_agents import (
    Agent,
    AgentBody,
    LabelledValueHead,
    Observation,
    PolicyOutput,
    Representation,
)

NUM_FRAMES = 5
"""Batch size of the check; unlike other dimensions, so that swapped ones are noticed."""


@torch.no_grad()
def check_agents(agents: Mapping[str, Agent], environment: ProtocolEnvironment) -> None:
    """Run every agent on a few first frames, and check the shapes of its outputs.

    Agents, environment and generators are unchanged.

    Raises
    ------
    AgentShapeError
        Names the agent, its part, and the expected and actual shape.
    """
    rows = torch.arange(NUM_FRAMES) % len(environment.dataset)
    frames = environment.first_frames(rows.to(environment.device))
    for agent in agents.values():
        was_training = [part for part in agent.modules() if part.training]
        agent.eval()
        try:
            with torch.random.fork_rng(devices=[]):
                _check_parts(agent, frames)
        finally:
            for part in was_training:
                part.training = True


def _check_parts(agent: Agent, frames: Observation) -> None:
    representation = _read(agent, agent.policy_body, frames)
    policy, solo, value = agent.policy_head, agent.solo_head, agent.value_head
    if policy is not None:
        output: Any = _run(
            agent, "policy head", policy, lambda: policy.logits(representation, frames)
        )
        if not isinstance(output, PolicyOutput):
            raise _wrong(agent, "policy head", policy, _kind(output), "a PolicyOutput")
        space, num_linear = agent.shape.message_space, agent.shape.message_space.num_linear_symbols
        places = [agent.shape.num_visible, space.message_size]
        needed: dict[str, list[int] | None] = {
            "message_logits_BVPS": [*places, space.num_symbols],
            "linear_logits_BVPL": [*places, num_linear] if num_linear else None,
        }
        if agent.shape.has_decision or output.decision_logits_B3 is not None:
            needed["decision_logits_B3"] = [3]
        for name, expected in needed.items():
            _check(agent, "policy head", policy, f"{name}: ", getattr(output, name), expected)
        _run(agent, "policy head", policy, lambda: policy(representation, frames))
    if solo is not None:
        labels = _run(agent, "solo head", solo, lambda: solo(representation, frames))
        _check(agent, "solo head", solo, "", labels, [2])
    if value is not None:
        seen = _read(agent, agent.value_body, frames)
        head = value.heads[0] if isinstance(value, LabelledValueHead) else value
        values = _run(agent, "value head", head, lambda: head(seen, frames))
        _check(agent, "value head", head, "", values, [])


def _read(agent: Agent, body: AgentBody | None, frames: Observation) -> Representation:
    if body is None:
        return {}
    representation: Any = _run(agent, "body", body, lambda: body(frames))
    if not isinstance(representation, Mapping):
        raise _wrong(agent, "body", body, _kind(representation), "a dictionary of tensors")
    for name, value in representation.items():
        if not isinstance(value, Tensor) or not value.ndim or len(value) != NUM_FRAMES:
            expected = f"numbers of shape [{NUM_FRAMES}, ...]"
            raise _wrong(agent, "body", body, f"{name}: {_kind(value)}", expected)
    return representation


def _check(
    agent: Agent, part: str, module: object, name: str, value: Any, expected: list[int] | None
) -> None:
    """Check that a value has the expected shape (B omitted), or is None if that is expected."""
    if expected is None:
        if value is not None:
            raise _wrong(agent, part, module, name + _kind(value), "None")
        return
    shape = [NUM_FRAMES, *expected]
    is_right = isinstance(value, Tensor) and list(value.shape) == shape
    if not is_right or not value.is_floating_point():
        raise _wrong(agent, part, module, name + _kind(value), f"numbers of shape {shape}")


def _run(agent: Agent, part: str, module: object, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        raise AgentShapeError(
            f"the {part} {type(module).__name__} of the agent {agent.name!r} fails on {NUM_FRAMES} "
            f"frames: {type(error).__name__}: {error}. Give it the sizes of the agent's shape: "
            f"{_dimensions(agent)}."
        ) from error


def _wrong(agent: Agent, part: str, module: object, actual: str, expected: str) -> AgentShapeError:
    return AgentShapeError(
        f"the {part} {type(module).__name__} of the agent {agent.name!r} returns {actual} for "
        f"{NUM_FRAMES} frames, expected {expected}; the agent has {_dimensions(agent)}. Fix the "
        f"scenario's {part}."
    )


def _dimensions(agent: Agent) -> str:
    shape, space = agent.shape, agent.shape.message_space
    return (
        f"num_visible {shape.num_visible}, message_size {space.message_size}, num_symbols "
        f"{space.num_symbols}, num_linear_symbols {space.num_linear_symbols}, d_representation "
        f"{shape.d_representation} and {'a' if shape.has_decision else 'no'} decision"
    )


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        numbers = "numbers" if value.is_floating_point() else str(value.dtype)
        return f"{numbers} of shape {list(value.shape)}"
    return "None" if value is None else f"a {type(value).__name__}"
