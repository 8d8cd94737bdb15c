"""What a loss function gives back."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class LossOutput(NamedTuple):
    """A loss and what to log beside it.

    Attributes
    ----------
    loss : Tensor
        Scalar, with gradient.
    metrics : dict[str, Tensor]
        Scalars without gradient.
    """

    loss: Tensor
    metrics: dict[str, Tensor]
