"""Alias of the logging module (newer location)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nip_astra.lazy import lazy_exports

if TYPE_CHECKING:
    from nip_astra.astra.utils.logging import ASTRAWandbLogger as ASTRAWandbLogger
    from nip_astra.astra.utils.logging import config_logging as config_logging
    from nip_astra.astra.utils.logging import logger as logger

_HOMES = dict.fromkeys(("ASTRAWandbLogger", "config_logging", "logger"), "logging")

__all__ = [*_HOMES]


# Imported on first use: torch and transformers take seconds.
__getattr__, __dir__ = lazy_exports(
    __name__, {name: f"{__name__}.{home}" for name, home in _HOMES.items()}
)
