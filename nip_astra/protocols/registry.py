"""The registry of interaction protocols."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from nip_astra.errors import ConfigurationError
from nip_astra.parameters.hyper_parameters import HyperParameters
from nip_astra.protocols.protocol_base import ProtocolHandler
from nip_astra.protocols.zero_knowledge import ZeroKnowledgeProtocol
from nip_astra.registry import Registry

PROTOCOL_HANDLERS: Registry[type[ProtocolHandler]] = Registry("protocol_handler")


def register_protocol_handler(
    name: str,
) -> Callable[[type[ProtocolHandler]], type[ProtocolHandler]]:
    """Register a `ProtocolHandler` subclass under its name in `interaction_protocol`.

    `name` is an `InteractionProtocolType` member, or any valid section name of a parameter file.
    """
    return PROTOCOL_HANDLERS.register(name)


def build_protocol_handler(hyper_params: HyperParameters) -> ProtocolHandler:
    """Build `interaction_protocol`, wrapped in `ZeroKnowledgeProtocol` if enabled.

    Its parameters are the section of its name, or their defaults.

    Raises
    ------
    ConfigurationError
        If no protocol is named, its class is incomplete, or its declaration inconsistent.
    UnknownNameError
        If no protocol has that name.
    """
    name = hyper_params.interaction_protocol
    if name is None:
        raise ConfigurationError(
            "interaction_protocol must be set, for instance --set interaction_protocol=nip. "
            f"Available: {', '.join(PROTOCOL_HANDLERS.names())}."
        )
    cls = PROTOCOL_HANDLERS.get(name)
    if inspect.isabstract(cls):
        missing = ", ".join(sorted(cls.__abstractmethods__))
        raise ConfigurationError(
            f"the class {cls.__qualname__} of the protocol {name!r} lacks {missing}. Define each "
            "as an attribute or method."
        )
    section = getattr(hyper_params, name, None)
    handler = cls(hyper_params, cls.Parameters() if section is None else section)
    if hyper_params.protocol_common.zero_knowledge:
        return ZeroKnowledgeProtocol(hyper_params, handler)
    return handler
