"""What `nip-astra compare-dumps` does; imported when it runs."""

from __future__ import annotations

from pathlib import Path

from nip_astra.checkpoints.dumps import compare_dumps
from nip_astra.cli.terminal import say

SHOWN = 10
"""Differences that are told; the first is what matters."""


def compare(one: str, other: str, *, tolerance: float) -> bool:
    """Tell the first stage at which two runs differ, and say whether they do."""
    found = compare_dumps(Path(one), Path(other), tolerance=tolerance)
    if not found.differences:
        say(f"the same in all {found.num_stages} stages")
        return False
    first = found.differences[0].stage
    say(f"they differ first in {first}")
    own = [one for one in found.differences if one.stage == first]
    for difference in own[:SHOWN]:
        say(f"  {difference.field} {difference.told}".rstrip())
    if len(own) > SHOWN:
        say(f"  and {len(own) - SHOWN} more")
    later = dict.fromkeys(one.stage for one in found.differences if one.stage != first)
    if later:
        say(f"then in {len(later)} more of {found.num_stages} stages")
    return True
