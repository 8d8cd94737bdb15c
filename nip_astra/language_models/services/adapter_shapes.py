"""What a training service is told of the adapter that it is to train."""

from __future__ import annotations

from typing import Any

import torch

from nip_astra.errors import ConfigurationError, ServiceRequestError
from nip_astra.language_models.base import LanguageModel
from nip_astra.language_models.remote import RemoteLanguageModel

LORA_ALPHA = 32.0
"""Scale of all adapters of Tinker's."""


def plain_adapter(policy: LanguageModel) -> dict[str, Any] | None:
    """Size and place of a policy's adapter; None where all its weights learn.

    Raises
    ------
    ServiceRequestError
        When it is one that services do not train.
    """
    if isinstance(policy, RemoteLanguageModel):
        return None if policy.lora is None else policy.lora.model_dump()
    config = _adapter_of(policy)
    if config is None:
        return None
    targets = config.target_modules
    if config.use_rslora or config.use_dora or config.lora_dropout:
        raise ServiceRequestError(
            "an adapter was to be trained at a service, but it is one with dropout, DoRA or rank "
            "scaling, which services do not train. Set lora to a plain one."
        )
    return {
        "rank": config.r,
        "alpha": float(config.lora_alpha),
        "target_modules": targets if isinstance(targets, str) else sorted(targets),
    }


def tinker_shape(policy: LanguageModel) -> dict[str, Any]:
    """Size and place of a policy's adapter, in the words of Tinker's protocol.

    Raises
    ------
    ConfigurationError
        When it is none that the protocol has.
    """
    if isinstance(policy, RemoteLanguageModel):
        return _shape_of_remote(policy)
    config = _adapter_of(policy)
    _check_scale(None if config is None else config.lora_alpha)
    module: Any = getattr(policy, "module", None)
    head = module.get_base_model().get_output_embeddings()
    parts: dict[str, set[bool]] = {"train_attn": set(), "train_mlp": set(), "train_unembed": set()}
    for name, layer in module.get_base_model().named_modules():
        is_adapted = hasattr(layer, "lora_A")
        if not (is_adapted or isinstance(layer, torch.nn.Linear)) or "lora_" in name:
            continue
        if name.endswith("base_layer"):
            continue
        is_attention = "attn" in name or "attention" in name
        part = "train_attn" if is_attention else "train_mlp"
        parts["train_unembed" if layer is head else part].add(is_adapted)
    mixed = [part for part, found in parts.items() if len(found) > 1]
    if mixed:
        raise ConfigurationError(
            "a policy was to be trained through Tinker's protocol, which adapts all attention, all "
            f"MLPs or the head, but the adapter is on a part of them ({', '.join(mixed)}). Set "
            "lora.target_modules to all-linear."
        )
    return {"rank": config.r, **{part: True in found for part, found in parts.items()}}


def _adapter_of(policy: LanguageModel) -> Any:
    """PEFT's configuration of the adapter that a policy trains, None where it has none."""
    module: Any = getattr(policy, "module", None)
    if not hasattr(module, "peft_config"):
        return None
    return module.peft_config[module.active_adapter]


def _shape_of_remote(policy: RemoteLanguageModel) -> dict[str, Any]:
    _check_scale(None if policy.lora is None else policy.lora.alpha)
    assert policy.lora is not None
    if policy.lora.target_modules != "all-linear":
        raise ConfigurationError(
            "a policy without weights at hand was to be trained through Tinker's protocol, but "
            f"the layers {policy.lora.target_modules} of its adapter are not known here. Set "
            "lora.target_modules to all-linear."
        )
    parts = {"train_attn": True, "train_mlp": True, "train_unembed": False}
    return {"rank": policy.lora.rank, **parts}


def _check_scale(alpha: float | None) -> None:
    if alpha != LORA_ALPHA:
        raise ConfigurationError(
            "a policy was to be trained through Tinker's protocol, which trains adapters of the "
            f"scale {LORA_ALPHA:g}, but it is trained "
            f"{'in full' if alpha is None else f'with lora.alpha {alpha:g}'}. Set "
            f"the policy's language_model.lora to {{rank: 32, alpha: {LORA_ALPHA:g}}}."
        )
