"""DPO, IPO and PPO."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nip_astra.astra.algorithms.dpo import DPO as DPO
    from nip_astra.astra.algorithms.dpo import IPO as IPO
    from nip_astra.astra.algorithms.dpo import DPOBatch as DPOBatch
    from nip_astra.astra.algorithms.dpo import DPOStep as DPOStep
    from nip_astra.astra.algorithms.ppo import PPO as PPO
    from nip_astra.astra.algorithms.ppo import PPOBatch as PPOBatch
    from nip_astra.astra.algorithms.ppo import PPOStep as PPOStep

_HOMES = {
    "DPO": "dpo",
    "DPOBatch": "dpo",
    "DPOStep": "dpo",
    "IPO": "dpo",
    "PPO": "ppo",
    "PPOBatch": "ppo",
    "PPOStep": "ppo",
}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    # Imported on first use: torch and transformers take seconds.
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
