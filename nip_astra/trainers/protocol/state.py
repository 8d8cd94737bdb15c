"""What a run of agents in a protocol has done so far."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class RlState:
    """Counters and figures of a run.

    Attributes
    ----------
    iteration : int
        Iterations completed.
    num_optimizer_steps : int
        Minibatches that agents learned from.
    is_prepared : bool
        Whether observations were measured and bodies trained beforehand, where asked for.
    before : dict or None
        Test statistics of the untrained agents.
    last : dict
        Statistics of the last iteration.
    """

    iteration: int = 0
    num_optimizer_steps: int = 0
    is_prepared: bool = False
    before: dict[str, Any] | None = None
    last: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> RlState:
        """Take what `to_dict` gave."""
        return cls(**plain)
