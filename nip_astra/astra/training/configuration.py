"""The parameters of training, which may be subclassed and changed."""

from __future__ import annotations

from typing import Any, Self

from pydantic import ConfigDict, Field, ValidationError, model_validator

from nip_astra.errors import ParameterError
from nip_astra.parameters.faults import faults_of
from nip_astra.parameters.training import TrainingConfiguration as SharedConfiguration


class TrainingConfiguration(SharedConfiguration):
    """The `training` section of a parameter file, and a seed.

    All its fields may be given. A subclass, or whoever holds an object, may set further attributes;
    those that are fields stay checked.
    """

    model_config = ConfigDict(frozen=False, validate_assignment=True)

    seed: int = Field(default=0, ge=0)
    """Root of all randomness of training; 0 is a seed like any other."""

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
