"""A hook's return value is checked field by field, and faults are reported in a single message."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from nip_astra.errors import ConfigurationError
from nip_astra.rollouts.batch import Batch
from nip_astra.rollouts.trajectory import Trajectory
from nip_astra.trainers.service.contract import check_batch, check_takes, check_trajectories


def trajectories() -> list[Trajectory]:
    return [
        Trajectory([1, 2, 3], [0, 1, 1], logprobs=[0, -1, -1], reward=1.0),
        Trajectory([1, 2], [0, 1], logprobs=[0, -1], reward=0.0),
    ]


def batch(**values: Any) -> Batch:
    made = Batch.from_trajectories(trajectories())
    made.values["advantages"] = torch.tensor([1.0, -1.0])
    for name, value in values.items():
        if value is None:
            del made.values[name]
        else:
            made.values[name] = value
    return made


def told(given: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        check_batch(given, trainer="MyTrainer", num_rows=2)
    return str(caught.value)


def test_a_valid_batch_passes_with_advantages_of_rows_or_of_tokens() -> None:
    for made in (batch(), batch(advantages=torch.ones(2, 3))):
        found, metrics = check_batch((made, {"a": 1.0}), trainer="MyTrainer", num_rows=2)
        assert found is made
        assert metrics == {"a": 1.0}


@pytest.mark.parametrize(
    ("values", "facts"),
    [
        ({"advantages": None}, "advantages missing [2] [2, 3]"),
        ({"advantages": [1.0, 2.0, 3.0]}, "advantages [3] [2]"),
        ({"advantages": ["high", "low"]}, "advantages list str"),
        ({"advantages": torch.tensor([1, 2])}, "advantages torch.int64"),
        ({"advantages": torch.tensor([1.0, torch.nan])}, "advantages NaN"),
        ({"loss_mask": torch.ones(2, 2, dtype=torch.bool)}, "loss_mask [2, 2] [2, 3]"),
        ({"loss_mask": torch.ones(2, 3)}, "loss_mask torch.float32 torch.bool"),
        ({"input_ids": None}, "input_ids [2, 3]"),
    ],
)
def test_a_field_that_is_wrong_is_named(values: dict[str, Any], facts: str) -> None:
    text = told((batch(**values), {}))
    for fact in ("MyTrainer", "_prepare_batch", *re.findall(r"\[.*?\]|\S+", facts)):
        assert fact in text


def test_all_faults_are_reported_at_once() -> None:
    text = told((batch(advantages=None, loss_mask=None).select([0]), {"kl": torch.tensor(1.0)}))
    assert "the batch has 1 rows, but it was given 2" in text
    assert "values['advantages'] is missing" in text
    assert "values['loss_mask'] is nothing" in text
    assert "metrics['kl'] is a tensor [] and must be a number; write float(...)" in text


def test_an_invalid_batch_is_reported() -> None:
    assert "nothing, not (Batch, dict)" in told(None)
    assert "a Batch, not (Batch, dict)" in told(batch())
    assert "the metrics are nothing" in told((batch(), None))


def checked(given: Any, **options: Any) -> list[Trajectory]:
    options = {"needs_advantage": True, "metrics": {}} | options
    return check_trajectories(given, trainer="MyRemote", **options)


def test_trajectories_need_a_number_or_a_number_per_token() -> None:
    right = trajectories()
    right[0].advantage, right[1].advantage = 0.5, torch.tensor([0.0, 1.0])
    assert checked(right) is right
    right[0].advantage, right[1].advantage = np.float32(0.5), np.array([0.0, 1.0])
    assert checked(right, metrics={"mean": np.float32(0.5)}) is right
    right[1]["advantage"] = np.array([1.0, 0.0])[::-1]
    assert checked(right) is right
    right[0].advantage = np.float32("nan")
    with pytest.raises(ConfigurationError, match="NaN or infinite"):
        checked(right)
    for wrong_kind in (np.array(["a", "b"]), np.array([0.5, None])):
        right[0].advantage = wrong_kind
        with pytest.raises(ConfigurationError, match="advantage is a ndarray and must be"):
            checked(right)
    right[0].advantage = np.longdouble(0.5)
    assert checked(right) is right
    assert len(checked(trajectories(), needs_advantage=False)) == 2
    wrong = trajectories()
    wrong[0].advantage, wrong[1].advantage = torch.ones(2), float("nan")
    with pytest.raises(ConfigurationError) as caught:
        checked(wrong, metrics={"x": [1]})
    text = str(caught.value)
    assert "trajectory.advantage has not one entry a token" in text
    assert "trajectory.advantage is NaN or infinite" in text
    assert "metrics['x'] is a list of 1 int" in text
    with pytest.raises(ConfigurationError, match=r"advantage is missing .* \(in 2 of 2\)"):
        checked(trajectories())
    with pytest.raises(ConfigurationError, match="it returned nothing, not list"):
        checked(None)


def test_a_hook_with_other_parameters_is_reported() -> None:
    class MyTrainer:
        def _prepare_trajectories(self, trajectories: Any) -> Any:
            return trajectories

    with pytest.raises(ConfigurationError, match="too many positional") as caught:
        check_takes(MyTrainer()._prepare_trajectories, "trajectories", "metrics")
    assert "_prepare_trajectories(self, trajectories, metrics)" in str(caught.value)
