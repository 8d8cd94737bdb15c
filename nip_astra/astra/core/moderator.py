"""Alias of `core.scorer`."""

from nip_astra.astra.core.scorer import Moderator, Scorer

__all__ = ["Moderator", "Scorer"]
