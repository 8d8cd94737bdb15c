"""Training parameters, which may be subclassed and extended."""

from __future__ import annotations

from typing import Any, Self

from pydantic import ConfigDict, Field, ValidationError, model_validator

from nip_astra.errors import ParameterError
from nip_astra.parameters.conversion import ASTRA_NAMES, rename
from nip_astra.parameters.parameters_base import MAX_WHOLE, faults_of
from nip_astra.parameters.training import TrainingConfiguration as SharedConfiguration


class TrainingConfiguration(SharedConfiguration):
    """The `training` section of a parameter file, and a seed.

    `num_iterations` and `minibatch_size` may also be given by their names in ASTRA-RL:
    `training_steps` and `batch_size`. Further attributes may be set; fields stay validated.
    """

    model_config = ConfigDict(frozen=False, validate_assignment=True)

    seed: int = Field(default=0, ge=0, le=MAX_WHOLE)
    """Root seed of all randomness of training."""

    def __init__(self, /, **values: Any) -> None:
        super().__init__(**rename(values, ASTRA_NAMES)[0])

    @property
    def training_steps(self) -> int:
        """Another name of `num_iterations`."""
        return self.num_iterations

    @training_steps.setter
    def training_steps(self, value: int) -> None:
        self.num_iterations = value

    @property
    def batch_size(self) -> int:
        """Another name of `minibatch_size`."""
        return self.minibatch_size

    @batch_size.setter
    def batch_size(self, value: int) -> None:
        self.minibatch_size = value

    @model_validator(mode="after")
    def _can_stop_early(self) -> Self:
        # Only the trainer knows whether anything is evaluated: HFASTTrainer takes eval_every.
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in type(self).model_fields and not name.startswith("_"):
            object.__setattr__(self, name, value)
            return
        try:
            super().__setattr__(name, value)
        except ValidationError as error:
            raise ParameterError(faults_of(error, type(self), {})) from None
