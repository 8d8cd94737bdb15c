"""What a trainer pays for going away from the reference."""

from __future__ import annotations

import logging
from typing import Annotated, Any, Literal

from pydantic import Field

from nip_astra.parameters.conditions import where_given
from nip_astra.parameters.parameters_base import SubParameters
from nip_astra.rl_objectives.kl import AdaptiveKl, KlKind

logger = logging.getLogger(__name__)


class KlParameters(SubParameters):
    """Price of the divergence from the reference."""

    weight: float = Field(default=0.05, ge=0)
    """Price per nat and token. Larger stays closer to the reference."""
    kind: KlKind = "k1"
    """Estimator of the divergence. In the loss k1 has no gradient on average: take k2 there."""
    place: Literal["reward", "loss"] = "reward"
    """Whether the divergence lowers the reward of each token, or is added to the loss."""
    target: float | None = Field(default=None, gt=0)
    """Divergence per token, in nats, that the weight is adapted to hold; null keeps it."""
    horizon: Annotated[float, where_given("target")] = Field(default=2000.0, gt=0)
    """Probes over which an adapted weight changes by at most a fifth."""


def check_estimator(kind: KlKind, weight: float, name: str) -> None:
    """Warn where a divergence in the loss would hold nothing near the reference.

    Parameters
    ----------
    weight : float
        Of the divergence in the loss.
    name : str
        Of the parameter that chose the estimator.
    """
    if weight > 0 and kind == "k1":
        logger.warning(
            "the divergence is a part of the loss, where k1 has no gradient on average and holds "
            "nothing near the reference; set %s=k2, or k3",
            name,
        )


class KlPenalty:
    """The weight of the divergence, fixed or adapted (`rl_objectives.kl.AdaptiveKl`).

    Attributes
    ----------
    weight : float
        The weight as it is now.
    """

    def __init__(self, parameters: KlParameters) -> None:
        self.parameters = parameters
        self.weight = parameters.weight
        self._adaptive: AdaptiveKl | None = None
        check_estimator(parameters.kind, self.loss_weight, "ast_ppo.kl.kind")
        if parameters.target is not None:
            self._adaptive = AdaptiveKl(
                weight=parameters.weight, target=parameters.target, horizon=parameters.horizon
            )

    @property
    def reward_weight(self) -> float:
        """The weight, where the reward pays."""
        return self.weight if self.parameters.place == "reward" else 0.0

    @property
    def loss_weight(self) -> float:
        """The weight, where the loss pays."""
        return self.weight if self.parameters.place == "loss" else 0.0

    def observe(self, divergence: float, *, num_samples: int) -> None:
        """Adapt the weight to the divergence of an iteration, nats per token."""
        if self._adaptive is not None:
            self.weight = self._adaptive.update(divergence, num_samples=num_samples)

    def state(self) -> dict[str, Any]:
        """The weight, for a checkpoint."""
        return {"weight": self.weight}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take what `state` gave."""
        self.weight = state["weight"]
        if self._adaptive is not None:
            self._adaptive.load_state(state)
