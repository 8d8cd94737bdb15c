"""Heads and bodies of a wrong shape are refused when agents are built."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from nip_astra.errors import AgentShapeError
from nip_astra.scenario_base.protocol.tensordict_agents import PolicyOutput
from tests.toy_protocol_scenario import (
    ToyBody,
    ToyPolicyHead,
    ToySoloHead,
    ToyValueHead,
    toy_kind,
    toy_trainer,
)


@pytest.fixture(autouse=True)
def _kind() -> Iterator[None]:
    with toy_kind():
        yield


def refusal(monkeypatch: pytest.MonkeyPatch, part: type, hook: str, change: Any) -> str:
    """The message where what a part gives is changed."""
    original = getattr(part, hook)
    monkeypatch.setattr(part, hook, lambda *args: change(original(*args)))
    trainer = "solo_agent" if part is ToySoloHead else "vanilla_ppo"
    with pytest.raises(AgentShapeError) as caught:
        toy_trainer(trainer)
    return str(caught.value)


@pytest.mark.parametrize("trainer", ["vanilla_ppo", "mappo", "solo_agent"])
def test_parts_of_the_right_shape_are_built_and_learn_as_without_the_check(
    trainer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(3)
    with_check = toy_trainer(trainer)
    drawn = torch.rand(2)
    torch.manual_seed(3)
    monkeypatch.setattr("nip_astra.scenarios.tensordict_base.check_agents", lambda *_: None)
    without = toy_trainer(trainer)
    assert torch.equal(drawn, torch.rand(2))
    weights = zip(
        with_check.scenario_instance.combined_agents.parameters(),
        without.scenario_instance.combined_agents.parameters(),
        strict=True,
    )
    assert all(torch.equal(one, other) for one, other in weights)
    modes = [
        [module.training for module in one.scenario_instance.combined_agents.modules()]
        for one in (with_check, without)
    ]
    assert modes[0] == modes[1]


def test_parts_are_asked_as_in_a_test_so_that_what_they_count_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    modes = []
    forward = ToyBody.forward

    def note(body: ToyBody, observation: Any) -> Any:
        modes.append(body.training)
        return forward(body, observation)

    monkeypatch.setattr(ToyBody, "forward", note)
    toy_trainer()
    assert modes == [False] * 4, "two agents, two bodies each"


def test_message_logits_of_another_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    def flat(output: PolicyOutput) -> PolicyOutput:
        return output._replace(message_logits_BVPS=output.message_logits_BVPS.flatten(1))

    assert refusal(monkeypatch, ToyPolicyHead, "logits", flat) == (
        "the agent 'prover' was to be built, but its policy head ToyPolicyHead gives, for 5 "
        "frames, message_logits_BVPS: numbers of shape [5, 2]. Needed: numbers of shape [5, 1, 1, "
        "2]; the agent has num_visible 1, message_size 1, num_symbols 2, num_linear_symbols 0, "
        "d_representation 16 and no decision. Mend what the scenario builds as policy head."
    )


def test_a_verifier_without_decision_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    message = refusal(
        monkeypatch, ToyPolicyHead, "logits", lambda out: out._replace(decision_logits_B3=None)
    )
    assert "the agent 'verifier'" in message
    assert "decision_logits_B3: None. Needed: numbers of shape [5, 3];" in message


def test_linear_logits_where_there_are_no_such_symbols(monkeypatch: pytest.MonkeyPatch) -> None:
    def more(output: PolicyOutput) -> PolicyOutput:
        return output._replace(linear_logits_BVPL=output.message_logits_BVPS)

    message = refusal(monkeypatch, ToyPolicyHead, "logits", more)
    assert "linear_logits_BVPL: numbers of shape [5, 1, 1, 2]. Needed: None;" in message


def test_a_policy_head_that_gives_a_tuple(monkeypatch: pytest.MonkeyPatch) -> None:
    message = refusal(monkeypatch, ToyPolicyHead, "logits", tuple)
    assert "gives, for 5 frames, a tuple. Needed: a PolicyOutput;" in message


def test_values_with_a_dimension_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    message = refusal(monkeypatch, ToyValueHead, "forward", lambda values: values.unsqueeze(-1))
    assert "value head ToyValueHead gives, for 5 frames, numbers of shape [5, 1]" in message
    assert "Needed: numbers of shape [5];" in message


def test_labels_instead_of_their_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    message = refusal(monkeypatch, ToySoloHead, "forward", lambda logits: logits.argmax(-1))
    assert "solo head ToySoloHead gives, for 5 frames, torch.int64 of shape [5]" in message


def test_a_body_that_forgets_the_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    def mean(read: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: value.mean(0) for name, value in read.items()}

    message = refusal(monkeypatch, ToyBody, "forward", mean)
    assert "body ToyBody gives, for 5 frames, representation: numbers of shape [16]" in message
    assert "Needed: numbers of shape [5, ...];" in message


def test_a_head_that_fails_on_what_the_body_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    message = refusal(
        monkeypatch, ToyBody, "forward", lambda read: {"representation": torch.zeros(5, 3)}
    )
    assert (
        "its policy head ToyPolicyHead fails on 5 first frames: RuntimeError: mat1 and" in message
    )
    assert "d_representation 16 and no decision." in message
