"""Each family has its own parts; a part of another family is refused by name."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest

from nip_astra.errors import MissingPartError
from nip_astra.scenario_instance import ConversationInstance, ProtocolInstance, ScenarioInstance
from tests.kit.experiments import trainer_of


def test_a_conversation_has_no_protocol(tiny_scenario: Path) -> None:
    instance = trainer_of("ast_dpo", scenario=tiny_scenario).scenario_instance
    assert isinstance(instance, ConversationInstance)
    assert set(instance.datasets) == {"train", "dev", "test"}
    assert instance.num_parameters > 0
    with pytest.raises(MissingPartError, match=r"'ast_chat'.*'protocol_handler'.*sampler"):
        instance.protocol_handler  # noqa: B018 - reading it is the test
    assert not hasattr(instance, "combined_agents")


def test_a_protocol_has_no_opening_prompts() -> None:
    instance = trainer_of("vanilla_ppo", scenario="graph_isomorphism_small").scenario_instance
    assert isinstance(instance, ProtocolInstance)
    assert instance.num_parameters > 0
    with pytest.raises(MissingPartError, match=r"'graph_isomorphism'.*'datasets'"):
        instance.datasets  # noqa: B018 - reading it is the test


def test_the_base_alone_is_an_instance_that_can_be_copied() -> None:
    instance = ScenarioInstance(kind="plain")
    assert instance.num_parameters == 0
    assert copy.deepcopy(instance) == pickle.loads(pickle.dumps(instance)) == instance
