"""Alias of `scorers.detoxify`."""

from nip_astra.astra.scorers.detoxify import DetoxifyModerator, DetoxifyScorer

__all__ = ["DetoxifyModerator", "DetoxifyScorer"]
