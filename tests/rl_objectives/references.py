"""Stand-ins that let the losses of other libraries be called on tensors alone."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

from torch import Tensor


def _same(tensor: Tensor, **_: object) -> Tensor:
    return tensor


def trl_trainer(**attributes: Any) -> SimpleNamespace:
    """What a loss of TRL reads of its trainer, in one process and one batch a step."""
    accelerator = SimpleNamespace(
        num_processes=1, device="cpu", gather=_same, gather_for_metrics=_same, reduce=_same
    )
    return SimpleNamespace(
        **{
            "accelerator": accelerator,
            "aux_loss_enabled": False,
            "model": SimpleNamespace(training=True),
            "current_gradient_accumulation_steps": 1,
            "use_vllm": False,
            "_metrics": {"train": defaultdict(list), "eval": defaultdict(list)},
            "_total_train_tokens": 0,
            "_tp_size": 1,
        }
        | attributes
    )
