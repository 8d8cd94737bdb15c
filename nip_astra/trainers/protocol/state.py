"""What a run of agents in a protocol has done so far."""

from __future__ import annotations

from dataclasses import dataclass, field

from nip_astra.checkpoints.run_state import RunState


@dataclass
class RlState(RunState):
    """Counters and figures of a run; an optimizer step is a minibatch that agents learned from.

    Attributes
    ----------
    is_prepared : bool
        Whether observations were measured and bodies trained beforehand, where asked for.
    last : dict
        Statistics of the last iteration.
    """

    is_prepared: bool = False
    last: dict[str, float] = field(default_factory=dict)
