"""The registry of chat models."""

from __future__ import annotations

from collections.abc import Callable

from nip_astra.language_models.services.chat import ChatModel
from nip_astra.parameters.parameters_base import claim_parameters
from nip_astra.parameters.types import ChatModelType
from nip_astra.registry import Registry

CHAT_MODELS: Registry[type[ChatModel]] = Registry(
    "chat_model", package="nip_astra.language_models.services.chat_models", members=ChatModelType
)


def register_chat_model(name: str) -> Callable[[type[ChatModel]], type[ChatModel]]:
    """Register a `ChatModel` subclass under the `_type` by which parameter files name it."""

    def decorate(cls: type[ChatModel]) -> type[ChatModel]:
        claim_parameters(cls, name)
        return CHAT_MODELS.register(name)(cls)

    return decorate
