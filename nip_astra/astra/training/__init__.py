"""Harness, trainer and its configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nip_astra.lazy import lazy_exports

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


# Imported on first use: torch and transformers take seconds.
__getattr__, __dir__ = lazy_exports(
    __name__, {name: f"{__name__}.{home}" for name, home in _HOMES.items()}
)
