"""What a tree of conversations collects while it grows.

Shape suffixes: `B` row, `T` token.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from nip_astra.language_models.base import Generation
from nip_astra.scenario_base.conversation.tokens import Turn


@dataclass
class OpenConversation:
    """A path of the tree: the turns as each model reads them.

    Attributes
    ----------
    target_turns : list[Turn]
        Empty where the target reads texts.
    texts : list[str]
        What was said, the opening first.
    failure : str or None
        Why nothing more is said, since a probe or response failed; None while all is well.
    is_refused : bool
        Whether the service marks the last response as a refusal.
    """

    path: str
    episode: int
    node: int
    attacker_turns: list[Turn]
    target_turns: list[Turn]
    texts: list[str]
    failure: str | None = None
    is_refused: bool = False


@dataclass
class TreeColumns:
    """What the nodes of a tree collect while it grows."""

    parent: list[int] = field(default_factory=list)
    depth: list[int] = field(default_factory=list)
    episode: list[int] = field(default_factory=list)
    contexts: list[list[int]] = field(default_factory=list)
    probes: list[str] = field(default_factory=list)
    responses: list[str] = field(default_factory=list)
    failures: list[str | None] = field(default_factory=list)
    are_refused: list[bool] = field(default_factory=list)
    generations: list[Generation] = field(default_factory=list)
    target_nll: list[Tensor] = field(default_factory=list)
    read: dict[str, list[list[int]]] = field(default_factory=lambda: {"attacker": [], "target": []})

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the time that the block takes to a part's seconds."""
        started = time.perf_counter()
        yield
        spent = time.perf_counter() - started
        self.seconds[part] = self.seconds.get(part, 0.0) + spent

    def add_level(
        self, parents: Sequence[OpenConversation], children: Sequence[OpenConversation], depth: int
    ) -> None:
        """Add a node for each child; every parent has as many."""
        width = len(children) // len(parents)
        self.parent += [parent.node for parent in parents for _ in range(width)]
        self.depth += [depth] * len(children)
        self.episode += [child.episode for child in children]
        self.responses += [child.texts[-1] for child in children]
        self.failures += [child.failure for child in children]
        self.are_refused += [child.is_refused for child in children]

    def note(self, role: str, contexts: Sequence[Sequence[int]], said: Generation) -> None:
        """Keep what a model had to read: contexts, and all but the last token of each turn."""
        rows_per_context = len(said.ids_BT) // len(contexts)
        lengths = said.mask_BT.sum(dim=1).tolist()
        self.read[role] += [
            [*contexts[row // rows_per_context], *ids[: max(length - 1, 0)]]
            for row, (ids, length) in enumerate(zip(said.ids_BT.tolist(), lengths, strict=True))
        ]
