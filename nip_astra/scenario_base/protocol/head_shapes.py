"""Check once that the parts of agents give tensors of the shapes that a protocol needs.

Shapes: as in `tensordict_agents`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from nip_astra.errors import AgentShapeError
from nip_astra.scenario_base.protocol.environment import ProtocolEnvironment
from nip_astra.scenario_base.protocol.tensordict_agents import (
    Agent,
    AgentBody,
    AgentPolicyHead,
    LabelledValueHead,
    Observation,
    PolicyOutput,
    Representation,
)

NUM_FRAMES = 5
"""B of the check: no other dimension that is often met, so that a swap of dimensions is seen."""

T = TypeVar("T")


@torch.no_grad()
def check_agents(agents: Mapping[str, Agent], environment: ProtocolEnvironment) -> None:
    """Ask every agent about a few first frames, and refuse answers of a wrong shape.

    Agents, environment and generators are as before.
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
    read = _read(agent, agent.policy_body, frames)
    if agent.policy_head is not None:
        _check_policy(agent, agent.policy_head, read, frames)
    if agent.solo_head is not None:
        _check_head(agent, "solo head", agent.solo_head, [2], read, frames)
    if agent.value_head is not None:
        head, seen = agent.value_head, _read(agent, agent.value_body, frames)
        first = head.heads[0] if isinstance(head, LabelledValueHead) else head
        _check_head(agent, "value head", first, [], seen, frames)


def _read(agent: Agent, body: AgentBody | None, frames: Observation) -> Representation:
    if body is None:
        return {}
    found: Any = _ask(agent, "body", body, lambda: body(frames))
    if not isinstance(found, Mapping):
        raise _fault(agent, "body", body, _kind(found), "a dictionary of tensors")
    for name, value in found.items():
        if not isinstance(value, Tensor) or not value.ndim or len(value) != NUM_FRAMES:
            raise _fault(
                agent,
                "body",
                body,
                f"{name}: {_kind(value)}",
                f"numbers of shape [{NUM_FRAMES}, ...]",
            )
    return found


def _check_policy(
    agent: Agent, head: AgentPolicyHead, read: Representation, frames: Observation
) -> None:
    space, shape = agent.shape.message_space, agent.shape
    output: Any = _ask(agent, "policy head", head, lambda: head.logits(read, frames))
    if not isinstance(output, PolicyOutput):
        raise _fault(agent, "policy head", head, _kind(output), "a PolicyOutput")
    place = [shape.num_visible, space.message_size]
    needed: dict[str, list[int] | None] = {
        "message_logits_BVPS": [*place, space.num_symbols],
        "linear_logits_BVPL": [*place, space.num_linear_symbols]
        if space.num_linear_symbols
        else None,
    }
    if shape.has_decision or output.decision_logits_B3 is not None:
        needed["decision_logits_B3"] = [3]
    for name, expected in needed.items():
        _check(agent, "policy head", head, name, getattr(output, name), expected)
    _ask(agent, "policy head", head, lambda: head(read, frames))


def _check_head(
    agent: Agent,
    part: str,
    head: nn.Module,
    expected: list[int],
    read: Representation,
    frames: Observation,
) -> None:
    found = _ask(agent, part, head, lambda: head(read, frames))
    _check(agent, part, head, "", found, expected)


def _check(
    agent: Agent, part: str, module: nn.Module, name: str, found: Any, expected: list[int] | None
) -> None:
    """Refuse what is no tensor of numbers of the expected shape, without its first dimension."""
    if expected is None:
        if found is not None:
            raise _fault(agent, part, module, f"{name}: {_kind(found)}", "None")
        return
    is_right = isinstance(found, Tensor) and list(found.shape) == [NUM_FRAMES, *expected]
    if not is_right or not found.is_floating_point():
        needed = f"numbers of shape {[NUM_FRAMES, *expected]}"
        raise _fault(agent, part, module, f"{name}: {_kind(found)}".removeprefix(": "), needed)


def _ask(agent: Agent, part: str, module: nn.Module, ask: Callable[[], T]) -> T:
    try:
        return ask()
    except Exception as error:
        raise AgentShapeError(
            f"the {part} {type(module).__name__} of the agent {agent.name!r} fails on {NUM_FRAMES} "
            f"frames: {type(error).__name__}: {error}. Give it the sizes of the agent's shape: "
            f"{_dimensions(agent)}."
        ) from error


def _fault(
    agent: Agent, part: str, module: nn.Module, found: str, expected: str
) -> AgentShapeError:
    return AgentShapeError(
        f"the {part} {type(module).__name__} of the agent {agent.name!r} returns {found} for "
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
