"""The registry of message regressors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nip_astra.message_regressors.base import MessageRegressor
from nip_astra.parameters.message_regression import MESSAGE_REGRESSORS
from nip_astra.parameters.parameters_base import claim_parameters


def register_message_regressor(
    name: str,
) -> Callable[[type[MessageRegressor]], type[MessageRegressor]]:
    """Register a `MessageRegressor` under the `_type` by which parameter files name it."""

    def decorate(cls: type[MessageRegressor]) -> type[MessageRegressor]:
        claim_parameters(cls, name)
        MESSAGE_REGRESSORS.register(name)(cls)
        return cls

    return decorate


def build_message_regressor(parameters: Any) -> MessageRegressor:
    """The message regressor that the parameters describe."""
    regressor: MessageRegressor = MESSAGE_REGRESSORS.get(parameters.type_name)(parameters)
    return regressor
