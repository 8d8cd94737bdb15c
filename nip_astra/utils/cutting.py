"""Where work is cut that several do."""

from __future__ import annotations

from itertools import pairwise


def cut_evenly(indices: range, count: int) -> list[range]:
    """Neighbouring indices in so many runs, of lengths that differ by one at most."""
    ends = [indices.start + len(indices) * part // count for part in range(count + 1)]
    return [range(start, stop) for start, stop in pairwise(ends)]
