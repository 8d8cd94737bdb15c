"""Valid values of `TrainingConfiguration`; tests of the optimizer check that each is used."""

from __future__ import annotations

from typing import Any

import pytest

from nip_astra.errors import ParameterError
from nip_astra.parameters.training import TrainingConfiguration


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
