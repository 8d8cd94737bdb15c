"""Find what was said before a turn, and name conversations and turns so that links lead to them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from nip_astra.report.records import Node

Key = tuple[int, int, str]
"""What tells a conversation from others of its table: step, episode, opening."""


def key_of(node: Node) -> Key:
    """Return the conversation that a node belongs to."""
    return node.step, *node.conversation


class Paths:
    """The turns of one table by conversation."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._conversations: dict[Key, list[Node]] = {}
        for node in nodes:
            self._conversations.setdefault(key_of(node), []).append(node)

    def to(self, node: Node) -> list[Node]:
        """Return the turns from the opening to a node, itself the last.

        Where the rows do not say what was said before it, there is that node alone.
        """
        others = self._conversations.get(key_of(node), [node])
        if node.node is not None and node.parent is not None:
            return _up_to_the_root(node, others)
        earlier = [other for other in others if other.depth < node.depth]
        earlier.sort(key=lambda other: other.depth)
        is_chain = [other.depth for other in earlier] == list(range(node.depth))
        return [*earlier, node] if is_chain else [node]

    def find(self, like: Node) -> Node | None:
        """Return the turn that says the same at the same place; None where there is none."""
        for (_, *conversation), nodes in self._conversations.items():
            if tuple(conversation) == like.conversation:
                for node in nodes:
                    if node.depth == like.depth and node.probe == like.probe:
                        return node
        return None


def _up_to_the_root(node: Node, others: Sequence[Node]) -> list[Node]:
    by_index = {other.node: other for other in others}
    path = [node]
    parent = by_index.get(node.parent)
    # A parent is one turn earlier; anything else is a broken row, and could make a circle.
    while parent is not None and parent.depth == path[-1].depth - 1:
        path.append(parent)
        parent = by_index.get(parent.parent)
    return path[::-1]


class Anchors:
    """Names the conversations of a page, the same whenever it is made again."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._taken: set[str] = set()

    def new(self, table: str, node: Node) -> str:
        """Return an id for a node's conversation that no other has."""
        slug = re.sub(r"[^A-Za-z0-9]+", "-", table.removeprefix("evaluations/")).strip("-")
        stem = f"{self._prefix}-{slug or 'table'}-{node.step}-{node.episode}"
        anchor, number = stem, 2
        while anchor in self._taken:
            anchor, number = f"{stem}-again-{number}", number + 1
        self._taken.add(anchor)
        return anchor


def label_of(table: str, node: Node) -> str:
    """Return what a node's conversation is called."""
    when = f", iteration {node.step:,}" if node.step else ""
    name = table.removeprefix("evaluations/")
    return f"conversation {node.episode} of \N{LEFT DOUBLE QUOTATION MARK}{name}" + (
        f"\N{RIGHT DOUBLE QUOTATION MARK}{when}"
    )
