"""Write and read what training changes of a Hugging Face module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nip_astra.errors import CheckpointError


def save_weights(module: Any, directory: Path) -> None:
    """Write a module's weights, or its adapter's alone, in Hugging Face layout."""
    # peft would otherwise look for the base model's config to see whether embeddings changed.
    options = {"save_embedding_layers": False} if has_adapter(module) else {}
    module.save_pretrained(directory, **options)


def restore_weights(module: Any, directory: Path) -> None:
    """Read back what `save_weights` wrote.

    Raises
    ------
    CheckpointError
        When the file is missing or of another model.
    """
    from safetensors.torch import load_file

    name = "adapter_model.safetensors" if has_adapter(module) else "model.safetensors"
    try:
        state = load_file(directory / name)
        if has_adapter(module):
            from peft import set_peft_model_state_dict

            problems = set_peft_model_state_dict(module, state)
            faults = list(problems.unexpected_keys)
            faults += [key for key in problems.missing_keys if "lora_" in key]
        else:
            problems = module.load_state_dict(state, strict=False)
            tied = set(getattr(module, "all_tied_weights_keys", {}) or {})
            faults = list(problems.unexpected_keys)
            faults += [key for key in problems.missing_keys if key not in tied]
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"the weights in {directory} do not fit: {error}") from error
    if faults:
        raise CheckpointError(
            f"the weights in {directory} are of another model: {', '.join(faults[:3])}. "
            "Resume with the parameters that wrote them."
        )


def has_adapter(module: Any) -> bool:
    """Say whether a module carries a LoRA adapter."""
    return hasattr(module, "peft_config")
