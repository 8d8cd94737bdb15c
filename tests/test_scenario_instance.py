"""Each family has its own parts; a part of another family is refused by name."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest

from nip_astra.errors import MissingPartError
from nip_astra.scenario_instance import ConversationInstance, ProtocolInstance, ScenarioInstance
from tests.kit.experiments import trainer_of


def test_a_part_of_another_family_is_refused(tiny_scenario: Path) -> None:
    conversation = trainer_of("ast_dpo", scenario=tiny_scenario).scenario_instance
    assert isinstance(conversation, ConversationInstance)
    assert set(conversation.datasets) == {"train", "dev", "test"}
    with pytest.raises(MissingPartError, match=r"'ast_chat'.*'protocol_handler'.*sampler"):
        conversation.protocol_handler  # noqa: B018 - reading it is the test
    assert not hasattr(conversation, "combined_agents")
    protocol = trainer_of("vanilla_ppo", scenario="graph_isomorphism_small").scenario_instance
    assert isinstance(protocol, ProtocolInstance)
    assert min(conversation.num_parameters, protocol.num_parameters) > 0
    with pytest.raises(MissingPartError, match=r"'graph_isomorphism'.*'datasets'"):
        protocol.datasets  # noqa: B018 - reading it is the test


def test_the_base_alone_is_an_instance_that_can_be_copied() -> None:
    instance = ScenarioInstance(kind="plain")
    assert instance.num_parameters == 0
    assert copy.deepcopy(instance) == pickle.loads(pickle.dumps(instance)) == instance
