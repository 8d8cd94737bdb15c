"""A value function on top of a language model."""

from __future__ import annotations

import torch
from torch import Tensor


class ValueHead(torch.nn.Module):
    """The return expected before each token, a linear map of the hidden state; 0 at first.

    Parameters
    ----------
    hidden_size : int
        Width of the hidden states.
    trains_model : bool
        Whether gradients flow on into what made the hidden states.
    """

    def __init__(self, hidden_size: int, *, trains_model: bool) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(hidden_size, 1)
        torch.nn.init.zeros_(self.linear.weight)
        torch.nn.init.zeros_(self.linear.bias)
        self.trains_model = trains_model

    def forward(self, hidden_BTX: Tensor) -> Tensor:
        """Values `[B, T]` float32."""
        values_BT1: Tensor = self.linear(hidden_BTX if self.trains_model else hidden_BTX.detach())
        return values_BT1.squeeze(-1)
