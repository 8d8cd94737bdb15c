"""Write and read what training changes of a Hugging Face module."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from nip_astra.checkpoints.shards import SHARDS, load_whole
from nip_astra.errors import CheckpointError

ADAPTER_CONFIG = "adapter_config.json"


def save_weights(module: Any, directory: Path) -> None:
    """Write a module's weights, or its adapter's alone, in Hugging Face layout."""
    # peft would otherwise look for the base model's config to see whether embeddings changed.
    options = {"save_embedding_layers": False} if has_adapter(module) else {}
    module.save_pretrained(directory, **options)


def learned_weights(module: Any) -> dict[str, Tensor]:
    """What training changes of a module, by the names in the file of `save_weights`.

    Of weights that are divided among processes, the part of this one.
    """
    named = {name: weight.detach() for name, weight in module.named_parameters()}
    if not has_adapter(module):
        return named
    from peft import get_peft_model_state_dict

    found: dict[str, Tensor] = get_peft_model_state_dict(
        module, state_dict=named, save_embedding_layers=False
    )
    return found


def save_adapter_config(module: Any, directory: Path) -> None:
    """Write what a folder of an adapter holds beside its weights."""
    config = copy.copy(module.peft_config[module.active_adapter])
    # Whoever loads it does not train it, unless they say so.
    config.inference_mode = True
    config.save_pretrained(str(directory))


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


def write_joined(folder: Path, output: Path) -> None:
    """Write what a checkpoint's folder of a model holds, with parts joined, to another folder.

    Raises
    ------
    CheckpointError
        When a part is missing or broken.
    """
    weights = load_whole(folder / SHARDS) if (folder / SHARDS).is_dir() else None
    output.mkdir(parents=True, exist_ok=True)
    for file in (path for path in folder.iterdir() if path.is_file()):
        shutil.copy2(file, output / file.name)
    if weights is not None:
        is_adapter = (folder / ADAPTER_CONFIG).is_file()
        pattern = "adapter_model{suffix}.safetensors" if is_adapter else None
        save_torch_state_dict(weights, output, filename_pattern=pattern)
