"""What an AST run has done so far."""

from __future__ import annotations

from dataclasses import dataclass, field

from nip_astra.trainers.language_model.state import LanguageModelState


@dataclass
class AstState(LanguageModelState):
    """Counters and half-used experience of an AST run, and what it found.

    Attributes
    ----------
    num_queries : int
        Target queries spent in training.
    first_query : dict
        Target queries until each planted failure was found.
    """

    num_queries: int = 0
    first_query: dict[str, int | None] = field(default_factory=dict)
