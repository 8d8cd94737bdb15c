"""Problems, samplers, algorithms, scorers and evaluators: the interfaces."""

from __future__ import annotations

from nip_astra.lazy import lazy_exports

_HOMES = {
    "ActionT": "common",
    "Algorithm": "algorithm",
    "Evaluator": "evaluator",
    "Graph": "sampler",
    "GraphMetrics": "evaluator",
    "Node": "sampler",
    "Sampler": "sampler",
    "Scorer": "scorer",
    "StateT": "common",
    "System": "system",
    "ValueFunctionSystem": "system",
}

__all__ = [*_HOMES]


# Imported on first use: torch and transformers take seconds.
__getattr__, __dir__ = lazy_exports(
    __name__, {name: f"{__name__}.{home}" for name, home in _HOMES.items()}
)
