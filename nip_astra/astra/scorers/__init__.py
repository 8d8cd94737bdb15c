"""Scorers by their names in ASTRA-RL."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nip_astra.astra.scorers.detoxify import DetoxifyModerator as DetoxifyModerator
    from nip_astra.astra.scorers.detoxify import DetoxifyScorer as DetoxifyScorer
    from nip_astra.astra.scorers.llamaguard import LlamaGuardModerator as LlamaGuardModerator
    from nip_astra.astra.scorers.llamaguard import LlamaGuardScorer as LlamaGuardScorer

_HOMES = {
    "DetoxifyModerator": "detoxify",
    "DetoxifyScorer": "detoxify",
    "LlamaGuardModerator": "llamaguard",
    "LlamaGuardScorer": "llamaguard",
}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    # Imported on first use: torch and transformers take seconds.
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
