"""The registry of trained models whose view of an image agents read."""

from __future__ import annotations

from collections.abc import Callable

from nip_astra.parameters.parameters_base import claim_parameters, polymorphic
from nip_astra.parameters.types import PretrainedModelType
from nip_astra.registry import Registry
from nip_astra.scenarios.images.pretrained.base import PretrainedModel

PRETRAINED_MODELS: Registry[type[PretrainedModel]] = Registry(
    "pretrained_model",
    package="nip_astra.scenarios.images.pretrained",
    members=PretrainedModelType,
)
PretrainedModelParameters = polymorphic(PRETRAINED_MODELS.get, PretrainedModel.Parameters)


def register_pretrained_model(
    name: str,
) -> Callable[[type[PretrainedModel]], type[PretrainedModel]]:
    """Register a `PretrainedModel` subclass under the `_type` that parameter files name it by."""

    def decorate(cls: type[PretrainedModel]) -> type[PretrainedModel]:
        claim_parameters(cls, name)
        return PRETRAINED_MODELS.register(name)(cls)

    return decorate
