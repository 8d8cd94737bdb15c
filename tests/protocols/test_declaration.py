"""A protocol that contradicts itself is refused, with every fault reported."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from nip_astra.errors import ConfigurationError
from nip_astra.parameters.hyper_parameters import HyperParameters
from nip_astra.parameters.parameters_base import SubParameters
from nip_astra.protocols.protocol_base import DeterministicSingleVerifierProtocolHandler
from nip_astra.protocols.registry import build_protocol_handler, register_protocol_handler
from nip_astra.protocols.zero_knowledge import ZeroKnowledgeProtocol
from tests.kit.messages import says


class Echo(DeterministicSingleVerifierProtocolHandler):
    """A prover speaks and the verifier decides."""

    agent_names = ("prover", "verifier")
    message_channel_names = ("main",)
    agent_channel_visibility = (("prover", "main"), ("verifier", "main"))
    max_message_rounds = 2
    min_message_rounds = 1

    def is_agent_active(self, agent_name: str, round_index: int, channel_name: str) -> bool:
        return agent_name == self.agent_names[round_index]


PLAIN = HyperParameters.with_sections({})


def hyper_params(**values: Any) -> HyperParameters:
    return PLAIN.from_dict({"trainer": "none", "scenario": "none", **values})


PAIRS = (("prover", "main"), ("arthur", "main"), ("verifier", "side"))


@pytest.mark.parametrize(
    ("attributes", "facts"),
    [
        ({"message_channel_names": "main"}, ["message_channel_names", "'main'"]),
        ({"agent_names": ("prover", "prover")}, ["agent_names", "('prover', 'prover')"]),
        ({"agent_names": ("prover/1.0", "", "verifier")}, ["agent_names", "'prover/1.0'", "''"]),
        (
            {"agent_channel_visibility": ("prover",)},
            ["agent_channel_visibility", "'prover'", "(agent, channel)"],
        ),
        (
            {"agent_channel_visibility": PAIRS[:1]},
            ["('verifier', 'main')", "agent_channel_visibility"],
        ),
        # All faults of names are reported at once.
        (
            {"agent_channel_visibility": PAIRS, "max_message_rounds": 0},
            ["'arthur'", "'side'", "max_message_rounds=0"],
        ),
        ({"favoured_decisions": {"verifier": 1}}, ["favoured_decisions", "'verifier'"]),
        ({"reward": lambda *_: math.nan}, ["reward('prover', NOTHING)", "nan", "'verifier'"]),
        ({"reward": lambda *_: "1"}, ["reward('verifier', NOTHING)", "'1'"]),
        (
            {"favoured_decisions": {"prover": 2}},
            ["favoured_decisions['prover']", "2", "REJECT (0)", "ACCEPT (1)"],
        ),
        ({"verifier_names": ()}, ["('prover', 'verifier')", "verifier_names"]),
        ({"verifier_names": ("arthur",)}, ["verifier_names", "'arthur'", "prover, verifier"]),
        (
            {"verifier_names": ("prover", "verifier")},
            ["verifier_names", "('prover', 'verifier')", "1", "step"],
        ),
        ({"min_message_rounds": 3}, ["min_message_rounds=3", "max_message_rounds=2"]),
        ({"max_message_rounds": 2.0}, ["max_message_rounds=2.0", "integers"]),
        (
            {"is_agent_active": lambda self, agent, r, channel: agent == "prover"},
            ["'verifier'", "1 to 2", "max_message_rounds", "min_message_rounds"],
        ),
        (
            {"active_table": lambda self: torch.ones(2, 2, 1, dtype=torch.bool)},
            ["active_table", "[2, 2, 1]", "[at least 1, 2, 2, 1]"],
        ),
    ],
)
def test_a_fault_names_the_attribute_and_its_value(
    attributes: dict[str, Any], facts: list[str]
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        type("Mine", (Echo,), attributes)(hyper_params(), SubParameters())
    assert says(caught.value, *facts)


def test_a_missing_protocol_is_reported_with_the_valid_protocols() -> None:
    with pytest.raises(ConfigurationError) as caught:
        build_protocol_handler(hyper_params())
    assert says(caught.value, "adp, debate", "--set interaction_protocol=")


@pytest.mark.usefixtures("no_plugins_left")
def test_a_custom_protocol_is_built_by_its_name_if_it_is_complete() -> None:
    assert register_protocol_handler("echo")(Echo) is Echo
    names = {"interaction_protocol": "echo"}
    assert type(build_protocol_handler(hyper_params(**names))) is Echo
    wrapped = build_protocol_handler(
        hyper_params(**names, protocol_common={"zero_knowledge": True})
    )
    assert isinstance(wrapped, ZeroKnowledgeProtocol)

    @register_protocol_handler("unfinished")
    class Unfinished(DeterministicSingleVerifierProtocolHandler):
        agent_names = ("prover", "verifier")
        message_channel_names = ("main",)

    with pytest.raises(ConfigurationError) as caught:
        build_protocol_handler(hyper_params(interaction_protocol="unfinished"))
    assert says(caught.value, "agent_channel_visibility", "is_agent_active")


class TwoVerifiers(Echo):
    """Two agents decide."""

    agent_names = ("verifier0", "verifier1")
    agent_channel_visibility = (("verifier0", "main"), ("verifier1", "main"))
    num_verifiers = None


def test_zero_knowledge_is_refused_over_several_verifiers() -> None:
    base = TwoVerifiers(hyper_params(), SubParameters())
    with pytest.raises(ConfigurationError) as caught:
        ZeroKnowledgeProtocol(hyper_params(), base)
    assert says(caught.value, "TwoVerifiers", "2", "protocol_common.zero_knowledge=false")
