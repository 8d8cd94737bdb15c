"""Message regressors, classifiers of labels refitted on every batch of messages.

Shape suffixes: `N` training message, `M` test message, `D` feature.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from nip_astra.parameters.parameters_base import MAX_LR
from nip_astra.parameters.trainers import MESSAGE_REGRESSORS, MessageRegressorParameters
from nip_astra.parameters.types import MessageRegressorType
from nip_astra.utils.activations import ACTIVATIONS


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


# ---- shipped regressors


@register_message_regressor(MessageRegressorType.LINEAR)
class LinearMessageRegressor(MessageRegressor):
    """Logistic regression by Newton's method, linear in the symbols."""

    class Parameters(MessageRegressor.Parameters):
        """Number of steps and regularisation."""

        num_newton_steps: int = Field(default=8, ge=1)
        """Steps of Newton's method. Few suffice, because the loss is convex."""
        ridge: float = Field(default=1.0, gt=0)
        """Weight of half the squared coefficients in the loss. Larger needs more messages to fit a
        symbol."""

    def fit_and_judge(
        self,
        features_ND: Tensor,
        labels_N: Tensor,
        judged_MD: Tensor,
        generator: torch.Generator,
    ) -> Tensor:
        design_ND, labels_N = _with_ones(features_ND), labels_N.double()
        ridge_D = torch.full((design_ND.shape[1],), self.parameters.ridge, dtype=torch.double)
        weights_D = torch.zeros_like(ridge_D)
        for _ in range(self.parameters.num_newton_steps):
            odds_N = (design_ND @ weights_D).sigmoid()
            gradient_D = design_ND.T @ (odds_N - labels_N) + ridge_D * weights_D
            curvature_N = odds_N * (1 - odds_N)
            hessian_DD = design_ND.T @ (curvature_N[:, None] * design_ND) + ridge_D.diag()
            weights_D = weights_D - torch.linalg.solve(hessian_DD, gradient_D)
        return (_with_ones(judged_MD) @ weights_D).float()


def _with_ones(features: Tensor) -> Tensor:
    """Return the features in double precision, with a column for the intercept."""
    return torch.cat([features, torch.ones(len(features), 1)], dim=1).double()


@register_message_regressor(MessageRegressorType.MLP)
class MlpMessageRegressor(MessageRegressor):
    """A multilayer perceptron, fitted by Adam on the binary cross entropy."""

    can_go_on = True

    class Parameters(MessageRegressor.Parameters):
        """Size and optimisation of the network."""

        d_hidden: int = Field(default=64, ge=1, le=1_000_000)
        """Width of the hidden layers. Larger fits more complex codes."""
        num_layers: int = Field(default=2, ge=0, le=1000)
        """Hidden layers. More fit more complex codes; 0 is linear in the symbols."""
        activation: Literal["relu", "tanh", "gelu", "sigmoid"] = "relu"
        """Activation between layers."""
        num_epochs: int = Field(default=20, ge=1)
        """Epochs over the messages. Larger fits them more closely."""
        minibatch_size: int = Field(default=128, ge=1)
        """Messages per step. Larger takes fewer steps."""
        lr: float = Field(default=1e-2, gt=0, le=MAX_LR)
        """Learning rate. Larger learns faster and may diverge."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self._net: nn.Sequential | None = None

    def state(self) -> dict[str, Any]:
        return {} if self._net is None else dict(self._net.state_dict())

    def load_state(self, state: Mapping[str, Any]) -> None:
        if not state:
            return
        self._net = self._built(state["0.weight"].shape[1], torch.Generator())
        self._net.load_state_dict(state)

    def _built(self, num_features: int, generator: torch.Generator) -> nn.Sequential:
        parameters = self.parameters
        widths = [num_features, *[parameters.d_hidden] * parameters.num_layers, 1]
        layers: list[nn.Module] = []
        for d_in, d_out in pairwise(widths):
            layers.append(_linear(d_in, d_out, generator))
            layers.append(ACTIVATIONS[parameters.activation]())
        # The output has no activation: it is a logit.
        return nn.Sequential(*layers[:-1])

    def fit_and_judge(
        self,
        features_ND: Tensor,
        labels_N: Tensor,
        judged_MD: Tensor,
        generator: torch.Generator,
    ) -> Tensor:
        parameters = self.parameters
        if self._net is None:
            self._net = self._built(features_ND.shape[1], generator)
        net = self._net
        optimizer = torch.optim.Adam(net.parameters(), lr=parameters.lr)
        for _ in range(parameters.num_epochs):
            order_N = torch.randperm(len(labels_N), generator=generator)
            for rows in torch.split(order_N, parameters.minibatch_size):
                logits = net(features_ND[rows]).squeeze(-1)
                optimizer.zero_grad()
                loss = binary_cross_entropy_with_logits(logits, labels_N[rows])
                loss.backward()  # type: ignore[no-untyped-call]  # torch's own
                optimizer.step()
        logits_M: Tensor = net(judged_MD).squeeze(-1).detach()
        return logits_M


def _linear(d_in: int, d_out: int, generator: torch.Generator) -> nn.Linear:
    """Create a layer with torch's initialisation, drawn from the generator."""
    # The meta device draws nothing from the global generator.
    layer = nn.Linear(d_in, d_out, device="meta").to_empty(device="cpu")
    bound = 1 / math.sqrt(d_in)
    for weights in (layer.weight, layer.bias):
        nn.init.uniform_(weights, -bound, bound, generator=generator)
    return layer
