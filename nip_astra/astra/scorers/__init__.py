"""Scorers under their names in ASTRA-RL."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nip_astra.lazy import lazy_exports

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


# Imported on first use: torch and transformers take seconds.
__getattr__, __dir__ = lazy_exports(
    __name__, {name: f"{__name__}.{home}" for name, home in _HOMES.items()}
)
