"""The experiment log, and sending of metrics to W&B."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from nip_astra.errors import TrackingError
from nip_astra.tracking.wandb_runs import has_credentials
from nip_astra.trust import read_variable

logger = logging.getLogger("nip_astra.astra")
"""Logger of this package's trainers, also for custom ones."""


def config_logging(level: int = logging.INFO) -> None:
    """Show the log in the terminal."""
    logging.basicConfig(
        level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S"
    )
    logger.setLevel(level)


class ASTRAWandbLogger:
    """Sends metrics to Weights & Biases; offline it needs neither account nor key.

    Parameters
    ----------
    wandb_kwargs : Mapping
        Arguments of `wandb.init`, for instance `project`, `mode` and `config`.
    """

    def __init__(self, wandb_kwargs: Mapping[str, Any] | None = None) -> None:
        import wandb

        given = {"project": "nip_astra", **(wandb_kwargs or {})}
        mode = given.get("mode") or read_variable("WANDB_MODE") or "online"
        if mode == "online" and not has_credentials():
            # W&B itself would stop to ask at a terminal.
            raise TrackingError(
                "use_wandb needs a W&B key. Run `wandb login`, set WANDB_API_KEY, set "
                "WANDB_MODE=offline, or set use_wandb=False."
            )
        self.run = wandb.init(**given)

    def log(self, current_logs: Mapping[str, Any]) -> None:
        """Send metrics."""
        self.run.log(dict(current_logs))
