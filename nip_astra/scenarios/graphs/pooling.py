"""What becomes of the sums of two graphs' nodes before they are tokens.

Shapes: B frames, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from nip_astra.scenarios.graphs.agent_parameters import GraphIsomorphismAgentParameters

MOMENTUM = 0.1
"""Share of the latest minibatch in the statistics that agents play by, once there are ten."""


class SumsNorm(nn.BatchNorm1d):
    """Batch normalisation over frames and both graphs (arXiv:1502.03167).

    While learning, by the minibatch's mean and variance; in play by their running means, or those
    of the frames at hand as long as nothing was learnt.
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def forward(self, sums_B2D: Tensor) -> Tensor:
        rows_RD = sums_B2D.flatten(0, 1)
        if self.training:
            self.num_batches_tracked.add_(1)
        num_batches = int(self.num_batches_tracked)
        normed_RD = functional.batch_norm(
            rows_RD,
            # Where torch may not write them, it would not use them either.
            self.running_mean if num_batches else None,
            self.running_var if num_batches else None,
            self.weight,
            self.bias,
            training=self.training or not num_batches,
            # A plain mean at first: there is nothing yet that the minibatch could be blended with.
            momentum=max(MOMENTUM, 1 / max(num_batches, 1)),
            eps=self.eps,
        )
        return normed_RD.view(sums_B2D.shape)


class PairPooling(nn.Module):
    """Normalises the sums, disturbs them, and makes them blind to which graph is the first.

    Parameters
    ----------
    width : int
        D.
    """

    def __init__(self, parameters: GraphIsomorphismAgentParameters, width: int) -> None:
        super().__init__()
        self.norm = SumsNorm(width) if parameters.use_batch_norm else None
        self.noise_sigma = parameters.noise_sigma
        self.is_pair_invariant = parameters.use_pair_invariant_pooling

    def forward(self, sums_B2D: Tensor) -> Tensor:
        """What the two graph tokens are made of, [B, 2, D]."""
        if self.norm is not None:
            sums_B2D = self.norm(sums_B2D)
        if self.noise_sigma and self.training:
            # The same for both graphs: equal ones stay equal.
            noise_B1D = torch.randn_like(sums_B2D[:, :1]) * self.noise_sigma
            sums_B2D = sums_B2D + noise_B1D * sums_B2D.detach()
        if self.is_pair_invariant:
            first, second = sums_B2D.unbind(1)
            sums_B2D = torch.stack([(first + second) / 2, (first - second).abs()], dim=1)
        return sums_B2D
