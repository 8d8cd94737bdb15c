"""DPO, IPO and PPO."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nip_astra.lazy import lazy_exports

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


# Imported on first use: torch and transformers take seconds.
__getattr__, __dir__ = lazy_exports(
    __name__, {name: f"{__name__}.{home}" for name, home in _HOMES.items()}
)
