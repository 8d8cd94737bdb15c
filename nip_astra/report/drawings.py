"""Datapoints in a report, as the kind of scenario shows them that described them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nip_astra.errors import NipAstraError
from nip_astra.scenario_base.protocol.datapoint_views import DatapointView
from nip_astra.scenarios.registry import SCENARIOS


def view_of(datapoint: Mapping[str, Any]) -> DatapointView:
    """The view of what a datapoint says it is; a plain one where no scenario knows that."""
    kind = datapoint.get("kind")
    return (_view_class(kind) if isinstance(kind, str) else DatapointView)(datapoint)


def _view_class(kind: str) -> type[DatapointView]:
    for name in SCENARIOS.names():
        try:
            scenario = SCENARIOS.get(name)
        except NipAstraError:
            continue  # a package that cannot be imported is told when its scenario is asked for
        if scenario.datapoint_kind == kind:
            return scenario.datapoint_view
    return DatapointView
