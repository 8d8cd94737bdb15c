"""What `TrainingConfiguration` takes; that each field is used is tested with the optimizer."""

from __future__ import annotations

from typing import Any

import pytest

from nip_astra.errors import ParameterError
from nip_astra.parameters.training import TrainingConfiguration


def test_the_defaults_are_those_that_the_guides_name() -> None:
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


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd", "rmsprop", "adagrad"])
def test_the_five_optimizers_are_known(optimizer: str) -> None:
    assert TrainingConfiguration.from_dict({"optimizer": optimizer}).optimizer == optimizer


def test_gradients_may_stay_unclipped() -> None:
    assert TrainingConfiguration.from_dict({"max_grad_norm": None}).max_grad_norm is None


@pytest.mark.parametrize(
    "values",
    [
        {"lr": 0},
        {"lr": -1e-3},
        {"lr": None},
        {"lr": "1e-5"},
        {"lr": True},
        {"minibatch_size": 0},
        {"minibatch_size": 1.5},
        {"weight_decay": -0.1},
        {"gradient_accumulation_steps": 0},
        {"num_iterations": 0},
        {"num_episodes_per_experience": 0},
        {"num_epochs": 0},
        {"max_grad_norm": 0},
        {"num_warmup_steps": -1},
        {"eval_period": -1},
        {"lr_schedule": "step"},
        {"optimizer": "lion"},
        {"learning_rate": 1e-3},
    ],
)
def test_what_makes_no_sense_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ParameterError, match=f"  {next(iter(values))}: "):
        TrainingConfiguration.from_dict(values)
