"""Valid values of `TrainingConfiguration`; tests of the optimizer check that each is used."""

from __future__ import annotations

from typing import Any

import pytest

from nip_astra.errors import ParameterError
from nip_astra.parameters.training import TrainingConfiguration


def test_the_defaults_are_those_of_the_guides() -> None:
    assert TrainingConfiguration().to_dict() == {
        "lr": 1e-5,
        "minibatch_size": 8,
        "batch_order": "shuffled",
        "optimizer": "adamw",
        "weight_decay": 0.0,
        "gradient_accumulation_steps": 1,
        "num_iterations": 1000,
        "num_episodes_per_experience": 8,
        "num_epochs": 1,
        "max_grad_norm": 1.0,
        "lr_schedule": "constant",
        "num_warmup_steps": 0,
        "eval_period": 0,
        "dev_metric": "mean_reward",
        "early_stopping_patience": None,
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("lr", wrong) for wrong in (0, -1e-3, None, "1e-5", True)),
        *(("minibatch_size", wrong) for wrong in (0, 1.5)),
        *((f"num_{what}", 0) for what in ("iterations", "episodes_per_experience", "epochs")),
        *((name, 0) for name in ("gradient_accumulation_steps", "max_grad_norm")),
        *((name, -1) for name in ("weight_decay", "num_warmup_steps", "eval_period")),
        *(("lr_schedule", "step"), ("optimizer", "lion"), ("learning_rate", 1e-3)),
    ],
)
def test_an_impossible_value_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ParameterError) as caught:
        TrainingConfiguration.from_dict({name: value})
    assert [fault.path for fault in caught.value.faults] == [name]
