"""Base class of message regressors, classifiers of labels refitted on every batch of messages.

Shape suffixes: `N` training message, `M` test message, `D` feature.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from nip_astra.parameters.trainers import MESSAGE_REGRESSORS, MessageRegressorParameters


class MessageRegressor(ABC):
    """Predicts labels from messages."""

    can_go_on: ClassVar[bool] = False
    """Whether a fit starts from the previous one. Such a class implements `state` and `load_state`;
    others keep no state between fits."""

    class Parameters(MessageRegressorParameters):
        """Parameters of every message regressor; a subclass adds its own."""

    def __init__(self, parameters: Any) -> None:
        self.parameters = parameters

    def state(self) -> dict[str, Any]:
        """Return the state between fits for checkpoints, of plain values and tensors."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:  # noqa: B027  # there may be nothing
        """Restore the result of `state`."""

    @abstractmethod
    def fit_and_judge(
        self,
        features_ND: Tensor,
        labels_N: Tensor,
        judged_MD: Tensor,
        generator: torch.Generator,
    ) -> Tensor:
        """Fit labelled messages, and classify others.

        Parameters
        ----------
        features_ND : Tensor
            float32 on the CPU; one-hot symbols, 0 in channels without a message.
        labels_N : Tensor
            float32; 0 or 1.
        judged_MD : Tensor
            The messages to classify, like `features_ND`.
        generator : torch.Generator
            The only source of random numbers; torch's global generator belongs to the run.

        Returns
        -------
        Tensor
            Log-odds of the label 1, `[M]`.
        """


def register_message_regressor(
    name: str,
) -> Callable[[type[MessageRegressor]], type[MessageRegressor]]:
    """Register a `MessageRegressor` under its `_type` in parameter files; a decorator."""
    return MESSAGE_REGRESSORS.register(name)


def build_message_regressor(parameters: Any) -> MessageRegressor:
    """Build the message regressor that the parameters describe."""
    regressor: MessageRegressor = MESSAGE_REGRESSORS.get(parameters.type_name)(parameters)
    return regressor
