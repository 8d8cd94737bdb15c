"""Weights of torch modules in files: safetensors, or a Hugging Face folder for publication."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from nip_astra.errors import CheckpointError


def save_modules(modules: Mapping[str, torch.nn.Module], directory: Path) -> None:
    """Write the weights of each module as `<name>.safetensors`."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, module in modules.items():
        # Copies: safetensors refuses tensors that share memory, as those of a shared body do.
        weights = {
            weight_name: value.detach().cpu().clone().contiguous()
            for weight_name, value in module.state_dict().items()
        }
        save_file(weights, directory / f"{name}.safetensors")


def load_modules(modules: Mapping[str, torch.nn.Module], directory: Path) -> None:
    """Load the weights of `save_modules`.

    Raises
    ------
    CheckpointError
        When a file is missing or corrupt, or of other weights.
    """
    for name, module in modules.items():
        path = directory / f"{name}.safetensors"
        try:
            module.load_state_dict(load_file(path))
        except (OSError, SafetensorError, RuntimeError) as error:
            raise CheckpointError(
                f"the weights of {name!r} cannot be loaded from {path}: {error}. Resume with the "
                "model that wrote them."
            ) from error


def publish_modules(modules: Mapping[str, torch.nn.Module], directory: Path) -> None:
    """Write each module for its users: as transformers does if it can, else as `save_modules`."""
    plain_modules = {}
    for name, module in modules.items():
        save_pretrained = getattr(module, "save_pretrained", None)
        if callable(save_pretrained):
            save_pretrained(directory / name)
        else:
            plain_modules[name] = module
    if plain_modules:
        save_modules(plain_modules, directory)
