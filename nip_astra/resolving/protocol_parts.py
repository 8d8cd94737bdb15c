"""What of a scenario's and a preset's parameters belongs to the protocol that is played."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nip_astra.errors import ConfigurationError, NipAstraError
from nip_astra.parameters.loading import Layer
from nip_astra.parameters.parameters_base import SubParameters
from nip_astra.protocols.registry import PROTOCOL_HANDLERS
from nip_astra.resolving.base_runs import only
from nip_astra.scenarios.registry import Scenario


def protocol_section(
    protocol: Any, scenario_class: type[Scenario], kind: str
) -> dict[str, type[SubParameters]]:
    """The section of the interaction protocol, if the scenario's agents play one."""
    if not scenario_class.uses_protocol:
        if protocol is not None:
            raise ConfigurationError(
                f"interaction_protocol {protocol!r} was asked for, but agents of a scenario of the "
                f"kind {kind!r} play none. Leave it out, or choose another --scenario."
            )
        return {}
    if not isinstance(protocol, str):
        raise ConfigurationError(
            f"a scenario of the kind {kind!r} needs an interaction protocol, but "
            f"interaction_protocol is {protocol!r}. Choose one of: "
            f"{', '.join(PROTOCOL_HANDLERS.names())}."
        )
    return {protocol: PROTOCOL_HANDLERS.get(protocol).Parameters}


def about_protocol(layer: Layer, protocol: Any, kind: str) -> Layer:
    """A scenario's or preset's layer without protocols that are not played, and their agents.

    A name that no protocol has stays, to be told as a fault.
    """
    layer = only(layer, set(layer.values) - (set(PROTOCOL_HANDLERS.names()) - {protocol}))
    given = layer.values.get(kind)
    section: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
    agents = section.get("agents")
    if not isinstance(agents, Mapping) or not (own := _agents_of(protocol)):
        return layer
    of_others = set().union(*map(_agents_of, PROTOCOL_HANDLERS.names())) - own
    left = {name: value for name, value in agents.items() if name not in of_others}
    return Layer(layer.source, {**layer.values, kind: {**section, "agents": left}})


def _agents_of(protocol: str) -> set[str]:
    """The agents of a protocol's class; none where they depend on its parameters."""
    try:
        names = getattr(PROTOCOL_HANDLERS.get(protocol), "agent_names", None)
    except NipAstraError:
        return set()  # a package that cannot be imported is told when its protocol is asked for
    return set(names) if isinstance(names, tuple) else set()
