"""Play conversations in which reference and attacker take turns by a proposal."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nip_astra.evaluation.failure_probability import attacker_turns
from nip_astra.language_models.base import (
    GenerationSession,
    SamplingOptions,
    TokenSampler,
    TokenScorer,
    Turns,
    as_sampler,
    pad_left,
)
from nip_astra.rollouts.tree import RolloutTree
from nip_astra.samplers.trees import TreeSampler
from nip_astra.scenario_base.agents import ConversationAgent
from nip_astra.scenario_base.chat_agent import TextAttacker


class _TurnsInOrder(GenerationSession):
    """Each call is answered by the model whose turn it is."""

    def __init__(self, sessions: Sequence[GenerationSession]) -> None:
        self._sessions = sessions
        self._turns = iter(sessions)

    def generate(
        self,
        contexts: Sequence[Sequence[int]],
        rows_per_context: int,
        uniforms_RT: Tensor,
        options: SamplingOptions,
        *,
        branching: int = 1,
        spans: Sequence[tuple[int, int]] | None = None,
    ) -> Turns:
        return next(self._turns).generate(
            contexts, rows_per_context, uniforms_RT, options, branching=branching, spans=spans
        )

    def close(self) -> None:
        for session in self._sessions:
            session.close()


def speaker_of(
    proposal: str, attacker: ConversationAgent, reference: ConversationAgent, num_turns: int
) -> ConversationAgent:
    """An agent whose turns are the attacker's or the reference's, as the proposal says.

    It speaks in conversations that do not branch, of `num_turns` turns.
    """
    voices = [as_sampler(agent.language_model, role=agent.role) for agent in (reference, attacker)]
    # All but the sessions is the reference's, which differs from the attacker in weights alone.
    model: Any = copy.copy(reference.language_model)
    model.voices = voices
    model.open_session = partial(_open_session, voices, attacker_turns(proposal, num_turns))
    return replace(reference, language_model=model)


def _open_session(voices: Sequence[TokenSampler], turns: Sequence[int]) -> GenerationSession:
    """A session whose turns are those of the first or of the second voice."""
    sessions = [model.open_session() for model in voices]
    return _TurnsInOrder([sessions[turn] for turn in turns])


def why_inexact(agents: Sequence[ConversationAgent | TextAttacker]) -> str | None:
    """Say why the probability of a sampled probe cannot be known exactly; None where it can."""
    with_tokens = [agent for agent in agents if isinstance(agent, ConversationAgent)]
    if len(with_tokens) < len(agents):
        return "the attacker gives texts, and not how probable they are"
    if not all(isinstance(agent.language_model, TokenScorer) for agent in with_tokens):
        return "the backend of the attacker samples tokens, and does not tell how probable they are"
    first, *others = (agent.sampling for agent in with_tokens)
    if any(other != first for other in others):
        return "attacker and reference are sampled with different options"
    faults = []
    if first.temperature != 1.0:
        faults.append(f"temperature {first.temperature:g}")
    if first.top_k is not None:
        faults.append(f"top_k {first.top_k}")
    if first.top_p < 1.0:
        faults.append(f"top_p {first.top_p:g}")
    if faults:
        return (
            f"the attacker is sampled with {', '.join(faults)}, so that the probability of a probe "
            "is not the model's own; weights are exact at temperature 1 without top_k and top_p"
        )
    return None


def sampled_logprobs(model: TokenScorer, tree: RolloutTree, options: SamplingOptions) -> Tensor:
    """The log-probability with which a model would have said each probe, `[N]`, nats.

    Under the distribution that is sampled from: tokens that are never drawn are left out. NaN
    where the backend cannot tell.
    """
    nodes = tree.nodes
    contexts = [tree.context_of(node) for node in range(tree.num_nodes)]
    rows = *pad_left(contexts, torch.device("cpu")), nodes["probe"], nodes["probe_mask"]
    logprobs_NT = model.sampled_logprobs(*rows, options)
    if logprobs_NT is None:
        return torch.full((tree.num_nodes,), float("nan"))
    return logprobs_NT.double().sum(dim=1)


def sampler_of(proposal: str, sampler: TreeSampler, *, num_turns: int) -> TreeSampler:
    """A sampler whose probes come by a proposal; all that it plays is in memory together."""
    # An attacker whose probabilities are not known is in no mixture.
    attacker = sampler.attacker if isinstance(sampler.attacker, ConversationAgent) else None
    reference = sampler.reference
    agent = speaker_of(proposal, attacker or reference, reference, num_turns)
    found = sampler.with_attacker(agent)
    found.max_cache_bytes = None
    return found
