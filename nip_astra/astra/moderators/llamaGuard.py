"""Alias of `scorers.llamaguard`."""  # noqa: N999 - the name that it had

from nip_astra.astra.scorers.llamaguard import LlamaGuardModerator, LlamaGuardScorer

__all__ = ["LlamaGuardModerator", "LlamaGuardScorer"]
