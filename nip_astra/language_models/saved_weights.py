"""Write and read what training changes of a Hugging Face module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from nip_astra.checkpoints.shards import SHARDS, load_whole
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
    try:
        state = saved_weights(directory, is_adapter=has_adapter(module))
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
    except RuntimeError as error:
        raise CheckpointError(f"the weights in {directory} do not fit: {error}") from error
    if faults:
        raise CheckpointError(
            f"the weights in {directory} are of another model: {', '.join(faults[:3])}. "
            "Resume with the parameters that wrote them."
        )


def saved_weights(directory: Path, *, is_adapter: bool = False) -> dict[str, Tensor]:
    """All weights of a folder by name, whole or divided.

    Raises
    ------
    CheckpointError
        When they are missing or broken.
    """
    if (directory / SHARDS).is_dir():
        return load_whole(directory / SHARDS)
    path = directory / ("adapter_model.safetensors" if is_adapter else "model.safetensors")
    try:
        found: dict[str, Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"the weights in {path} were to be read, but: {error}. Restore the file, or resume "
            "from another checkpoint."
        ) from error
    return found


def has_adapter(module: Any) -> bool:
    """Say whether a module carries a LoRA adapter."""
    return hasattr(module, "peft_config")
