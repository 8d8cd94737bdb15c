"""Parameters of the probe for messages that give the label away."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from nip_astra.parameters.conditions import where_given
from nip_astra.parameters.parameters_base import (
    ComponentRegistry,
    PlainText,
    PolymorphicParameters,
    SubParameters,
    polymorphic,
)
from nip_astra.parameters.types import MessageRegressorType

MESSAGE_REGRESSORS: ComponentRegistry[Any] = ComponentRegistry(
    "message_regressor",
    package="nip_astra.message_regressors",
    members=MessageRegressorType,
    modules=dict.fromkeys(MessageRegressorType, "library"),
)
"""Kinds of regressor; `nip_astra.message_regressors.base` has the decorator."""


class MessageRegressorParameters(PolymorphicParameters):
    """What parameters of every kind of regressor inherit."""


RegressorField = polymorphic(MESSAGE_REGRESSORS.get, MessageRegressorParameters)


class MessageRegressionParameters(SubParameters):
    """A probe for provers that give the label away: whether it can be read off what they send."""

    regressor: RegressorField | None = None  # type: ignore[valid-type]
    """What is fitted from message to label, by its `_type`, for instance `{_type: mlp}`; null fits
    nothing."""
    agents: list[PlainText] | None = None
    """Names of the agents whose messages are probed; null probes those of all."""
    reset_on_fit: Annotated[bool, where_given("regressor")] = True
    """Whether each fit starts afresh; else from what the last one found, for an mlp, which tells
    codes that stay from those that pass. Then the same datapoints are judged throughout."""
    period: Annotated[int, where_given("regressor")] = Field(default=1, ge=1)
    """Iterations between fits. Larger is faster."""
    test_share: Annotated[float, where_given("regressor")] = Field(default=0.2, gt=0, lt=1)
    """Share of the datapoints whose messages the accuracy is measured on; the others are learnt
    from. Larger measures more exactly what was learnt from less."""
