"""Requirements on a kind of scenario with networks, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from nip_astra.errors import ConfigurationError, DataError
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.scenarios.tensordict_base import Datasets, TensorDictScenario
from tests.kit.toy_protocol_scenario import (
    ToyProtocolScenario,
    toy_hyper_params,
)

pytestmark = pytest.mark.usefixtures("toy_protocol")


def _build(kind: type[TensorDictScenario]) -> None:
    hyper_params = toy_hyper_params()
    kind.build(
        hyper_params,
        hyper_params.toy_protocol,
        ExperimentSettings(),
        scenario_dir=None,
        trainer_type="rl",
    )


def test_a_kind_without_one_of_its_hooks_is_refused() -> None:
    class Halved(ToyProtocolScenario):
        build_value_head = TensorDictScenario.build_value_head

    with pytest.raises(ConfigurationError, match=r"Halved .*build_value_head"):
        _build(Halved)


def test_labels_that_are_not_two_are_refused() -> None:
    class ThreeLabels(ToyProtocolScenario):
        @classmethod
        def build_datasets(
            cls, parameters: Any, *, seed: int, scenario_dir: Path | None
        ) -> Datasets:
            content = {"y": torch.tensor([[0], [1], [2]]), "vector": torch.zeros(3, 3)}
            both = TensorDict(content, batch_size=[3])
            return Datasets(both, both)

    with pytest.raises(DataError, match=r"`y` of the train dataset must be 0 or 1"):
        _build(ThreeLabels)
