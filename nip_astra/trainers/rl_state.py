"""What a run of agents in a protocol has done so far, and the state of global generators."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch


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
        """Give plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> RlState:
        """Take what `to_dict` gave."""
        return cls(**plain)


def global_generators() -> dict[str, Any]:
    """Give the states of the generators of Python, numpy and torch, as plain values and tensors."""
    name, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (str(name), torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_global_generators(state: dict[str, Any]) -> None:
    """Take up what `global_generators` gave."""
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])
