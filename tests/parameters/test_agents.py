"""Parameters of agents, and of all agents by name."""

from __future__ import annotations

import pytest

from nip_astra.parameters.agents import (
    AgentParameters,
    AgentsParameters,
    LrFactors,
    RandomAgentParameters,
)
from nip_astra.parameters.parameters_base import explicit_values


def test_an_agent_that_plays_at_random_declares_this() -> None:
    assert RandomAgentParameters().is_random
    assert explicit_values(RandomAgentParameters()) == {"is_random": True}


def test_agents_are_given_by_name_or_in_pairs_and_have_a_default() -> None:
    slow = AgentParameters(agent_lr_factor=LrFactors(actor=0.1))
    agents = AgentsParameters(prover=slow, _default=AgentParameters())
    assert agents == AgentsParameters([("prover", slow), ("default", AgentParameters())])
    assert agents["prover"] is slow
    assert agents["verifier"] == AgentParameters()
    with pytest.raises(KeyError, match="verifier"):
        AgentsParameters(prover=slow)["verifier"]


def test_of_groups_only_set_values_are_returned() -> None:
    agents = AgentsParameters(prover=AgentParameters(agent_lr_factor=LrFactors(actor=0.1)))
    assert explicit_values({"agents": agents, "order": (("a",), ("b",))}) == {
        "agents": {"prover": {"agent_lr_factor": {"actor": 0.1}}},
        "order": [["a"], ["b"]],
    }
