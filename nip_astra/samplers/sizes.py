"""How much a tree of conversation asks for."""

from __future__ import annotations

MAX_PROBES = 1_000_000
"""Most that an iteration plays: the records, scores and samples of as many take some GiB."""


def num_probes_of(tree_width: int, tree_depth: int) -> int:
    """Probes of a tree; where they are more than `MAX_PROBES`, a number above that."""
    total, level = 0, 1
    for _ in range(min(tree_depth, MAX_PROBES + 1)):
        level *= tree_width
        total += level
        if total > MAX_PROBES:
            break
    return total
