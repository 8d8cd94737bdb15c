"""The registry of language-model backends."""

from __future__ import annotations

from collections.abc import Callable

from nip_astra.language_models.base import TokenModel
from nip_astra.parameters.parameters_base import claim_parameters
from nip_astra.parameters.types import LanguageModelType
from nip_astra.registry import Registry

LANGUAGE_MODELS: Registry[type[TokenModel]] = Registry(
    "language_model", package="nip_astra.language_models", members=LanguageModelType
)


def register_language_model(
    name: str,
) -> Callable[[type[TokenModel]], type[TokenModel]]:
    """Register a `TokenModel` subclass under the `_type` by which parameter files name it."""

    def decorate(cls: type[TokenModel]) -> type[TokenModel]:
        claim_parameters(cls, name)
        return LANGUAGE_MODELS.register(name)(cls)

    return decorate
