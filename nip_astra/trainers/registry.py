"""The registry of trainers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from nip_astra.errors import PluginError
from nip_astra.registry import Registry
from nip_astra.trainers.trainer_base import Trainer

TRAINERS: Registry[type[Trainer]] = Registry("trainer")
TrainerClass = TypeVar("TrainerClass", bound=type[Trainer])


def register_trainer(name: str) -> Callable[[TrainerClass], TrainerClass]:
    """Register a `Trainer` subclass under its name for `--trainer`; a decorator.

    `name` is a `TrainerType` member or, for a custom trainer, any string.
    """

    def decorate(cls: TrainerClass) -> TrainerClass:
        if not (isinstance(cls, type) and issubclass(cls, Trainer)):
            raise PluginError(
                f"{getattr(cls, '__name__', cls)!r}, the trainer {str(name)!r}, is not a subclass "
                "of nip_astra.trainers.trainer_base.Trainer. Derive it from that or a family base."
            )
        TRAINERS.register(str(name))(cls)
        return cls

    return decorate
