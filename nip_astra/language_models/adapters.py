"""Low-rank adapters (LoRA, arXiv:2106.09685) through peft, which is imported only when asked."""

from __future__ import annotations

import copy
from typing import Any

from pydantic import Field

from nip_astra.errors import MissingDependencyError
from nip_astra.parameters.parameters_base import SubParameters


class LoraParameters(SubParameters):
    """Size and place of a low-rank adapter."""

    rank: int = Field(default=16, ge=1)
    """Rank of the update. Larger learns more and takes more memory."""
    alpha: float = Field(default=32.0, gt=0)
    """Scale: the update is multiplied by alpha / rank."""
    target_modules: str | list[str] = "all-linear"
    """Names of the layers to adapt, or all-linear."""


def add_adapter(module: Any, parameters: LoraParameters) -> Any:
    """Wrap the model with a fresh adapter, whose weights are float32 and start as a no-op."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise MissingDependencyError(
            "a LoRA attacker was asked for, and it needs the package peft. Install it with: "
            "pip install 'nip_astra[lora]', or set lora to null to train all weights."
        ) from error
    config = LoraConfig(
        r=parameters.rank,
        lora_alpha=parameters.alpha,
        target_modules=parameters.target_modules,
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )
    return get_peft_model(module, config)


def merged_copy(module: Any) -> Any:
    """Give a plain model with the adapter added into its weights; the original stays as it is."""
    return copy.deepcopy(module).merge_and_unload()
