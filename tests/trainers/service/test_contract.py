"""A hook's return value is checked field by field, and faults are reported in a single message."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from nip_astra.errors import ConfigurationError
from nip_astra.rollouts.batch import Batch
from nip_astra.rollouts.trajectory import Trajectory
from nip_astra.trainers.service.contract import check_batch, check_takes, check_trajectories
from tests.kit.messages import says


def trajectories() -> list[Trajectory]:
    return [
        Trajectory([1, 2, 3], [0, 1, 1], logprobs=[0, -1, -1], reward=1.0),
        Trajectory([1, 2], [0, 1], logprobs=[0, -1], reward=0.0),
    ]


def batch(**values: Any) -> Batch:
    """A valid batch of two rows with other values; None leaves one out."""
    made = Batch.from_trajectories(trajectories())
    values = {"advantages": torch.tensor([1.0, -1.0])} | values
    made.values.update({name: value for name, value in values.items() if value is not None})
    for name in (name for name, value in values.items() if value is None):
        made.values.pop(name, None)
    return made


@pytest.mark.parametrize("advantages", [torch.ones(2), torch.ones(2, 3)])
def test_a_valid_batch_passes_with_advantages_of_rows_or_of_tokens(advantages: Any) -> None:
    made = batch(advantages=advantages)
    assert check_batch((made, {"a": 1.0}), trainer="Mine", num_rows=2) == (made, {"a": 1.0})


SOME = torch.ones(2, 2, dtype=torch.bool)


@pytest.mark.parametrize(
    ("result", "facts"),
    [
        ((batch(advantages=None), {}), ("'advantages'", "[2]", "[2, 3]")),
        ((batch(advantages=[1.0, 2.0, 3.0]), {}), ("'advantages'", "[3]", "[2]")),
        ((batch(advantages=["high", "low"]), {}), ("'advantages'", "list", "str")),
        ((batch(advantages=torch.tensor([1, 2])), {}), ("'advantages'", "torch.int64")),
        ((batch(advantages=torch.tensor([1.0, torch.nan])), {}), ("'advantages'", "NaN")),
        ((batch(loss_mask=SOME), {}), ("'loss_mask'", "[2, 2]", "[2, 3]")),
        ((batch(loss_mask=torch.ones(2, 3)), {}), ("'loss_mask'", "torch.float32", "torch.bool")),
        ((batch(input_ids=None), {}), ("'input_ids'", "[2, 3]")),
        # All faults at once.
        (
            (batch(advantages=None, loss_mask=None).select([0]), {"kl": torch.tensor(1.0)}),
            ("1 rows", "2", "'advantages'", "'loss_mask'", "'kl'", "float(...)"),
        ),
        (None, ("nothing", "(Batch, dict)")),
        (batch(), ("Batch", "(Batch, dict)")),
        ((batch(), None), ("metrics", "nothing")),
    ],
    ids=[
        *("no advantages", "too many advantages", "advantages of text", "whole advantages"),
        *("nan advantage", "shape of a mask", "type of a mask", "no tokens", "all at once"),
        *("nothing", "no tuple", "no metrics"),
    ],
)
def test_every_fault_of_a_batch_is_named(result: Any, facts: tuple[str, ...]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        check_batch(result, trainer="MyTrainer", num_rows=2)
    assert says(caught.value, "MyTrainer", "_prepare_batch", *facts)


def with_advantages(*advantages: Any) -> list[Trajectory]:
    made = trajectories()
    for trajectory, advantage in zip(made, advantages, strict=False):
        trajectory.advantage = advantage
    return made


def check(result: Any, *, needs_advantage: bool = True, metrics: Any = {}) -> list[Trajectory]:
    return check_trajectories(
        result, trainer="MyRemote", needs_advantage=needs_advantage, metrics=metrics
    )


@pytest.mark.parametrize(
    "advantages",
    [
        (0.5, torch.tensor([0.0, 1.0])),
        (np.float32(0.5), np.array([0.0, 1.0])),
        (np.longdouble(0.5), np.array([1.0, 0.0])[::-1]),
    ],
    ids=["python and torch", "numpy", "other layouts of numpy"],
)
def test_trajectories_have_a_number_or_a_number_per_token(advantages: Any) -> None:
    right = with_advantages(*advantages)
    assert check(right, metrics={"mean": np.float32(0.5)}) is right
    assert len(check(trajectories(), needs_advantage=False)) == 2


@pytest.mark.parametrize(
    ("result", "metrics", "facts"),
    [
        (with_advantages(np.float32("nan"), 0.5), {}, ("advantage", "NaN or infinite")),
        (with_advantages(np.array(["a", "b"]), 0.5), {}, ("advantage", "ndarray")),
        (with_advantages(np.array([0.5, None]), 0.5), {}, ("advantage", "ndarray")),
        (
            with_advantages(torch.ones(2), float("nan")),
            {"x": [1]},
            ("one entry a token", "NaN or infinite", "metrics['x']", "list of 1 int"),
        ),
        (trajectories(), {}, ("advantage", "missing", "in 2 of 2")),
        (None, {}, ("nothing", "list")),
    ],
    ids=["nan", "texts", "objects", "several faults", "missing", "nothing"],
)
def test_every_fault_of_trajectories_is_named(
    result: Any, metrics: Any, facts: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        check(result, metrics=metrics)
    assert says(caught.value, "MyRemote", "_prepare_trajectories", *facts)


def test_a_hook_with_other_parameters_is_reported() -> None:
    class MyTrainer:
        def _prepare_trajectories(self, trajectories: Any) -> Any:
            return trajectories

    with pytest.raises(ConfigurationError) as caught:
        check_takes(MyTrainer()._prepare_trajectories, "trajectories", "metrics")
    assert says(caught.value, "MyTrainer", "_prepare_trajectories(self, trajectories, metrics)")
