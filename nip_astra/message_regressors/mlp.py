"""A small network as message regressor.

Shapes: N messages to learn from, M messages to judge, D numbers that describe a message.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from nip_astra.message_regressors.base import MessageRegressor
from nip_astra.message_regressors.registry import register_message_regressor
from nip_astra.parameters.types import MessageRegressorType


@register_message_regressor(MessageRegressorType.MLP)
class MlpMessageRegressor(MessageRegressor):
    """Two hidden layers, fitted by Adam on the binary cross entropy; reads codes of any kind."""

    class Parameters(MessageRegressor.Parameters):
        """Size of the network, and how long it learns."""

        d_hidden: int = Field(default=64, ge=1)
        """Width of the two hidden layers. Larger reads more intricate codes."""
        num_epochs: int = Field(default=20, ge=1)
        """Passes over the messages. Larger fits them closer."""
        batch_size: int = Field(default=128, ge=1)
        """Messages in one step. Larger takes fewer steps."""
        lr: float = Field(default=1e-2, gt=0)
        """Learning rate. Larger learns faster and may diverge."""

    def fit_and_judge(
        self,
        features_ND: Tensor,
        labels_N: Tensor,
        judged_MD: Tensor,
        generator: torch.Generator,
    ) -> Tensor:
        chosen = self.parameters
        widths = [features_ND.shape[1], chosen.d_hidden, chosen.d_hidden, 1]
        layers: list[nn.Module] = []
        for d_in, d_out in pairwise(widths):
            layers += [_linear(d_in, d_out, generator), nn.ReLU()]
        net = nn.Sequential(*layers[:-1])
        optimizer = torch.optim.Adam(net.parameters(), lr=chosen.lr)
        for _ in range(chosen.num_epochs):
            order_N = torch.randperm(len(labels_N), generator=generator)
            for rows in torch.split(order_N, chosen.batch_size):
                logits = net(features_ND[rows]).squeeze(-1)
                optimizer.zero_grad()
                loss = binary_cross_entropy_with_logits(logits, labels_N[rows])
                loss.backward()  # type: ignore[no-untyped-call]  # torch's own
                optimizer.step()
        logits_M: Tensor = net(judged_MD).squeeze(-1).detach()
        return logits_M


def _linear(d_in: int, d_out: int, generator: torch.Generator) -> nn.Linear:
    """Give a layer initialised like torch's own, by the generator alone."""
    # On the meta device nothing is drawn from the global generator.
    layer = nn.Linear(d_in, d_out, device="meta").to_empty(device="cpu")
    bound = 1 / math.sqrt(d_in)
    for weights in (layer.weight, layer.bias):
        nn.init.uniform_(weights, -bound, bound, generator=generator)
    return layer
