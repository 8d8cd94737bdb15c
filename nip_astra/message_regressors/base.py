"""What a message regressor is: a classifier of labels, fitted anew on every batch of messages.

Shapes: N messages to learn from, M messages to judge, D numbers that describe a message.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from nip_astra.parameters.message_regression import MESSAGE_REGRESSORS, MessageRegressorParameters


class MessageRegressor(ABC):
    """Tells labels by messages.

    Attributes
    ----------
    can_go_on : bool
        Whether a fit starts from what the one before found, where the regressor is still the same.
        Such a class gives `state` and `load_state`, and others keep nothing between fits.
    """

    can_go_on: ClassVar[bool] = False

    class Parameters(MessageRegressorParameters):
        """Parameters of every message regressor; a subclass adds its own."""

    def __init__(self, parameters: Any) -> None:
        self.parameters = parameters

    def state(self) -> dict[str, Any]:
        """What is kept between fits, as plain values and tensors, for checkpoints."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:  # noqa: B027  # there may be nothing
        """Take up what `state` gave."""

    @abstractmethod
    def fit_and_judge(
        self,
        features_ND: Tensor,
        labels_N: Tensor,
        judged_MD: Tensor,
        generator: torch.Generator,
    ) -> Tensor:
        """Learn from messages with labels, and judge others.

        Parameters
        ----------
        features_ND : Tensor
            float32 on the CPU; one-hot symbols, 0 in channels in which nothing was sent.
        labels_N : Tensor
            float32; 0 or 1.
        judged_MD : Tensor
            The messages to judge, like `features_ND`.
        generator : torch.Generator
            The only source of random numbers: torch's global one belongs to the run.

        Returns
        -------
        Tensor
            Log-odds of the label 1, `[M]`; above 0 says 1.
        """


def register_message_regressor(
    name: str,
) -> Callable[[type[MessageRegressor]], type[MessageRegressor]]:
    """Register a `MessageRegressor` under the `_type` by which parameter files name it."""
    return MESSAGE_REGRESSORS.register(name)


def build_message_regressor(parameters: Any) -> MessageRegressor:
    """The message regressor that the parameters describe."""
    regressor: MessageRegressor = MESSAGE_REGRESSORS.get(parameters.type_name)(parameters)
    return regressor
