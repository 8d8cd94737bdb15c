"""Logistic regression as message regressor.

Shapes: N messages to learn from, M messages to judge, D numbers that describe a message.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from nip_astra.message_regressors.base import MessageRegressor
from nip_astra.message_regressors.registry import register_message_regressor
from nip_astra.parameters.types import MessageRegressorType


@register_message_regressor(MessageRegressorType.LINEAR)
class LinearMessageRegressor(MessageRegressor):
    """Logistic regression by Newton's method; reads what each symbol says apart from the others."""

    class Parameters(MessageRegressor.Parameters):
        """How often the fit is refined, and how it is kept finite."""

        num_newton_steps: int = Field(default=8, ge=1)
        """Steps of Newton's method. Few are enough: the loss is convex."""
        ridge: float = Field(default=1.0, gt=0)
        """Weight of half the squared coefficients beside the summed cross entropy. Larger takes
        more messages to believe a symbol."""

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
    """The features in double precision, with a column for the intercept."""
    return torch.cat([features, torch.ones(len(features), 1)], dim=1).double()
