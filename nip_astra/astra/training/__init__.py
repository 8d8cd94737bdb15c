"""Harness, trainer and its configuration."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nip_astra.astra.training.configuration import (
        TrainingConfiguration as TrainingConfiguration,
    )
    from nip_astra.astra.training.harness import Harness as Harness
    from nip_astra.astra.training.trainer import Trainer as Trainer

_HOMES = {
    "Harness": "harness",
    "Trainer": "trainer",
    "TrainingConfiguration": "configuration",
}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    # Imported on first use: torch and transformers take seconds.
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
