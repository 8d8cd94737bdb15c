"""nip_astra: models trained against and with each other by reinforcement learning."""

from __future__ import annotations

__version__ = "0.1.0"
