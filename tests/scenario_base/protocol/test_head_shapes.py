"""Kinds that lack a part, and heads and bodies of a wrong shape, are refused when built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from nip_astra.errors import AgentShapeError, ConfigurationError, DataError
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.scenarios.tensordict_base import Datasets, TensorDictScenario
from tests.kit.messages import says
from tests.kit.recording import record_calls
from tests.kit.toy_protocol_scenario import (
    ToyBody,
    ToyPolicyHead,
    ToyProtocolScenario,
    ToySoloHead,
    ToyValueHead,
    toy_hyper_params,
    toy_trainer,
)

pytestmark = pytest.mark.usefixtures("toy_protocol")


@pytest.mark.parametrize("trainer", ["vanilla_ppo", "mappo", "solo_agent"])
def test_parts_of_the_right_shape_are_built_and_learn_as_without_the_check(
    trainer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(3)
    checked: Any = toy_trainer(trainer).scenario_instance.combined_agents
    drawn = torch.rand(2)
    torch.manual_seed(3)
    monkeypatch.setattr("nip_astra.scenarios.tensordict_base.check_agents", lambda *_: None)
    plain: Any = toy_trainer(trainer).scenario_instance.combined_agents
    assert torch.equal(drawn, torch.rand(2))
    for weights, expected in zip(checked.parameters(), plain.parameters(), strict=True):
        assert torch.equal(weights, expected)
    for module, expected in zip(checked.modules(), plain.modules(), strict=True):
        assert module.training == expected.training


def test_parts_are_called_in_eval_mode_so_that_their_statistics_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = record_calls(monkeypatch, ToyBody, "forward")
    toy_trainer()
    assert [call.arguments[0].training for call in calls] == [False] * 4, "two bodies each"


WRONG: dict[str, tuple[Any, Any, list[str]]] = {
    "message logits of another shape": (
        ToyPolicyHead,
        lambda out: out._replace(message_logits_BVPS=out.message_logits_BVPS.flatten(1)),
        ["'prover'", "policy head ToyPolicyHead", "5 frames", "message_logits_BVPS", "[5, 2]"],
    ),
    "a verifier without decision logits": (
        ToyPolicyHead,
        lambda out: out._replace(decision_logits_B3=None),
        ["'verifier'", "decision_logits_B3", "None", "[5, 3]"],
    ),
    "linear logits where there are no such symbols": (
        ToyPolicyHead,
        lambda out: out._replace(linear_logits_BVPL=out.message_logits_BVPS),
        ["linear_logits_BVPL", "[5, 1, 1, 2]", "None", "num_symbols 2", "no decision"],
    ),
    "a tuple": (ToyPolicyHead, tuple, ["a tuple", "PolicyOutput"]),
    "values with a dimension too many": (
        ToyValueHead,
        lambda values: values.unsqueeze(-1),
        ["value head ToyValueHead", "[5, 1]", "[5]"],
    ),
    "labels instead of their logits": (
        ToySoloHead,
        lambda logits: logits.argmax(-1),
        ["solo head ToySoloHead", "int64", "[5]"],
    ),
    "a body that forgets the frames": (
        ToyBody,
        lambda read: {name: value.mean(0) for name, value in read.items()},
        ["body ToyBody", "representation", "[16]", "[5, ...]"],
    ),
    "a body whose width the head cannot read": (
        ToyBody,
        lambda read: {"representation": torch.zeros(5, 3)},
        ["policy head ToyPolicyHead", "fails", "RuntimeError", "d_representation 16"],
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_output_of_a_part_is_reported_with_the_required_shape(
    monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    part, change, facts = WRONG[case]
    hook = "logits" if part is ToyPolicyHead else "forward"
    original = getattr(part, hook)
    monkeypatch.setattr(part, hook, lambda *given: change(original(*given)))
    with pytest.raises(AgentShapeError) as caught:
        toy_trainer("solo_agent" if part is ToySoloHead else "vanilla_ppo")
    assert says(caught.value, *facts)


# ---- kinds of scenarios


class Halved(ToyProtocolScenario):
    """Lacks a hook."""

    build_value_head = TensorDictScenario.build_value_head


class ThreeLabels(ToyProtocolScenario):
    """Has other labels than 0 and 1."""

    @classmethod
    def build_datasets(cls, parameters: Any, *, seed: int, scenario_dir: Path | None) -> Datasets:
        content = {"y": torch.tensor([[0], [1], [2]]), "vector": torch.zeros(3, 3)}
        both = TensorDict(content, batch_size=[3])
        return Datasets(both, both)


@pytest.mark.parametrize(
    ("kind", "error", "facts"),
    [
        (Halved, ConfigurationError, ("Halved", "build_value_head")),
        (ThreeLabels, DataError, ("`y`", "train", "0 or 1")),
    ],
)
def test_a_kind_without_a_hook_or_with_other_labels_is_refused(
    kind: type[TensorDictScenario], error: type[Exception], facts: tuple[str, ...]
) -> None:
    hyper_params: Any = toy_hyper_params()
    options = {"scenario_dir": None, "trainer_type": "rl"}
    with pytest.raises(error) as caught:
        kind.build(hyper_params, hyper_params.toy_protocol, ExperimentSettings(), **options)
    assert says(caught.value, *facts)
