"""Weights of a checkpoint, or an adapter's, saved whole or in parts, in Hugging Face layout."""

from __future__ import annotations

import shutil
from pathlib import Path

from huggingface_hub import save_torch_state_dict

from nip_astra.checkpoints.shards import SHARDS, load_whole
from nip_astra.language_models.sources import ADAPTER_CONFIG


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
